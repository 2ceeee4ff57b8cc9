"""A warm start: what can be learned of the energy without chains, how it changes with x and how it changes with t.

It says nothing of what diffused data never reach, nor of the levels' masses: that is left to maximum likelihood.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from daebm.ladder import per_chain
from daebm.samplers.mgms import Energy

if TYPE_CHECKING:
    from daebm.training import Setup


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


def chainless_loss(setup: Setup, z: Tensor) -> Tensor:
    """What can be learned of the energy without chains, from standardised data z; in nats per pixel.

    Both terms are least at the true energies, at all levels; neither sees what no diffused data ever reach.
    """
    ladder, generator, pairs = setup.ladder, setup.state.generator, len(z) // 4
    t = torch.randint(ladder.levels, (len(z),), generator=generator, device=z.device)
    eps = torch.randn(z.shape, generator=generator, device=z.device)
    loss = setup.engine.denoising_loss(ladder.noised(z, t, eps), t, eps, per_chain(ladder.variance.sqrt(), t, z)) / 2
    if ladder.top == 0 or pairs == 0:
        return loss
    t = torch.randint(ladder.top, (pairs,), generator=generator, device=z.device)
    low = ladder.diffuse(z[:pairs], t, generator)
    high = ladder.diffuse(z[pairs : 2 * pairs], t + 1, generator)
    return loss + ordering_loss(setup.engine.energy, low, high, t) / z[0].numel()
