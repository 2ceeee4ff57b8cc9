"""What do updates that are too large do to a model with persistent chains? Fashion-MNIST at 14 x 14, a small network.

`python benchmarks/updates.py --rate 4e-4 [--trust .05] [--seed 0] [--decay-start .15] [--iterations 5000]` trains with
chains, one burst an iteration, then lets the weights stay (as they are, and their average over 1,000 iterations) and
shows, at t = 0, in the lowest three fifths of the ladder and above: energy of held-out images less that of the chains,
pixel variance over the images', pixel means in sds. Some ten minutes on one core.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from daebm import Dataset
from daebm.config import resolve
from daebm.data import to_unit_range
from daebm.experiments.images import dataset, presets
from daebm.levels import balance_levels
from daebm.samplers.langevin import KERNELS
from daebm.training import Setup, advance, begin

DENOISE, RELATE = 1000, 400  # iterations of warm start
HORIZON, LAST = 1000, 100  # iterations: of the average, and of what is shown on the way
SETTLE, WALK = 200, 250  # transitions in which levels get their masses, and in which chains are looked at
SMALL = {"device": "cpu", "precision": "fp32", "compile": "false", "width": "16", "batch": "100", "store": "200"}
CHAINS = {"bursts": "1", "block": "8", "finish": "0"}
Weights = dict[str, Tensor]


def halved(images: Tensor) -> Tensor:
    return F.avg_pool2d(images.float(), 2).round().to(torch.uint8)


def set_up(options: argparse.Namespace) -> Setup:
    changes = SMALL | CHAINS | {"denoise": str(DENOISE), "relate": str(RELATE)}
    changes |= {"learning_rate": str(options.rate), "trust": str(options.trust)}
    changes |= {"decay_start": str(options.decay_start), "iterations": str(DENOISE + RELATE + options.iterations)}
    config = resolve("fashion-mnist", presets({}), "da", "default", options.seed, changes)
    whole = dataset("fashion-mnist", config)
    train, held_out = halved(whole.train), halved(whole.held_out)
    grey = to_unit_range(train).double()
    return begin(config, Dataset("fashion-mnist", train, held_out, float(grey.mean()), float(grey.std())))


@torch.no_grad()
def staying(setup: Setup, weights: Weights, held_out: Tensor) -> list[str]:
    """What chains do once weights stay; everything is put back afterwards."""
    state, ladder, batch = setup.state, setup.ladder, setup.config.batch
    network, chains, names = state.network, state.chains, dict(state.network.named_parameters())
    live = {name: weight.detach().clone() for name, weight in names.items()}
    before = chains.x.clone(), chains.t.clone(), state.generator.get_state()
    for name, weight in names.items():
        weight.copy_(weights[name])
    move, seen = setup.engine.transition(KERNELS["mala"]), []
    for k in range(SETTLE + WALK):
        for i in range(0, len(chains), batch):
            here = slice(i, i + batch)
            chains.x[here], chains.t[here], _info = move(chains.x[here], chains.t[here], state.steps.sigma)
        if k < SETTLE and k % 5 == 0:
            balance_levels(setup, chains.x, chains.t, setup.config.level_rate / (1 + k / 30))
        if k >= SETTLE and k % 15 == 0:
            seen.append((chains.x.clone(), chains.t.clone()))
    x, t = (torch.cat(part) for part in zip(*seen, strict=True))
    generator, rows = torch.Generator().manual_seed(3), []
    bounds = (0, 1, *(k * ladder.levels // 5 for k in (1, 2, 3)), ladder.levels)
    for low, high in pairwise(bounds):
        own = (t >= low) & (t < high)
        if int(own.sum()) < 5:
            rows.append("no chains")
            continue
        levels = t[own][torch.randint(int(own.sum()), (1000,), generator=generator)]
        chosen = torch.randint(len(held_out), (1000,), generator=generator)
        y = ladder.diffuse(held_out[chosen], levels, generator)
        some = torch.randperm(int(own.sum()), generator=generator)[:1500]
        gap = float(network(y, levels).mean() - network(x[own][some], t[own][some]).mean())
        variance, mean = float(x[own].var(0).mean() / y.var(0).mean()), float((x[own].mean() - y.mean()) / y.std())
        rows.append(f"{gap:.0f} nats, {variance:.2f}, {mean:+.2f}")
    for name, weight in names.items():
        weight.copy_(live[name])
    chains.x.copy_(before[0])
    chains.t.copy_(before[1])
    state.generator.set_state(before[2])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--trust", type=float, default=0.0)
    parser.add_argument("--decay-start", type=float, default=0.15)
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # figures depend on it in the last digits
    setup = set_up(options)
    held_out = setup.dataset.standardise(setup.dataset.held_out)
    weights, average = dict(setup.state.network.named_parameters()), Weights()
    gaps, lowered = [], []
    for k in range(setup.config.iterations):
        before = {name: weight.detach().clone() for name, weight in weights.items() if name != "log_gain"}
        measures, age = advance(setup), k + 1 - setup.config.warm
        if age <= 0:
            continue
        moved = [(old - weights[name].detach(), weights[name].grad) for name, old in before.items()]
        lowered.append(sum(float((way * slope).sum()) for way, slope in moved if slope is not None))
        gaps.append(float(measures[1]))
        average = average or {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            average[name].lerp_(weight.detach(), max(1 / HORIZON, 1 / age))
        if age % max(1, options.iterations // 10) == 0:
            nats, gap = (sum(values[-LAST:]) / len(values[-LAST:]) for values in (lowered, gaps))
            print(f"{age}: an update lowers its batch by {nats:.3f} nats, gap {gap:.1f}", flush=True)
    for name, chosen in (("as they are", weights), ("averaged", average)):
        print(f"weights that stay, {name}: " + "; ".join(staying(setup, chosen, held_out)), flush=True)


if __name__ == "__main__":
    main()
