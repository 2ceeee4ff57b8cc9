"""Images: the IDX reader, the named sets and where they are found, arrays and folders of pictures."""

import errno
import gzip
import os
import re
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pooch
import pytest
import requests
import torch
from PIL import Image

from daebm import images
from daebm.errors import InputError
from daebm.image_files import CONTENT, MIRRORS, PUBLISHED
from daebm.images import image_array, image_folder, load_images, read_idx

DATA = Path(os.environ.get("DAEBM_DATA") or Path(__file__).parents[2] / "shared" / "data")
IMAGES, LABELS = "mnist/t10k-images-idx3-ubyte", "mnist/t10k-labels-idx1-ubyte"
PIXELS = np.arange(3 * 28 * 28, dtype=np.uint32).reshape(3, 28, 28).astype(np.uint8)


def idx(x: np.ndarray) -> bytes:
    return bytes([0, 0, 8, x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes()


FILES = {IMAGES: idx(PIXELS), LABELS: idx(np.array([7, 0, 9], np.uint8))}
PACKED = {key: gzip.compress(data, mtime=0) for key, data in FILES.items()}


def put(folder: Path, files: dict[str, bytes] = PACKED, suffix: str = ".gz") -> Path:
    for key, data in files.items():
        path = folder / (key + suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def refuse(url: str) -> bytes:
    raise requests.ConnectionError("no route to some.proxy.example")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Each place that is searched, in a temporary folder and empty; a network that is down."""
    places = {name: tmp_path / name for name in ("data_dir", "variable", "cache", "debian")}
    for folder in places.values():
        folder.mkdir()
    monkeypatch.setenv("DAEBM_DATA", str(places["variable"]))
    monkeypatch.setattr(pooch, "os_cache", lambda project: places["cache"])
    monkeypatch.setattr(images, "DEBIAN", places["debian"])
    serve(monkeypatch, refuse)
    return places


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST's test split with three images."""
    for key, data in FILES.items():
        monkeypatch.setitem(CONTENT, key, sha256(data).hexdigest())
        monkeypatch.setitem(PUBLISHED, key, sha256(PACKED[key]).hexdigest())


def serve(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], bytes]) -> None:
    """Replace pooch's HTTP; an ``answer`` that raises does so after half a file is written."""

    def download(self: object, url: str, output_file: str, pooch: object) -> None:
        Path(output_file).write_bytes(PACKED[IMAGES][:100])
        Path(output_file).write_bytes(answer(url))

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", download)


def check(loaded: tuple[np.ndarray, np.ndarray]) -> None:
    x, labels = loaded
    assert x.dtype == np.uint8 and labels.dtype == np.int64
    assert (x == PIXELS).all() and labels.tolist() == [7, 0, 9]


def refused(*patterns: str) -> object:
    """An InputError of one line in which the patterns occur in this order."""
    return pytest.raises(InputError, match=re.compile(r"^[^\n]*" + r"[^\n]*".join(patterns) + r"[^\n]*$"))


# IDX


@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 28, 28)])
def test_idx_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    (tmp_path / "a").write_bytes(idx(x))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(x)))
    for name in ("a", "a.gz"):
        y = read_idx(tmp_path / name)
        assert y.dtype == np.uint8 and y.shape == shape and (y == x).all() and y.flags.writeable


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.gz", FILES[IMAGES], "not a gzip file"),
        ("a.gz", b"", "not a gzip file"),
        ("a.gz", PACKED[IMAGES][:-20], "damaged or cut-off"),
        ("a.gz", PACKED[IMAGES][:40] + b"xxxx" + PACKED[IMAGES][44:], "damaged or cut-off"),
        ("a.gz", gzip.compress(FILES[IMAGES][:-1]), "3 x 28 x 28 bytes by its IDX header, but holds 2351"),
        ("a", FILES[IMAGES] + b"\0", "but holds 2353"),
        ("a", FILES[IMAGES][:9], "ends within its IDX header"),
        ("a", b"\0\0\x0d\x01" + bytes(8), "not an IDX file of unsigned bytes .it starts with 00 00 0d 01"),
        ("a", b"\0\0\x08\x00\x01", "not an IDX file"),
        ("a", b"\0\0\x08\xff" + bytes(2000), "not an IDX file"),
        ("a", b"\0\0\x08\x02" + bytes(4) + b"\xff" * 4, "but holds 0"),
        ("a", PACKED[IMAGES], "not an IDX file"),
        ("a", b"", "starts with nothing"),
    ],
)
def test_bad_idx_is_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with refused(re.escape(str(tmp_path / name)), message):
        read_idx(tmp_path / name)


def test_missing_idx_is_refused(tmp_path: Path) -> None:
    with refused("cannot read", "nowhere", "No such file"):
        read_idx(tmp_path / "nowhere")


# Named sets


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("cifar", "train", "'cifar': choose one of fashion-mnist, mnist, kmnist, emnist-letters"),
        ("mnist", "valid", "train or test, got 'valid'"),
        ("emnist-letters", "train", "no train split"),
    ],
)
def test_unknown_sets_and_splits(name: str, split: str, message: str) -> None:
    with refused(message):
        load_images(name, split)


def test_every_file_has_a_checksum() -> None:
    for name in MIRRORS:
        for split in ("train", "test") if MIRRORS[name] else ("test",):
            for key in images._keys(name, split):
                assert key in PUBLISHED or key in CONTENT
                assert MIRRORS[name] is None or key in PUBLISHED
    for table in (PUBLISHED, CONTENT):
        assert len(set(table.values())) == len(table)
        assert all(re.fullmatch("[0-9a-f]{64}", known) for known in table.values())


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("flat", [True, False])
def test_layouts(tiny: None, tmp_path: Path, suffix: str, flat: bool) -> None:
    """Plain or packed (here with another gzip header than published), in the sub-folder or the folder itself."""
    packed = {key: gzip.compress(data, 1, mtime=1) if suffix else data for key, data in FILES.items()}
    put(tmp_path, packed, suffix)
    check(load_images("mnist", "test", str(tmp_path / "mnist" if flat else tmp_path)))


def test_search_order(tiny: None, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Among good and bad files the first one counts, wherever it lies."""
    order = list(places)[:3]
    for first in order:
        put(places[first])
        check(load_images("mnist", "test", places["data_dir"]))
        put(places[first], dict.fromkeys(FILES, gzip.compress(b"bad")))
        for later in order[order.index(first) + 1 :]:
            put(places[later])
        with refused(re.escape(str(places[first] / IMAGES)), "checksum", "delete or replace it"):
            load_images("mnist", "test", places["data_dir"])
        for folder in places.values():
            for file in folder.rglob("*.gz"):
                file.unlink()
    put(places["variable"])
    put(places["data_dir"], dict.fromkeys(FILES, gzip.compress(b"bad")))
    check(load_images("mnist", "test"))  # the bad files lie where nobody looks without data_dir
    monkeypatch.delenv("DAEBM_DATA")
    with refused("is not in"):
        load_images("mnist", "test")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_debian_package(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    for key, data in FILES.items():
        monkeypatch.setitem(CONTENT, key.replace("mnist", "fashion-mnist"), sha256(data).hexdigest())
        (places["debian"] / (Path(key).name + suffix)).write_bytes(PACKED[key] if suffix else data)
    check(load_images("fashion-mnist", "test"))
    with refused("is not in"):
        load_images("mnist", "test")


def test_a_given_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("data_dir names", "nowhere", "not a folder"):
        load_images("mnist", "test", tmp_path / "nowhere")
    monkeypatch.setenv("DAEBM_DATA", str(tmp_path / "elsewhere"))
    with refused("DAEBM_DATA names", "elsewhere", "not a folder"):
        load_images("mnist", "test")


def test_a_file_of_another_set_is_named_as_such(tiny: None, tmp_path: Path) -> None:
    """Good files must not be called damaged: the sets share file names."""
    put(tmp_path)
    with refused("mnist/t10k-images-idx3-ubyte, not fashion-mnist/t10k-images-idx3-ubyte", "sub-folder"):
        load_images("fashion-mnist", "test", tmp_path / "mnist")


def test_kmnist_train_is_checked_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum of its content is not known: an unpacked file is not taken."""
    keys = {key.replace("mnist/t10k", "kmnist/train"): data for key, data in FILES.items()}
    packed = {key: gzip.compress(data, mtime=0) for key, data in keys.items()}
    put(tmp_path, keys, "")
    with refused("is not in"):
        load_images("kmnist", "train", tmp_path)
    put(tmp_path, packed)
    with refused("checksum of kmnist/train-images"):
        load_images("kmnist", "train", tmp_path)
    for key, data in packed.items():
        monkeypatch.setitem(PUBLISHED, key, sha256(data).hexdigest())
    check(load_images("kmnist", "train", tmp_path))


def test_download(
    tiny: None, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(url: str) -> bytes:
        asked.append(url)
        return PACKED[f"mnist/{url.rsplit('/', 1)[1].removesuffix('.gz')}"]

    serve(monkeypatch, answer)
    for _ in range(2):
        check(load_images("mnist", "test"))
    assert asked == [f"{MIRRORS['mnist']}/{Path(key).name}.gz" for key in FILES]
    assert sorted(path.name for path in (places["cache"] / "mnist").iterdir()) == [f"{Path(k).name}.gz" for k in FILES]


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "kmnist"])
def test_offline(places: dict[str, Path], name: str) -> None:
    looked = [re.escape(str(places[place])) for place in ("data_dir", "variable", "cache")]
    with refused(
        "t10k-images-idx3-ubyte.gz", *looked, "ConnectionError", f"get {MIRRORS[name]}/t10k", "DAEBM_DATA"
    ) as e:
        load_images(name, "test", places["data_dir"])
    assert "proxy" not in str(e.value) and e.value.__context__ is None
    assert not list(places["cache"].rglob("*.*"))


def test_letters_have_no_download() -> None:
    with refused("emnist-letters-test-images-idx3-ubyte.gz is not in", "no download", "emnist-letters-test.csv"):
        load_images("emnist-letters", "test")


def test_wrong_download_leaves_nothing(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, lambda url: b"<html>please log in</html>")
    with refused("downloading it failed", "another checksum", "get https://"):
        load_images("mnist", "test")
    assert not list((places["cache"] / "mnist").iterdir())


def test_no_room_for_a_download(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(url: str) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    serve(monkeypatch, full)
    with refused("cannot write into", re.escape(str(places["cache"])), "No space left", "DAEBM_DATA"):
        load_images("mnist", "test")
    assert not list((places["cache"] / "mnist").iterdir())


def test_cache_that_cannot_be_made(places: dict[str, Path]) -> None:
    places["cache"].rmdir()
    places["cache"].write_text("a file")
    with refused("cannot write into", "DAEBM_DATA"):
        load_images("mnist", "test")


def _real(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    if not (DATA / images._keys(name, split)[0]).parent.is_dir():
        pytest.skip("needs the real files: set DAEBM_DATA to their folder")
    return load_images(name, split, DATA)


@pytest.mark.parametrize(
    ("name", "split", "count"),
    [
        ("fashion-mnist", "train", 60_000),
        ("fashion-mnist", "test", 10_000),
        ("mnist", "train", 60_000),
        ("mnist", "test", 10_000),
        ("kmnist", "test", 10_000),
    ],
)
def test_real_sets(name: str, split: str, count: int) -> None:
    x, labels = _real(name, split)
    assert x.shape == (count, 28, 28) and x.dtype == np.uint8 and labels.dtype == np.int64
    assert x.min() == 0 and x.max() == 255
    counts = np.bincount(labels)
    assert len(counts) == 10 and (name == "mnist" or (counts == count // 10).all())


def test_real_letters() -> None:
    x, labels = _real("emnist-letters", "test")
    assert x.shape == (14_800, 28, 28) and x.dtype == np.uint8 and labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [800] * 18 + [400] and (np.diff(labels) >= 0).all()
    # Upright: an I is tall, and an F, large or small, has the least ink at the bottom right.
    letter_i, letter_f = (x[labels == "ABCDEFGHI".index(letter)].mean(0) for letter in "IF")
    place = np.arange(28)
    tall, wide = (np.cov(place, aweights=letter_i.sum(axis)) for axis in (1, 0))
    assert tall > 2 * wide
    quarters = letter_f.reshape(2, 14, 2, 14).mean((1, 3))
    assert quarters[1, 1] == quarters.min() < quarters[0, 0] / 2


# Arrays


def test_arrays_become_four_dimensional_tensors() -> None:
    x = image_array(PIXELS)
    assert x.shape == (3, 1, 28, 28) and x.dtype == torch.uint8 and (x[:, 0].numpy() == PIXELS).all()
    assert image_array(torch.zeros(2, 3, 4, 5, dtype=torch.uint8)).shape == (2, 3, 4, 5)
    for dtype in (np.float16, np.float32, np.float64, ">f4"):
        y = image_array(np.linspace(-1, 1, 24).astype(dtype).reshape(2, 3, 4)[:, ::-1])
        assert y.dtype == torch.float32 and y.shape == (2, 1, 3, 4) and y.is_contiguous()
        assert y[0, 0, 2, 0] == -1 and y[1, 0, 0, 3] == 1
    assert not image_array(torch.zeros(2, 4, 4, requires_grad=True)).requires_grad


def test_array_of_read_only_bytes_is_copied() -> None:
    x = np.frombuffer(bytes(16), np.uint8).reshape(1, 4, 4)
    image_array(x)[0, 0, 0, 0] = 1
    assert x.sum() == 0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[0.0]], "got list"),
        (np.zeros((2, 4, 4), np.int64), "got ndarray of int64"),
        (torch.zeros(2, 4, 4, dtype=torch.bool), "got Tensor of torch.bool"),
        (np.zeros((4, 4), np.uint8), r"got \(4, 4\)"),
        (np.zeros((1, 1, 1, 4, 4), np.uint8), r"got \(1, 1, 1, 4, 4\)"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"1 or 3 channels, got \(2, 4, 4, 3\): reshape or permute"),
        (np.zeros((0, 4, 4), np.uint8), "n >= 1"),
        (np.full((2, 4, 4), np.nan), "NaN or infinite value .first in row 0"),
        (torch.full((2, 4, 4), torch.inf), "NaN or infinite"),
        (np.full((2, 4, 4), 1e300), "got 1e.300 to 1e.300"),
        (PIXELS.astype(np.float32), r"\[-1, 1\], got 0 to 255: give 0..255 as uint8, or rescale"),
        (torch.full((2, 4, 4), -1.5), "got -1.5 to -1.5"),
    ],
)
def test_bad_arrays_are_refused(x: object, message: str) -> None:
    with refused("images", message):
        image_array(x)


# Folders


def picture(path: Path, mode: str = "L", size: tuple[int, int] = (5, 4), value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).convert(mode).save(path)


def test_folder_of_grey_pictures(tmp_path: Path) -> None:
    for k, name in enumerate(["a.png", "b/c.bmp", "b/d.TIF", "e.gif"]):
        picture(tmp_path / name, value=50 * k)
    picture(tmp_path / "f.png", "1", value=255)
    (tmp_path / "notes.txt").write_text("not a picture")
    x = image_folder(tmp_path)
    assert x.shape == (5, 1, 4, 5) and x.dtype == torch.uint8 and x.is_contiguous()
    assert x[:, 0, 0, 0].tolist() == [0, 50, 100, 150, 255]


def test_folder_of_colour_pictures(tmp_path: Path) -> None:
    for k, (name, mode) in enumerate([("a.png", "RGB"), ("b.png", "RGBA"), ("c.jpg", "CMYK"), ("d.jpeg", "RGB")]):
        picture(tmp_path / name, mode, value=50 * k)
    Image.new("RGB", (5, 4), (255, 0, 0)).quantize(4).save(tmp_path / "e.png")  # a palette with a colour
    x, palette = image_folder(str(tmp_path)).split([4, 1])
    assert x.shape == (4, 3, 4, 5) and x.is_contiguous() and palette.amax((0, 2, 3)).tolist() == [255, 0, 0]
    assert (x.float().mean((1, 2, 3)) - torch.tensor([0.0, 50, 100, 150])).abs().max() < 2  # JPEG rounds


def test_folder_resized(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", size=(20, 10), value=7)
    picture(tmp_path / "b.png", size=(9, 31), value=8)
    x = image_folder(tmp_path, size=8)
    assert x.shape == (2, 1, 8, 8) and x.unique().tolist() == [7, 8]
    with refused("size must be at least 1"):
        image_folder(tmp_path, size=0)


def test_odd_picture_out_is_named(tmp_path: Path) -> None:
    for name in ("a", "c", "d"):
        picture(tmp_path / f"{name}.png")
    picture(tmp_path / "b.png", size=(6, 4))
    with refused(r"b.png has channels, height and width \(1, 4, 6\)", r"\(1, 4, 5\): resize it or give size"):
        image_folder(tmp_path)
    picture(tmp_path / "b.png", "RGB")
    with refused("b.png", r"\(3, 4, 4\)", "convert it to grey or RGB"):
        image_folder(tmp_path, size=4)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with refused("nowhere is not a folder"):
        image_folder(tmp_path / "nowhere")
    with refused("holds no .png"):
        image_folder(tmp_path)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "deep.png")
    with refused("deep.png has more than 8 bits"):
        image_folder(tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".tif"])
def test_unreadable_pictures_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"b{suffix}"
    picture(tmp_path / "a.png", size=(28, 28))
    Image.fromarray(np.random.default_rng(0).integers(256, size=(28, 28), dtype=np.uint8)).save(path)
    assert len(image_folder(tmp_path)) == 2
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"not a picture", b""):
        path.write_bytes(damaged)
        with refused("cannot read the picture", rf"b{suffix} \(.*\): delete or replace it"):
            image_folder(tmp_path)
