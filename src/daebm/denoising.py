"""A warm start: what can be learned of the energy without chains, how it changes with x and how it changes with t.

It says nothing of what diffused data never reach, nor of the levels' masses: that is left to maximum likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from daebm.ladder import Ladder, per_chain
from daebm.samplers.mgms import Energy, blocks, carried_energies

BLOCK = 8  # labels among which the right one is to be told
LABEL_WEIGHT = 5.0  # a block spans a seventh of our ladders: all of them together weigh about as much as all noise


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


def draw_pairs(ladder: Ladder, z: Tensor, other: Tensor, generator: torch.Generator) -> Pairs:
    """Standardised data, as many of one as of the other, at random levels one apart."""
    below = torch.randint(max(ladder.top, 1), (len(z),), generator=generator, device=z.device)
    return Pairs(ladder.diffuse(z, below, generator), ladder.diffuse(other, below + 1, generator), below, below + 1)


def ordering_loss(energy: Energy, x: Tensor, y: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """-log of the model's probability that x, and not y, is the one at the lower of two levels.

    Least where the model's log ratio of the two levels' densities is the true one up to a constant: the scores say how
    the energy changes with x, this says how it changes with t, for each image. The masses of the levels cancel.
    """
    points, own, other = torch.cat([x, y]), torch.cat([below, above]), torch.cat([above, below])
    of_x, of_y = (energy(points, own) - energy(points, other)).chunk(2)
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
    x, sd = ladder.noised(z, t, eps), per_chain(ladder.on(z.device).variance.sqrt(), t, z)
    pairs = len(z) // 4 if ladder.top else 0
    return Noisy(x, t, eps, sd, *draw_pairs(ladder, z[:pairs], z[pairs : 2 * pairs], generator))


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


class Labelled(NamedTuple):
    """Diffused data x at levels t, and for each a block of labels that holds t: (n, b), and which of them there are."""

    x: Tensor
    t: Tensor
    labels: Tensor
    valid: Tensor


def draw_labelled(ladder: Ladder, z: Tensor, generator: torch.Generator) -> Labelled:
    """Standardised data z at random levels, with blocks of labels as a label move would draw from."""
    t = torch.randint(ladder.levels, (len(z),), generator=generator, device=z.device)
    return Labelled(ladder.diffuse(z, t, generator), t, *blocks(t, ladder.top, BLOCK, generator))


def label_loss(energy: Energy, x: Tensor, t: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """-log of the probability with which a label move that carries x finds the label that x has; in nats.

    The likelihood of t given the whitened coordinates of x. A label move with x fixed has the noise give the answer
    away; with the noise carried along the rest of the image has to tell, over all the levels of a block at once.
    """
    u = carried_energies(energy, x, t, labels)[1]
    own = (valid & (labels == t.unsqueeze(1))).int().argmax(1)
    return F.cross_entropy(torch.where(valid, -u, -torch.inf), own)


def nothing_known(dimension: int) -> float:
    """The larger of the two losses for a guess at every label and no noise removed."""
    return 0.5 + LABEL_WEIGHT * math.log(BLOCK) / dimension


def relating_loss(score: Callable[..., Tensor], energy: Energy, *given: Tensor) -> Tensor:
    """Denoising as in `chainless_loss`, and `label_loss`; ``given`` are 4 parts of `Noisy` and all of `Labelled`."""
    noisy, labelled = given[:4], given[4:]
    return score(*noisy) / 2 + LABEL_WEIGHT * label_loss(energy, *labelled) / noisy[0][0].numel()
