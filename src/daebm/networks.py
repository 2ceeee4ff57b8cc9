"""Energies U(x, t) with parameters: x of shape (n, d), t of shape (n,), to shape (n,). U low = likely.

Networks without levels take t and ignore it, so that every energy is called in one way.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daebm.errors import InputError
from daebm.ladder import Ladder


class ReluBasis(nn.Module):
    """The paper's 1-D energy: U(x, t) = (x / 10)^2 + theta_t . (x - knots)_+ + c_t, knots -4..4 by .1.

    One coefficient vector and intercept per level; the quadratic term keeps exp(-U) integrable.
    """

    knots: Tensor

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-4, 4, 81))
        self.theta = nn.Parameter(torch.randn(levels, 81))
        self.intercept = nn.Parameter(torch.zeros(levels))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hinge = (x - self.knots).clamp(min=0)
        return (x / 10).square().squeeze(1) + (hinge * self.theta[t]).sum(1) + self.intercept[t]


class ReluMLP(nn.Module):
    """The paper's toy network for plain EBMs: d-128-128-128-1 with ReLU, 33,537 parameters for d = 2."""

    def __init__(self, dimension: int, width: int, hidden: int) -> None:
        super().__init__()
        sizes = [dimension] + [width] * hidden
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, 1)
        _kaiming(self, gain=math.sqrt(2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        del t
        h = x
        for layer in self.layers:
            h = F.relu(layer(h))
        u: Tensor = -self.head(h).squeeze(1)
        return u


class GatedMLP(nn.Module):
    """The paper's toy network with levels: Softplus, gated by a sinusoidal time embedding; 116,097 parameters.

    The first layer is gated before its activation, the others after it, as in the released code.
    """

    frequencies: Tensor

    def __init__(self, dimension: int, width: int, hidden: int) -> None:
        super().__init__()
        half = width // 2
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(half) / (half - 1)))
        self.embed = nn.ModuleList([nn.Linear(2 * half, width), nn.Linear(width, width)])
        sizes = [dimension] + [width] * hidden
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(hidden))
        self.head = nn.Linear(width, 1)
        _kaiming(self, gain=1.0)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t.to(x.dtype).unsqueeze(1) * self.frequencies
        wave = torch.cat([angle.sin(), angle.cos()], dim=1)
        time = F.softplus(self.embed[1](F.softplus(self.embed[0](wave))))
        h = F.softplus(self.layers[0](x) * self.gates[0](time))
        for layer, gate in zip(self.layers[1:], self.gates[1:], strict=True):
            h = F.softplus(layer(h)) * gate(time)
        u: Tensor = -self.head(h).squeeze(1)
        return u


def _kaiming(module: nn.Module, gain: float) -> None:
    """Normal weights with sd gain / sqrt(fan_in), zero biases: what the released code uses."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=gain / math.sqrt(part.in_features))
            nn.init.zeros_(part.bias)


class GaussianTop(nn.Module):
    """U(x, t) of the inner network below level T; |x|^2 / 2 at T, which DRL takes as known."""

    def __init__(self, inner: nn.Module, top: int) -> None:
        super().__init__()
        self.inner, self.top = inner, top

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        learned: Tensor = self.inner(x, t.clamp(max=self.top - 1))
        return torch.where(t == self.top, x.square().flatten(1).sum(1) / 2, learned)


def build(name: str, event: tuple[int, ...], ladder: Ladder, width: int, hidden: int) -> nn.Module:
    """The network called ``name`` for events of shape ``event``."""
    if len(event) != 1:
        raise InputError(f"network {name!r} takes events of shape (d,), got {event}: flatten the data first")
    if name == "relu-basis":
        if event != (1,):
            raise InputError(f"network 'relu-basis' takes 1-dimensional data, got events of shape {event}")
        return ReluBasis(ladder.levels)
    if name == "relu-mlp":
        return ReluMLP(event[0], width, hidden)
    if name == "gated-mlp":
        return GatedMLP(event[0], width, hidden)
    raise InputError(f"unknown network {name!r}: choose one of relu-basis, relu-mlp, gated-mlp")
