"""Samples after training, in standardised units, with frozen step sizes: from noise, and long runs from data.

Every function counts the energy gradients it spent, over all chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from daebm.errors import DaebmError, InputError
from daebm.ladder import Ladder
from daebm.methods import conditional, conditional_sigma
from daebm.samplers import langevin
from daebm.samplers.langevin import Info, Kernel, State
from daebm.samplers.mgms import Energy, LabelMove, at_level, carried_to, transition

ENOUGH, PATIENCE = 2, 10  # looks for so many times what is asked for; so many times as many looks are too many


class Drawn(NamedTuple):
    """Samples x (n, ...), their levels (n,); of all together, gradients spent and refusals of what was not finite."""

    x: Tensor
    t: Tensor
    gradients: int
    refused: int = 0


class Sampler(NamedTuple):
    """What moves a chain of a model with levels: Algorithm 2 with everything but the chain fixed."""

    kernel: Kernel
    energy: Energy
    ladder: Ladder
    sigma: Tensor
    steps: int
    move: LabelMove


def from_noise(sampler: Sampler, event: tuple[int, ...], count: int, generator: torch.Generator) -> Drawn:
    """The starting point of Algorithm 3: x ~ N(0, I) at level T."""
    _positive(count=count)
    x = torch.randn(count, *event, generator=generator, device=generator.device)
    return Drawn(x, torch.full((count,), sampler.ladder.top, device=x.device), 0)


def transitions(sampler: Sampler, start: Drawn, count: int, generator: torch.Generator) -> Drawn:
    """``count`` MGMS transitions of every chain. Those that end at t = 0 are samples of the data's level."""
    _positive(transitions=count)
    x, t, refused = start.x, start.t, torch.zeros((), device=start.x.device)
    for _ in range(count):
        x, t, info = transition(
            sampler.kernel, sampler.energy, x, t, sampler.sigma, sampler.steps, sampler.move, generator
        )
        refused += info.refused
    return Drawn(x, t, start.gradients + count * (sampler.steps + 1) * len(x), start.refused + int(refused))


def patience(waits: int, trip: float) -> int:
    """Transitions after which a chain that still waits for level 0 is given up, out of ``waits`` such waits in all.

    None is longer on average than a round trip over the levels, of ``trip`` transitions, and the tail of a wait falls
    off like an exponential's. The longest of so many is then about 1 + log(waits) trips; three times that leaves room
    for a trip that was judged from few.
    """
    return math.ceil(3 * trip * (1 + math.log(waits)))


def until_visits(
    sampler: Sampler, start: Drawn, visits: int, generator: torch.Generator, maximum: int = 10_000
) -> Drawn:
    """Algorithm 3: each chain runs until ``visits`` (M) of its transitions have ended at t = 0; x at that moment.

    A visit counts however long the chain has been there, as in the released code. Chains that have arrived stop, so
    the cost is what their own stopping times add up to. One that waits ``maximum`` transitions for a visit is an error.
    """
    _positive(visits=visits, maximum=maximum)
    x, t = start.x.clone(), start.t.clone()
    missing = torch.full_like(t, visits)
    waited = torch.zeros_like(t)
    gradients, refused = start.gradients, start.refused
    while len(active := (missing > 0).nonzero().squeeze(1)):
        if int(waited[active].max()) >= maximum:
            raise DaebmError(
                f"{len(active)} of {len(x)} chains have not been at level 0 {visits} times, and one has waited for it "
                f"for {maximum} transitions: the labels of this model hardly mix; train it for longer, on more levels "
                "or with a larger noise floor"
            )
        x[active], t[active], info = transition(
            sampler.kernel,
            sampler.energy,
            x[active],
            t[active],
            sampler.sigma,
            sampler.steps,
            sampler.move,
            generator,
        )
        there = t[active] == 0
        missing[active] -= there.long()
        waited[active] = torch.where(there, 0, waited[active] + 1)
        gradients += (sampler.steps + 1) * len(active)
        refused += int(info.refused)
    return Drawn(x, t, gradients, refused)


def looked_at(sampler: Sampler, start: Drawn, count: int, settle: int, generator: torch.Generator) -> Drawn:
    """``count`` samples: x of chains at t = 0, looked at so often that there should be twice as many, at random.

    Chains settle for ``settle`` transitions; the looks are spread over half as many more. At a time that is set
    beforehand the law at t = 0 is the model's, as far as chains have settled. When a chain arrives there (Algorithm 3)
    is no such time, nor is when enough have been found: kinds of points from which labels travel fast would be seen too
    often. Samples of one call are not quite independent, for a chain may be seen more than once.
    """
    _positive(count=count, settle=settle)
    looks = math.ceil(ENOUGH * count * sampler.ladder.levels / len(start.x))
    apart = math.ceil(settle / (2 * looks))
    here, seen = transitions(sampler, start, settle, generator), []
    for k in range(looks * PATIENCE):
        seen.append(here.x[here.t == 0])
        x = torch.cat(seen)
        if k + 1 >= looks and len(x) >= count:
            x = x[torch.randperm(len(x), generator=generator, device=x.device)[:count]]
            return Drawn(x, torch.zeros(count, dtype=torch.long, device=x.device), here.gradients, here.refused)
        here = transitions(sampler, here, apart, generator)
    raise DaebmError(
        f"{len(torch.cat(seen))} of {count} samples were found in {len(seen)} looks at {len(here.x)} chains, and there "
        "should be one at each level: the labels of this model hardly mix; train it for longer, on more levels or with "
        "a larger noise floor"
    )


def annealed(
    sampler: Sampler,
    start: Drawn,
    steps: int,
    generator: torch.Generator,
    carry: bool = False,
    observe: Callable[[int, Tensor], None] | None = None,
) -> Drawn:
    """A time-annealed start: ``steps`` Langevin steps at each level from T down to 0.

    With ``carry`` every level hands x over as the label move of that name does, which takes a level's noise off at
    once: the same quality for a quarter of the steps. Not exact in itself, but a good place to start an exact chain.
    ``observe`` is shown each level and the x with which it ends.
    """
    x, gradients, refused = start.x, start.gradients, start.refused
    for level in range(sampler.ladder.top, -1, -1):
        t = torch.full((len(x),), level, device=x.device)
        if carry and level < sampler.ladder.top:
            x = carried_to(sampler.energy, x, t + 1, t.unsqueeze(1))[0].squeeze(1)
        x, info = langevin.run(
            sampler.kernel, at_level(sampler.energy, t), x, float(sampler.sigma[level]), steps, generator
        )
        gradients += (steps + 1) * len(x)
        refused += int(info.nonfinite.sum())
        if observe is not None:
            observe(level, x)
    return Drawn(x, torch.zeros_like(start.t), gradients, refused)


def recovery(sampler: Sampler, start: Drawn, generator: torch.Generator) -> Drawn:
    """DRL's sequential sampling: from level T down, L conditional Langevin steps at each level."""
    x, gradients, refused = start.x, start.gradients, start.refused
    for level in range(sampler.ladder.top - 1, -1, -1):
        t = torch.full((len(x),), level, device=x.device)
        target = conditional(sampler.energy, sampler.ladder, t, x)
        sigma = conditional_sigma(sampler.sigma, sampler.ladder, t).to(x.dtype)
        scaled = x / sampler.ladder.alpha[level + 1].sqrt().to(x.dtype)
        x, info = langevin.run(sampler.kernel, target, scaled, sigma, sampler.steps, generator)
        gradients += (sampler.steps + 1) * len(x)
        refused += int(info.nonfinite.sum())
    return Drawn(x, torch.zeros_like(start.t), gradients, refused)


def long_run(
    kernel: Kernel,
    energy: Energy,
    x: Tensor,
    sigma: float,
    steps: int,
    generator: torch.Generator,
    observe: Callable[[int, State], None] | None = None,
    every: int = 1,
    compile: bool = False,
) -> tuple[Tensor, Info]:
    """Langevin steps at t = 0 from given points, usually data: does the model hold them where they belong?"""
    t = torch.zeros(len(x), dtype=torch.long, device=x.device)
    return langevin.run(kernel, at_level(energy, t), x, sigma, steps, generator, observe, every, compile)


def tweedie(energy: Energy, x: Tensor, floor: float) -> Tensor:
    """E[clean | x] under the model, x - floor^2 grad U(x, 0): level 0 holds noise of sd ``floor``, this removes it."""
    t = torch.zeros(len(x), dtype=torch.long, device=x.device)
    _value, grad = langevin.energy_and_gradient(at_level(energy, t), x)
    return x - floor**2 * grad


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name} must be at least 1, got {count}")
