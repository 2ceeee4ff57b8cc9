"""Energies U(x, t) with parameters: x of shape (n, d), t of shape (n,), to shape (n,). U low = likely.

Networks without levels take t and ignore it, so that every energy is called in one way.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daebm.config import Config
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
        # Summed over the knots below x the hinges are slope * x - offset, so a point costs two look-ups.
        below = torch.searchsorted(self.knots, x.detach().contiguous()).squeeze(1)
        slope = F.pad(self.theta.cumsum(1), (1, 0))[t, below]
        offset = F.pad((self.theta * self.knots).cumsum(1), (1, 0))[t, below]
        x = x.squeeze(1)
        return (x / 10).square() + slope * x - offset + self.intercept[t]


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


class LevelMLP(nn.Module):
    """Our default: a Gaussian, corrected by an MLP with gains and biases per level, with a head of squares.

    U(x, t) = 1/2 (x - m_t)' C_t^-1 (x - m_t) + w_t . h(x, t) + 1/2 sum_j e^(2 s_tj) q_j(x, t)^2 + c_t

    - The Gaussian is the data's own, diffused: m_t = sqrt(abar_t) m, C_t = abar_t S + v_t I. The network starts as
      that model and learns what is not Gaussian.
    - q = Q h are learned constraints, near zero on the data. Thin structure costs the squares little: the scale
      e^s starts at 1 / sqrt(v_t), so each level has the curvature of its noise by construction.
    - ``octaves`` adds sin and cos of each coordinate at frequencies 1, 2, 4, ..: fine detail in few dimensions.
    """

    axes: Tensor
    mean: Tensor
    spread: Tensor
    abar: Tensor
    variance: Tensor
    frequencies: Tensor

    def __init__(
        self, data: Tensor, ladder: Ladder, width: int, hidden: int, squares: int = 0, octaves: int = 0
    ) -> None:
        super().__init__()
        data = data.flatten(1).double()
        dimension = data.shape[1]
        covariance = torch.cov(data.T).reshape(dimension, dimension)
        spread, axes = torch.linalg.eigh(covariance)
        self.register_buffer("axes", axes.float())
        self.register_buffer("mean", (data.mean(0) @ axes).float())
        self.register_buffer("spread", spread.clamp(min=0).float())
        self.register_buffer("abar", ladder.abar.float())
        self.register_buffer("variance", ladder.variance.float())
        self.register_buffer("frequencies", 2.0 ** torch.arange(octaves))

        sizes = [dimension * (1 + 2 * octaves)] + [width] * hidden
        levels = ladder.levels
        self.weights = nn.ParameterList(
            # SiLU halves the second moment, which the 2 makes up for behind the first layer.
            torch.randn(a, b) * math.sqrt((2 if i else 1) / a)
            for i, (a, b) in enumerate(pairwise(sizes))
        )
        self.gains = nn.ParameterList(torch.ones(levels, width) for _ in range(hidden))
        self.biases = nn.ParameterList(
            # Spread the first layer's bends over the data; further layers bend near zero.
            (2 * torch.rand(1, width) - 1).repeat(levels, 1) * (0.1 if i else 1.0)
            for i in range(hidden)
        )
        self.head = nn.Parameter(torch.zeros(levels, width))
        self.constant = nn.Parameter(torch.zeros(levels))
        # Small enough that the squares start far below the Gaussian, whatever the level's scale.
        self.constraints = nn.Parameter(torch.randn(width, squares) * 0.005 / math.sqrt(width))
        self.offsets = nn.Parameter(torch.zeros(levels, squares))
        noise = torch.where(ladder.variance > 0, ladder.variance, ladder.variance[min(1, ladder.top)])
        self.log_scales = nn.Parameter((-noise.log() / 2).float().unsqueeze(1).repeat(1, squares))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x.flatten(1)
        h = x
        if len(self.frequencies):
            angle = (x.unsqueeze(2) * self.frequencies).flatten(1)
            h = torch.cat([x, angle.sin(), angle.cos()], dim=1)
        for weight, gain, bias in zip(self.weights, self.gains, self.biases, strict=True):
            h = F.silu(torch.addcmul(bias[t], h @ weight, gain[t]))
        u = (h * self.head[t]).sum(1) + self.constant[t] + self._gaussian(x, t)
        if self.offsets.shape[1]:
            q = (h @ self.constraints + self.offsets[t]) * self.log_scales[t].exp()
            u = u + q.square().sum(1) / 2
        return u

    def _gaussian(self, x: Tensor, t: Tensor) -> Tensor:
        """-log density of the diffused Gaussian at level t, without the dimension's constant."""
        variance = self.abar.unsqueeze(1) * self.spread + self.variance.unsqueeze(1)
        # A clean level 0 may have flat directions; no narrower than the noise of level 1 makes it a proper start.
        variance = variance.clamp(min=float(self.variance[min(1, len(self.variance) - 1)]))
        centred = x @ self.axes - (self.abar.sqrt().unsqueeze(1) * self.mean)[t]
        return (centred.square() / variance[t]).sum(1) / 2 + variance.log().sum(1)[t] / 2


class GaussianTop(nn.Module):
    """U(x, t) of the inner network below level T; |x|^2 / 2 at T, which DRL takes as known."""

    def __init__(self, inner: nn.Module, top: int) -> None:
        super().__init__()
        self.inner, self.top = inner, top

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        learned: Tensor = self.inner(x, t.clamp(max=self.top - 1))
        return torch.where(t == self.top, x.square().flatten(1).sum(1) / 2, learned)


def build(config: Config, data: Tensor, ladder: Ladder) -> nn.Module:
    """The network a config names, for standardised ``data`` (n, ...), whose shape and moments it may use."""
    event = tuple(data.shape[1:])
    width, hidden = config.width, config.hidden
    network: nn.Module
    if config.network == "level-mlp":
        network = LevelMLP(data, ladder, width, hidden, config.squares, config.octaves)
    elif len(event) != 1:
        raise InputError(f"network {config.network!r} takes events of shape (d,), got {event}: flatten the data first")
    elif config.network == "relu-mlp":
        network = ReluMLP(event[0], width, hidden)
    elif config.network == "gated-mlp":
        network = GatedMLP(event[0], width, hidden)
    elif event == (1,):
        network = ReluBasis(ladder.levels)
    else:
        raise InputError(f"network 'relu-basis' takes 1-dimensional data, got events of shape {event}")
    return GaussianTop(network, ladder.top) if config.method == "drl" else network
