"""How well the levels of a ladder overlap, measured on data or on chains, and ladders spaced by it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.samplers.mgms import Energy, carried_energies, label_energies

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# A chain started at N(0, I) with label T must be able to move: below this overlap it mostly cannot.
MINIMUM_NOISE_OVERLAP = 0.15
MIXTURE_POINTS = 2048  # at most so many of the data make up the exact diffused density
# An acceptance of 0 would make an edge infinitely long and one of 1 make it vanish: neither can be measured.
ACCEPTANCE_LIMIT = 1e-6


def noise_overlap(ladder: Ladder, data: Tensor, generator: torch.Generator | None = None, draws: int = 512) -> float:
    """Acceptance of moving the label from the starting noise N(0, I) to level T: E min(1, p_T(x) / N(x; 0, I)).

    p_T is the exact diffused density of ``data`` (standardised; up to 2,048 of its points as a mixture).
    """
    z = _mixture_points(data, generator)
    x = torch.randn(draws, z.shape[1], generator=generator, dtype=torch.float64)
    square = x.square().sum(1)
    log_p = _log_diffused(ladder, -1, z, x @ z.T, square)
    return float(_metropolis(log_p + square / 2).mean())


def data_acceptance(ladder: Ladder, data: Tensor, generator: torch.Generator | None = None, draws: int = 512) -> Tensor:
    """``neighbour_acceptance`` of exact chains on the diffused density of ``data``, so before there is a model.

    The density is a mixture over up to 2,048 of the points, from which the chains are drawn too. The levels share
    their random numbers: two matrix products serve them all, and the edges err alike, by about 0.15 / sqrt(draws).
    Float64: squares of size d are divided by the noise variance, which float32 gets wrong by up to nats. A clean
    level 0 is so many separate points, which overlap with no density: its edge gets 0.
    """
    z = _mixture_points(data, generator)
    origin = torch.randint(len(z), (draws,), generator=generator)
    eps = torch.randn(draws, z.shape[1], generator=generator, dtype=torch.float64)
    signal, noise = z[origin] @ z.T, eps @ z.T
    accepted = torch.zeros(ladder.top, dtype=torch.float64)
    noisy = range(int(ladder.floor == 0), ladder.levels)
    for t in noisy:
        a, sd = ladder.abar[t].sqrt(), ladder.variance[t].sqrt()
        inner, square = a * signal + sd * noise, (a * z[origin] + sd * eps).square().sum(1)
        own = _log_diffused(ladder, t, z, inner, square)
        for s in (t - 1, t + 1):
            if s in noisy:
                accepted[min(s, t)] += _metropolis(_log_diffused(ladder, s, z, inner, square) - own).mean() / 2
    return accepted


def neighbour_acceptance(
    energy: Energy, x: Tensor, t: Tensor, top: int, chunk: int = 256, carry: bool = False
) -> Tensor:
    """Mean Metropolis acceptance of the label move t <-> t + 1 for chains (x, t) at equilibrium, shape (T,).

    Levels of unequal mass favour one direction, but overlap is not about mass: it is measured at the mass ratios of
    `level_balance`. With ``carry`` the label takes x along, as in the move of that name. An edge without chains is NaN.
    """
    return level_balance(energy, x, t, top, chunk, carry)[1]


def level_balance(
    energy: Energy, x: Tensor, t: Tensor, top: int, chunk: int = 256, carry: bool = False
) -> tuple[Tensor, Tensor]:
    """Per edge t <-> t + 1 the log of mass(t + 1) over mass(t), to be made up for, and the label acceptance then; (T,).

    The log mass ratio is the one at which both directions are accepted equally often (Bennett's way). With chains at
    one end only, or all moves refused at the other, it is the log of their mean exp(-(change of U)), noisier, but it is
    what fills an empty level; without any it is 0. The ratio of masses is the same with ``carry``, and known better
    where levels overlap better then. Evaluates ``chunk`` chains at a time, each at t, t + 1 and t - 1.
    """
    if not 0 < len(x) == len(t) or bool(((t < 0) | (t > top)).any()):
        raise InputError(f"every chain needs a label in 0..{top}: got {len(x)} chains, labels {sorted({*t.tolist()})}")
    labels = torch.stack([t, t + 1, t - 1], 1).clamp(0, top)

    def energies(rows: slice) -> Tensor:
        if not carry:
            return label_energies(energy, x[rows], labels[rows])
        with torch.no_grad():
            return carried_energies(energy, x[rows], t[rows], labels[rows])[1]

    u = torch.cat([energies(slice(i, i + chunk)) for i in range(0, len(x), chunk)]).detach().cpu().double()
    # NumPy from here on: its calls on a few hundred numbers cost a third of PyTorch's, and training asks all the time.
    log_r, own = (u[:, :1] - u[:, 1:]).numpy(), t.cpu().numpy()
    log_r[~np.isfinite(log_r)] = -np.inf  # refused, as the label moves do
    rising, falling = _Moves(log_r[own < top, 0], own[own < top], top), _Moves(log_r[own > 0, 1], own[own > 0] - 1, top)

    # The log of the number of chains on top, for the root lies beyond every log r if most moves are refused.
    high = np.maximum(rising.largest(), falling.largest()) + np.log(len(log_r)) + 1
    low, log_mass = -high, np.zeros(top)
    one_sided = falling.log_mean() - rising.log_mean()  # one of them is 0
    for _ in range(64):  # down to rounding
        less = rising.accepted(log_mass) < falling.accepted(-log_mass)
        low, high = np.where(less, log_mass, low), np.where(less, high, log_mass)
        log_mass = (low + high) / 2
    log_mass = np.where(rising.possible & falling.possible, log_mass, one_sided)
    both = torch.from_numpy(np.stack([rising.accepted(log_mass), falling.accepted(-log_mass)]))
    return torch.from_numpy(-log_mass), both.nanmean(0, dtype=torch.float64)


def respaced(ladder: Ladder, acceptance: Tensor, top: int | None = None, overlap: float | None = None) -> Ladder:
    """The ladder with its levels moved so that all neighbour moves are accepted equally often; its ends stay.

    An edge of acceptance a is as long as two unit normals with this acceptance are far apart. Lengths add up, so the
    new levels are equally spaced along the way, with log noise variance linear between old levels. T is ``top``, or
    the least that gives ``overlap`` an edge, or the old one. A clean level 0 has no log variance: it and 1 stay.
    """
    v, first = ladder.variance, int(ladder.floor == 0)
    if not torch.allclose(ladder.abar, (1 - v) / (1 - v[0]), rtol=1e-9, atol=0):
        raise InputError("only a ladder with abar_t = (1 - v_t) / (1 - v_0) can be re-spaced")
    if acceptance.shape != (ladder.top,):
        raise InputError(f"re-spacing {ladder.top} edges needs as many acceptances, got {tuple(acceptance.shape)}")
    a = acceptance.cpu().double()
    if unknown := [t for t in range(first, ladder.top) if not 0 <= float(a[t]) <= 1]:
        raise InputError(f"the acceptance of edges {unknown} is not a number in [0, 1]: let chains visit their levels")
    if overlap is not None and not 0 < overlap < 1:
        raise InputError(f"overlap must lie between 0 and 1, got {overlap!r}")
    way = np.concatenate([[0.0], _length(a[first:]).cumsum(0).numpy()])
    if top is None:
        step = None if overlap is None else float(_length(torch.tensor(overlap, dtype=torch.float64)))
        top = ladder.top if step is None else first + max(1, math.ceil(way[-1] / step - 1e-9))
    if min(top, ladder.top) <= first:
        raise InputError(f"re-spacing needs T of {first + 1} or more, before and after: got {ladder.top} and {top}")
    log_v = np.interp(np.linspace(0, way[-1], top + 1 - first), way, v[first:].log().numpy())
    v = torch.cat([v[: first + 1], torch.from_numpy(log_v[1:-1]).exp(), v[-1:]])
    return Ladder((1 - v) / (1 - v[0]), v)


def overlapping(
    data: Tensor,
    floor: float = 0.0,
    last_variance: float = 0.95,
    overlap: float = 0.35,
    generator: torch.Generator | None = None,
    first_sd: float = 0.01,
) -> Ladder:
    """Levels between the ends of `Ladder.geometric` whose neighbours exchange labels at a rate of about ``overlap``.

    Measured on standardised ``data``: the last levels, where the shrinking signal costs overlap too, come closer,
    and few dimensions may need one or two levels only, too few for x to mix. Lengths nearly add up: two rounds.
    """
    ladder = Ladder.geometric(max(4 * data[0].numel(), 1024), floor, first_sd, last_variance)  # half the steps or less
    for _ in range(2):
        ladder = respaced(ladder, data_acceptance(ladder, data, generator), overlap=overlap)
    return ladder


def _length(acceptance: Tensor) -> Tensor:
    """delta at which N(0, 1) and N(delta, 1) have this acceptance, 2 Phi(-delta / 2)."""
    quantile: Tensor = torch.special.ndtri(acceptance.clamp(ACCEPTANCE_LIMIT, 1 - ACCEPTANCE_LIMIT) / 2)
    return -2 * quantile


def _metropolis(log_r: Tensor) -> Tensor:
    return log_r.clamp(max=0).exp()


class _Moves:
    """Moves of labels in one direction: their log ratios, and which of ``edges`` edges they go over."""

    def __init__(self, log_r: Floats, edge: Integers, edges: int) -> None:
        self.log_r, self.edge, self.edges = log_r, edge, edges
        count = np.bincount(edge, minlength=edges)
        self.count = np.where(count > 0, count, np.nan)
        self.possible = np.bincount(edge[np.isfinite(log_r)], minlength=edges) > 0  # not all refused

    def largest(self) -> Floats:
        """The largest size of a log ratio over each edge that is finite; 0 without any."""
        largest, finite = np.zeros(self.edges), np.isfinite(self.log_r)
        np.maximum.at(largest, self.edge[finite], np.abs(self.log_r[finite]))
        return largest

    def accepted(self, log_factor: Floats) -> Floats:
        """Mean acceptance over each edge with so much added to the log ratios; NaN for an edge without any."""
        probability = np.exp(np.minimum(self.log_r + log_factor[self.edge], 0))
        mean: Floats = np.bincount(self.edge, probability, self.edges) / self.count
        return mean

    def log_mean(self) -> Floats:
        """Log of the mean of exp(log_r) over each edge; 0 for an edge without any, or with refused moves only."""
        largest = np.full(self.edges, -np.inf)
        np.maximum.at(largest, self.edge, self.log_r)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        total = np.bincount(self.edge, np.exp(self.log_r - largest[self.edge]), self.edges)
        known = total > 0
        return np.where(known, largest + np.log(np.where(known, total, 1.0) / np.where(known, self.count, 1.0)), 0.0)


def _mixture_points(data: Tensor, generator: torch.Generator | None) -> Tensor:
    chosen = torch.randperm(len(data), generator=generator)[:MIXTURE_POINTS]
    return data[chosen].reshape(len(chosen), -1).to("cpu", torch.float64)


def _log_diffused(ladder: Ladder, t: int, z: Tensor, inner: Tensor, square: Tensor) -> Tensor:
    """log p_t(x) + d/2 log 2 pi of the mixture over the points z, from x . z of shape (n, m) and |x|^2 of (n,)."""
    a, v = ladder.abar[t].sqrt(), ladder.variance[t]
    near = (a / v) * inner - (a**2 / (2 * v)) * z.square().sum(1)
    near = torch.maximum(near, near.amax(1, keepdim=True) - 700)  # exponentials that underflow are slow
    return torch.logsumexp(near, 1) - square / (2 * v) - math.log(len(z)) - z.shape[1] / 2 * v.log()
