"""A warm start by denoising score matching: the slope of the energy is learned without chains.

Denoising says nothing of how much mass each level, or each island of the data, has: that is left to maximum
likelihood. But chains that start from diffused data then find an energy that holds them where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from daebm.ladder import per_chain
from daebm.samplers import langevin
from daebm.samplers.adapt import StepSizes
from daebm.samplers.mgms import Energy, at_level
from daebm.spacing import level_balance

if TYPE_CHECKING:
    from daebm.training import Setup

BALANCED = 8192  # at most so many chains are looked at
SETTLE_CHAINS = 32  # per level
SETTLE_ROUNDS, SETTLE_STEPS = 8, 5  # an adaptation of the step sizes each; the second half is measured
SETTLE_ROWS = 256  # chains moved together; bounds memory


def denoising_loss(network: Energy, x: Tensor, t: Tensor, eps: Tensor, sd: Tensor) -> Tensor:
    """Mean over pixels of |sd_t grad U(x_t, t) - eps|^2, least where grad U is minus the true score."""

    def total(y: Tensor) -> Tensor:
        return network(y, t).sum()

    slope: Tensor = torch.func.grad(total)(x)
    return (sd * slope - eps).square().mean()


def ordering_loss(energy: Energy, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    """-log of the model's probability that x, and not y, is the one at level t when the other is at t + 1.

    For x at t and y at t + 1 of independent data. Least where U(., t + 1) - U(., t) is the true log ratio of the two
    densities up to a constant: the scores say how the energy changes with x, this says how it changes with t. The
    masses of the levels cancel.
    """
    both = torch.cat([x, x, y, y])
    right_x, wrong_x, wrong_y, right_y = energy(both, torch.cat([t, t + 1, t, t + 1])).chunk(4)
    return F.softplus(right_x + right_y - wrong_x - wrong_y).mean()


def chainless_loss(setup: Setup, z: Tensor, rows: int) -> Tensor:
    """What can be learned of the energy without chains, from ``rows`` of the standardised data z; in nats per pixel.

    Both terms are least at the true energies, at all levels; neither sees what no diffused data ever reach.
    """
    ladder, generator, pairs = setup.ladder, setup.state.generator, len(z) // 4
    t = torch.randint(ladder.levels, (rows,), generator=generator, device=z.device)
    eps = torch.randn(z[:rows].shape, generator=generator, device=z.device)
    sd = per_chain(ladder.variance.sqrt(), t, z)
    loss = setup.engine.denoising_loss(ladder.noised(z[:rows], t, eps), t, eps, sd) / 2
    if ladder.top == 0 or pairs == 0:
        return loss
    t = torch.randint(ladder.top, (pairs,), generator=generator, device=z.device)
    low = ladder.diffuse(z[:pairs], t, generator)
    high = ladder.diffuse(z[pairs : 2 * pairs], t + 1, generator)
    return loss + ordering_loss(setup.engine.energy, low, high, t) / z[0].numel()


def balance_levels(setup: Setup, x: Tensor, t: Tensor, share: float = 1.0) -> None:
    """Take back, by the network's constants, a share of the levels' difference in mass, seen on chains (x, t)."""
    constant = cast(Tensor, setup.state.network.constant)
    ratio, _acceptance = level_balance(setup.state.network, x[:BALANCED], t[:BALANCED], setup.ladder.top)
    with torch.no_grad():  # mass e^(ratio) too much is energy too low
        constant[1:] += share * ratio.cumsum(0).to(constant)


def settle(setup: Setup) -> None:
    """After the warm start: let step sizes adapt to the energy, and give all levels of the model equal mass.

    On chains that have left the diffused data for what the model itself holds likely near them: as long as the two
    differ, the masses seen from the data are nats wrong at every edge.
    """
    state, ladder, generator = setup.state, setup.ladder, setup.state.generator
    if setup.config.method != "da":
        return
    t = torch.arange(ladder.levels, device=setup.data.device).repeat(SETTLE_CHAINS)
    rows = torch.randint(len(setup.data), (len(t),), generator=generator, device=t.device)
    x = ladder.diffuse(setup.points(rows), t, generator)
    steps = StepSizes.start(state.steps.sigma, state.steps.bounds, SETTLE_CHAINS)
    draws = []
    for settled in (k >= SETTLE_ROUNDS // 2 for k in range(SETTLE_ROUNDS)):
        for i in range(0, len(t), SETTLE_ROWS):
            here, sigma = slice(i, i + SETTLE_ROWS), steps.sigma[t[i : i + SETTLE_ROWS]].to(x.dtype)
            x[here], info = langevin.run(
                langevin.mala, at_level(state.network, t[here]), x[here], sigma, SETTLE_STEPS, generator
            )
            steps.record(t[here], info.accept_prob)
        steps.adapt()
        draws += [x.clone()] if settled else []
    state.steps.sigma = steps.sigma
    constant = getattr(state.network, "constant", None)
    if isinstance(constant, Tensor) and constant.shape == (ladder.levels,):
        balance_levels(setup, torch.cat(draws), t.repeat(len(draws)))
