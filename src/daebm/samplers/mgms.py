"""MALA within Gibbs mixture sampling (MGMS, Algorithm 2) of p(x, t) proportional to exp(-U(x, t)).

A transition moves x at a fixed level by Langevin steps, then moves the level at a fixed x. Both leave p(x, t)
invariant. Nothing is carried over between transitions, so no cached energy can outlive its level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.samplers import langevin
from daebm.samplers.langevin import Info, Kernel, PlainEnergy

Energy = Callable[[Tensor, Tensor], Tensor]
"""U(x, t): x of shape (n, ...), t of shape (n,), to shape (n,)."""


class LabelInfo(NamedTuple):
    """The new labels (n,) and how many label energies were not finite, and so were given probability zero."""

    t: Tensor
    nonfinite: Tensor


LabelMove = Callable[[Energy, Tensor, Tensor, "torch.Generator | None"], LabelInfo]


def label_energies(energy: Energy, x: Tensor, labels: Tensor) -> Tensor:
    """U(x_i, labels_ij), shape (n, b), in one evaluation of n * b points.

    An energy with a method ``of_labels(x, labels)`` is asked there: a network can compute once what does not see t.
    """
    n, b = labels.shape
    with torch.no_grad():
        if hasattr(energy, "of_labels"):
            return energy.of_labels(x, labels)  # type: ignore[no-any-return]
        repeated = x.unsqueeze(1).expand(n, b, *x.shape[1:]).reshape(n * b, *x.shape[1:])
        u = energy(repeated, labels.reshape(-1))
    if u.shape != (n * b,):
        raise InputError(f"an energy must return shape {(n * b,)} for {n * b} points, but it returned {tuple(u.shape)}")
    return u.reshape(n, b)


def at_level(energy: Energy, t: Tensor) -> PlainEnergy:
    """U(., t). An energy with a method ``at(t)`` is asked there: a network can compute once what does not see x."""
    if hasattr(energy, "at"):
        return energy.at(t)  # type: ignore[no-any-return]
    return lambda x: energy(x, t)


def _gibbs(
    energy: Energy, x: Tensor, t: Tensor, labels: Tensor, valid: Tensor, generator: torch.Generator | None
) -> LabelInfo:
    """Draw t exactly from p(t | x) restricted to the valid ones of ``labels`` (n, b), by the Gumbel-max trick."""
    u = label_energies(energy, x, labels)
    usable = torch.isfinite(u) & valid
    uniform = torch.rand(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=torch.finfo(u.dtype).tiny)))
    choice = torch.where(usable, gumbel - u, -torch.inf).argmax(1, keepdim=True)
    drawn = labels.gather(1, choice).squeeze(1)
    return LabelInfo(torch.where(usable.any(1), drawn, t), (valid & ~torch.isfinite(u)).sum(1))


def full(top: int) -> LabelMove:
    """Global jump: draw t from p(t | x) over all T + 1 labels (line 7 of Algorithm 2)."""

    def move(energy: Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
        labels = torch.arange(top + 1, device=t.device).expand(len(t), -1)
        return _gibbs(energy, x, t, labels, torch.ones_like(labels, dtype=torch.bool), generator)

    return move


def block(top: int, size: int) -> LabelMove:
    """Draw t from p(t | x) inside a block of ``size`` labels whose borders are drawn at random.

    Exact, because which block is used does not depend on where inside it the label is. (A block centred on the
    current label would not be: the move back would look at another block.) Costs ``size`` forwards, not T + 1.
    """
    if size < 2:
        raise InputError(f"a label block needs at least 2 labels, got {size}")

    def move(energy: Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
        offset = torch.randint(size, t.shape, generator=generator, device=t.device)
        first = (t + offset) // size * size - offset
        labels = first.unsqueeze(1) + torch.arange(size, device=t.device)
        valid = (labels >= 0) & (labels <= top)
        return _gibbs(energy, x, t, labels.clamp(0, top), valid, generator)

    return move


def local(top: int) -> LabelMove:
    """Serial tempering: propose t - 1 or t + 1, each with probability 1/2, and accept by Metropolis.

    At the ends half of the proposals point outside and are refused; always proposing inwards there would need the
    factor 1/2 in the ratio instead.
    """

    def move(energy: Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
        proposal = t + 2 * torch.randint(2, t.shape, generator=generator, device=t.device) - 1
        inside = (proposal >= 0) & (proposal <= top)
        pair = torch.stack([t, proposal.clamp(0, top)], dim=1)
        u = label_energies(energy, x, pair)
        log_u = langevin.log_uniform(len(t), u, generator)
        log_r = u[:, 0] - u[:, 1]
        accept = inside & torch.isfinite(log_r) & (log_u < log_r)
        return LabelInfo(torch.where(accept, proposal, t), (~torch.isfinite(u)).sum(1))

    return move


def label_move(name: str, top: int, size: int) -> LabelMove:
    """The label move called ``full``, ``block`` (of ``size`` labels) or ``local``."""
    if name == "block" and size > top:
        name = "full"  # a global jump contains every block and costs no more
    if name == "full":
        return full(top)
    if name == "block":
        return block(top, size)
    if name == "local":
        return local(top)
    raise InputError(f"unknown label move {name!r}: choose full, block or local")


class TransitionInfo(NamedTuple):
    """Of one transition: the level the steps were taken at (n,), the steps' info, and label refusals (n,)."""

    level: Tensor
    steps: Info
    label_nonfinite: Tensor


def transition(
    kernel: Kernel,
    energy: Energy,
    x: Tensor,
    t: Tensor,
    sigma: Tensor,
    steps: int,
    move: LabelMove,
    generator: torch.Generator | None = None,
    compile: bool = False,
    check: bool = True,
) -> tuple[Tensor, Tensor, TransitionInfo]:
    """Algorithm 2: ``steps`` Langevin steps at the chains' levels with step sizes sigma[t], then a label move.

    Costs steps + 1 gradients, and the forwards of the label move. Without ``check`` nothing is read back from the
    device, so that the whole can be captured in a graph.
    """
    if check:
        _check(sigma, t, steps)
    here = at_level(energy, t)
    state = langevin.init(here, x, compile)
    state, info = langevin.take_steps(kernel, here, state, sigma[t].to(x.dtype), steps, generator, compile)
    label = move(energy, state.x, t, generator)
    return state.x, label.t, TransitionInfo(t, Info(info.accept_prob / steps, info.nonfinite), label.nonfinite)


def _check(sigma: Tensor, t: Tensor, steps: int) -> None:
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    if sigma.ndim != 1 or int(t.min()) < 0 or int(t.max()) >= len(sigma):
        raise InputError(
            f"sigma must hold a step size per level, and t lie among them: got sigma of shape {tuple(sigma.shape)} "
            f"and t in {int(t.min())}..{int(t.max())}"
        )
    at_level = sigma[t]
    if not bool((torch.isfinite(at_level) & (at_level > 0)).all()):
        raise InputError(f"sigma must be positive, got {at_level[~(at_level > 0)][0]:g}")
