"""The files of the named image sets: where each set is published, and the checksum of every file."""

MIRRORS = {
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "kmnist": "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
    "emnist-letters": None,  # the 14,800-image split has no public file of its own
}
LETTERS_SOURCE = (
    "write the pixels (in the order of the row) and labels of emnist-letters-test.csv, 14,800 rows, from "
    "https://www.kaggle.com/datasets/crawford/emnist as IDX files of these names (NIST's own file has 20,800 images)"
)
# sha256 of the .gz files as published: what a download must be.
PUBLISHED = {
    "fashion-mnist/train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "fashion-mnist/train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "fashion-mnist/t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "fashion-mnist/t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "mnist/train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist/t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "kmnist/train-images-idx3-ubyte": "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
    "kmnist/train-labels-idx1-ubyte": "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
    "kmnist/t10k-images-idx3-ubyte": "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
    "kmnist/t10k-labels-idx1-ubyte": "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
}
# sha256 of the uncompressed content, so that unpacked or repacked files are accepted; not known for KMNIST's train.
CONTENT = {
    "fashion-mnist/train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "fashion-mnist/train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "fashion-mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion-mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "kmnist/t10k-images-idx3-ubyte": "76fbd229ce87db80dd281af5e6670de4ad0e42fb30a7bd643972994c47c1f42e",
    "kmnist/t10k-labels-idx1-ubyte": "a11dc742be8e781a40a92f53d6a4957e7b7d36df2faa097659131ebfd8fd60c6",
    "emnist/emnist-letters-test-images-idx3-ubyte": "1d86b338cbf52388ca7ab46041a33a94e55b221ff9c3c3097a206e52ce3bfb06",
    "emnist/emnist-letters-test-labels-idx1-ubyte": "4118ec990e27517e3d750ebe9b2044792debc6b0dcddc5c4bc58faddbe968bc2",
}
