"""Image networks: the paper's size, images of any size, many labels at once, an exact start, right gradients."""

import math
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daebm import Config, Dataset, Ladder, resnet, train
from daebm.denoising import denoising_loss
from daebm.errors import InputError
from daebm.networks import build
from daebm.resnet import LevelResNet, ResNet, convolve, eleven_bits

LEVELS = 5
EVENTS = [(1, 8, 8), (1, 9, 11), (1, 28, 28), (3, 9, 11), (3, 16, 5)]


def small(event: tuple[int, ...] = (1, 8, 8), depth: int = 1, width: int = 4, patch: int = 1, heads: int = 1) -> ResNet:
    """A network in float64 with biases that are not zero, so that a forgotten one shows, and weights of 11 bits."""
    torch.manual_seed(0)
    network = ResNet(event, LEVELS, width, depth, patch, heads).double()
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            part.weight.data = eleven_bits(part.weight.data)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            nn.init.normal_(part.bias, std=0.3)
    return network


def level_network(
    event: tuple[int, ...] = (1, 8, 8), floor: float = 0.1, patch: int = 1, heads: int = 4
) -> tuple[LevelResNet, Ladder, Tensor]:
    """Correlated images with a mean, the ladder, and the network at its start."""
    generator = torch.Generator().manual_seed(1)
    d = math.prod(event)
    data = torch.randn(200, d, generator=generator) @ torch.randn(d, d, generator=generator) / math.sqrt(d) + 0.5
    data = data.reshape(200, *event)
    ladder = Ladder.geometric(d, floor=floor, top=LEVELS - 1)
    torch.manual_seed(2)
    return LevelResNet(data, ladder, width=4, patch=patch, heads=heads), ladder, data


def speak(network: LevelResNet) -> None:
    """Let its correction, which starts at zero, say something at every resolution."""
    for head in network.inner.heads:
        nn.init.normal_(head.weight)


def images(n: int, event: tuple[int, ...], seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *event, generator=generator, dtype=torch.float64), torch.arange(n) % LEVELS


def margins(event: tuple[int, ...], multiple: int = 8) -> list[int]:
    """Zeros around an image, in the order of F.pad, that make its sides such multiples; an odd one goes to the end."""
    missing = [-side % multiple for side in (event[2], event[1])]
    return [side for m in missing for side in (m // 2, m - m // 2)]


def squares(x: Tensor, side: int) -> Tensor:
    """Every square of so many pixels a side as one pixel, its pixels row by row as channels."""
    return torch.cat(
        [x[:, [c], i::side, j::side] for c in range(x.shape[1]) for i in range(side) for j in range(side)], 1
    )


def reference(network: ResNet, x: Tensor, t: Tensor, patch: int = 1) -> Tensor:
    """The network written down a second time, plainly, from its weights alone."""
    weights = dict(network.named_parameters())

    def layer(name: str, h: Tensor) -> Tensor:
        w, b = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.conv2d(h, w, b, padding=1) if w.ndim == 4 else F.linear(h, w, b)

    def swish(h: Tensor) -> Tensor:
        return h * torch.sigmoid(h)

    width = weights["stem.weight"].shape[0]
    frequencies = 10_000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2 - 1))
    angle = t.double()[:, None] * frequencies
    time = layer("embed.0", torch.cat([torch.sin(angle), torch.cos(angle)], 1))
    time = swish(layer("embed.1", swish(time)))
    h = layer("stem", squares(F.pad(x, margins(tuple(x.shape[1:]), 8 * patch)), patch))
    count = sum(name.endswith("first.weight") for name in weights)
    higher, u = sum(name.startswith("higher_heads") for name in weights) // 2, torch.zeros(len(x), dtype=x.dtype)
    for i in range(count):
        if i and i % (count // 4) == 0:  # four resolutions
            before = i // (count // 4) - 1 - (3 - higher)
            if before >= 0:
                u = u - (swish(h).sum((2, 3)) * layer(f"higher_heads.{before}", time)).sum(1)
            n, c, height, width_ = h.shape
            h = h.reshape(n, c, height // 2, 2, width_ // 2, 2).mean((3, 5))
        block = f"_blocks.{i}."
        inner = layer(block + "first", swish(h)) + layer(block + "shift", time)[:, :, None, None]
        skip = layer(block + "skip", h) if block + "skip.weight" in weights else h
        h = layer(block + "second", swish(inner)) + skip
    return u - (swish(h).sum((2, 3)) * layer("head", time)).sum(1)


def test_paper_network_has_the_papers_size() -> None:
    network = ResNet((1, 28, 28), 51)
    assert sum(p.numel() for p in network.parameters()) == 4_756_864
    x, labels = torch.zeros(2, 1, 28, 28), torch.tensor([[0, 50, 7], [1, 2, 3]])
    with torch.no_grad():
        assert network(x, torch.tensor([0, 50])).shape == (2,)
        assert network.of_labels(x, labels).shape == (2, 3)


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_other_sizes_are_padded_with_zeros_to_a_multiple_of_8(event: tuple[int, ...]) -> None:
    """The network of the padded size with the same weights must give the same numbers on the padded image."""
    network = small(event)
    sides = [event[0], *(side + -side % 8 for side in event[1:])]
    padded = ResNet(tuple(sides), LEVELS, 4).double()
    padded.load_state_dict(network.state_dict())
    x, t = images(6, event)
    assert torch.equal(network(x, t), padded(F.pad(x, margins(event)), t))  # the same operations on the same numbers


@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_every_pixel_is_seen(event: tuple[int, ...], patch: int) -> None:
    network = small(event, patch=patch)
    x, t = images(2, event)
    (grad,) = torch.autograd.grad(network(x.requires_grad_(True), t).sum(), x)
    assert (grad != 0).all()


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_the_stem_is_a_convolution_of_the_padded_image(event: tuple[int, ...]) -> None:
    network = small(event)
    x, _t = images(3, event)
    plain = F.conv2d(F.pad(x, margins(event)), network.stem.weight, network.stem.bias, padding=1)
    torch.testing.assert_close(network._shared(x)[0], plain)  # float64: the order of 27 products at most


@pytest.mark.parametrize(
    ("event", "depth", "patch", "heads"),
    [
        ((1, 8, 8), 1, 1, 1),
        ((3, 9, 11), 1, 1, 4),
        ((1, 8, 8), 2, 1, 2),
        ((1, 16, 16), 1, 2, 1),
        ((3, 9, 17), 2, 2, 3),
        ((1, 8, 8), 1, 3, 4),
    ],
    ids=str,
)
def test_the_network_is_what_it_says(event: tuple[int, ...], depth: int, patch: int, heads: int) -> None:
    """Energy and slope against a plain second writing, in float64: rounding only, so the defaults (1e-7) hold.

    With patches the image is padded to a multiple of 8 of them a side: 9 x 17 pixels to 16 x 32 for patches of 2.
    """
    network = small(event, depth, patch=patch, heads=heads)
    assert len(network.heads) == heads and len(network.blocks) == 4 * depth
    assert network.stem.weight.shape == (4, event[0] * patch**2, 3, 3)
    x, t = images(2 * LEVELS, event)
    x.requires_grad_(True)
    ours, plain = network(x, t), reference(network, x, t, patch)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(plain.sum(), x)[0])


def test_patches_keep_the_order_of_their_pixels() -> None:
    """Planted: with two pixels of every square exchanged the network must say something else."""
    network = small((1, 16, 16), patch=2)
    x, t = images(4, (1, 16, 16))
    exchanged = x.clone()
    exchanged[..., ::2, ::2], exchanged[..., 1::2, ::2] = x[..., 1::2, ::2], x[..., ::2, ::2]
    with torch.no_grad():
        assert float((network(exchanged, t) - network(x, t)).abs().min()) > 1e-3


def test_what_lies_beyond_the_range_of_pixels_costs_its_square() -> None:
    """In units of the noise, from five of its sds on; nothing within, at any level, by every way to ask."""
    network, ladder, data = level_network()
    network = network.double()
    with torch.no_grad():  # else the Gaussian's own square is in it
        network.log_gain.fill_(-40.0)
    for level in (0, LEVELS - 1):
        sd, root = math.sqrt(float(ladder.variance[level])), math.sqrt(float(ladder.abar[level]))
        low, high = root * float(data.min()) - 5 * sd, root * float(data.max()) + 5 * sd
        x = torch.zeros(4, 1, 8, 8, dtype=torch.float64)
        x[1, 0, 2, 3], x[2, 0, 2, 3], x[3, 0, 0, 0], x[3, 0, 7, 7] = high - 1e-3, high + 2 * sd, high + sd, low - sd
        t = torch.full((4,), level)
        expected = torch.tensor([0.0, 0.0, 2.0, 1.0], dtype=torch.float64)
        for u in (network(x, t), network.at(t)(x), network.of_labels(x, t[:, None])[:, 0]):
            torch.testing.assert_close(u - u[0], expected, rtol=0, atol=1e-4)
        plain = network.ungained(x, t) - network.parts(x, t).sum(1)
        torch.testing.assert_close(plain - plain[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet", "level-resnet"])
def test_a_config_names_the_patch(name: str) -> None:
    """784 pixels of 28 x 28 are 196 patches of 2, padded to 16 x 16: a quarter of the first map."""
    data = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(5))
    network = build(Config(network=name, width=4, hidden=1, patch=2), data, Ladder.geometric(784, floor=0.1, top=4))
    inner = network if name == "resnet" else network.inner
    assert inner.patch == 2 and inner._shared(data)[0].shape == (10, 4, 16, 16)
    with pytest.raises(InputError, match="patch must be at least 1"):
        Config(network=name, patch=0)


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("kind", ["resnet", "level-resnet"])
def test_the_energy_at_given_levels_is_the_energy(kind: str, patch: int) -> None:
    """Energy and slope, of points that come later too: the same operations on the same numbers."""
    network: nn.Module = small((1, 9, 8), patch=patch)
    if kind == "level-resnet":
        network = level_network((1, 9, 8), patch=patch)[0].double()
        speak(network)
        nn.init.normal_(network.constant)
    for seed in (3, 4):
        x, t = images(2 * LEVELS, (1, 9, 8), seed)
        here = network.at(t)
        for y in (x, 1 - x):
            y.requires_grad_(True)
            a, b = here(y), network(y, t)
            assert torch.equal(a, b) and len(a.unique()) == len(t)
            assert torch.equal(*(torch.autograd.grad(u.sum(), y)[0] for u in (a, b)))
            assert not torch.equal(a, network(y, t.flip(0)))  # planted: levels of other rows


@pytest.mark.parametrize(("together", "patch"), [(None, 1), (1, 1), (2, 1), (3, 1), (None, 2), (3, 2)])
@pytest.mark.parametrize("kind", ["resnet", "level-resnet"])
def test_many_labels_at_once_are_one_by_one(
    monkeypatch: pytest.MonkeyPatch, kind: str, together: int | None, patch: int
) -> None:
    """``together`` labels fit into one part; 7 labels are then 1, 7, 4 or 3 parts."""
    event, n = (1, 9, 8), 3
    if kind == "resnet":
        network: nn.Module = small(event, patch=patch)
        inner = network
    else:
        network = level_network(event, patch=patch)[0].double()
        inner = network.inner
        speak(network)
        nn.init.normal_(network.constant)
    x, _t = images(n, event)
    labels = torch.randint(LEVELS, (n, 7), generator=torch.Generator().manual_seed(4))
    if together is not None:
        values = n * 4 * (16 * 8 if patch == 1 else 8 * 8)  # images, channels, padded pixels: one label's map
        monkeypatch.setattr(resnet, "LABEL_VALUES", together * values + values - 1)
    parts, rest = [], inner._rest
    monkeypatch.setattr(inner, "_rest", lambda h, c, *level: parts.append(len(h)) or rest(h, c, *level))
    with torch.no_grad():
        u = network.of_labels(x, labels)
        assert parts == {None: [21], 1: [3] * 7, 2: [6, 6, 6, 3], 3: [9, 9, 3]}[together]
        single = torch.stack([network(x, labels[:, j]) for j in range(7)], dim=1)
    torch.testing.assert_close(u, single)  # float64: a convolution may sum in another order for another batch


@pytest.mark.parametrize("floor", [0.1, 0.0])
def test_level_resnet_starts_as_the_diffused_gaussian(floor: float) -> None:
    """-log N(x; m_t, C_t) without the dimension's constant: a normalised density at every level.

    Without a floor level 0 has no noise: the Gaussian is there no narrower than the noise of level 1.
    """
    network, ladder, data = level_network((1, 4, 5), floor)
    flat = data.flatten(1).double()
    x = images(20, (1, 4, 5))[0].float()
    for t in range(ladder.levels):
        covariance = float(ladder.abar[t]) * torch.cov(flat.T) + float(ladder.variance[t]) * torch.eye(20)
        if floor == 0 and t == 0:
            spread, axes = torch.linalg.eigh(covariance)
            covariance = axes @ torch.diag(spread.clamp(min=float(ladder.variance[1]))) @ axes.T
        normal = torch.distributions.MultivariateNormal(math.sqrt(float(ladder.abar[t])) * flat.mean(0), covariance)
        expected = (-normal.log_prob(x.flatten(1).double()) - 20 / 2 * math.log(2 * math.pi)).float()
        # float32: an eigenvector is off by 6e-8, and up to 100 times that after division by the noise sd.
        torch.testing.assert_close(network(x, torch.full((20,), t)), expected, rtol=1e-4, atol=1e-4)
    labels = torch.arange(ladder.levels).expand(20, -1)
    one_by_one = torch.stack([network(x, labels[:, t]) for t in range(ladder.levels)], dim=1)
    torch.testing.assert_close(network.of_labels(x, labels), one_by_one, rtol=1e-5, atol=1e-4)  # float32 sums


def test_the_correction_weighs_as_the_noise_of_its_level() -> None:
    """U = Gaussian + f / sqrt(v_t) + c_t, also where f and c are not zero."""
    network, ladder, _data = level_network()
    network.double()
    speak(network)
    nn.init.normal_(network.constant)
    x, t = images(2 * LEVELS, (1, 8, 8))
    expected = network.base(x, t) + network.inner(x, t) / ladder.variance[t].sqrt() + network.constant[t]
    torch.testing.assert_close(network(x, t), expected, rtol=1e-6, atol=1e-6)  # 1 / sqrt(v) is kept in float32


def test_the_energy_depends_on_the_level() -> None:
    """Of one image at all levels, for the inner network too: no two energies agree."""
    x = images(1, (1, 8, 8))[0].expand(LEVELS, -1, -1, -1)
    u = small()(x, torch.arange(LEVELS)).tolist()
    assert len({round(value, 6) for value in u}) == LEVELS


@pytest.mark.parametrize("depth", [1, 2])
def test_slopes_are_finite_differences(depth: int) -> None:
    """First and second derivatives (denoising needs both), in float64, at every level.

    gradcheck's differences of 1e-6 are right to about 1e-9 by rounding; its limits are 1e-5 absolute, .001 relative.
    """
    network = small((1, 3, 4), depth)
    x, t = images(LEVELS, (1, 3, 4))
    x.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda y: network(y, t), (x,))
    assert torch.autograd.gradgradcheck(lambda y: network(y, t), (x,), fast_mode=True)


def test_slopes_of_level_resnet_are_finite_differences() -> None:
    network, _ladder, _data = level_network((1, 3, 4))
    network.double()
    nn.init.normal_(network.inner.head.weight, std=0.1)
    x, t = images(LEVELS, (1, 3, 4))
    assert torch.autograd.gradcheck(lambda y: network(y, t), (x.requires_grad_(True),))  # limits as above


def test_coarse_convolutions_give_a_float32_energy_near_the_exact_one() -> None:
    """bfloat16 keeps 8 bits: each of 9 products in a row is off by 2^-9 of its size, well within 5 % together."""
    torch.manual_seed(0)
    network = ResNet((1, 8, 8), LEVELS, width=16)
    x, t = images(50, (1, 8, 8))
    x = x.float()
    with torch.no_grad():
        fine = network(x, t)
        network.arithmetic = "bf16"
        coarse, labelled = network(x, t), network.of_labels(x, t.unsqueeze(1)).squeeze(1)
    assert coarse.dtype == torch.float32 and not torch.equal(coarse, fine)
    assert float((coarse - fine).abs().max()) < 0.05 * float(fine.abs().max())
    torch.testing.assert_close(labelled, coarse)  # the same operations


# One number as two of 11 bits.


def two_part_case() -> tuple[nn.Conv2d, Tensor]:
    """A layer and numbers of many sizes and both signs, zero among them."""
    torch.manual_seed(6)
    x = torch.randn(5, 8, 7, 6, generator=torch.Generator().manual_seed(7))
    x = x * 10.0 ** torch.arange(-4, 4).reshape(8, 1, 1)
    x[0, 0, 0, :3] = torch.tensor([0.0, 1.0, -1.0])
    layer = nn.Conv2d(8, 16, 3, padding=1)
    layer.weight.data = eleven_bits(layer.weight.data)
    return layer, x


def given_to(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What the larger product is given in tf32x2."""
    real = F.conv2d
    with mock.patch.object(F, "conv2d", side_effect=real) as product:
        convolve(layer, x, "tf32x2")
    (high,) = (call.args[0].detach() for call in product.call_args_list if call.args[0].dtype == torch.float32)
    return high


def test_weights_have_11_bits_and_their_own_gradient() -> None:
    """The nearest such numbers, so that float16 holds them as they are; in every arithmetic and dtype."""
    weight = torch.randn(3000, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    near = eleven_bits(weight)
    mantissa = torch.frexp(near.detach()).mantissa * 2**11
    assert torch.equal(mantissa, mantissa.round()) and torch.equal(near.half().float(), near)
    assert torch.equal(near, weight.detach().half().float())  # nearest too
    (slope,) = torch.autograd.grad((near * torch.arange(3000)).sum(), weight)
    assert torch.equal(slope, torch.arange(3000).float())
    assert torch.equal(eleven_bits(weight.double()), near.double()) and torch.equal(eleven_bits(near), near)
    layer, x = two_part_case()
    rounded = {precision: convolve(layer, x, precision) for precision in ("fp32", "tf32x2", "fp16", "bf16")}
    with torch.no_grad():
        layer.weight.mul_(1 + 1e-5)  # nearer to where it was than to any other of these numbers
    for precision, before in rounded.items():
        assert torch.equal(convolve(layer, x, precision), before)


def test_a_draft_sees_pixels_unrounded() -> None:
    """Two numbers of 11 bits have 22: off by 2^-22 of a pixel, where float16 alone is off by up to 2^-11."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(50, 9, generator=generator).requires_grad_(True)
    weight = eleven_bits(torch.randn(7, 9, generator=generator))
    given = resnet._halves(rows, weight)
    assert [part.dtype for part in given] == [torch.float16] * 2 and {part.shape[1] for part in given} == {24}
    product = given[0].double() @ given[1].double().T
    exact, size = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    rounded = rows.half().double() @ weight.double().T  # planted
    assert bool(((product - exact).abs() < 2**-21 * size).all())
    assert bool(((rounded - exact).abs() > 2**-15 * size).any())
    (slope,) = torch.autograd.grad(product.sum(), rows)
    torch.testing.assert_close(slope, weight.sum(0).expand(50, -1), rtol=1e-2, atol=1e-2)  # through float16


def test_maps_of_a_draft_are_halved_as_others_are() -> None:
    x = torch.randn(3, 5, 8, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    halved, expected = (call(x) for call in (resnet._Halved.apply, lambda h: F.avg_pool2d(h, 2)))
    torch.testing.assert_close(halved, expected, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(out, x, weight)[0] for out in (halved, expected)]
    assert torch.equal(*slopes)
    assert slopes[0].is_contiguous(memory_format=torch.channels_last)  # else a convolution copies it first


def test_the_large_part_is_a_tf32_number() -> None:
    """10 bits beyond the leading one: a mantissa in [1/2, 1) times 2^11 is whole. So TF32 does not round it again.

    What is left of x is below the last of these bits, 2^-10 of x, and on the same side of zero.
    """
    layer, x = two_part_case()
    high = given_to(layer, x)
    mantissa = torch.frexp(high).mantissa * 2**11
    assert torch.equal(mantissa, mantissa.round())
    assert not torch.equal(torch.frexp(x).mantissa * 2**11, (torch.frexp(x).mantissa * 2**11).round())
    low = (x - high).double()
    assert torch.equal(high.double() + low, x.double())
    assert (low.abs() <= 2**-10 * x.abs()).all() and (low * x >= 0).all()
    assert high[0, 0, 0, :3].tolist() == [0.0, 1.0, -1.0]


def test_two_parts_are_nearly_float32() -> None:
    """The small part, 2^-10 of x at most, is multiplied in bfloat16: x and w are off by 2^-9 of themselves each, the
    result by as much again. Together 3 * 2^-19, below 2^-17 of the sum of |w x|, float32's own 2^-24 or so included.

    Planted: without the small part all is off by some 2^-11, and in bfloat16 alone by more.
    """
    layer, x = two_part_case()
    with torch.no_grad():
        exact = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), padding=1)
        size = F.conv2d(x.abs(), layer.weight.abs(), layer.bias.abs(), padding=1)

        def off(y: Tensor) -> float:
            assert y.dtype == torch.float32
            return float(((y - exact).abs() / size).max())

        assert off(layer(x)) < 2**-20
        assert off(convolve(layer, x, "tf32x2")) < 2**-17
        assert off(layer(given_to(layer, x))) > 2**-14 and off(convolve(layer, x, "bf16")) > 2**-14
        for precision in ("fp32", "tf32"):  # TF32 is a switch of the library
            assert torch.equal(convolve(layer, x, precision), layer(x))


def test_the_slope_of_two_parts_is_that_of_the_layer() -> None:
    """In x and the bias exactly: the same product with the same weights. In the weights it is that of the large part,
    off by less than 2^-10 of every product that it sums."""
    layer, x = two_part_case()
    direction = torch.randn(5, 16, 7, 6, generator=torch.Generator().manual_seed(8))
    x.requires_grad_(True)
    inputs = [x, layer.bias, layer.weight]
    two, plain = (torch.autograd.grad((y * direction).sum(), inputs) for y in (convolve(layer, x, "tf32x2"), layer(x)))
    assert torch.equal(two[0], plain[0]) and torch.equal(two[1], plain[1])
    (size,) = torch.autograd.grad(
        (F.conv2d(x.abs(), layer.weight.abs(), padding=1) * direction.abs()).sum(), layer.weight
    )
    assert ((two[2] - plain[2]).abs() <= 2**-10 * size.abs()).all() and not torch.equal(two[2], plain[2])


def test_a_network_in_two_parts_learns_as_in_float32() -> None:
    """Energy and denoising loss, a slope of a slope, with its gradient by every weight.

    A weight sees its input without the small part, off by 2^-11 on average: .001 of a gradient. bfloat16, with two
    bits less and every product rounded, is off by more.
    """
    torch.manual_seed(0)
    network = ResNet((1, 8, 8), LEVELS, width=8)
    x, t = images(2 * LEVELS, (1, 8, 8))
    x, eps = x.float(), images(2 * LEVELS, (1, 8, 8), seed=9)[0].float()
    found, energies = {}, {}
    for precision in ("fp32", "tf32x2", "bf16"):
        network.arithmetic = precision
        energies[precision] = network(x, t).detach()
        loss = denoising_loss(network, x, t, eps, torch.full((len(t), 1, 1, 1), 0.5))
        found[precision] = torch.autograd.grad(loss, list(network.parameters()))
    # 9 layers in a row of 2^-17 at most each, of sums that cancel in part.
    assert float((energies["tf32x2"] - energies["fp32"]).abs().max()) < 2**-12 * float(energies["fp32"].abs().max())

    def off(precision: str) -> list[float]:
        pairs = zip(found[precision], found["fp32"], strict=True)
        return [float((a - b).norm() / b.norm()) for a, b in pairs]

    assert max(off("tf32x2")) < 0.001 < max(off("bf16"))


def refusal(name: str, data: Tensor, width: int = 8) -> str:
    with pytest.raises(InputError) as error:
        build(Config(network=name, width=width), data, Ladder.geometric(16, floor=0.1))
    return str(error.value)


@pytest.mark.parametrize("name", ["resnet", "level-resnet"])
@pytest.mark.parametrize("event", [(6,), (4, 4), (1, 1, 4, 4)], ids=str)
def test_events_that_are_no_images_are_refused(name: str, event: tuple[int, ...]) -> None:
    message = refusal(name, torch.randn(30, *event))
    assert "(c, h, w)" in message and str(event) in message and "\n" not in message


@pytest.mark.parametrize("name", ["resnet", "level-resnet"])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 17])
def test_widths_that_cannot_be_are_refused(name: str, width: int) -> None:
    message = refusal(name, torch.randn(30, 1, 4, 4), width)
    assert f"width={width}" in message and "even" in message and "\n" not in message


def test_training_refuses_rows_for_an_image_network() -> None:
    rows = torch.randn(30, 6)
    with pytest.raises(InputError, match=r"\(c, h, w\), got \(6,\)"):
        train(Config(network="level-resnet", width=4, batch=10, store=20), Dataset("rows", rows, rows))
