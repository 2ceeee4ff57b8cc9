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

ENOUGH_ROWS = 10  # for each dimension: a covariance from as many needs no shrinking


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
        if half < 2:
            raise InputError(f"network 'gated-mlp' needs a width of at least 4, got width={width}")
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


def _covariance(data: Tensor) -> Tensor:
    """Of rows (n, d). Few rows understate the spread along some directions, and new rows that have it look absurd: the
    covariance is shrunk towards equal variances then, by as much as Ledoit and Wolf (2004) find best."""
    rows, dimension = data.shape
    if rows >= ENOUGH_ROWS * dimension:
        return torch.cov(data.T).reshape(dimension, dimension)
    from sklearn.covariance import ledoit_wolf  # here, as its import takes as long as all the rest

    return torch.from_numpy(ledoit_wolf(data.cpu().numpy())[0]).to(data)


class DiffusedGaussian(nn.Module):
    """U(x, t) = 1/2 |C_t^(-1/2) (x - m_t)|^2 + 1/2 log det C_t: the Gaussian of the data, diffused to every level.

    m_t = sqrt(abar_t) m and C_t = abar_t S + v_t I, with mean m and covariance S of standardised ``data``, shrunk if
    rows are few.
    """

    axes: Tensor
    centre: Tensor
    precision: Tensor
    half_log_det: Tensor

    def __init__(self, data: Tensor, ladder: Ladder) -> None:
        super().__init__()
        data = data.flatten(1).double()
        spread, axes = torch.linalg.eigh(_covariance(data))
        # A single clean level has no noise to take a scale from.
        noise = ladder.variance if ladder.top else ladder.variance.clamp(min=1e-4)
        self.noise = torch.where(noise > 0, noise, noise[min(1, ladder.top)])  # the scale of each level, (T + 1,)
        # A clean level 0 may have flat directions; no narrower than the noise of level 1 makes it a proper start.
        spread = ladder.abar.unsqueeze(1) * spread.clamp(min=0) + ladder.variance.unsqueeze(1)
        spread = spread.clamp(min=max(float(self.noise[0]), 1e-8))
        self.register_buffer("axes", axes.float())  # C_t = axes diag(spread_t) axes'
        self.register_buffer("centre", (ladder.abar.sqrt().unsqueeze(1) * (data.mean(0) @ axes)).float())
        self.register_buffer("precision", spread.rsqrt().float())  # C_t^(-1/2) on the axes
        self.register_buffer("half_log_det", spread.log().sum(1).float() / 2)

    def whiten(self, x: Tensor, t: Tensor) -> Tensor:
        """y_t = C_t^(-1/2) (x - m_t), (n, d)."""
        return (x.flatten(1) @ self.axes - self.centre[t]) * self.precision[t]

    def half_square(self, x: Tensor, t: Tensor) -> Tensor:
        return self.whiten(x, t).square().sum(1) / 2

    def half_squares(self, x: Tensor, labels: Tensor) -> Tensor:
        """The same of x at each of its labels (n, b)."""
        y = ((x.flatten(1) @ self.axes).unsqueeze(1) - self.centre[labels]) * self.precision[labels]
        return y.square().sum(2) / 2

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.half_square(x, t) + self.half_log_det[t]

    def mean_energy(self, t: Tensor) -> Tensor:
        """E U(x, t) of its own draws at levels t."""
        return self.half_log_det[t] + len(self.axes) / 2

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x at other levels with the same whitened coordinates, (n, b, ...), and log sqrt(det C_label / det C_t)."""
        y = self.whiten(x, t).unsqueeze(1) / self.precision[labels] + self.centre[labels]
        stretch = self.half_log_det[labels] - self.half_log_det[t].unsqueeze(1)
        return (y @ self.axes.T).reshape(*labels.shape, *x.shape[1:]), stretch

    def of_labels(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.half_squares(x, labels) + self.half_log_det[labels]


class LevelMLP(nn.Module):
    """Our default: the data's own Gaussian at every level, bent by an MLP with gains and biases per level.

    U(x, t) = 1/2 |y_t - R h|^2 + 1/2 |e^(s_t) (Q h + o_t)|^2 + w_t . h + c_t + 1/2 log det C_t,  h = MLP(x, t)

    - y_t = C_t^(-1/2) (x - m_t) is x whitened by the diffused Gaussian of the data, m_t = sqrt(abar_t) m and
      C_t = abar_t S + v_t I. At the start R = w = 0: the model begins as that Gaussian at every level, normalised, so
      that labels mix from the first iteration; R h then moves its centre, as a denoiser would.
    - Q h (``squares`` of them) are learned constraints that vanish on the data. Their scale e^s starts at
      1 / sqrt(v_t), the curvature of the level's noise: a thin structure needs no sharp bend in the network.
    - ``octaves`` adds sin and cos of each coordinate at frequencies 1, 2, 4, ..: fine detail in few dimensions.
    """

    frequencies: Tensor

    def __init__(
        self, data: Tensor, ladder: Ladder, width: int, hidden: int, squares: int = 0, octaves: int = 0
    ) -> None:
        super().__init__()
        levels, dimension = ladder.levels, data[0].numel()
        self.base = DiffusedGaussian(data, ladder)
        self.register_buffer("frequencies", 2.0 ** torch.arange(octaves))

        sizes = [dimension * (1 + 2 * octaves)] + [width] * hidden
        self.weights = nn.ParameterList(torch.randn(a, b) / math.sqrt(a) for a, b in pairwise(sizes))
        self.gains = nn.ParameterList(torch.ones(levels, width) for _ in range(hidden))
        self.biases = nn.ParameterList(
            # Spread the first layer's bends over the data; further layers bend near zero.
            (2 * torch.rand(1, width) - 1).repeat(levels, 1) * (0.1 if i else 1.0)
            for i in range(hidden)
        )
        self.shift = nn.Parameter(torch.zeros(width, dimension))  # R
        self.head = nn.Parameter(torch.zeros(width))
        self.head_gain = nn.Parameter(torch.ones(levels, width))
        self.constant = nn.Parameter(torch.zeros(levels))
        # Not zero, which would be a saddle, but far below the Gaussian at every level's scale.
        self.constraints = nn.Parameter(torch.randn(width, squares) * 0.005 / math.sqrt(width))  # Q
        self.offsets = nn.Parameter(torch.zeros(levels, squares))
        self.log_scales = nn.Parameter((-self.base.noise.log() / 2).float().unsqueeze(1).repeat(1, squares))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x.flatten(1)
        h = x
        if len(self.frequencies):
            angle = (x.unsqueeze(2) * self.frequencies).flatten(1)
            h = torch.cat([x, angle.sin(), angle.cos()], dim=1)
        for weight, gain, bias in zip(self.weights, self.gains, self.biases, strict=True):
            h = F.silu(torch.addcmul(bias[t], h @ weight, gain[t]))
        u = (self.base.whiten(x, t) - h @ self.shift).square().sum(1) / 2 + self.base.half_log_det[t]
        if self.offsets.shape[1]:
            q = (h @ self.constraints + self.offsets[t]) * self.log_scales[t].exp()
            u = u + q.square().sum(1) / 2
        return u + (h * self.head_gain[t]) @ self.head + self.constant[t]

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.carried(x, t, labels)


class GaussianTop(nn.Module):
    """U(x, t) of the inner network below level T; |x|^2 / 2 at T, which DRL takes as known."""

    def __init__(self, inner: nn.Module, top: int) -> None:
        super().__init__()
        self.inner, self.top = inner, top

    @property
    def base(self) -> nn.Module | None:
        """The Gaussian that the inner network starts from, if it does."""
        return getattr(self.inner, "base", None)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        learned: Tensor = self.inner(x, t.clamp(max=self.top - 1))
        return torch.where(t == self.top, x.square().flatten(1).sum(1) / 2, learned)


def build(config: Config, data: Tensor, ladder: Ladder) -> nn.Module:
    """The network a config names, for standardised ``data`` (n, ...), whose shape and moments it may use."""
    event = tuple(data.shape[1:])
    width, hidden = config.width, config.hidden
    network: nn.Module
    if config.network in ("resnet", "level-resnet"):
        from daebm.resnet import LevelResNet, ResNet

        if config.network == "resnet":
            network = ResNet(event, ladder.levels, width, hidden, config.patch, config.heads)
        else:
            network = LevelResNet(data, ladder, width, hidden, config.patch, config.heads)
    elif config.network == "level-mlp":
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
