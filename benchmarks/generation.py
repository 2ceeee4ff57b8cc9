"""Images from noise: what they cost, and how good they are by a small classifier's judgement.

`python benchmarks/generation.py --model fashion-mnist [--device cuda] [--count 1000] [--ways annealed first-hit ...]`
prints a JSON line for every way and writes a picture of each with --out. Ways: ``annealed`` with 20, 35 or 80 steps a
level (`annealed-20`), ``first-hit`` and ``visits-50`` (Algorithm 3 with M = 1 and M = 50), ``chains`` (those that come
with the model, moved on until they have been at t = 0). Real images get the same treatment: the floor's noise, and
Tweedie's formula after.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge import Judge, confident, frechet, nearest, shares, train_judge, unit
from torch import Tensor

from daebm import checkpoint, load, sampling
from daebm.engine import Engine, set_precision
from daebm.images import contact_sheet, load_images
from daebm.model import Model, model_folder
from daebm.samplers.langevin import KERNELS

WAYS = ["annealed-20", "annealed-35", "annealed-80", "first-hit", "chains"]
LARGEST = 200_000  # transitions
SHOWN = 60


def ready(name: str, device: str) -> Model:
    """The model on ``device``, in the precision that it was trained in or, on a CPU, without what that cannot do."""
    model = load(name).to(device)
    if device == "cpu":
        model.config = dataclasses.replace(model.config, device="cpu", compile=False, precision="fp32")
    else:
        set_precision(model.network, model.config.precision)
    return model


def annealed(model: Model, count: int, steps: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Samples and gradients an image."""
    carry = model.config.label_move == "carry"
    with torch.no_grad():
        start = sampling.from_noise(model.sampler(), model.event, count, generator)
        drawn = sampling.annealed(model.sampler(), start, steps, generator, carry)
    return drawn.x, drawn.gradients / count


def until_visits(model: Model, x: Tensor, t: Tensor, visits: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Algorithm 3 by the captured transition: all chains go on until the last one is done, each keeps its own x.

    A chain costs what it took until its own moment, as if it had stopped then.
    """
    engine = Engine(model.config, model.network, model.ladder, generator)
    transition = engine.transition(KERNELS[model.config.kernel])
    kept, missing, spent = x.clone(), torch.full_like(t, visits), torch.zeros_like(t)
    for k in range(LARGEST):
        x, t, _info = transition(x, t, model.sigma)
        spent += (missing > 0).long()
        arrived = (missing == 1) & (t == 0)
        kept = torch.where(arrived.reshape(-1, 1, 1, 1), x, kept)
        missing -= ((t == 0) & (missing > 0)).long()
        if k % 100 == 0 and not bool((missing > 0).any()):
            break
    done = missing == 0
    return kept[done], float(spent.double().mean()) * (model.config.steps + 1)


def measures(judge: Judge, x: Tensor, test: Tensor, train: Tensor) -> dict[str, Any]:
    found = shares(judge, x)
    return {
        "images": len(x),
        "class_shares": [round(v, 3) for v in found.tolist()],
        "total_variation": round(float((found - 1 / len(found)).abs().sum()) / 2, 3),
        "confident": round(confident(judge, x), 3),
        "frechet": round(frechet(judge, x, test), 2),
        "nearest_training_image": round(float(nearest(x, train).median()), 2),
    }


def picture(path: Path, x: Tensor) -> None:
    """Dark on white, as garments are looked at."""
    shown = -x[:SHOWN].clamp(-1, 1).cpu().numpy()
    checkpoint.write_atomically(path, contact_sheet(shown, np.array([-1.0, 1.0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fashion-mnist")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    args = parser.parse_args()
    model = ready(args.model, args.device)
    name = model.config.experiment
    judge = train_judge(name, args.device, args.seed)
    train, test = (unit(torch.from_numpy(load_images(name, split)[0])).to(args.device) for split in ("train", "test"))
    generator = torch.Generator(args.device).manual_seed(args.seed + 1)

    def cleaned(x: Tensor) -> Tensor:
        return torch.cat([model.to_data(model.cleaned(part)).clamp(-1, 1) for part in x.split(200)])

    order = torch.randperm(len(test), generator=generator, device=args.device)
    noisy = model.ladder.diffuse(model.standardise(test[order]), torch.zeros_like(order), generator)
    halves = cleaned(noisy[: 2 * args.count]).chunk(2)  # one to compare with, one to stand for real images
    real = {"way": "real images", "judge": round(judge.accuracy, 4)}
    print(json.dumps(real | measures(judge, halves[1], halves[0], train)), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    for way in args.ways:
        kind, _, number = way.partition("-")
        if kind == "annealed":
            x, gradients = annealed(model, args.count, int(number), generator)
        elif kind == "chains":
            tensors, _facts = checkpoint.read(model_folder(args.model), "model")
            start = (tensors["chains.x"].float().to(args.device), tensors["chains.t"].to(args.device))
            x, gradients = until_visits(model, *start, 1, generator)
        else:
            noise = sampling.from_noise(model.sampler(), model.event, args.count, generator)
            x, gradients = until_visits(model, noise.x, noise.t, 1 if way == "first-hit" else int(number), generator)
        found = measures(judge, cleaned(x), halves[0][: len(x)], train)
        print(json.dumps({"way": way, "gradients_per_image": round(gradients)} | found), flush=True)
        if args.out:
            picture(args.out / f"{way}.png", cleaned(x))


if __name__ == "__main__":
    main()
