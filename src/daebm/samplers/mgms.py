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
from daebm.samplers.langevin import Info, Kernel, PlainEnergy, State

Energy = Callable[[Tensor, Tensor], Tensor]
"""U(x, t): x of shape (n, ...), t of shape (n,), to shape (n,)."""


class LabelInfo(NamedTuple):
    """Where x is now, the new labels (n,), and how many label energies were not finite: they had probability zero."""

    x: Tensor
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


def carried_to(energy: Energy, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """x_i carried from level t_i to labels_ij, (n, b, ...), and the log of the factor that stretches volumes, (n, b).

    The energy says how by its method ``carried(x, t, labels)``: a bijection between any two levels.
    """
    if not hasattr(energy, "carried"):
        raise InputError("label_move=carry needs an energy that can carry x between levels: level-mlp or level-resnet")
    result: tuple[Tensor, Tensor] = energy.carried(x, t, labels)
    return result


def carried_energies(energy: Energy, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """x_i carried from level t_i to labels_ij, (n, b, ...), and the energies there in the coordinates that are kept."""
    places, log_stretch = carried_to(energy, x, t, labels)
    return places, energy(places.flatten(0, 1), labels.flatten()).reshape(labels.shape) - log_stretch


def _draw(u: Tensor, valid: Tensor, generator: torch.Generator | None) -> Tensor:
    """Which of the valid labels (n, b) is drawn with probabilities exp(-u), by the Gumbel-max trick; (n,)."""
    usable = torch.isfinite(u) & valid
    uniform = torch.rand(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    gumbel = -torch.log(-torch.log(uniform.clamp(min=torch.finfo(u.dtype).tiny)))
    return torch.where(usable, gumbel - u, -torch.inf).argmax(1)


def _gibbs(
    energy: Energy, x: Tensor, t: Tensor, labels: Tensor, valid: Tensor, generator: torch.Generator | None
) -> LabelInfo:
    """Draw t exactly from p(t | x) restricted to the valid ones of ``labels`` (n, b)."""
    u = label_energies(energy, x, labels)
    usable = torch.isfinite(u) & valid
    drawn = labels.gather(1, _draw(u, valid, generator).unsqueeze(1)).squeeze(1)
    return LabelInfo(x, torch.where(usable.any(1), drawn, t), (valid & ~torch.isfinite(u)).sum(1))


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
        labels, valid = blocks(t, top, size, generator)
        return _gibbs(energy, x, t, labels, valid, generator)

    return move


def blocks(t: Tensor, top: int, size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The labels (n, size) of the block around each t, and which of them there are."""
    offset = torch.randint(size, t.shape, generator=generator, device=t.device)
    first = (t + offset) // size * size - offset
    labels = first.unsqueeze(1) + torch.arange(size, device=t.device)
    return labels.clamp(0, top), (labels >= 0) & (labels <= top)


def carry(top: int, size: int) -> LabelMove:
    """A block draw that takes x along: t given the whitened coordinates of x, and not given x itself.

    With x fixed a label can move only as far as the noise in x leaves its variance open, some percent in hundreds of
    dimensions. An energy that carries x to another level shrinks or stretches that noise with it. Exact, for it is a
    Gibbs draw in the coordinates (y, t) with x = x_t(y), whose density is exp(-U(x_t(y), t)) |dx_t / dy|.
    """
    block(top, size)  # the same demand on the size

    def move(energy: Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
        labels, valid = blocks(t, top, size, generator)
        with torch.no_grad():
            places, u = carried_energies(energy, x, t, labels)
        chosen = _draw(u, valid, generator)
        rows = torch.arange(len(t), device=t.device)
        drawn = torch.where((torch.isfinite(u) & valid).any(1), labels[rows, chosen], t)
        # Who stays is left untouched: there and back again is not bit for bit the same.
        stays = (drawn == t).reshape(-1, *[1] * (x.ndim - 1))
        new = torch.where(stays, x, places[rows, chosen])
        return LabelInfo(new, drawn, (valid & ~torch.isfinite(u)).sum(1))

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
        return LabelInfo(x, torch.where(accept, proposal, t), (~torch.isfinite(u)).sum(1))

    return move


def stay(energy: Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """No move at all, for steps at fixed levels."""
    return LabelInfo(x, t, torch.zeros_like(t))


def label_move(name: str, top: int, size: int) -> LabelMove:
    """The label move called ``full``, ``block`` or ``carry`` (of ``size`` labels), or ``local``."""
    if name == "block" and size > top:
        name = "full"  # a global jump contains every block and costs no more
    if name == "full":
        return full(top)
    if name == "block":
        return block(top, size)
    if name == "carry":
        return carry(top, size)
    if name == "local":
        return local(top)
    raise InputError(f"unknown label move {name!r}: choose full, block, local or carry")


class TransitionInfo(NamedTuple):
    """Of one transition: the level the steps were taken at (n,), the steps' info, and label refusals (n,).

    ``kept`` is the probability that a draft was kept (n,), 1 where nothing was drafted.
    """

    level: Tensor
    steps: Info
    label_nonfinite: Tensor
    kept: Tensor

    @property
    def refused(self) -> Tensor:
        """Proposals and label energies that were not finite, of all chains together."""
        return self.steps.nonfinite.sum() + self.label_nonfinite.sum()


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
    draft: Energy | None = None,
) -> tuple[Tensor, Tensor, TransitionInfo]:
    """Algorithm 2: ``steps`` Langevin steps at the chains' levels with step sizes sigma[t], then a label move.

    Costs steps + 1 gradients, and the forwards of the label move. Without ``check`` nothing is read back from the
    device, so that the whole can be captured in a graph. With a ``draft``, a cheaper energy close to this one, the
    steps are those of the draft, and are kept or undone together (`keep`), for two forwards more: still exact, for a
    kernel that is.
    """
    if check:
        _check(sigma, t, steps)
    if draft is not None and not x.is_cuda:
        compile = False  # there only the steps would be compiled, and the draft's energy at the start another function
    here = at_level(energy if draft is None else draft, t)
    start = langevin.init(here, x, compile)
    end, info = langevin.take_steps(kernel, here, start, sigma[t].to(x.dtype), steps, generator, compile)
    x, kept, undone = end.x, torch.ones_like(end.energy), info.nonfinite
    if draft is not None:
        x, kept, nonfinite = keep(energy, t, start, end, generator)
        undone = undone + nonfinite
    label = move(energy, x, t, generator)
    return label.x, label.t, TransitionInfo(t, Info(info.accept_prob / steps, undone), label.nonfinite, kept)


def draft_log_ratio(energy: Energy, t: Tensor, start: State, end: State) -> Tensor:
    """U(x) - D(x) - (U(y) - D(y)) for a draft from x to y by its energy D; the states hold D."""
    with torch.no_grad():
        u_start, u_end = energy(torch.cat([start.x, end.x]), torch.cat([t, t])).chunk(2)
    return (u_start - start.energy) - (u_end - end.energy)


def keep(
    energy: Energy, t: Tensor, start: State, end: State, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where chains are after a draft was kept or undone, the probability of keeping it, and what was not finite.

    Equal steps that are reversible for exp(-D) are so in a row, which makes exp(-D(x)) / exp(-D(y)) the ratio of the
    two directions, and a Metropolis decision on the whole row exact for exp(-U) (Liu's surrogate transition method).
    """
    log_r = draft_log_ratio(energy, t, start, end)
    log_u = langevin.log_uniform(len(t), log_r, generator)
    finite = torch.isfinite(log_r)
    rows = (finite & (log_u < log_r)).reshape(-1, *[1] * (end.x.ndim - 1))
    kept = torch.where(finite, log_r.clamp(max=0).exp(), 0.0)
    return torch.where(rows, end.x, start.x), kept, (~finite).to(log_r.dtype)


def _check(sigma: Tensor, t: Tensor, steps: int) -> None:
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    if sigma.ndim != 1 or int(t.min()) < 0 or int(t.max()) >= len(sigma):
        raise InputError(
            f"sigma must hold a step size per level, and t lie among them: got sigma of shape {tuple(sigma.shape)} "
            f"and t in {int(t.min())}..{int(t.max())}"
        )
    at_level = sigma[t]
    if len(bad := at_level[~(torch.isfinite(at_level) & (at_level > 0))]):
        raise InputError(f"sigma must be positive and finite, got {bad[0]:g}")
