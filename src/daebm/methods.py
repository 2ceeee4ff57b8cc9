"""The six training methods as rows of one table: they differ in where chains start, how they move, and on what.

| method     | each iteration's chains start from     | they move on                | own kernel         |
|------------|----------------------------------------|-----------------------------|--------------------|
| cd         | the data batch                         | U(x)                        | langevin           |
| persistent | where they were left                   | U(x)                        | langevin           |
| noise      | N(0, I)                                | U(x)                        | langevin           |
| hybrid     | where they were left, or N(0, I)       | U(x)                        | langevin           |
| drl        | the partner one level up               | U(x, t) given that partner  | langevin           |
| da         | where they were left                   | U(x, t) and t, by MGMS      | mala               |

With ``margin`` chains of `da` that are stranded begin anew as diffused data, counted (`levels.replace_stranded`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from daebm.chains import Chains
from daebm.errors import InputError
from daebm.ladder import Ladder, per_chain
from daebm.samplers import langevin
from daebm.samplers.langevin import Info, Kernel, PlainEnergy
from daebm.samplers.mgms import Energy, TransitionInfo

if TYPE_CHECKING:
    from daebm.config import Config


@dataclass(frozen=True)
class Method:
    """One row. ``restart`` is the probability that a stored chain starts afresh from N(0, I)."""

    name: str
    title: str
    start: Literal["store", "data", "partner"]
    restart: float
    ladder: bool
    kernel: Literal["langevin", "mala"]
    # How samples are drawn from noise after training: that many Langevin steps, in units of the training L;
    # 0 stands for the method's own way (sequential conditional sampling for drl, MGMS for da).
    post_steps: int


METHODS = {
    row.name: row
    for row in (
        Method("cd", "EBM, contrastive divergence", "data", 0.0, False, "langevin", 250),
        Method("persistent", "EBM, persistent", "store", 0.0, False, "langevin", 250),
        Method("noise", "EBM, noise", "store", 1.0, False, "langevin", 1),
        Method("hybrid", "EBM, hybrid", "store", 0.05, False, "langevin", 20),
        Method("drl", "Diffusion recovery likelihood", "partner", 0.0, True, "langevin", 0),
        Method("da", "DA-EBM", "store", 0.0, True, "mala", 0),
    )
}


def method(name: str) -> Method:
    """The row called ``name``."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


Transition = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, TransitionInfo]]
"""Algorithm 2 with everything but x, t and the step sizes fixed."""


class Negatives(NamedTuple):
    """The chains' side of the gradient: points and their levels, and per burst (levels, acceptance, refusals)."""

    x: Tensor
    t: Tensor
    bursts: list[TransitionInfo]


def conditional(energy: Energy, ladder: Ladder, t: Tensor, partner: Tensor) -> PlainEnergy:
    """-log p(x_t | x_(t+1)) up to a constant: U(x, t) + |x_(t+1) - sqrt(alpha_(t+1)) x|^2 / (2 (1 - alpha_(t+1))).

    Appendix D. ``t`` is the level of x and ``partner`` lies one level up.
    """
    ladder = ladder.on(partner.device)
    shrink = per_chain(ladder.alpha.sqrt(), t + 1, partner)
    variance = ladder.step_variance[t + 1].to(partner.dtype)

    def conditional_energy(x: Tensor) -> Tensor:
        return energy(x, t) + (partner - shrink * x).square().flatten(1).sum(1) / (2 * variance)

    return conditional_energy


def conditional_sigma(sigma: Tensor, ladder: Ladder, t: Tensor) -> Tensor:
    """Gao et al. step in y = sqrt(alpha_(t+1)) x; in x the same step is longer by 1 / sqrt(alpha_(t+1))."""
    return sigma[t] / ladder.on(t.device).alpha.sqrt()[t + 1]


def plain_info(t: Tensor, steps: Info) -> TransitionInfo:
    """Of steps without a label move or a draft."""
    return TransitionInfo(t, steps, torch.zeros_like(t), torch.ones_like(steps.accept_prob))


def draw_negatives(
    config: Config,
    energy: Energy,
    kernel: Kernel,
    ladder: Ladder,
    chains: Chains,
    sigma: Tensor,
    x_data: Tensor,
    t_data: Tensor,
    partner: Tensor,
    generator: torch.Generator,
    transition: Transition,
) -> Negatives:
    """Start chains where the method's row says, move them, and put stored chains back into their slots."""
    row = method(config.method)
    n = len(x_data)
    if row.start == "partner":
        # Gao et al. start at y = x_(t+1), that is at x = x_(t+1) / sqrt(alpha_(t+1)).
        target = conditional(energy, ladder, t_data, partner)
        start = partner / per_chain(ladder.on(partner.device).alpha.sqrt(), t_data + 1, partner)
        step = conditional_sigma(sigma, ladder, t_data).to(start.dtype)
        x, info = langevin.run(kernel, target, start, step, config.steps, generator, compile=config.compile)
        return Negatives(x, t_data, [plain_info(t_data, info)])
    if row.start == "data":
        slots, x, t = None, x_data, t_data
    else:
        slots = chains.draw(n, generator)
        x, t = chains.x[slots], chains.t[slots]
        if config.restart_probability > 0:
            fresh = torch.rand(n, generator=generator, device=x.device) < config.restart_probability
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            x = torch.where(fresh.reshape(-1, *[1] * (x.ndim - 1)), noise, x)
            t = torch.where(fresh, ladder.top, t)  # noise belongs to level T
            chains.stage[slots] = torch.where(fresh, 0, chains.stage[slots])  # and its round trip begins anew
            chains.ease[slots] = torch.where(fresh, 1, chains.ease[slots])
    bursts: list[TransitionInfo] = []
    if row.ladder:
        for _ in range(config.bursts):
            x, t, burst = transition(x, t, sigma)
            bursts.append(burst)
            if slots is not None:
                chains.count_trips(slots, t, ladder.top)
    else:
        at = t
        step = sigma[t].to(x.dtype)
        x, info = langevin.run(
            kernel, lambda y: energy(y, at), x, step, config.steps, generator, compile=config.compile
        )
        bursts.append(plain_info(t, info))
    if slots is not None:
        accepted = torch.stack([burst.steps.accept_prob * burst.kept for burst in bursts]).mean(0)
        chains.put(slots, x, t, accepted)
    return Negatives(x, t, bursts)
