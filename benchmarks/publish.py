"""Make the model of a finished image run ready to be shipped: `python benchmarks/publish.py RUN FOLDER --device cuda`.

With a model that is shipped already (`python benchmarks/publish.py fashion-mnist FOLDER`) in place of a run only its
scores are made anew, by the code as it is: laws, calibration, and what is stored of them.

Averaged weights of the network in half precision, everything else as it is; some hundred chains to start from; the laws
of its scores, from training images; its normalising constant; and calibration scores, from images that were held out:
nine in ten calibrate, the rest are there to look at calibration by. Scores of a few test images are kept too, so that a
test can tell whether another machine finds the same. The model card is written by hand.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from daebm import DAEBM, checkpoint, detection, load
from daebm.experiments.images import HELD_OUT
from daebm.fitting import Normalised, normalise_trained
from daebm.images import load_images
from daebm.model import Model, model_folder
from daebm.profile import LAW_ROWS, SAID, Law
from daebm.sampling import Drawn
from daebm.state import holds_state, read_state
from daebm.units import Units

CHAINS, STORED = 200, 8
VALIDATION = 500  # of the images that were held out; the others calibrate
FPR = 0.01


def units(model: Model, rows: int) -> Units:
    """Grey levels 0 to 255."""
    shift, scale = (np.array([127.5 * value]) for value in (1 + model.shift, model.scale))
    return Units(model.event[1:], np.array([True]), shift, scale, rows)


def rounded(law: Law) -> Law:
    """As it is saved: float32 is exact to a millionth of a distance."""
    return type(law)(*(getattr(law, part.name).astype(np.float32).astype(np.float64) for part in fields(law)))


def history(run: Path, iteration: int, trips: float, gap: tuple[float, float]) -> list[dict[str, Any]]:
    """The acceptance of every thousandth iteration while chains persisted, and what is known at the end."""
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [row for row in logged if row.get("acceptance") and row["iteration"] <= iteration]
    nothing = {"gap": np.nan, "gap_error": np.nan, "round_trips": np.nan, "chosen": False}
    looks = [{key: row[key] for key in ("iteration", "acceptance")} | nothing for row in known]
    found = {"gap": gap[0], "gap_error": gap[1], "round_trips": trips, "chosen": True}
    return [*(look for look in looks[:-1] if look["iteration"] % 1000 == 0), looks[-1] | found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run, or the name of a model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=LAW_ROWS, help="of each part; few for a trial")
    args = parser.parse_args()
    model = load(args.run).to(args.device)
    name = model.config.experiment
    for key, value in model.network.state_dict().items():
        if key.startswith("inner."):
            value.copy_(value.half())
    train, _labels = load_images(name, "train")
    # In any order: MNIST is sorted by who wrote it, and its last 500 images are unlike those before.
    held = np.random.default_rng(model.config.seed).permutation(train[-HELD_OUT:])[: args.images].astype(np.float64)
    train = train[: min(args.images, LAW_ROWS)]
    laws = {kind: rounded(detection.fit_law(kind, model, train)) for kind in SAID}

    folder = model_folder(args.run)
    if holds_state(folder):
        state, facts = read_state(folder)
        chains = Drawn(state["chains.x"].float().to(args.device), state["chains.t"].to(args.device), 0)
        found = normalise_trained(model, chains, model._points(train[:, None]), model.config.seed)
        u = [model.energy(images[:, None]).astype(np.float64) for images in (train, held.astype(np.uint8))]
        gap = float(u[1].mean() - u[0].mean()), float(np.hypot(*(part.std() / np.sqrt(len(part)) for part in u)))
        trips, seconds = float(state["chains.trips"].double().mean()), facts["seconds"]
        looks = history(folder, facts["iteration"], trips, gap)
    else:
        state, facts = checkpoint.read(folder, "model")
        before = DAEBM.load(folder)
        found = Normalised(
            before.log_normaliser_,
            before.log_normaliser_se_,
            (-before.drawn_ - before.log_normaliser_ - before.units_.log_stretch)[::-1],
        )
        looks, seconds = before.history_, facts["seconds"]
    detector = DAEBM.from_model(
        model,
        units(model, len(load_images(name, "train")[0]) - HELD_OUT),
        found,
        laws,
        held[-min(VALIDATION, args.images // 2) :],
        held[: -min(VALIDATION, args.images // 2)],
        looks,
        score_by="features",
        fpr=FPR,
        random_state=model.config.seed,
    )

    images, _labels = load_images(name, "test")
    few = torch.from_numpy(np.unique(np.linspace(0, len(state["chains.t"]) - 1, CHAINS).astype(int)))
    more = {"chains.x": state["chains.x"][few].half(), "chains.t": state["chains.t"][few]}
    more["stored.images"] = torch.from_numpy(images[:STORED])
    for key, score in detection.model_scores(model, laws).items():
        more[f"stored.{key}"] = torch.from_numpy(score(images[:STORED]))
    detector.save(args.folder, more)
    tensors, everything = checkpoint.read(args.folder, "model")
    for key, value in tensors.items():
        if key.startswith("network.inner.") and value.is_floating_point():
            tensors[key] = value.half()
        elif key.startswith("law."):
            tensors[key] = value.float()
        elif key.startswith("estimator.examples."):
            tensors[key] = value.half()  # grey levels, which it holds exactly
    everything.pop("format")
    checkpoint.write(args.folder, "model", tensors, everything | {"seconds": seconds})
    said = {"log_normaliser": [found.value, found.error], "end": looks[-1]}
    print(json.dumps(said | {path.name: path.stat().st_size for path in args.folder.iterdir()}))
    for kind in detector.calibration_ if args.images >= LAW_ROWS else ():
        detector.score_by = kind
        flagged = [float((detector.predict(part[:2000]) < 0).mean()) for part in (images.astype(np.float64),)]
        print(json.dumps({"score": kind, "false alarms of 2,000 test images": flagged[0]}), flush=True)


if __name__ == "__main__":
    main()
