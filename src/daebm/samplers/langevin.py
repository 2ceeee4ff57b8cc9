"""Langevin kernels for one energy U(x), shape (n, ...) -> (n,): unadjusted, and Metropolis-adjusted (MALA).

One step convention, the paper's eq. 4: x' = x - (sigma^2 / 2) grad U(x) + sigma eps. The state carries energy and
gradient, so a step costs one gradient. A kernel knows nothing of levels; `mgms` closes over the level. Randomness
is an argument: given the same eps and log u, a step is a function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.samplers.capture import Captured, compiled

PlainEnergy = Callable[[Tensor], Tensor]


class State(NamedTuple):
    """Positions (n, ...), their energies (n,) and gradients (n, ...)."""

    x: Tensor
    energy: Tensor
    grad: Tensor


class Info(NamedTuple):
    """Acceptance probability (n,) of each proposal, and whether it was refused because it was not finite (n,)."""

    accept_prob: Tensor
    nonfinite: Tensor


Kernel = Callable[[PlainEnergy, State, Tensor, Tensor, Tensor], tuple[State, Info]]


def energy_and_gradient(energy: PlainEnergy, x: Tensor) -> tuple[Tensor, Tensor]:
    """U(x) and grad U(x), detached."""
    if torch.compiler.is_compiling():  # traceable; eager autograd.grad is the faster of the two outside a graph

        def total(y: Tensor) -> tuple[Tensor, Tensor]:
            u = energy(y)
            return u.sum(), u

        grad, value = torch.func.grad(total, has_aux=True)(x)
        return value.detach(), grad.detach()
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        value = energy(leaf)
        if value.shape != x.shape[:1]:
            raise InputError(
                f"an energy must map x of shape {tuple(x.shape)} to shape {tuple(x.shape[:1])}, "
                f"but it returned {tuple(value.shape)}"
            )
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), grad


@cache
def _compiled_gradient() -> Callable[[PlainEnergy, Tensor], tuple[Tensor, Tensor]]:
    return compiled(energy_and_gradient)


def init(energy: PlainEnergy, x: Tensor, compile: bool = False) -> State:
    """The state at x. Call it again whenever the energy changes: a cache of another energy is a wrong sampler."""
    if x.ndim < 2:
        raise InputError(f"x must have shape (n, ...) with an event dimension, got {tuple(x.shape)}: x.unsqueeze(1)?")
    evaluate = _compiled_gradient() if compile and x.is_cuda else energy_and_gradient
    with torch.no_grad():  # the gradient with respect to x is asked for inside
        return State(x.detach(), *evaluate(energy, x))


def propose(energy: PlainEnergy, state: State, sigma: Tensor, eps: Tensor) -> tuple[State, Tensor]:
    """Where MALA would go by noise eps, and log q(x | x') - log q(x' | x) of the way back and the way there.

    The reverse move needs noise eps' = -eps + (sigma / 2)(g + g'), so that is (|eps|^2 - |eps'|^2) / 2, written here
    without the cancellation of two large squares.
    """
    step = sigma.reshape(-1, *[1] * (state.x.ndim - 1))
    x = state.x - step**2 / 2 * state.grad + step * eps
    new_energy, grad = energy_and_gradient(energy, x)
    both = state.grad + grad
    correction = step / 2 * both * (eps - step / 4 * both)
    return State(x, new_energy, grad), correction.flatten(1).sum(1)


def mala(energy: PlainEnergy, state: State, sigma: Tensor, eps: Tensor, log_u: Tensor) -> tuple[State, Info]:
    """One MALA step (lines 3-5 of Algorithm 2), with a step size per chain."""
    new, correction = propose(energy, state, sigma, eps)
    log_r = state.energy - new.energy + correction
    finite = torch.isfinite(log_r)
    accept = finite & (log_u < log_r)  # NaN compares false, +inf is refused above
    return _take(accept, state, *new), Info(torch.where(finite, log_r.clamp(max=0).exp(), 0.0), ~finite)


def langevin(energy: PlainEnergy, state: State, sigma: Tensor, eps: Tensor, log_u: Tensor) -> tuple[State, Info]:
    """One unadjusted Langevin step: every finite proposal is taken, so the target is met only as sigma -> 0."""
    del log_u
    step = sigma.reshape(-1, *[1] * (state.x.ndim - 1))
    proposal = state.x - step**2 / 2 * state.grad + step * eps
    new_energy, new_grad = energy_and_gradient(energy, proposal)
    finite = torch.isfinite(new_energy) & torch.isfinite(new_grad.flatten(1).sum(1))
    return _take(finite, state, proposal, new_energy, new_grad), Info(finite.to(new_energy.dtype), ~finite)


def _take(accept: Tensor, state: State, x: Tensor, energy: Tensor, grad: Tensor) -> State:
    rows = accept.reshape(-1, *[1] * (x.ndim - 1))
    return State(
        torch.where(rows, x, state.x),
        torch.where(accept, energy, state.energy),
        torch.where(rows, grad, state.grad),
    )


def log_uniform(n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """log u for u uniform on (0, 1], shape (n,).

    Never -inf: `rand` is exactly 0 once in 2^24 float32 draws, and log 0 would accept any proposal whatever. It is
    never 1, so log(1 - rand) is finite.
    """
    return torch.rand(n, generator=generator, dtype=like.dtype, device=like.device).neg_().log1p_()


KERNELS: dict[str, Kernel] = {"langevin": langevin, "mala": mala}
GRAPH_STEPS = 50  # steps in one CUDA graph of a long run
UNROLL = 4  # compiled steps per call on a CPU: a quarter of the call overhead, and a compilation of seconds


def _advance(
    kernel: Kernel, energy: PlainEnergy, state: State, sigma: Tensor, noise: list[tuple[Tensor, Tensor]], total: Info
) -> tuple[State, Info]:
    """As many steps as there are pairs (eps, log u), their infos added to ``total``."""
    for eps, log_u in noise:
        state, info = kernel(energy, state, sigma, eps, log_u)
        total = Info(total.accept_prob + info.accept_prob, total.nonfinite + info.nonfinite)
    return state, total


@cache
def _compiled_advance() -> Callable[..., tuple[State, Info]]:
    return compiled(_advance)


def take_steps(
    kernel: Kernel,
    energy: PlainEnergy,
    state: State,
    sigma: Tensor,
    steps: int,
    generator: torch.Generator | None,
    compile: bool,
) -> tuple[State, Info]:
    """``steps`` steps with sigma (n,); infos are sums over them. Reads nothing back from the device."""
    x = state.x
    # On a GPU the steps are captured in a graph: unrolling would only make the compilation longer.
    together = UNROLL if compile and not x.is_cuda else 1
    advance = _compiled_advance() if compile else _advance
    total = Info(torch.zeros_like(state.energy), torch.zeros_like(state.energy))
    for done in range(0, steps, together):
        noise = [
            (
                torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device),
                log_uniform(len(x), x, generator),
            )
            for _ in range(min(together, steps - done))
        ]
        with torch.no_grad():
            state, total = advance(kernel, energy, state, sigma, noise, total)
    return state, total


def run(
    kernel: Kernel,
    energy: PlainEnergy,
    x: Tensor,
    sigma: Tensor | float,
    steps: int,
    generator: torch.Generator | None = None,
    observe: Callable[[int, State], None] | None = None,
    every: int = 1,
    compile: bool = False,
) -> tuple[Tensor, Info]:
    """Take ``steps`` steps from x; returns the final x, mean acceptance probability and refusal count per chain.

    ``observe(k, state)`` is called after each ``every``-th step k. ``compile`` takes the same steps with the same
    noise through compiled code, up to rounding: worth its seconds of compilation from thousands of steps on. On a
    GPU it also captures them in a graph.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    state = init(energy, x)
    sigma = torch.as_tensor(sigma, dtype=x.dtype, device=x.device)
    if sigma.shape not in ((), (1,), (len(x),)):
        raise InputError(f"sigma must be one number or one for each of {len(x)} chains, got {tuple(sigma.shape)}")
    if len(bad := sigma[~(torch.isfinite(sigma) & (sigma > 0))]):
        raise InputError(f"sigma must be positive and finite, got {bad[0]:g}")
    sigma = sigma.expand(len(x))

    accepted, refused = torch.zeros_like(state.energy), torch.zeros_like(state.energy)
    stride = every if observe is not None else steps
    if compile and x.is_cuda:
        stride = min(stride, GRAPH_STEPS)
    moves: dict[int, Callable[..., tuple[State, Info]]] = {}
    done = 0
    while done < steps:
        count = min(stride, steps - done, every - done % every if observe is not None else steps)
        if count not in moves:

            def move(*now: Tensor, count: int = count) -> tuple[State, Info]:
                return take_steps(kernel, energy, State(*now), sigma, count, generator, compile)

            captured = compile and x.is_cuda and generator is not None
            moves[count] = Captured(move, cast(torch.Generator, generator)) if captured else move
        state, info = moves[count](*state)
        accepted, refused = accepted + info.accept_prob, refused + info.nonfinite
        done += count
        if observe is not None and done % every == 0:
            observe(done, state)
    return state.x, Info(accepted / steps, refused)
