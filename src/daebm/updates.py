"""One update of the weights: learning rate, clipping, the weight average."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from daebm.config import Config
from daebm.state import TrainingState


def learning_rate(config: Config, iteration: int) -> float:
    """Linear warm-up, then a staircase at the milestones or, without any, constant and linear to zero.

    A warm start by denoising comes before that, with a rate of its own that falls linearly to zero.
    """
    if iteration < config.denoise:
        return config.denoise_rate * min(1.0, (iteration + 1) / 100) * (1 - iteration / config.denoise)
    iteration -= config.denoise
    share = iteration / (config.iterations - config.denoise)
    rate = config.learning_rate * min(1.0, (iteration + 1) / (config.warm_up + 1))
    if config.milestones:
        return float(rate * config.decay_factor ** sum(share >= m for m in config.milestones))
    return rate * min(1.0, (1 - share) / max(1 - config.decay_start, 1e-12))


def update(config: Config, state: TrainingState, loss: Tensor) -> Tensor:
    """A step of the optimiser and of the weight average; returns the norm of the gradient."""
    rate = learning_rate(config, state.iteration) * state.rate_scale
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    state.optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    grad_norm = nn.utils.clip_grad_norm_(state.network.parameters(), config.clip if config.clip else math.inf)
    if loss.is_cuda or torch.isfinite(grad_norm):  # on a GPU asking would wait: there the loop finds it and rolls back
        state.optimiser.step()
    state.iteration += 1
    if config.average:
        # A young average forgets faster, so that it is never dominated by the initial weights.
        age = state.iteration - config.denoise if state.iteration > config.denoise else state.iteration
        decay = min(config.average, (1 + age) / (10 + age))
        names, weights = zip(*state.network.named_parameters(), strict=True)
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average([state.average[name] for name in names], [weight.detach() for weight in weights], 0)
    return grad_norm
