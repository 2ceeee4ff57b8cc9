"""The noise ladder against the paper's tables, its own algebra, and closed forms."""

import math
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch

from daebm.errors import InputError
from daebm.ladder import Ladder, per_chain
from daebm.spacing import noise_overlap

SIGMAS = 5.0  # a mean over independent draws beyond 5 standard errors fails; about 100 such numbers are looked at

LADDERS = {
    "paper T = 6": Ladder.paper(6, 0.01, 0.3),
    "paper T = 50": Ladder.paper(50, 0.0002, 0.02),
    "geometric": Ladder.geometric(2),
    "geometric with a floor": Ladder.geometric(64, floor=0.1),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("ladder", "levels", "step_sd", "abar", "noise_sd"),
    [
        pytest.param(
            LADDERS["paper T = 6"],
            [1, 2, 3, 4, 5, 6],
            [0.01, 0.078, 0.204, 0.388, 0.630, 0.930],
            [0.9999, 0.99382, 0.95246, 0.80907, 0.48795, 0.06592],
            [0.0100, 0.0786, 0.2180, 0.4370, 0.7156, 0.9665],
            id="T = 6",
        ),
        pytest.param(
            LADDERS["paper T = 50"],
            [1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50],
            [0.0002, 0.0008, 0.0050, 0.0202, 0.0454, 0.0808, 0.1262, 0.1818, 0.2474, 0.3232, 0.4090, 0.5050],
            [1.0, 1.0, 0.99996, 0.99897, 0.99275, 0.97091, 0.91553, 0.80473, 0.62613, 0.39968, 0.18737, 0.05474],
            [0.0002, 0.0008, 0.0063, 0.0321, 0.0851, 0.1706, 0.2906, 0.4419, 0.6114, 0.7748, 0.9015, 0.9722],
            id="T = 50",
        ),
    ],
)
def test_paper_schedules(
    ladder: Ladder, levels: list[int], step_sd: list[float], abar: list[float], noise_sd: list[float]
) -> None:
    for computed, table, digits in (
        ((1 - ladder.alpha).sqrt(), step_sd, 4),
        (ladder.abar, abar, 5),
        (ladder.variance.sqrt(), noise_sd, 4),
    ):
        assert computed[levels].tolist() == pytest.approx(table, abs=0.51 * 10.0**-digits)
    assert ladder.abar[0] == 1 and ladder.variance[0] == 0 and ladder.floor == 0


def test_the_first_levels_are_not_rounded_away() -> None:
    """In float32, 1 - abar_1 of the paper's T = 50 comes out as 0 and 1 - abar_2 off by 14 %."""
    sd = LADDERS["paper T = 50"].variance.sqrt()
    delta = 0.0002 + (0.02 - 0.0002) / 49
    assert float(sd[1]) == pytest.approx(2.0e-4, rel=1e-9)
    assert float(sd[2]) == pytest.approx(math.hypot(0.0002, 0.0002 + delta), rel=1e-6)


def test_geometric_formula() -> None:
    """v_t = v_0 e^(kt) and abar_t = (1 - v_t) / (1 - v_0): standardised data stay standardised."""
    ladder = Ladder.geometric(10, floor=0.1, last_variance=0.9, top=7)
    k = math.log(0.9 / 0.01) / 7
    for t in range(8):
        v = 0.01 * math.exp(k * t)
        assert float(ladder.variance[t]) == pytest.approx(v, rel=1e-12)
        assert float(ladder.abar[t]) == pytest.approx((1 - v) / 0.99, rel=1e-12)
    assert ladder.top == 7 and ladder.levels == 8 and ladder.floor == pytest.approx(0.1)


def test_geometric_with_a_zero_floor_starts_at_the_data() -> None:
    ladder = Ladder.geometric(10, first_sd=0.02, top=5)
    assert ladder.floor == 0 and ladder.abar[0] == 1
    assert float(ladder.variance[1].sqrt()) == pytest.approx(0.02)
    steps = ladder.variance[1:].log().diff()
    torch.testing.assert_close(steps, steps[:1].expand(4))
    assert float(ladder.variance[-1]) == pytest.approx(0.95)
    torch.testing.assert_close(ladder.abar + ladder.variance, torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dimension", "floor", "least", "most"),
    [(2, 0.0, 4, 8), (2, 0.03, 2, 5), (64, 0.03, 15, 22), (64, 0.1, 10, 16), (784, 0.03, 65, 75)],
)
def test_the_number_of_levels(dimension: int, floor: float, least: int, most: int) -> None:
    assert least <= Ladder.geometric(dimension, floor=floor).top <= most


def test_the_number_of_levels_grows_like_the_root_of_the_dimension() -> None:
    tops = [Ladder.geometric(d, floor=0.03).top for d in (64, 256, 1024, 4096)]
    for small, large in pairwise(tops):
        assert large / small == pytest.approx(2, rel=0.05)


def test_a_single_level() -> None:
    ladder = Ladder.single(0.25)
    assert (ladder.top, ladder.levels, ladder.floor) == (0, 1, 0.25)
    assert Ladder.single().variance.tolist() == [0.0]


@pytest.mark.parametrize("name", LADDERS)
def test_one_step_of_the_diffusion_is_the_next_level(name: str) -> None:
    """x_(t+1) = sqrt(alpha) x_t + noise has exactly the mean and variance of level t + 1, for every t."""
    ladder = LADDERS[name]
    torch.testing.assert_close(ladder.alpha[1:] * ladder.abar[:-1], ladder.abar[1:], rtol=1e-14, atol=0)
    risen = ladder.alpha[1:] * ladder.variance[:-1] + ladder.step_variance[1:]
    torch.testing.assert_close(risen, ladder.variance[1:], rtol=1e-14, atol=0)
    torch.testing.assert_close(ladder.step_variance[1:], 1 - ladder.alpha[1:], rtol=1e-8, atol=1e-15)
    assert ladder.alpha[0] == 1 and ladder.step_variance[0] == ladder.variance[0]
    assert bool((ladder.step_variance[1:] > 0).all())


@pytest.mark.parametrize("name", ["paper T = 6", "geometric with a floor"])
@pytest.mark.parametrize("way", ["at once", "level by level"])
def test_moments_of_diffused_points(name: str, way: str) -> None:
    """Both ways to every level: mean sqrt(abar_t) z and variance v_t, and for level 0 no more than the floor."""
    ladder, n = LADDERS[name], 20_000
    z = torch.tensor([1.5, -0.5], dtype=torch.float64).expand(n, 2)
    generator = seeded(1)
    x = ladder.diffuse(z, torch.zeros(n, dtype=torch.long), generator)
    for t in range(ladder.levels):
        if t > 0:
            below = torch.full((n,), t - 1)
            x = ladder.diffuse(z, below + 1, generator) if way == "at once" else ladder.diffuse_up(x, below, generator)
        centred = x - ladder.abar[t].sqrt() * z
        v = float(ladder.variance[t])
        if v == 0:
            assert torch.equal(x, z)
            continue
        # Known moments of a Gaussian: the mean has standard error sqrt(v / n), the variance v sqrt(2 / n).
        assert float(centred.mean(0).abs().max()) < SIGMAS * math.sqrt(v / n)
        assert float((centred.square().mean(0) - v).abs().max()) < SIGMAS * v * math.sqrt(2 / n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("event", [(1,), (2,), (1, 4, 4)], ids=str)
def test_diffusion_keeps_shape_and_dtype_and_mixes_levels(dtype: torch.dtype, event: tuple[int, ...]) -> None:
    ladder = LADDERS["paper T = 6"]
    z, t = torch.ones(3, *event, dtype=dtype), torch.tensor([0, 3, 5])
    x = ladder.diffuse(z, t, seeded(2))
    up = ladder.diffuse_up(x, t, seeded(3))
    for out in (x, up):
        assert out.shape == z.shape and out.dtype == dtype
    assert torch.equal(x[0], z[0]) and not torch.equal(x[1], z[1])  # each chain has its own level
    assert torch.equal(x, ladder.diffuse(z, t, seeded(2)))
    assert per_chain(ladder.abar, t, z).shape == (3, *[1] * len(event))


def test_a_ladder_is_copied_to_a_device_once() -> None:
    ladder = Ladder.geometric(4, top=3)
    meta = torch.device("meta")
    assert ladder.on(torch.device("cpu")) is ladder
    with mock.patch.object(Ladder, "__post_init__"):  # which reads the numbers
        assert ladder.on(meta) is ladder.on(meta) and ladder.on(meta).variance.device == meta


@pytest.mark.parametrize("point", [0.0, 1.0, 3.0])
def test_noise_overlap_in_closed_form(point: float) -> None:
    """Data at one point: the acceptance is the overlap of N(m, v) and N(0, 1), a one-dimensional integral."""
    ladder = Ladder.geometric(1, last_variance=0.7, top=3)
    m, v = math.sqrt(float(ladder.abar[-1])) * point, 0.7
    x = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    noise = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    level = torch.exp(-((x - m) ** 2) / (2 * v)) / math.sqrt(2 * math.pi * v)
    width = float(x[1] - x[0])
    accept = (level / noise).clamp(max=1)
    overlap, square = (float((noise * accept**k).sum()) * width for k in (1, 2))
    draws = 100_000
    estimate = noise_overlap(ladder, torch.full((5, 1), point), seeded(4), draws=draws)
    assert abs(estimate - overlap) < SIGMAS * math.sqrt((square - overlap**2) / draws)


def test_noise_overlap_falls_with_the_dimension_and_rises_with_the_last_variance() -> None:
    def overlap(dimension: int, last_variance: float) -> float:
        data = torch.ones(10, 1, dimension)  # any event shape
        return noise_overlap(Ladder.geometric(dimension, last_variance=last_variance), data, seeded(5))

    assert overlap(2, 0.95) > overlap(100, 0.95)
    assert overlap(2, 0.95) > overlap(2, 0.5)
    assert 0 <= overlap(100, 0.5) < 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ladder.paper(0, 0.01, 0.3), "top .* 0"),
        (lambda: Ladder.paper(6, -0.01, 0.3), r"delta_first .* -0\.01"),
        (lambda: Ladder.paper(6, 0.01, math.nan), "delta_last .* nan"),
        (lambda: Ladder.paper(6, 0.01, 0.4), r"delta_last=0\.4 .* 6 levels .* 1\.23, which must stay below 1"),
        (lambda: Ladder.geometric(0), "dimension .* 0"),
        (lambda: Ladder.geometric(2, floor=-0.1), r"floor must be 0 or more, got -0\.1"),
        (lambda: Ladder.geometric(2, floor=1.2), r"floor=1\.2"),
        (lambda: Ladder.geometric(2, first_sd=0.0), r"first_sd .* 0\.0"),
        (lambda: Ladder.geometric(2, last_variance=1.0), r"last_variance=1\.0"),
        (lambda: Ladder.geometric(2, last_variance=math.inf), "last_variance .* inf"),
        (lambda: Ladder.geometric(2, top=1), "at least 2 levels above 0, got top=1"),
        (lambda: Ladder.geometric(2, floor=0.1, top=0), "at least 1 levels above 0, got top=0"),
    ],
)
def test_bad_schedules_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    ("abar", "variance", "message"),
    [
        (torch.ones(2), torch.zeros(2), "float64"),
        (torch.ones(2).double(), torch.zeros(3).double(), r"\(2,\) and \(3,\)"),
        (torch.ones(0).double(), torch.zeros(0).double(), r"\(0,\)"),
        (torch.tensor([1, 0.5]).double(), torch.tensor([0.5, 0.0]).double(), "must rise"),
        (torch.tensor([0.5, 1.0]).double(), torch.tensor([0.0, 0.5]).double(), "signal shares fall"),
        (torch.tensor([1, 0.5]).double(), torch.tensor([math.nan, 0.5]).double(), "must rise"),
    ],
)
def test_bad_tensors_are_refused(abar: torch.Tensor, variance: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ladder(abar, variance)
