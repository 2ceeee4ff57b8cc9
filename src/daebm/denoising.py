"""A warm start by denoising score matching: the slope of the energy is learned without chains.

Denoising says nothing of how much mass each level, or each island of the data, has: that is left to maximum
likelihood. But chains that start from diffused data then find an energy that holds them where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from daebm.ladder import per_chain
from daebm.spacing import level_balance

if TYPE_CHECKING:
    from daebm.training import Setup

BALANCE_CHAINS = 64  # diffused data per level for the balance of the levels


def denoising_loss(network: nn.Module, x: Tensor, t: Tensor, eps: Tensor, variance: Tensor) -> Tensor:
    """Mean over pixels of |sqrt(v_t) grad U(x_t, t) - eps|^2, least where grad U is minus the true score."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(network(x, t).sum(), x, create_graph=True)
    return (per_chain(variance.sqrt(), t, x) * slope - eps).square().mean()


def balance_levels(setup: Setup) -> None:
    """Shift the network's constant of every level so that, on diffused data, all levels have equal mass."""
    constant = getattr(setup.state.network, "constant", None)
    ladder, generator = setup.ladder, setup.state.generator
    if not isinstance(constant, Tensor) or constant.shape != (ladder.levels,):
        return
    t = torch.arange(ladder.levels, device=setup.data.device).repeat(BALANCE_CHAINS)
    rows = torch.randint(len(setup.data), (len(t),), generator=generator, device=t.device)
    x = ladder.diffuse(setup.points(rows), t, generator)
    ratio, _acceptance = level_balance(setup.state.network, x, t, ladder.top)
    with torch.no_grad():  # mass e^(ratio) too much is energy too low
        constant[1:] += ratio.cumsum(0).to(constant)
