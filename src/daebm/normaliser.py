"""Normalising constants of the levels: MBAR over the levels' energies, tied to a Gaussian whose constant is known.

Every point that any level has given is weighed under all levels at once (Shirts and Chodera 2008), which makes the
most of chains that travel over the ladder. The levels alone fix only ratios Z_s / Z_t. What fixes the scale is one
more level: exact draws of a known density that overlaps the ladder, both ways. (Importance sampling from the known
density alone would be blind to what it does not reach.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from daebm import sampling
from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.networks import DiffusedGaussian
from daebm.samplers.langevin import PlainEnergy
from daebm.samplers.mgms import Energy, label_energies
from daebm.sampling import Drawn, Sampler
from daebm.targets import LOG_2PI

NEWTON_STEPS = 200  # a handful is usual; a ladder with gaps takes dozens
TOLERANCE = 1e-8  # nats
LEAST_SHARED = 1e-3  # of a point that two parts of the ladder could both have given; with less they are not connected
CHUNK = 1 << 17  # numbers of points per evaluation; bounds memory
KERNEL_DIMENSIONS = 16  # in more, kernels hardly overlap with what they came from
KERNEL_SHARE = 0.85  # level 0 is what counts: level T is close to its Gaussian and needs few draws
KERNELS, NEIGHBOUR = 2000, 8  # at most so many, each as wide as its eighth neighbour is far


class LogNormalisers(NamedTuple):
    """log Z of every level, (K,), with standard errors, relative to the level whose constant is known."""

    value: Tensor
    error: Tensor


def log_normalisers(u: Tensor, state: Tensor, chain: Tensor) -> LogNormalisers:
    """MBAR: log Z_k = log of the integral of exp(-u_k), with log Z of the last state taken as 0.

    ``u`` (n, K) holds the energies of every point under every state, ``state`` (n,) the one it was drawn from and
    ``chain`` (n,) the chain it came from. Points of one chain depend on each other: errors are taken over chains, each
    as one observation, so they stay honest however slowly chains move.

    The estimate is a logistic regression of the state on the energies: b_k = log N_k - log Z_k maximises
    sum_n log softmax_k(b_k - u_nk) at the states that were seen. It is concave, so Newton's steps with halving arrive,
    unless states do not overlap at all: the error is infinite then.
    """
    u = torch.where(u.isnan(), torch.inf, u).double()
    n, states = u.shape
    count = torch.bincount(state, minlength=states).double()
    if bool((count == 0).any()):
        empty = (count == 0).nonzero().flatten().tolist()
        raise InputError(f"no point was drawn at level {empty[0]}: let the chains visit every level first")
    seen = torch.nn.functional.one_hot(state, states).double()
    u = u - u.amin(1, keepdim=True)

    def objective(b: Tensor) -> Tensor:
        return torch.logsumexp(b - u, 1).sum() - count @ b

    # From the counts alone the way can be long: begin with ratios of neighbours, for states come in order.
    b = count.log() - _neighbour_start(u, state)
    loss = objective(b)
    for _ in range(NEWTON_STEPS):
        p = torch.softmax(b - u, 1)
        slope = p.sum(0) - count
        curvature = torch.diag(p.sum(0)) - p.T @ p
        # The last state is fixed; a ridge far below one point keeps an edge without overlap from blowing up.
        step = torch.linalg.solve(curvature[:-1, :-1] + 1e-9 * n * torch.eye(states - 1, dtype=u.dtype), slope[:-1])
        step = torch.cat([step, step.new_zeros(1)])
        length = 1.0
        while objective(b - length * step) > loss and length > 1e-6:
            length /= 2
        b = b - length * step
        loss = objective(b)
        if solved := float(step.abs().max()) < TOLERANCE:
            break

    p = torch.softmax(b - u, 1)
    curvature = (torch.diag(p.sum(0)) - p.T @ p)[:-1, :-1]
    free = count.log() - b
    value = free - free[-1]
    if not solved or float(torch.linalg.eigvalsh(curvature)[0]) < LEAST_SHARED:
        return LogNormalisers(value, torch.cat([u.new_full((states - 1,), torch.inf), u.new_zeros(1)]))
    # What one chain more would change in b - log N: one Newton step of its own residuals, and its share of the counts.
    residual = torch.linalg.solve(curvature, (seen - p)[:, :-1].T).T
    pull = residual - seen[:, :-1] / count[:-1] + (seen[:, -1] / count[-1]).unsqueeze(1)
    chains = int(chain.max()) + 1
    total = torch.zeros(chains, states - 1, dtype=u.dtype).index_add_(0, chain, pull)
    total = total - total.sum(0) / chains
    error = torch.cat([total.square().sum(0).sqrt(), u.new_zeros(1)])
    return LogNormalisers(value, error)


def _neighbour_start(u: Tensor, state: Tensor) -> Tensor:
    """log Z of every state from its neighbour by one-sided means, averaged over both sides: rough but never far."""
    log_z = torch.zeros(u.shape[1], dtype=u.dtype)
    for k in range(u.shape[1] - 2, -1, -1):
        ratio = []
        for here, there, sign in ((k, k + 1, -1.0), (k + 1, k, 1.0)):
            log_w = (u[:, here] - u[:, there])[state == here]
            log_w = log_w[log_w.isfinite()]
            if len(log_w):
                ratio.append(sign * (torch.logsumexp(log_w, 0) - math.log(len(log_w))))
        log_z[k] = log_z[k + 1] + (torch.stack(ratio).mean() if ratio else 0.0)
    return log_z


class Reference(NamedTuple):
    """A normalised energy (n, ...) -> (n,) with exact draws from it."""

    energy: PlainEnergy
    draws: Tensor


def known_reference(
    base: DiffusedGaussian, ladder: Ladder, rows: Tensor, count: int, generator: torch.Generator
) -> Reference:
    """A density known exactly that overlaps both ends of the ladder, in float64.

    It is the Gaussian that a level network starts from at level T. In few dimensions it is for the most part a sum of
    kernels around standardised ``rows`` (n, ...), each as wide as its neighbours are far, which level 0 resembles:
    then the constant is found from both ends, and several times more exactly.
    """
    event, dimension, top = rows.shape[1:], rows[0].numel(), ladder.top
    axes, precision, centre = base.axes.double(), base.precision[top].double(), base.centre[top].double()
    white = torch.randn(count, dimension, generator=generator, dtype=axes.dtype, device=axes.device)
    gaussian = (white / precision + centre) @ axes.T

    def gaussian_log(x: Tensor) -> Tensor:
        y = (x.flatten(1) @ axes - centre) * precision
        return -y.square().sum(1) / 2 + precision.log().sum() - dimension / 2 * LOG_2PI

    if dimension > KERNEL_DIMENSIONS or len(rows) <= NEIGHBOUR:
        return Reference(lambda x: -gaussian_log(x), gaussian.reshape(count, *event))
    z = rows[torch.randperm(len(rows), generator=generator)[:KERNELS]].flatten(1).double()
    near = torch.cdist(z, z).kthvalue(NEIGHBOUR + 1, 1).values / math.sqrt(dimension)
    width = (near**2 + ladder.floor**2).sqrt().clamp(min=1e-4)  # repeated rows are no distance apart
    weight = width.log() * dimension + math.log(len(z)) + dimension / 2 * LOG_2PI

    def energy(x: Tensor) -> Tensor:
        away = torch.cdist(x.flatten(1), z, compute_mode="donot_use_mm_for_euclid_dist") / width
        kernels = torch.logsumexp(-away.square() / 2 - weight, 1)
        return -torch.logaddexp(gaussian_log(x) + math.log(1 - KERNEL_SHARE), kernels + math.log(KERNEL_SHARE))

    which = torch.randint(len(z), (count,), generator=generator)
    noise = torch.randn(count, dimension, generator=generator, dtype=z.dtype)
    kernel = z[which] + width[which].unsqueeze(1) * noise
    near_data = torch.rand(count, 1, generator=generator) < KERNEL_SHARE
    return Reference(energy, torch.where(near_data, kernel, gaussian).reshape(count, *event))


def all_energies(energy: Energy, x: Tensor, levels: int, reference: Reference) -> Tensor:
    """U(x, t) of every point at every level and, last, under the reference; (n, levels + 1)."""
    rows = max(1, min((CHUNK << 4 if x.is_cuda else CHUNK) // (levels * x[0].numel()), 1000))
    parts = []
    for i in range(0, len(x), rows):
        here = x[i : i + rows]
        labels = torch.arange(levels, device=x.device).expand(len(here), -1)
        parts.append(torch.cat([label_energies(energy, here, labels), reference.energy(here).unsqueeze(1)], 1))
    return torch.cat(parts).cpu()


def level_normalisers(energy: Energy, x: Tensor, t: Tensor, levels: int, reference: Reference) -> LogNormalisers:
    """log Z_0 .. log Z_T of a model, each (T + 1,), from snapshots x (s, n, ...) and t (s, n) of n chains.

    Energies are evaluated in the precision of the reference's draws: use float64, in which nothing rounds.
    """
    snapshots, chains = t.shape
    draws = reference.draws
    points = torch.cat([x.flatten(0, 1).to(draws), draws])
    state = torch.cat([t.flatten(), torch.full((len(draws),), levels, device=t.device)]).cpu()
    chain = torch.cat([torch.arange(chains).repeat(snapshots), chains + torch.arange(len(draws))])
    value, error = log_normalisers(all_energies(energy, points, levels, reference), state, chain)
    return LogNormalisers(value[:-1], error[:-1])


def snapshots(
    sampler: Sampler, start: Drawn, generator: torch.Generator, burn_in: int, count: int, apart: int
) -> tuple[Tensor, Tensor]:
    """x (count, n, ...) and t (count, n) of chains that settle first and are then looked at now and again."""
    here = sampling.transitions(sampler, start, burn_in, generator)
    seen = []
    for _ in range(count):
        here = sampling.transitions(sampler, here, apart, generator)
        seen.append(here)
    return torch.stack([drawn.x for drawn in seen]), torch.stack([drawn.t for drawn in seen])
