"""How the training of images fares, stage by stage: after each warm start, and while chains persist.

`python benchmarks/stages.py [--experiment fashion-mnist] [--preset default] [--seed 0] [--looks 4] [KEY=VALUE ...]`
prints a JSON line at a time, on held-out images. Fifths of the ladder go from low to high. Energies of images differ by
a hundred nats, so what matters is mostly seen on a chain beside the image that it began from.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch import Tensor

from daebm.config import resolve
from daebm.denoising import denoising_loss, draw_labelled, label_loss
from daebm.experiments import experiment
from daebm.ladder import per_chain
from daebm.samplers import langevin, mgms
from daebm.spacing import neighbour_acceptance
from daebm.training import Setup, advance, begin

ROWS = 500  # images per evaluation; bounds memory
FIFTHS = 5


class Looks:
    """Measures of a setup as it is now; the same held-out images and noise every time."""

    def __init__(self, setup: Setup, images: int) -> None:
        self.setup, self.ladder = setup, setup.ladder
        self.network, self.generator = setup.state.network, torch.Generator(setup.data.device)
        self.z = setup.dataset.standardise(setup.dataset.held_out[:images].to(setup.data.device))

    def again(self) -> torch.Generator:
        return self.generator.manual_seed(1)

    def levels(self, count: int) -> Tensor:
        """As many levels as images, each as often as any other."""
        return torch.arange(count, device=self.z.device) * self.ladder.levels // count

    def energies(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([self.network(x[i : i + ROWS], t[i : i + ROWS]) for i in range(0, len(x), ROWS)])

    def by_fifth(self, values: Tensor, t: Tensor) -> list[float | None]:
        fifth = t * FIFTHS // self.ladder.levels
        there = [fifth == k for k in range(FIFTHS)]
        return [round(float(values[own].mean()), 3) if bool(own.any()) else None for own in there]

    def shares(self, t: Tensor) -> list[float]:
        fifth = torch.bincount(t * FIFTHS // self.ladder.levels, minlength=FIFTHS)
        own = torch.bincount(torch.arange(self.ladder.levels) * FIFTHS // self.ladder.levels, minlength=FIFTHS)
        return [round(v, 3) for v in (fifth.cpu() / len(t) * self.ladder.levels / own).tolist()]

    def denoising(self) -> dict[str, Any]:
        """The loss at t = 0, T/4, T/2, and what a label of a block costs in nats, and a guess."""
        generator, found = self.again(), []
        z = self.z[:ROWS]
        for level in (0, self.ladder.top // 4, self.ladder.top // 2):
            t = torch.full((len(z),), level, device=z.device)
            eps = torch.randn(z.shape, generator=generator, device=z.device)
            plain = getattr(self.network, "ungained", self.network)
            sd = per_chain(self.ladder.on(z.device).variance.sqrt(), t, z)
            found.append(round(float(denoising_loss(plain, self.ladder.noised(z, t, eps), t, eps, sd).detach()), 4))
        labelled = draw_labelled(self.ladder, z, generator)
        with torch.no_grad():
            parts = [[part[i : i + 100] for part in labelled] for i in range(0, len(z), 100)]
            label = sum(len(part[0]) * float(label_loss(self.network, *part)) for part in parts) / len(z)
        return {"denoising": found, "label": [round(label, 3), round(float(labelled.valid.sum(1).log().mean()), 3)]}

    def fall(self, after: tuple[int, ...] = (60, 300), chains: int = 100) -> dict[str, Any]:
        """U(image) - U(chain) after so many steps at fixed levels 0, T/8, T/4, T/2; the same images at each."""
        generator, found = self.again(), {}
        chosen = torch.tensor([0, *(self.ladder.top // k for k in (8, 4, 2))], device=self.z.device)
        chains = min(chains, len(self.z))
        t = chosen.repeat_interleave(chains)
        x = self.ladder.diffuse(self.z[:chains].repeat(4, 1, 1, 1), t, generator)
        here, sigma, y, done = mgms.at_level(self.network, t), self.setup.state.steps.sigma[t].to(x.dtype), x, 0
        for steps in after:
            y, _info = langevin.run(langevin.mala, here, y, sigma, steps - done, generator)
            done = steps
            gap = (self.energies(x, t) - self.energies(y, t)).reshape(4, -1).mean(1)
            found[f"fall_{steps}"] = [round(v, 1) for v in gap.tolist()]
        return found

    def roam(self, transitions: int = 60, chains: int = 400) -> dict[str, Any]:
        """U(image) - U(chain) after transitions with label moves, at the chain's level; and where chains are."""
        config, generator = self.setup.config, self.again()
        z = self.z[:chains]
        t = self.levels(len(z))
        x, move = (
            self.ladder.diffuse(z, t, generator),
            mgms.label_move(config.label_move, self.ladder.top, config.block),
        )
        kernel = langevin.KERNELS[config.kernel]
        with torch.no_grad():
            for _ in range(transitions):
                x, t, _info = mgms.transition(
                    kernel, self.network, x, t, self.setup.state.steps.sigma, config.steps, move, generator
                )
        gap = self.energies(self.ladder.diffuse(z, t, generator), t) - self.energies(x, t)
        return {"own_gap": self.by_fifth(gap, t), "own_shares": self.shares(t)}

    def store(self) -> dict[str, Any]:
        """The persistent chains against diffused held-out images of their levels."""
        chains, ladder, generator = self.setup.state.chains, self.ladder, self.again()
        x, t = chains.x, chains.t
        held = []
        for level in range(ladder.levels):
            here = torch.full((min(1000, len(self.z)),), level, device=t.device)
            held.append(self.energies(ladder.diffuse(self.z[: len(here)], here, generator), here).mean())
        abar, noise = (values.to(x)[t] for values in (ladder.abar, ladder.variance))
        centre = self.z.mean(0) * per_chain(ladder.on(x.device).abar.sqrt(), t, x)
        spread = (x - centre).square().flatten(1).mean(1) / (abar * self.z.var(0).mean() + noise)
        mean = x.flatten(1).mean(1) - abar.sqrt() * self.z.mean()
        count = torch.bincount(t, minlength=ladder.levels) * ladder.levels / len(t)
        acceptance = self.setup.state.steps.acceptance().cpu()
        carry = self.setup.config.label_move == "carry"
        edges = neighbour_acceptance(self.network, x, t, ladder.top, carry=carry)
        found: dict[str, Any] = {
            "gap": self.by_fifth(torch.stack(held)[t] - self.energies(x, t), t),
            "variance_ratio": self.by_fifth(spread, t),
            "mean_difference": self.by_fifth(mean, t),
            "shares": self.shares(t),
            "level_share_range": [round(float(v), 2) for v in (count.min(), count.max())],
            "acceptance_range": [
                round(float(v), 2) for v in (acceptance.nan_to_num(1).min(), acceptance.nan_to_num(0).max())
            ],
            "neighbour_acceptance_least": round(float(edges.nan_to_num(1).min()), 3),
            "round_trips": round(float(chains.trips.double().mean()), 3),
            "reached_top_from_0": round(float((chains.stage == 2).double().mean()), 3),
            "refused": int(self.setup.state.nonfinite),
        }
        if hasattr(self.network, "log_gain"):
            found["gains"] = [[round(v, 3) for v in gain] for gain in self.network.log_gain.detach().exp().T.tolist()]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--experiment", default="fashion-mnist")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--looks", type=int, default=4, help="while chains persist")
    parser.add_argument("--images", type=int, default=5000, help="held-out images that are looked at")
    args = parser.parse_args()
    overrides = dict(setting.split("=", 1) for setting in args.settings)
    config = resolve(args.experiment, experiment(args.experiment).presets, "da", args.preset, args.seed, overrides)
    setup = begin(config, experiment(args.experiment).dataset(config))
    looks, state, start = Looks(setup, args.images), setup.state, time.perf_counter()
    weights = sum(weight.numel() for weight in state.network.parameters())
    print(json.dumps({"levels": setup.ladder.levels, "weights": weights, "settings": config.to_json()}), flush=True)

    every = max(1, (config.iterations - config.warm) // args.looks)
    measures: list[Tensor] = []
    while state.iteration < config.iterations:
        measures.append(advance(setup))
        persisting = state.iteration > config.warm
        due = state.iteration in (config.denoise, config.warm) or (
            persisting and (state.iteration - config.warm) % every == 0
        )
        if not due:
            continue
        loss, gap, _norm, acceptance = torch.stack(measures).mean(0).tolist()
        measures.clear()
        found = {"iteration": state.iteration, "loss": loss, "batch_gap": gap, "batch_acceptance": acceptance}
        found |= looks.denoising() | looks.fall() | looks.roam() | (looks.store() if persisting else {})
        print(json.dumps(found | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
