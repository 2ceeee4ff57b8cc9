"""Residual networks for images: x of shape (n, c, h, w), t of shape (n,), to U of shape (n,)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.networks import DiffusedGaussian
from daebm.samplers.mgms import at_level

MULTIPLIERS = (1, 2, 2, 2)  # channels at full, half, quarter and eighth resolution, in units of the width
REACH = 5.0  # sds of the noise by which a pixel may lie beyond those of the data
KNOTS = 8  # between which the gains of the levels are linear
LABEL_VALUES = 1 << 27  # values of one feature map in a label draw: bounds memory to some GiB


HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def eleven_bits(weight: Tensor) -> Tensor:
    """The nearest numbers with as many bits as TF32 and float16 have; the gradient is that of the weights themselves.

    So neither TF32 nor float16 rounds a weight again, nor does a file in half precision (but those below 2^-14).
    """
    if torch.compiler.is_exporting():  # other runtimes know no bits: whoever exports has rounded
        return weight
    exact = weight.detach()
    near = ((exact.float().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
    return weight + (near.to(exact.dtype) - exact)


def convolve(layer: nn.Conv2d, x: Tensor, precision: str) -> Tensor:
    """``layer(x)`` in float32 for fp32 and tf32 (PyTorch's switch for the process), or with products in 16 bits.

    Weights have 11 bits in all of them but bf16, which has 8. With tf32x2 x is two numbers of 11 bits, and the small
    one a cheap second product: then nothing is rounded that energies would feel. The slope is left to the first
    product: Metropolis is exact for any drift.

    ``drafted`` is tf32x2 wherever no `Draft` stands in. A layer whose weights are in 16 bits is one: its maps are too.
    """
    if layer.weight.dtype == torch.float16:
        return cast(Tensor, layer(x.to(layer.weight.dtype)))
    weight, bias = eleven_bits(layer.weight), cast(Tensor, layer.bias)
    if precision in HALF:
        dtype = HALF[precision]
        return F.conv2d(x.to(dtype), weight.to(dtype), bias.to(dtype), padding=layer.padding).float()
    if precision in ("tf32x2", "drafted"):
        exact = x.detach()
        low = exact - (exact.view(torch.int32) & -(1 << 13)).view(torch.float32)  # beyond TF32's 10 bits
        rest = F.conv2d(low.bfloat16(), weight.detach().bfloat16(), padding=layer.padding).float()
        return F.conv2d(x - low, weight, bias, padding=layer.padding) + rest
    return F.conv2d(x, weight, bias, padding=layer.padding)


class Block(nn.Module):
    """x + conv(SiLU(conv(SiLU(x)) + shift_t)); the skip is a 3x3 convolution where the channels change."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 3, padding=1) if out != channels else None
        self.shift = nn.Linear(time, out)

    def coarsen(self) -> None:
        for layer in (self.first, self.second, self.skip):
            if layer is not None:
                coarsen(layer)


def coarsen(layer: nn.Conv2d) -> None:
    """Give it float16 weights of its own."""
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(weight.detach().half(), requires_grad=False))


class Draft:
    """The energy of a network in float16, to draft the steps of a burst with (`mgms.transition`).

    Its convolutions and the maps between them have 11 bits; what a burst of such steps gets wrong is made up for at its
    end. It shares everything else with the network, whose weights it reads anew whenever it is asked for levels.
    """

    def __init__(self, network: nn.Module) -> None:
        shared = {id(value): value for value in (*network.parameters(), *network.buffers())}
        self.network = copy.deepcopy(network, dict(shared))
        for part in self.network.modules():
            if hasattr(part, "coarsen"):
                cast(Block, part).coarsen()
        pairs = zip(self.network.parameters(), network.parameters(), strict=True)
        self.own = [(mine, theirs) for mine, theirs in pairs if mine is not theirs]

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at(t)(x)

    def at(self, t: Tensor) -> Callable[[Tensor], Tensor]:
        for mine, theirs in self.own:
            mine.copy_(theirs.detach())
        return at_level(self.network, t)


class ResNet(nn.Module):
    """The paper's image network (its appendix E.3 and released code): no normalisation, 4,756,864 parameters.

    A 3x3 convolution on the image padded to a multiple of 8 (28 to 32, with zeros), one block or more per resolution,
    2x2 means between them, SiLU, a sum over the last map, and the inner product with a vector that depends on t. The
    level enters every block through a sinusoidal embedding.

    ``patch`` makes each square of so many pixels a side one pixel of more channels first: a quarter of the work for 2.
    ``heads`` is at how many resolutions, from the lowest up, a map is summed up so, with a vector of its own: what is
    fine in an image then has its own say in the slope.

    ``arithmetic`` is the precision of the convolutions (`convolve`). Sums along the residual stream, the level's part
    and the energy are float32 always: only the products are allowed to be coarse.
    """

    frequencies: Tensor

    def __init__(
        self, event: tuple[int, ...], levels: int, width: int = 128, depth: int = 1, patch: int = 1, heads: int = 1
    ) -> None:
        super().__init__()
        if len(event) != 3:
            raise InputError(f"an image network takes events of shape (c, h, w), got {event}")
        if width < 4 or width % 2:
            raise InputError(f"an image network needs an even width of at least 4, got width={width}")
        if not 1 <= heads <= len(MULTIPLIERS):
            raise InputError(f"an image network has {len(MULTIPLIERS)} resolutions, of which heads={heads} cannot be")
        self.levels, self.patch, self.arithmetic = levels, patch, "fp32"
        missing = [-size % (patch * 2 ** (len(MULTIPLIERS) - 1)) for size in event[:0:-1]]  # width first, for F.pad
        self.padding = [side for m in missing for side in (m // 2, m - m // 2)]
        half, time = width // 2, 4 * width
        self.register_buffer("frequencies", torch.exp(-math.log(1e4) * torch.arange(half) / (half - 1)))
        self.embed = nn.ModuleList([nn.Linear(width, time), nn.Linear(time, time)])
        self.stem = nn.Conv2d(event[0] * patch**2, width, 3)
        sizes = [width] + [multiplier * width for multiplier in MULTIPLIERS for _ in range(depth)]
        self.depth, channels = depth, sizes[-1]
        self._blocks = nn.ModuleList(Block(a, b, time) for a, b in pairwise(sizes))
        self.head = nn.Linear(time, channels)
        higher = MULTIPLIERS[len(MULTIPLIERS) - heads : -1]
        self.higher_heads = nn.ModuleList(nn.Linear(time, multiplier * width) for multiplier in higher)
        for part in self.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(part.weight, nonlinearity="linear")
                nn.init.zeros_(cast(Tensor, part.bias))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self._blocks]

    @property
    def heads(self) -> list[nn.Linear]:
        """From high to low resolution."""
        return [*(cast(nn.Linear, head) for head in self.higher_heads), self.head]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self._rest(*self._shared(x), *self._levels(t))

    def at(self, t: Tensor) -> Callable[[Tensor], Tensor]:
        """U(., t), with what does not see x computed once: for many steps at the same levels."""
        shifts, heads = self._levels(t)
        return lambda x: self._rest(*self._shared(x), shifts, heads)

    def of_labels(self, x: Tensor, labels: Tensor) -> Tensor:
        """U(x_i, labels_ij), shape (n, b). The stem and the first convolution do not see t and are computed once."""
        h, c = self._shared(x)

        def some(part: Tensor) -> Tensor:
            rows = part.shape[1]
            h_rows, c_rows = (v.unsqueeze(1).expand(-1, rows, -1, -1, -1).flatten(0, 1) for v in (h, c))
            return self._rest(h_rows, c_rows, *self._levels(part.flatten())).reshape(part.shape)

        together = max(1, LABEL_VALUES // h.numel())
        return torch.cat([some(labels[:, i : i + together]) for i in range(0, labels.shape[1], together)], dim=1)

    def _levels(self, t: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """What depends on the level alone: the shift of every block, (n, channels, 1, 1), and the heads' vectors."""
        angle = torch.arange(self.levels, device=self.frequencies.device).unsqueeze(1) * self.frequencies
        wave = torch.cat([angle.sin(), angle.cos()], dim=1)
        time = F.silu(self.embed[1](F.silu(self.embed[0](wave))))  # of every level, (T + 1, 4 width)
        own = _own(t, self.levels).to(time)
        shifts = [(own @ block.shift(time))[:, :, None, None] for block in self.blocks]
        return shifts, [own @ head(time) for head in self.heads]

    def _shared(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What does not see the level: the stem's map and the first convolution of the first block."""
        # Few input channels are little work: a float32 product of neighbourhoods sees every pixel unrounded.
        x = F.pad(F.pixel_unshuffle(F.pad(x, self.padding), self.patch), [1, 1, 1, 1])
        height, width = x.shape[2] - 2, x.shape[3] - 2
        near = [x[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        near_rows = torch.stack(near, dim=4).permute(0, 2, 3, 1, 4).flatten(3)  # (n, height, width, 9 channels)
        weight, bias = eleven_bits(self.stem.weight).flatten(1), cast(Tensor, self.stem.bias)
        if self.blocks[0].first.weight.dtype == torch.float16:  # of a draft, whose maps all have 16 bits
            near_rows, weight, bias = *_halves(near_rows, weight), bias.half()
        h = F.linear(near_rows, weight, bias).permute(0, 3, 1, 2)
        return h, convolve(self.blocks[0].first, F.silu(h), self.arithmetic)

    def features(self, x: Tensor, t: Tensor) -> Tensor:
        """The last and coarsest map that the energy is summed up from, as a direction: (n, channels * height * width).

        Its length is mostly the contrast of an image.
        """
        shifts, _heads = self._levels(t)
        return F.normalize(self._maps(*self._shared(x), shifts)[-1].flatten(1))

    def _rest(self, h: Tensor, c: Tensor, shifts: list[Tensor], heads: list[Tensor]) -> Tensor:
        def summed(part: Tensor, head: Tensor) -> Tensor:
            last = F.silu(part).permute(0, 2, 3, 1)  # so that the slope has channels last too
            return (last.flatten(1, 2).sum(1, dtype=head.dtype) * head).sum(1)

        maps = self._maps(h, c, shifts)[-len(heads) :]
        u = summed(maps[0], heads[0])
        for part, head in zip(maps[1:], heads[1:], strict=True):
            u = u + summed(part, head)
        return -u

    def _maps(self, h: Tensor, c: Tensor, shifts: list[Tensor]) -> list[Tensor]:
        """The last map of every resolution, from high to low."""
        maps = []
        for i, (block, shift) in enumerate(zip(self.blocks, shifts, strict=True)):
            if i and i % self.depth == 0:
                maps.append(h)
                h = _halved(h)
            if i:
                c = convolve(block.first, F.silu(h), self.arithmetic)
            c = convolve(block.second, F.silu(c + shift.to(c.dtype)), self.arithmetic)
            h = c + (h.to(c.dtype) if block.skip is None else convolve(block.skip, h, self.arithmetic))
        return [*maps, h]


def _halved(h: Tensor) -> Tensor:
    """Means of 2x2 pixels."""
    if h.dtype == torch.float16:
        return cast(Tensor, _Halved.apply(h))  # type: ignore[no-untyped-call]
    return F.avg_pool2d(h, 2)


class _Halved(torch.autograd.Function):
    """For maps in 16 bits, where traffic is what costs: compiled, it is one kernel with the sum before it.

    The backward pass is written out so that its result has channels last; that of slices would not, and every
    convolution would copy it.
    """

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return (h[:, :, ::2, ::2] + h[:, :, ::2, 1::2] + h[:, :, 1::2, ::2] + h[:, :, 1::2, 1::2]) / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        slope = F.interpolate(slopes[0] / 4, scale_factor=2, mode="nearest")
        return slope.contiguous(memory_format=torch.channels_last)


def _halves(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float16 factors of rows @ weight.T that see every pixel unrounded: two numbers of 11 bits beside each other."""
    high = rows.half()
    unused = -2 * rows.shape[-1] % 8  # tensor cores take multiples of 8
    two = torch.cat([high, (rows - high).half()], -1), torch.cat([weight, weight], 1).half()
    return F.pad(two[0], [0, unused]), F.pad(two[1], [0, unused])


def _own(t: Tensor, levels: int) -> Tensor:
    """1 at the own level, (..., T + 1): a product with it is exact, and its gradient has a fixed order on a GPU.

    That of an index has none in a compiled graph, and then no run continues bit for bit.
    """
    return t.unsqueeze(-1) == torch.arange(levels, device=t.device)


class LevelResNet(nn.Module):
    """Ours for images: the data's own diffused Gaussian at every level, corrected by the paper's network.

    U(x, t) = a_t g(x, t) + (1 - a_t) d/2 + (b_t f(x, t) + (1 - b_t) f_t) / sqrt(v_t) + 1/2 log det C_t + c_t + o(x, t)

    with g(x, t) = 1/2 |C_t^(-1/2) (x - m_t)|^2. The correction f starts at zero, so that the model begins as a
    normalised density whose labels mix, and weighs most where the noise is least, as the slope of the true energy does.
    The gains a_t and b_t start at 1. They are smooth in t: two numbers at each of a few knots, which a few hundred
    chains know well. d/2 and f_t are the means of what they multiply, so that a gain that changes hardly changes the
    mass of its level.

    Pixels have a least and a largest value, and noise hardly takes them five of its sds further: o(x, t) is half the
    square of what lies beyond that, in units of the noise. Out there the network has learned nothing, and runs of
    50,000 steps would find where it happens to be low.
    """

    scale: Tensor
    blend: Tensor
    mean: Tensor
    reach: Tensor

    def __init__(
        self, data: Tensor, ladder: Ladder, width: int = 128, depth: int = 1, patch: int = 1, heads: int = 1
    ) -> None:
        super().__init__()
        self.base = DiffusedGaussian(data, ladder)
        self.inner = ResNet(tuple(data.shape[1:]), ladder.levels, width, depth, patch, heads)
        for head in self.inner.heads:
            nn.init.zeros_(head.weight)
        self.constant = nn.Parameter(torch.zeros(ladder.levels))
        self.register_buffer("scale", self.base.noise.rsqrt().float())
        knots = torch.linspace(0, ladder.top, min(KNOTS, ladder.levels))
        spacing = ladder.top / max(len(knots) - 1, 1) or 1.0
        distance = (torch.arange(ladder.levels).unsqueeze(1) - knots).abs() / spacing
        self.register_buffer("blend", (1 - distance).clamp(min=0))  # linear between knots
        self.log_gain = nn.Parameter(torch.zeros(len(knots), 2))
        self.register_buffer("mean", torch.zeros(ladder.levels))  # f_t
        ends = torch.stack([data.min(), data.max()]).double().cpu()
        beyond = REACH * self.base.noise.sqrt().unsqueeze(1) * torch.tensor([-1.0, 1.0])
        self.register_buffer("reach", (ladder.abar.sqrt().unsqueeze(1) * ends + beyond).float())  # (T + 1, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.at(t)(x)

    def at(self, t: Tensor) -> Callable[[Tensor], Tensor]:
        inner, (a, b, c) = self.inner.at(t), self._of_level(t)
        return lambda x: a * self.base.half_square(x, t) + b * inner(x) + c + self.outside(x, t.unsqueeze(1)).squeeze(1)

    def outside(self, x: Tensor, labels: Tensor) -> Tensor:
        """o(x, t) of x at each of its labels, (n, b)."""
        low, high = self.reach[labels].unsqueeze(2).unbind(-1)  # (n, b, 1)
        flat = x.flatten(1).unsqueeze(1)
        beyond = (flat - high).clamp(min=0) + (low - flat).clamp(min=0)
        return (beyond * self.scale[labels].unsqueeze(2)).square().sum(2) / 2

    def ungained(self, x: Tensor, t: Tensor) -> Tensor:
        """U with a_t = b_t = 1."""
        outside = self.outside(x, t.unsqueeze(1)).squeeze(1)
        return self.parts(x, t).sum(1) + self.base.half_log_det[t] + self.constant[t] + outside

    def parts(self, x: Tensor, t: Tensor) -> Tensor:
        """What the gains multiply: g and f / sqrt(v_t), (n, 2)."""
        return torch.stack([self.base.half_square(x, t), self.inner(x, t) * self.scale[t]], 1)

    def features(self, x: Tensor, t: Tensor) -> Tensor:
        return self.inner.features(x, t)

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.base.carried(x, t, labels)

    def of_labels(self, x: Tensor, labels: Tensor) -> Tensor:
        a, b, c = self._of_level(labels)
        inner = b * self.inner.of_labels(x, labels)
        return a * self.base.half_squares(x, labels) + inner + c + self.outside(x, labels)

    def _of_level(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a_t, b_t / sqrt(v_t), and all that does not depend on x."""
        a, b = (self.blend @ self.log_gain).exp().unbind(1)
        means = (1 - a) * (len(self.base.axes) / 2) + (1 - b) * self.scale * self.mean
        c = self.base.half_log_det + self.constant + means
        own = _own(t, len(c)).to(
            c
        )  # added up and not multiplied as matrices, which a setting of PyTorch's makes coarse
        return (own * a).sum(-1), (own * (b * self.scale)).sum(-1), (own * c).sum(-1)

    @torch.no_grad()
    def regain(self, data: Tensor, chains: Tensor, t: Tensor, share: float) -> None:
        """Take the gains a share of the way to where data and chains agree in the mean; f_t from the data.

        ``data`` and ``chains`` are `parts` (n, 2), row by row of a chain and of the image it began from, at levels t.
        Newton's step: the slope of a mean by its gain is minus the covariance, and differences have twice that of the
        chains, so that whole steps are half ones.
        """
        own = F.one_hot(t, len(self.mean)).to(data)  # a product, and no sum by index: that has no fixed order on a GPU
        self.mean.copy_(own.T @ data[:, 1] / own.sum(0) / self.scale)
        gap, weight = data - chains, self.blend[t] / self.blend[t].sum(0)  # (n, 2), (n, knots)
        mean = weight.T @ gap
        covariance = torch.einsum("nk,ni,nj->kij", weight, gap, gap) - torch.einsum("ki,kj->kij", mean, mean)
        self.log_gain.sub_(share * torch.linalg.solve(covariance + torch.eye(2, device=gap.device), mean))
