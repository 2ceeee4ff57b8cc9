"""Does normalisation break persistent training, as the paper says? Digits, the paper's network and none of our helps.

`python benchmarks/normalisation.py [--iterations 600] [--seeds 2]` trains DA-EBM with persistent chains from the
first iteration on three networks that differ in normalisation alone: none, group (one image at a time) before every
activation, spectral on every convolution. It prints how data and chains differ in energy, and the chains' pixel
variance over the diffused data's.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from daebm import Config, Dataset, DivergenceError
from daebm.resnet import ResNet
from daebm.state import build_ladder
from daebm.training import train

WIDTH, GROUPS = 16, 4


class GroupResNet(ResNet):
    """The paper's network with its feature maps normalised, in groups of channels, wherever an activation follows."""

    def _shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, _c = super()._shared(x)
        return h, self.blocks[0].first(F.silu(F.group_norm(h, GROUPS)))

    def _rest(self, h: Tensor, c: Tensor, shifts: list[Tensor], heads: list[Tensor]) -> Tensor:
        for i, (block, shift) in enumerate(zip(self.blocks, shifts, strict=True)):
            if i and i % self.depth == 0:
                h = F.avg_pool2d(h, 2)
            if i:
                c = block.first(F.silu(F.group_norm(h, GROUPS)))
            c = block.second(F.silu(F.group_norm(c, GROUPS) + shift))
            h = c + (h if block.skip is None else block.skip(h))
        u: Tensor = -(F.silu(F.group_norm(h, GROUPS)).flatten(2).sum(2) * heads[0]).sum(1)
        return u


def build(kind: str, levels: int) -> nn.Module:
    network = (GroupResNet if kind == "group" else ResNet)((1, 8, 8), levels, WIDTH)
    if kind == "spectral":
        for part in list(network.modules()):
            if isinstance(part, nn.Conv2d):
                spectral_norm(part)
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    digits = torch.from_numpy(load_digits().images / 8 - 1).float().unsqueeze(1)
    data = Dataset.standardised("digits", digits[:1297], digits[1297:])
    print("| normalisation | seed | gap, nats | acceptance | step at t = 0 | variance ratio | refused | roll-backs |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in ("none", "group", "spectral"):
        for seed in range(args.seeds):
            config = Config(
                **{"network": "resnet", "width": WIDTH, "hidden": 1, "floor": 0.15, "batch": 100, "store": 1000},
                **{"steps": 5, "bursts": 2, "label_move": "block", "step_size": 0.5, "adapt_every": 10, "seed": seed},
                **{"iterations": args.iterations, "learning_rate": 3e-4, "warm_up": args.iterations // 10},
                **{"energy_penalty": 1e-5, "log_every": max(1, args.iterations // 6)},
            )
            metrics: list[dict[str, float]] = []
            torch.manual_seed(seed)
            try:
                levels = build_ladder(config, data.standardise(data.train)).levels
                state, ladder = train(config, data, report=metrics.append, network=build(kind, levels))
            except DivergenceError as error:
                print(f"| {kind} | {seed} | {str(error).split(' after')[0]} | | | | | |", flush=True)
                continue
            last = [row for row in metrics if "gap" in row][-1]
            t, x = state.chains.t, state.chains.x
            expected = ladder.abar[t] * data.standardise(data.train).var(0).mean() + ladder.variance[t]
            ratio = float(x.var(0).mean() / expected.mean())
            step = float(state.steps.sigma[0])
            cells = f"{last['gap']:.2f} | {last['acceptance']:.2f} | {step:.3g} | {ratio:.2f}"
            print(f"| {kind} | {seed} | {cells} | {int(state.nonfinite)} | {state.rollbacks} |", flush=True)


if __name__ == "__main__":
    main()
