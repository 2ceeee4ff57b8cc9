"""A warm start: what can be learned of the energy without chains, how it changes with x and how it changes with t.

It says nothing of what diffused data never reach, nor of the levels' masses: that is left to maximum likelihood.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from daebm.ladder import Ladder, per_chain
from daebm.samplers.mgms import Energy


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


class Noisy(NamedTuple):
    """What the warm start learns from: x = noised data at levels t with their noise eps and its sd, and pairs of
    independent images of which ``low`` is at level ``edge`` and ``high`` one above."""

    x: Tensor
    t: Tensor
    eps: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor
    edge: Tensor


def draw_noisy(ladder: Ladder, z: Tensor, generator: torch.Generator) -> Noisy:
    """Standardised data z at random levels; a quarter as many pairs."""
    t = torch.randint(ladder.levels, (len(z),), generator=generator, device=z.device)
    eps = torch.randn(z.shape, generator=generator, device=z.device)
    x, sd = ladder.noised(z, t, eps), per_chain(ladder.variance.sqrt(), t, z)
    pairs = len(z) // 4 if ladder.top else 0
    edge = torch.randint(max(ladder.top, 1), (pairs,), generator=generator, device=z.device)
    low = ladder.diffuse(z[:pairs], edge, generator)
    high = ladder.diffuse(z[pairs : 2 * pairs], edge + 1, generator) if pairs else low
    return Noisy(x, t, eps, sd, low, high, edge)


def chainless_loss(score: Callable[..., Tensor], energy: Energy, *given: Tensor) -> Tensor:
    """What can be learned of the energy without chains, from ``given`` (the parts of `Noisy`); in nats per pixel.

    ``score`` is `denoising_loss` of the energy. Both terms are least at the true energies, at all levels; neither sees
    what no diffused data ever reach.
    """
    noisy = Noisy(*given)
    loss = score(noisy.x, noisy.t, noisy.eps, noisy.sd) / 2
    if len(noisy.edge):
        loss = loss + ordering_loss(energy, noisy.low, noisy.high, noisy.edge) / noisy.x[0].numel()
    return loss
