"""Which score tells strange images from normal ones, without looking at any other data set?

`python benchmarks/strangers.py [--model fashion-mnist --images 200 --scores energy features]` makes strangers out of
held-out images: turned by a quarter, upside down, moved by five pixels, with their quarters exchanged, put together
from the halves of two, or the mean of two. AUROC of held-out images against each. Choices are made on these.
"""

from __future__ import annotations

import argparse

import numpy as np

from daebm import detection, load
from daebm.detection import Images
from daebm.experiments.images import HELD_OUT
from daebm.images import load_images
from daebm.model import model_folder
from daebm.profile import needed


def strangers(held: Images) -> dict[str, Images]:
    """Every kind from images of its own; ``held`` is cut into eight parts."""
    part = np.array_split(held, 8)
    middle = held.shape[1] // 2
    return {
        "turned": np.rot90(part[0], 1, (1, 2)).copy(),
        "upside down": part[1][:, ::-1].copy(),
        "moved": np.roll(part[2], (5, 5), (1, 2)),
        "quarters": np.roll(part[3], (middle, middle), (1, 2)),
        "halves": np.concatenate([part[4][:, :, :middle], part[5][: len(part[4]), :, middle:]], 2),
        "mean of two": ((part[6].astype(int) + part[7][: len(part[6])]) // 2).astype(np.uint8),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fashion-mnist")
    parser.add_argument("--images", type=int, default=200, help="of a kind")
    parser.add_argument("--scores", nargs="+", default=["energy", "features"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = load(args.model).to(args.device)
    train, _labels = load_images(model.config.experiment, "train")
    train, held = train[:-HELD_OUT], train[-HELD_OUT:]
    sets = {"held-out": held[: 2 * args.images]} | strangers(held[2 * args.images :][: 8 * args.images])
    saved = detection.saved_laws(model_folder(args.model))
    laws = {k: saved.get(k) or detection.fit_law(k, model, train) for k in needed(args.scores, model.network)}
    scores = {k: v for k, v in detection.model_scores(model, laws).items() if k in args.scores}
    found = detection.detect(scores | detection.baseline_scores(train), sets).separations
    print(f"{'':<14}", *(f"{kind:>12}" for kind in [*list(sets)[1:], "mean"]))
    for name, by_kind in found.items():
        values = [it.value[0] for it in by_kind.values()]
        print(f"{name:<14}", *(f"{value:12.3f}" for value in [*values, float(np.mean(values))]))


if __name__ == "__main__":
    main()
