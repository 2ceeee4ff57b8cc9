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
from daebm.samplers.mgms import Energy, carried_energies


def denoising_loss(network: Energy, x: Tensor, t: Tensor, eps: Tensor, sd: Tensor) -> Tensor:
    """Mean over pixels of |sd_t grad U(x_t, t) - eps|^2, least where grad U is minus the true score."""

    def total(y: Tensor) -> Tensor:
        return network(y, t).sum()

    slope: Tensor = torch.func.grad(total)(x)
    return (sd * slope - eps).square().mean()


class Pairs(NamedTuple):
    """Independent diffused data: ``low`` at levels ``below``, ``high`` at levels ``above``."""

    low: Tensor
    high: Tensor
    below: Tensor
    above: Tensor


def draw_pairs(ladder: Ladder, z: Tensor, other: Tensor, generator: torch.Generator, span: int) -> Pairs:
    """Standardised data, as many of one as of the other, at random levels at most ``span`` apart."""
    below = torch.randint(max(ladder.top, 1), (len(z),), generator=generator, device=z.device)
    above = below + 1
    if span > 1:
        apart = torch.randint(1, span + 1, (len(z),), generator=generator, device=z.device)
        above = (below + apart).clamp(max=ladder.top)
    return Pairs(ladder.diffuse(z, below, generator), ladder.diffuse(other, above, generator), below, above)


def ordering_loss(energy: Energy, x: Tensor, y: Tensor, below: Tensor, above: Tensor, carry: bool = False) -> Tensor:
    """-log of the model's probability that x, and not y, is the one at the lower of two levels.

    Least where the model's log ratio of the two levels' densities is the true one up to a constant: the scores say how
    the energy changes with x, this says how it changes with t, for each image. The masses of the levels cancel. With
    x fixed the noise gives the answer away as soon as levels are not neighbours. With ``carry`` its variance goes
    with the level, as in the label move of that name, and the rest of the image has to tell.
    """
    points, own, other = torch.cat([x, y]), torch.cat([below, above]), torch.cat([above, below])
    wrong = carried_energies(energy, points, own, other.unsqueeze(1))[1].squeeze(1) if carry else energy(points, other)
    of_x, of_y = (energy(points, own) - wrong).chunk(2)
    return F.softplus(of_x + of_y).mean()


class Noisy(NamedTuple):
    """What denoising learns from: noised data x at levels t, their noise eps and its sd, and the parts of `Pairs`."""

    x: Tensor
    t: Tensor
    eps: Tensor
    sd: Tensor
    low: Tensor
    high: Tensor
    below: Tensor
    above: Tensor


def draw_noisy(ladder: Ladder, z: Tensor, generator: torch.Generator) -> Noisy:
    """Standardised data z at random levels; a quarter as many pairs, one level apart."""
    t = torch.randint(ladder.levels, (len(z),), generator=generator, device=z.device)
    eps = torch.randn(z.shape, generator=generator, device=z.device)
    x, sd = ladder.noised(z, t, eps), per_chain(ladder.variance.sqrt(), t, z)
    pairs = len(z) // 4 if ladder.top else 0
    return Noisy(x, t, eps, sd, *draw_pairs(ladder, z[:pairs], z[pairs : 2 * pairs], generator, span=1))


def chainless_loss(score: Callable[..., Tensor], energy: Energy, *given: Tensor) -> Tensor:
    """What can be learned of the energy without chains, from ``given`` (the parts of `Noisy`); in nats per pixel.

    ``score`` is `denoising_loss` of the energy. Both terms are least at the true energies, at all levels; neither sees
    what no diffused data ever reach.
    """
    noisy = Noisy(*given)
    loss = score(noisy.x, noisy.t, noisy.eps, noisy.sd) / 2
    if len(noisy.below):
        order = ordering_loss(energy, noisy.low, noisy.high, noisy.below, noisy.above)
        loss = loss + order / noisy.x[0].numel()
    return loss
