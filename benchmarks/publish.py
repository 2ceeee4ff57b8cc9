"""Make the model of a finished image run ready to be shipped: `python benchmarks/publish.py RUN FOLDER`.

Averaged weights of the network in half precision, everything else as it is; some hundred chains to start from; and the
laws of `daebm ood`, from training images. Scores of a few test images are kept too, so that a test can tell whether
another machine finds the same. The model card is written by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from daebm import checkpoint, detection, load
from daebm.images import load_images
from daebm.profile import Law
from daebm.state import read_state

CHAINS, STORED = 200, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--profiles", type=Path, help="those of the law's images, if known already")
    args = parser.parse_args()
    model = load(args.run).to(args.device)
    name = model.config.experiment
    for key, value in model.network.state_dict().items():
        if key.startswith("inner."):
            value.copy_(value.half())
    train, _labels = load_images(name, "train")
    laws = {"features": detection.fit_law("features", model, train)}
    known = args.profiles and Law.of(np.load(args.profiles).astype(np.float64))
    laws["profile"] = known or detection.fit_law("profile", model, train)
    state, facts = read_state(args.run)
    few = torch.from_numpy(np.unique(np.linspace(0, len(state["chains.t"]) - 1, CHAINS).astype(int)))
    images, _labels = load_images(name, "test")
    stored = images[:STORED]
    more = {"chains.x": state["chains.x"][few].half(), "chains.t": state["chains.t"][few]}
    more |= detection.law_tensors(laws) | {"stored.images": torch.from_numpy(stored)}
    for key, score in detection.model_scores(model, laws).items():
        more[f"stored.{key}"] = torch.from_numpy(score(stored))
    model.save(args.folder, more, {"iterations": facts["iteration"], "seconds": facts["seconds"]})
    tensors, everything = checkpoint.read(args.folder, "model")
    for key, value in tensors.items():
        if key.startswith("network.inner.") and value.is_floating_point():
            tensors[key] = value.half()
    everything.pop("format")
    checkpoint.write(args.folder, "model", tensors, everything)
    print({path.name: path.stat().st_size for path in args.folder.iterdir()})


if __name__ == "__main__":
    main()
