"""Neighbour acceptance against closed forms, and ladders that are spaced by it."""

import math
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2, norm
from torch import Tensor

from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.networks import DiffusedGaussian
from daebm.spacing import data_acceptance, level_balance, neighbour_acceptance, overlapping, respaced
from daebm.targets import Gaussian, LabelledLadder, Mixture

# Acceptance probabilities lie in [0, 1]: a mean a of n of them has a standard error of at most sqrt(a (1 - a) / n).
SIGMAS = 5.0


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def standard_error(a: Tensor, n: int) -> Tensor:
    return (a * (1 - a) / n).sqrt()


def chi_square_overlap(variance: Tensor, dimension: int) -> Tensor:
    """The integral of min(p, q), p = N(0, v I) and q = N(0, v' I) being neighbours; they cross at |x|^2 = r."""
    v, wide = variance[:-1], variance[1:]
    r = dimension * (wide / v).log() / (1 / v - 1 / wide)
    return torch.from_numpy(chi2.cdf((r / wide).numpy(), dimension) + chi2.sf((r / v).numpy(), dimension))


def narrow_levels(ladder: Ladder, dimension: int, weights: Tensor | None = None) -> LabelledLadder:
    """The ladder on data at the origin: N(0, v_t I) at level t."""
    mean = torch.zeros(dimension, dtype=torch.float64)
    levels = [Gaussian(mean, v.sqrt().expand(dimension)) for v in ladder.variance]
    return LabelledLadder(torch.ones(ladder.levels) if weights is None else weights, levels)


def exact_chains(target: LabelledLadder, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n independent chains at every level."""
    x = torch.cat([level.sample(n, generator) for level in target.levels])
    return x, torch.arange(len(target.levels)).repeat_interleave(n)


@pytest.mark.parametrize("dimension", [1, 16, 64])
def test_acceptance_in_closed_form(dimension: int) -> None:
    ladder, n = Ladder.geometric(dimension, floor=0.1), 10_000
    expected = chi_square_overlap(ladder.variance, dimension)
    target = narrow_levels(ladder, dimension)
    a = neighbour_acceptance(target, *exact_chains(target, n, seeded(1)), ladder.top)
    assert a.shape == (ladder.top,) and a.dtype == torch.float64
    assert bool(((a - expected).abs() < SIGMAS * standard_error(expected, n)).all())


def test_two_unit_normals() -> None:
    """The acceptance 2 Phi(-delta / 2) that turns into a length."""
    n, ones = 10_000, torch.ones(1, dtype=torch.float64)
    target = LabelledLadder(torch.ones(2), [Gaussian(0 * ones, ones), Gaussian(1.5 * ones, ones)])
    a = float(neighbour_acceptance(target, *exact_chains(target, n, seeded(2)), top=1))
    expected = 2 * norm.cdf(-0.75)
    assert abs(a - expected) < SIGMAS * math.sqrt(expected * (1 - expected) / n)


def test_level_weights_do_not_matter() -> None:
    """A level of little mass is seldom moved to: without the correction, one direction or both tell of the mass."""
    dimension, n = 16, 40_000
    ladder = Ladder.geometric(dimension, floor=0.1, top=4)
    expected = chi_square_overlap(ladder.variance, dimension)
    weights = torch.tensor([1.0, 4.0, 1.0, 4.0, 1.0])
    target = narrow_levels(ladder, dimension, weights)
    x, t = target.sample(n, seeded(3))
    error = standard_error(expected, int(torch.bincount(t).min()))
    a = neighbour_acceptance(target, x, t, ladder.top)
    assert bool(((a - expected).abs() < SIGMAS * error).all())
    naive = torch.zeros(2, ladder.top, dtype=torch.float64)
    for edge in range(ladder.top):
        for way, (start, end) in enumerate([(edge, edge + 1), (edge + 1, edge)]):
            points = x[t == start]
            u = [target(points, torch.full((len(points),), level)) for level in (start, end)]
            naive[way, edge] = (u[0] - u[1]).clamp(max=0).exp().mean()
    bias = (naive - expected).abs() / error
    assert bool((bias > SIGMAS).all())
    assert float(((naive.mean(0) - expected) / error).max()) > SIGMAS


def test_any_constants_of_the_levels_cancel() -> None:
    ladder = Ladder.geometric(8, floor=0.1)
    target = narrow_levels(ladder, 8)
    x, t = exact_chains(target, 500, seeded(4))
    a = neighbour_acceptance(target, x, t, ladder.top)
    for scale in (1.0, 30.0, 1e5):
        constant = scale * torch.randn(ladder.levels, generator=seeded(5), dtype=torch.float64)
        shifted = neighbour_acceptance(lambda y, s, c=constant: target(y, s) + c[s], x, t, ladder.top)  # type: ignore[misc]
        torch.testing.assert_close(shifted, a, rtol=0, atol=1e-9)


def test_edges_with_few_chains() -> None:
    """No chain at levels 2 and 3: edge 2 is unknown, 1 and 3 are known from one side."""
    ladder = Ladder.geometric(4, floor=0.1, top=5)
    target = narrow_levels(ladder, 4)
    x, t = exact_chains(target, 4_000, seeded(6))
    kept = (t != 2) & (t != 3)
    a = neighbour_acceptance(target, x[kept], t[kept], ladder.top)
    expected = chi_square_overlap(ladder.variance, 4)
    assert torch.isnan(a).tolist() == [False, False, True, False, False]
    known = ~torch.isnan(a)
    assert bool(((a - expected)[known].abs() < SIGMAS * standard_error(expected, 4_000)[known]).all())
    assert neighbour_acceptance(target, x[t == 0], t[t == 0], top=0).shape == (0,)


def test_an_empty_level_is_weighed_from_one_side() -> None:
    """Levels of one variance and known masses: each log r is the log ratio of the masses, seen from either side."""
    ones, weights = torch.ones(3, dtype=torch.float64), torch.tensor([1.0, 3.0, 0.5, 8.0], dtype=torch.float64)
    target = LabelledLadder(weights, [Gaussian(0 * ones, ones)] * 4)
    x = torch.randn(40, 3, generator=seeded(9), dtype=torch.float64)
    expected = weights.log().diff()
    for there in ([0, 2], [1, 3], [0, 1, 3]):
        t = torch.tensor(there)[torch.arange(40) % len(there)]
        torch.testing.assert_close(level_balance(target, x, t, 3)[0], expected, rtol=0, atol=1e-9)
    alone = level_balance(target, x, torch.zeros(40, dtype=torch.int64), 3)[0]
    torch.testing.assert_close(alone, expected * torch.tensor([1, 0, 0]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("no_energy", [math.nan, math.inf])
def test_refused_moves_are_made_up_for_by_mass(no_energy: float) -> None:
    """Up one move in four is possible, with log r = -3; down all are, with 3: as often where 1/4 = e^(3 - m)."""
    t = torch.arange(2).repeat_interleave(40)
    index = torch.arange(80.0).unsqueeze(1)

    def energy(x: Tensor, at: Tensor) -> Tensor:
        refused = (x[:, 0] < 40) & (x[:, 0] % 4 > 0) & (at == 1)
        return torch.where(refused, no_energy, 3.0 * at)

    ratio, acceptance = level_balance(energy, index, t, 1)
    assert float(ratio) == pytest.approx(-3 - math.log(4)) and float(acceptance) == pytest.approx(1 / 4)


@pytest.mark.parametrize("no_energy", [math.nan, math.inf, -math.inf])
def test_where_every_move_is_refused_nothing_is_to_be_made_up_for(no_energy: float) -> None:
    """Of three levels the upper two have no energy: nobody comes from 0 to 1, or from 1 anywhere."""
    ratio, acceptance = level_balance(
        lambda x, at: torch.where(at > 0, no_energy, 0.0 * x[:, 0]), torch.zeros(30, 1), torch.arange(30) % 3, 2
    )
    assert ratio.tolist() == [0, 0] and acceptance.tolist() == [0, 0]


def test_one_absurd_energy_does_not_blur_other_levels() -> None:
    """Two levels with log r of 1 and -1 everywhere, and a third that differs from them by 1e20."""
    values = torch.tensor([0.0, 1.0, 1e20], dtype=torch.float64)
    ratio, _acceptance = level_balance(lambda x, at: values[at], torch.zeros(30, 1), torch.arange(30) % 3, 2)
    assert float(ratio[0]) == pytest.approx(-1, abs=1e-9) and float(ratio[1]) == pytest.approx(-1e20)


def test_carried_labels_see_masses_where_levels_do_not_overlap() -> None:
    """Carried along, a Gaussian is the Gaussian of the other level: log r is the log ratio of masses for every x."""
    data = torch.randn(400, 100, generator=seeded(10)) * torch.linspace(0.01, 0.1, 100)
    ladder = Ladder.geometric(100, floor=0.1, top=3)
    base, shifts = DiffusedGaussian(data, ladder), torch.tensor([0.0, 2.0, -1.0, 4.0])

    class Shifted(torch.nn.Module):
        carried = staticmethod(base.carried)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return base(x, t) + shifts[t]

    t = torch.arange(400) % 4
    x = ladder.diffuse(data, t, seeded(11))
    ratio, acceptance = level_balance(Shifted(), x, t, 3, carry=True)
    torch.testing.assert_close(ratio, -shifts.diff().double(), rtol=0, atol=1e-4)  # float32 at tens of nats
    torch.testing.assert_close(acceptance, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-4)
    fixed, overlap = level_balance(Shifted(), x, t, 3)
    assert float(overlap.max()) < 0.05 and float((fixed + shifts.diff()).abs().max()) > 0.5


def test_energies_that_are_not_finite_are_refused_moves() -> None:
    x, t = torch.zeros(8, 1), torch.arange(2).repeat(4)

    def broken(points: Tensor, label: Tensor) -> Tensor:
        return torch.where(label == 1, torch.nan, points.sum(1))

    assert neighbour_acceptance(broken, x, t, top=1).tolist() == [0.0]


def test_the_cost_is_three_energies_a_chain_in_small_pieces() -> None:
    sizes = []

    def energy(x: Tensor, t: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        sizes.append(len(x))
        return (x * weight).square().sum(1) / (1.0 + t)

    weight = torch.ones(2, requires_grad=True)
    x, t = torch.randn(100, 2, generator=seeded(7)), torch.randint(4, (100,), generator=seeded(8))
    a = neighbour_acceptance(energy, x, t, top=3, chunk=30)
    assert sum(sizes) == 300 and max(sizes) == 90
    torch.testing.assert_close(a, neighbour_acceptance(energy, x, t, top=3, chunk=100), rtol=0, atol=1e-12)


def test_levels_are_placed_along_the_length() -> None:
    """Edges 1 and 3 long, two new ones: the middle level lies at length 2, a third of the way up the second edge."""
    log_v = [math.log(v) for v in (0.01, 0.1, 0.9)]
    v = torch.tensor(log_v, dtype=torch.float64).exp()
    ladder = Ladder((1 - v) / (1 - v[0]), v)
    moved = respaced(ladder, torch.tensor([2 * norm.cdf(-0.5), 2 * norm.cdf(-1.5)]))
    assert moved.variance[[0, 2]].tolist() == ladder.variance[[0, 2]].tolist()
    assert math.log(float(moved.variance[1])) == pytest.approx(log_v[1] + (log_v[2] - log_v[1]) / 3, rel=1e-6)
    torch.testing.assert_close(moved.abar, (1 - moved.variance) / 0.99)


@pytest.mark.parametrize(("overlap", "top"), [(0.9, 16), (2 * norm.cdf(-0.5), 4), (0.35, 3), (0.3, 2), (0.001, 1)])
def test_the_number_of_levels_for_an_overlap(overlap: float, top: int) -> None:
    """Two edges of length 2. One of overlap 0.9 is 0.251 long, of 0.35 it is 1.87, of 0.3 2.07, of 0.001 6.6."""
    ladder = Ladder.geometric(10, floor=0.1, top=2)
    acceptance = torch.full((2,), 2 * norm.cdf(-1.0), dtype=torch.float64)
    assert respaced(ladder, acceptance, overlap=overlap).top == top
    assert respaced(ladder, acceptance, top=7, overlap=overlap).top == 7


def test_an_even_ladder_stays() -> None:
    ladder = Ladder.geometric(10, floor=0.1)
    for a in (0.0, 0.3, 1.0):  # the limits are as good as any other: all edges are alike
        even = respaced(ladder, torch.full((ladder.top,), a))
        torch.testing.assert_close(even.variance, ladder.variance, rtol=1e-12, atol=0)
        torch.testing.assert_close(even.abar, ladder.abar, rtol=1e-12, atol=0)


@pytest.mark.parametrize("ladder", [Ladder.paper(6, 0.01, 0.3), Ladder.geometric(4, top=6)], ids=["paper", "geometric"])
def test_a_clean_level_0_keeps_its_first_step(ladder: Ladder) -> None:
    acceptance = torch.tensor([math.nan, 0.1, 0.2, 0.3, 0.4, 0.5])  # nobody asks for the first
    moved = respaced(ladder, acceptance, top=9)
    assert moved.top == 9 and moved.floor == 0 and moved.abar[0] == 1
    assert moved.variance[[1, 9]].tolist() == ladder.variance[[1, 6]].tolist()
    torch.testing.assert_close(moved.abar, 1 - moved.variance)
    # The hard edges at the bottom get more levels than the easy ones at the top.
    middle = float(ladder.variance[3])
    assert int((moved.variance < middle).sum()) - 3 >= 2


@pytest.mark.parametrize("dimension", [16, 64])
@pytest.mark.parametrize("power", [0.6, 2.5])
def test_a_badly_spaced_ladder_becomes_even(dimension: int, power: float) -> None:
    """Gaussian data with sds from 0 to 1, exact chains: two rounds, since lengths only nearly add up.

    At an acceptance of 0.5 from 10,000 chains a standard error is 1 %; the levels were placed with it and are judged
    with it. Five of these, times sqrt(2), make 7 %.
    """
    n, data_sd = 10_000, torch.linspace(0, 1, dimension, dtype=torch.float64) ** 2

    def measured(ladder: Ladder, seed: int) -> Tensor:
        v = ladder.abar[:, None] * data_sd**2 + ladder.variance[:, None]
        t = torch.arange(ladder.levels).repeat_interleave(n)
        x = v[t].sqrt() * torch.randn(len(t), dimension, generator=seeded(seed), dtype=torch.float64)
        return neighbour_acceptance(lambda y, s: (y**2 / v[s] + v[s].log()).sum(1) / 2, x, t, ladder.top)

    start = Ladder.geometric(dimension, floor=0.1)
    share = torch.linspace(0, 1, start.levels, dtype=torch.float64) ** power
    v = start.variance[0] * (start.variance[-1] / start.variance[0]) ** share
    ladder = Ladder((1 - v) / (1 - v[0]), v)
    ratios = []
    for seed in (9, 10, 11):
        acceptance = measured(ladder, seed)
        ratios.append(float(acceptance.max() / acceptance.min()))
        ladder = respaced(ladder, acceptance)
    assert ratios[0] > 2 and ratios[1] < 1.15 and ratios[2] < 1.07
    assert ladder.top == start.top


def test_data_acceptance_in_closed_form() -> None:
    """Data at one point. The levels share their draws, which makes the errors alike, not larger."""
    dimension, draws = 64, 4_000
    ladder = Ladder.geometric(dimension, floor=0.1)
    a = data_acceptance(ladder, torch.zeros(3, 1, 8, 8), seeded(12), draws)
    expected = chi_square_overlap(ladder.variance, dimension)
    assert a.shape == (ladder.top,) and a.dtype == torch.float64
    assert bool(((a - expected).abs() < SIGMAS * standard_error(expected, draws)).all())
    even = (a / a.mean() - 1).abs().max()
    assert float(even) < 1e-6  # all edges of this ladder are alike, and so are their errors


def test_data_acceptance_is_neighbour_acceptance_on_the_diffused_data() -> None:
    """Against chains and energies of the same mixture; the shrinking signal counts, and a clean level 0 does not."""
    ladder, draws, n = Ladder.geometric(3, first_sd=0.2, top=4), 8_000, 8_000
    z = torch.randn(5, 3, generator=seeded(13), dtype=torch.float64)
    a = data_acceptance(ladder, z, seeded(14), draws)
    levels = [
        Mixture(torch.ones(5) / 5, [Gaussian(ladder.abar[t].sqrt() * m, v.sqrt().expand(3)) for m in z])
        for t, v in enumerate(ladder.variance)
        if t > 0
    ]
    target = LabelledLadder(torch.ones(4), levels)
    b = neighbour_acceptance(target, *exact_chains(target, n, seeded(15)), top=3)
    assert a[0] == 0
    assert bool(((a[1:] - b).abs() < SIGMAS * math.sqrt(2) * standard_error(b, n)).all())


def test_data_acceptance_at_tiny_noise() -> None:
    """Squares of size 64 over a variance of 1e-8 leave float32 nothing; float64 still has the closed form."""
    ladder = Ladder.geometric(64, floor=1e-4, last_variance=1e-6)
    z = 3 + torch.randn(200, 64, generator=seeded(16), dtype=torch.float64)  # far apart: no component sees another
    a = data_acceptance(ladder, z, seeded(17), draws=2_000)
    expected = chi_square_overlap(ladder.variance, 64)
    assert bool(((a - expected).abs() < SIGMAS * standard_error(expected, 2_000)).all())


@pytest.mark.parametrize("dimension", [16, 64])
@pytest.mark.parametrize("floor", [0.1, 0.0])
def test_an_overlapping_ladder(dimension: int, floor: float) -> None:
    """Unequal data of variance 1 on average: every edge near the overlap, and judged on fresh draws even.

    The 512 draws it is measured with leave an error of about 0.15 / sqrt(512) = 0.007, or 2 %, in the placement.
    """
    sd = torch.linspace(0, 2, dimension).sqrt()
    data = sd * torch.randn(500, dimension, generator=seeded(18))
    ladder = overlapping(data, floor, last_variance=0.97, overlap=0.35, generator=seeded(19))
    again = overlapping(data, floor, last_variance=0.97, overlap=0.35, generator=seeded(19))
    assert torch.equal(ladder.variance, again.variance) and torch.equal(ladder.abar, again.abar)
    assert ladder.floor == pytest.approx(floor) and float(ladder.variance[-1]) == pytest.approx(0.97)
    a = data_acceptance(ladder, data, seeded(20), draws=2_000)[int(floor == 0) :]
    assert float(a.max() / a.min()) < 1.1
    assert 0.33 < float(a.mean()) < 0.43  # no fewer levels would do
    geometric = data_acceptance(Ladder.geometric(dimension, floor, last_variance=0.97), data, seeded(20), draws=2_000)
    assert float(geometric.max() / geometric[int(floor == 0) :].min()) > 1.1


EVEN = torch.full((4,), 0.3)
FLOORED = Ladder.geometric(8, floor=0.1, top=4)
CHAINS = torch.zeros(3, 2), torch.tensor([0, 1, 2])


def zero(x: Tensor, t: Tensor) -> Tensor:
    return torch.zeros(len(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: respaced(FLOORED, EVEN[:3]), r"4 edges needs as many acceptances, got \(3,\)"),
        (lambda: respaced(FLOORED, torch.tensor([0.3, math.nan, 0.3, math.nan])), r"edges \[1, 3\] is not a number"),
        (lambda: respaced(FLOORED, torch.tensor([0.3, 0.3, 1.2, 0.3])), r"edges \[2\] is not a number in \[0, 1\]"),
        (lambda: respaced(FLOORED, EVEN, overlap=1.0), r"overlap must lie between 0 and 1, got 1\.0"),
        (lambda: respaced(FLOORED, EVEN, top=0), "T of 1 or more, before and after: got 4 and 0"),
        (lambda: respaced(Ladder.single(0.1), EVEN[:0]), "T of 1 or more, before and after: got 0 and 0"),
        (lambda: respaced(Ladder.geometric(8, top=4), EVEN, top=1), "T of 2 or more, before and after: got 4 and 1"),
        (lambda: respaced(Ladder(FLOORED.abar**2, FLOORED.variance), EVEN), "only a ladder with abar_t = "),
        (lambda: neighbour_acceptance(zero, *CHAINS, top=1), r"label in 0\.\.1: got 3 chains, labels \[0, 1, 2\]"),
        (lambda: neighbour_acceptance(zero, CHAINS[0][:2], CHAINS[1], top=2), "got 2 chains, labels"),
        (lambda: neighbour_acceptance(zero, CHAINS[0][:0], CHAINS[1][:0], top=2), "got 0 chains, labels"),
        (lambda: overlapping(torch.zeros(9, 4), floor=1.5), r"floor=1\.5"),
        (lambda: overlapping(torch.zeros(9, 4), overlap=0.0), r"overlap .* 0\.0"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
