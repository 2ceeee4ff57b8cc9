"""Long runs of MALA at t = 0 from test images: do they keep their class, their energy, and their pixels?

`python benchmarks/long_run.py FOLDER [--model fashion-mnist --steps 100000 --images 200]` goes on from what it finds in
FOLDER, so that half a million steps may take several calls (--most N steps in this one). With --images 10 it starts
from one image of each class. Prints a JSON line for every look, and draws start and end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generation import picture, ready
from judge import Judge, train_judge, unit
from torch import Tensor

from daebm import checkpoint
from daebm.images import load_images
from daebm.model import Model

CLASSES, SEED = 10, 7
NAME = "chains"


def start(model: Model, images: int, name: str) -> Tensor:
    """Standardised test images with the floor's noise, as many of each class."""
    test, labels = load_images(name, "test")
    rows = np.concatenate([np.flatnonzero(labels == k)[: images // CLASSES] for k in range(CLASSES)])
    z = model.standardise(unit(torch.from_numpy(test[rows]))).to(model.device)
    generator = torch.Generator(model.device).manual_seed(SEED)
    return model.ladder.diffuse(z, torch.zeros(len(z), dtype=torch.long, device=model.device), generator)


def look(model: Model, judge: Judge, x: Tensor, first: Tensor, step: int, acceptance: float) -> dict[str, Any]:
    def classes(y: Tensor) -> Tensor:
        parts = [judge.probabilities(model.to_data(model.cleaned(part)).clamp(-1, 1)) for part in y.split(200)]
        return torch.cat(parts).argmax(1)

    with torch.no_grad():
        level = torch.zeros(len(x), dtype=torch.long, device=x.device)
        u, u_first = model.network(x, level), model.network(first, level)
    return {
        "step": step,
        "same_class": round(float((classes(x) == classes(first)).double().mean()), 3),
        "energy": [round(float(u.mean()), 1), round(float(u.std()), 1)],
        "energy_at_start": [round(float(u_first.mean()), 1), round(float(u_first.std()), 1)],
        "pixel_mean_shift": round(float(x.mean() - first.mean()), 4),
        "pixel_variance_ratio": round(float(x.var(0).mean() / first.var(0).mean()), 4),
        "acceptance": round(acceptance, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="fashion-mnist")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--every", type=int, default=5000)
    parser.add_argument("--most", type=int, default=0, help="steps in this call; 0 is all")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = ready(args.model, args.device)
    name = model.config.experiment
    judge = train_judge(name, args.device)
    first = start(model, args.images, name)
    generator = torch.Generator(args.device).manual_seed(SEED + 1)
    x, done = first, 0
    if checkpoint.exists(args.folder, NAME):
        tensors, facts = checkpoint.read(args.folder, NAME)
        x, done = tensors["x"].to(args.device), facts["done"]
        generator.set_state(tensors["generator"])
    else:
        print(json.dumps({"judge": round(judge.accuracy, 4), "images": len(x), "model": args.model}))
    until = min(args.steps, done + args.most) if args.most else args.steps
    while done < until:
        count = min(args.every, until - done)
        x, info = model.run_at_zero(x, count, generator, "mala")
        done += count
        checkpoint.write(args.folder, NAME, {"x": x, "generator": generator.get_state()}, {"done": done})
        print(json.dumps(look(model, judge, x, first, done, float(info.accept_prob.mean()))), flush=True)
    for title, y in (("start", first), ("end", x)):
        picture(args.folder / f"{title}.png", model.to_data(model.cleaned(y)))


if __name__ == "__main__":
    main()
