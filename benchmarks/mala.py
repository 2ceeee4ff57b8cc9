"""Speed of one MALA step against two libraries on the same network, as ratios within one run.

Run with `make bench`. torchebm's sampler is *unadjusted* Langevin (it has no MALA); ebmkit's is MALA with two
gradients a step. The contenders take turns, so that a slow moment of the machine hits all of them, and the
median over the rounds is reported.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from ebm.samplers.langevin import MALA
from torch import nn
from torchebm.core import BaseModel
from torchebm.samplers import LangevinDynamics

import daebm

SIGMA = 0.1


def energy_network() -> nn.Module:
    """Four linear layers, 128 wide, in two dimensions: the toy network of the paper."""
    torch.manual_seed(0)
    widths = [2, 128, 128, 128]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Softplus()]
    return nn.Sequential(*layers, nn.Linear(128, 1), nn.Flatten(0))


class TorchebmModel(BaseModel):
    """The network as torchebm wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


def contenders(network: nn.Module, x: torch.Tensor, steps: int) -> dict[str, Callable[[], object]]:
    step_size = SIGMA**2 / 2  # both libraries write x - h grad U + sqrt(2 h) eps
    unadjusted = LangevinDynamics(TorchebmModel(network), step_size=step_size, noise_scale=1.0)
    exact = MALA(step_size=step_size, steps=steps)
    generator = torch.Generator().manual_seed(0)

    def ebmkit() -> None:
        y = x
        for _ in range(steps):
            y = exact.step(network, y)

    return {
        "daebm MALA, compiled": lambda: daebm.run(daebm.mala, network, x, SIGMA, steps, generator, compile=True),
        "daebm MALA, eager": lambda: daebm.run(daebm.mala, network, x, SIGMA, steps, generator),
        "torchebm Langevin, unadjusted": lambda: unadjusted.sample(x=x, n_steps=steps),
        "ebmkit MALA": ebmkit,
    }


def milliseconds(call: Callable[[], object]) -> float:
    clock = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    network = energy_network()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds")
    for chains in (1_000, 10_000):
        x = torch.randn(chains, 2, generator=torch.Generator().manual_seed(1))
        calls = contenders(network, x, arguments.steps)
        for call in calls.values():
            call()  # warm up, and compile
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
        print(f"\n{chains:,} chains, {arguments.steps} steps; times faster than each (median over rounds)")
        reference = [name for name in calls if not name.startswith("daebm")]
        for ours in (name for name in calls if name.startswith("daebm")):
            ratios = (statistics.median(b / a for a, b in zip(times[ours], times[r], strict=True)) for r in reference)
            print(
                "  " + f"{ours:<24}" + "".join(f"{ratio:6.2f}x {r}" for ratio, r in zip(ratios, reference, strict=True))
            )
        transitions(network, x, 40, arguments.steps, times)


def transitions(
    network: nn.Module, x: torch.Tensor, steps: int, timed_steps: int, times: dict[str, list[float]]
) -> None:
    """MGMS transitions (steps MALA steps and a full label draw over 7 levels) beside the plain steps."""
    levels = torch.linspace(0, 1, 7)
    t = torch.zeros(len(x), dtype=torch.long)
    sigma = torch.full((7,), SIGMA)
    generator = torch.Generator().manual_seed(0)

    def labelled(y: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return network(y) + levels[label]

    def go() -> object:
        return daebm.transition(daebm.mala, labelled, x, t, sigma, steps, daebm.full(6), generator, compile=True)

    go()
    each = statistics.median(milliseconds(go) for _ in range(5))
    alone = statistics.median(times["daebm MALA, compiled"]) * steps / timed_steps
    share = each / alone
    print(
        f"  MGMS: {1000 / each:.2f} transitions of {steps} steps and a draw over 7 labels a second "
        f"({share:.2f}x the cost of their MALA steps alone)"
    )


if __name__ == "__main__":
    main()
