"""Normalising constants of the levels: MBAR over the levels' energies, tied to a Gaussian whose constant is known.

Every point that any level has given is weighed under all levels at once (Shirts and Chodera 2008), which makes the
most of chains that travel over the ladder. The levels alone fix only ratios Z_s / Z_t. What fixes the scale is one
more level: exact draws of the data's own Gaussian diffused to level T, which level T nearly is, so that the two
overlap both ways. (Importance sampling from the Gaussian alone would be blind to what it does not reach.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from daebm import sampling
from daebm.errors import DaebmError, InputError
from daebm.networks import DiffusedGaussian
from daebm.samplers.mgms import Energy, label_energies
from daebm.sampling import Drawn, Sampler
from daebm.targets import LOG_2PI

NEWTON_STEPS = 200  # a handful is usual; a ladder with gaps takes dozens
TOLERANCE = 1e-8  # nats
CHUNK = 1 << 17  # label energies per evaluation; bounds memory


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
    sum_n log softmax_k(b_k - u_nk) at the states that were seen. It is concave, so Newton's steps with halving arrive.
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

    # From the counts alone the way can be long: neighbours first, by Bennett's ratio, where states are in order.
    b = count.log() - _neighbour_start(u, state)
    value = objective(b)
    for _ in range(NEWTON_STEPS):
        p = torch.softmax(b - u, 1)
        slope = p.sum(0) - count
        curvature = torch.diag(p.sum(0)) - p.T @ p
        # The last state is fixed; a ridge far below one point keeps an edge without overlap from blowing up.
        step = torch.linalg.solve(curvature[:-1, :-1] + 1e-9 * n * torch.eye(states - 1, dtype=u.dtype), slope[:-1])
        step = torch.cat([step, step.new_zeros(1)])
        length = 1.0
        while objective(b - length * step) > value and length > 1e-6:
            length /= 2
        b = b - length * step
        value = objective(b)
        if float(step.abs().max()) < TOLERANCE:
            break
    else:
        raise DaebmError("the levels overlap too little for their constants to be found: train with more levels")

    # What one chain more would change in b - log N: one Newton step of its own residuals, and its share of the counts.
    p = torch.softmax(b - u, 1)
    curvature = (torch.diag(p.sum(0)) - p.T @ p)[:-1, :-1]
    residual = torch.linalg.solve(curvature, (seen - p)[:, :-1].T).T
    pull = residual - seen[:, :-1] / count[:-1] + (seen[:, -1] / count[-1]).unsqueeze(1)
    chains = int(chain.max()) + 1
    total = torch.zeros(chains, states - 1, dtype=u.dtype).index_add_(0, chain, pull)
    total = total - total.sum(0) / chains
    error = torch.cat([total.square().sum(0).sqrt(), u.new_zeros(1)])
    free = count.log() - b
    return LogNormalisers(free - free[-1], error)


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

    energy: Energy
    draws: Tensor


def gaussian_reference(
    base: DiffusedGaussian, level: int, event: tuple[int, ...], count: int, generator: torch.Generator
) -> Reference:
    """The data's Gaussian at one level, the one a level network starts from."""

    def energy(x: Tensor, _t: Tensor) -> Tensor:
        t = torch.full((len(x),), level, device=x.device)
        u: Tensor = base(x, t)
        return u + math.prod(event) / 2 * LOG_2PI

    eps = torch.randn(count, math.prod(event), generator=generator).to(base.axes)
    x = (eps / base.precision[level] + base.centre[level]) @ base.axes.T
    return Reference(energy, x.reshape(count, *event))


def level_normalisers(
    sampler: Sampler,
    start: Drawn,
    reference: Reference,
    generator: torch.Generator,
    burn_in: int,
    snapshots: int,
    apart: int,
    energy: Energy | None = None,
) -> LogNormalisers:
    """log Z_0 .. log Z_T of a model by chains (x, t) that go on from ``start``: ``snapshots`` of them, ``apart``
    transitions from one to the next, after a ``burn_in`` during which they settle on the model.

    ``energy`` is the same energy in higher precision, if there is one.
    """
    if burn_in:
        start = sampling.transitions(sampler, start, burn_in, generator)
    xs, ts = [], []
    for _ in range(snapshots):
        start = sampling.transitions(sampler, start, apart, generator)
        xs.append(start.x)
        ts.append(start.t)
    chains, levels, draws = len(start.t), sampler.ladder.levels, reference.draws
    x = torch.cat([*xs, draws.to(start.x)])
    state = torch.cat([*ts, torch.full((len(draws),), levels, device=start.t.device)])
    chain = torch.cat([torch.arange(chains).repeat(snapshots), chains + torch.arange(len(draws))])
    u = all_energies(energy or sampler.energy, x, levels, reference)
    value, error = log_normalisers(u, state.cpu(), chain)
    return LogNormalisers(value[:-1], error[:-1])


def all_energies(energy: Energy, x: Tensor, levels: int, reference: Reference) -> Tensor:
    """U(x, t) of every point at every level and, last, under the reference; (n, levels + 1) in float64."""
    rows = max(1, CHUNK // (levels * x[0].numel()))
    parts = []
    for i in range(0, len(x), rows):
        here = x[i : i + rows].double()
        labels = torch.arange(levels, device=x.device).expand(len(here), -1)
        known = reference.energy(here, labels[:, 0]).unsqueeze(1)
        parts.append(torch.cat([label_energies(energy, here, labels).double(), known.double()], 1))
    return torch.cat(parts).cpu()
