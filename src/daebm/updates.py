"""One update of the weights: learning rate, clipping, the weight average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from daebm.config import Config
from daebm.networks import DiffusedGaussian
from daebm.samplers.mgms import Energy
from daebm.state import TrainingState


def learning_rate(config: Config, iteration: int) -> float:
    """Linear warm-up, then a staircase at the milestones or, without any, constant and linear to zero.

    Both warm starts come before that, with rates of their own that rise fast and fall linearly to zero; none is left
    for the end, where weights stay.
    """
    for count, rate in ((config.denoise, config.denoise_rate), (config.relate, config.relate_rate)):
        if iteration < count:
            return rate * min(1.0, (iteration + 1) / 100) * (1 - iteration / count)
        iteration -= count
    share = iteration / (config.learned - config.warm)
    if share >= 1:
        return 0.0
    rate = config.learning_rate * min(1.0, (iteration + 1) / (config.warm_up + 1))
    if config.milestones:
        return float(rate * config.decay_factor ** sum(share >= m for m in config.milestones))
    return rate * min(1.0, (1 - share) / max(1 - config.decay_start, 1e-12))


def trainable(network: nn.Module) -> list[nn.Parameter]:
    """The weights that the optimiser moves."""
    return [weight for weight in network.parameters() if weight.requires_grad]


def likelihood_loss(
    network: nn.Module,
    energy: Energy,
    config: Config,
    x_data: Tensor,
    t_data: Tensor,
    x_chains: Tensor,
    t_chains: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """mean U(data) - mean U(chains) of the ``energy`` of a network, with a small penalty on its size; and U of both.

    An energy has no zero: what is small is measured from the mean energy of the Gaussian that a network starts from, if
    it starts from one. From 0, in many dimensions, the penalty would draw chains to the levels where that is highest.

    With a margin, a point that lies further than that below the chain at its level is drawn together with it, and not
    apart. The model gives it e^margin times the density of what it draws itself, and chains would gather there if they
    knew the way. Of a rare kind of points (garments with stripes, one in a thousand) there may be no chain to say so
    for a long time, and energies that nothing holds fall ever faster.
    """
    u_data, u_chains = energy(x_data, t_data), energy(x_chains, t_chains)
    gap = u_data.mean() - u_chains.mean()
    if config.margin:
        gap = (u_data - u_chains + config.margin).abs().mean() - config.margin
    loss = gap
    if config.energy_penalty:
        base = getattr(network, "base", None)
        usual = base.mean_energy if isinstance(base, DiffusedGaussian) else torch.zeros_like
        size = (u_data - usual(t_data)).square().mean() + (u_chains - usual(t_chains)).square().mean()
        loss = gap + config.energy_penalty * size
    return loss, u_data, u_chains


def _step(optimiser: torch.optim.Optimizer, most: float) -> None:
    """A step of the optimiser, shortened if it would lower its batch's loss by more than ``most`` nats (0: any).

    Adam moves each weight by the rate, however many there are: in a network of millions one update at 1e-5 lowers the
    loss of its batch by nats, and what is particular to the batch with it. Weights then follow the chains from one kind
    of image to the next, and the gap is 0 as long as they move. Nats do not depend on how many weights there are.
    """
    if not most:
        optimiser.step()
        return
    moving = [weight for weight in optimiser.param_groups[0]["params"] if weight.grad is not None]  # not the gains
    before = [weight.detach().clone() for weight in moving]
    optimiser.step()
    with torch.no_grad():  # to first order; nothing here waits for a GPU
        lowered = torch.stack(
            [((old - new) * cast(Tensor, new.grad)).sum() for old, new in zip(before, moving, strict=True)]
        ).sum()
        share = (most / lowered.clamp(min=most)).to(lowered)
        for old, new in zip(before, moving, strict=True):
            new.copy_(torch.lerp(old, new, share))


def update(config: Config, state: TrainingState, gradient: Sequence[Tensor | None]) -> Tensor:
    """A step of the optimiser and of the weight average along the ``gradient`` of a loss; returns its norm.

    At the end, where weights stay, only of the average: the constants of the levels still move.
    """
    rate = learning_rate(config, state.iteration) * state.rate_scale
    for group in state.optimiser.param_groups:
        group["lr"] = rate * group["factor"]
    for weight, slope in zip(trainable(state.network), gradient, strict=True):
        weight.grad = slope
    grad_norm = nn.utils.clip_grad_norm_(state.network.parameters(), config.clip if config.clip else math.inf)
    learning = state.iteration < config.learned  # later a rate of 0 would make NaN of what is not finite
    # Asking a GPU would wait: the loop finds it later.
    if learning and (grad_norm.is_cuda or torch.isfinite(grad_norm)):
        chains = state.iteration >= config.warm
        _step(state.optimiser, config.trust * rate / config.learning_rate if chains else 0.0)
    state.iteration += 1
    if config.average:
        # A young average forgets faster, so that it is never dominated by the initial weights.
        age = state.iteration - config.warm if state.iteration > config.warm else state.iteration
        decay = min(config.average, (1 + age) / (10 + age))
        if state.iteration > config.learned:  # what still moves is averaged from there on, the later the more
            decay = 1 - 2 / (state.iteration - config.learned + 1)
        names, weights = zip(*state.network.named_parameters(), strict=True)
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average([state.average[name] for name in names], [weight.detach() for weight in weights], 0)
    return grad_norm
