"""Constants of levels against closed forms and quadrature, errors that mean what they say, and planted faults."""

import math

import pytest
import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.networks import DiffusedGaussian
from daebm.normaliser import (
    Reference,
    all_energies,
    known_reference,
    level_normalisers,
    log_normalisers,
    snapshots,
)
from daebm.samplers.langevin import langevin, mala
from daebm.samplers.mgms import stay
from daebm.sampling import Drawn, Sampler
from daebm.targets import Gaussian, LabelledLadder, Mixture, Skewed

SIGMAS = 5.0


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def targets(dimension: int = 2) -> LabelledLadder:
    """Two clusters that widen into one, and a skewed level between; weights of the levels are their constants."""
    ones = torch.ones(dimension, dtype=torch.float64)
    clusters = [
        Mixture(torch.tensor([0.7, 0.3]), [Gaussian(m * ones, sd * ones) for m in (-1.0, 1.0)]) for sd in (0.3, 0.7)
    ]
    return LabelledLadder(torch.tensor([0.5, 3.0, 0.2, 1.0]), [*clusters, Skewed(dimension), Gaussian(0 * ones, ones)])


def exact(target: LabelledLadder, each: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Energies of ``each`` draws from every level, under every level, and the level of each."""
    x = torch.cat([level.sample(each, generator) for level in target.levels])
    levels = len(target.levels)
    state = torch.arange(levels).repeat_interleave(each)
    u = torch.stack([target(x, torch.full((len(x),), k)) for k in range(levels)], 1)
    return u, state


def truth(target: LabelledLadder) -> Tensor:
    log_weight = target.weights.double().log()
    return log_weight - log_weight[-1]


def test_closed_form_within_its_error() -> None:
    target = targets()
    u, state = exact(target, 4000, seeded(0))
    value, error = log_normalisers(u, state, torch.arange(len(u)))
    z = (value - truth(target))[:-1] / error[:-1]
    assert float(value[-1]) == 0 and float(error[-1]) == 0
    assert float(z.abs().max()) < SIGMAS and 0 < float(error[:-1].max()) < 0.05


@pytest.mark.parametrize("copies", [1, 5])
def test_error_is_the_spread_of_repetitions(copies: int) -> None:
    """Over 60 repetitions z has variance 1; points that a chain repeats five times add nothing, and the error knows."""
    target, z = targets(1), []
    for seed in range(60):
        u, state = exact(target, 150, seeded(seed))
        chain = torch.arange(len(u)).repeat(copies)
        value, error = log_normalisers(u.repeat(copies, 1), state.repeat(copies), chain)
        z.append((value - truth(target))[:-1] / error[:-1])
    square = torch.stack(z).square().mean(0)
    # A mean of 60 squares of N(0, 1) has a standard error of sqrt(2 / 60) = .18.
    assert bool(((square - 1).abs() < 4 * 0.18).all()), square
    if copies > 1:  # a planted fault: every point taken as a chain of its own
        _value, naive = log_normalisers(u.repeat(copies, 1), state.repeat(copies), torch.arange(copies * len(u)))
        torch.testing.assert_close(naive[:-1] * math.sqrt(copies), error[:-1], rtol=0.05, atol=0)


def test_chains_that_do_not_move_have_an_error_of_chains() -> None:
    """Label and x of one chain stay together: bootstrap over chains says what the closed-form error must be."""
    target, g = targets(1), seeded(3)
    x, t = target.sample(600, g)
    chain, t = torch.arange(600).repeat(4), t.repeat(4)
    x = x.repeat(4, 1)
    u = torch.stack([target(x, torch.full((len(x),), k)) for k in range(4)], 1)
    _value, error = log_normalisers(u, t, chain)
    draws = []
    for _ in range(100):
        picked = torch.randint(600, (600,), generator=g)
        rows = torch.cat([picked + 600 * copy for copy in range(4)])
        draws.append(log_normalisers(u[rows], t[rows], chain[rows]).value)
    torch.testing.assert_close(torch.stack(draws).std(0)[:-1], error[:-1], rtol=0.3, atol=0)


@pytest.mark.parametrize(
    ("looks", "draws", "faults"),
    [
        (1, 1000, ["draws of one chain"]),
        (4, 300, ["chains by snapshots", "points by themselves", "snapshots as chains"]),
    ],
    ids=["one look", "four looks"],
)
def test_chains_that_stand_still_are_observations_and_so_is_each_draw(
    looks: int, draws: int, faults: list[str]
) -> None:
    """Of chains that are looked at again and again where they are: over repetitions z has variance 1 all the same."""
    chains, repetitions = 400, 100
    target, base = targets(1), Gaussian(torch.zeros(1).double(), torch.full((1,), 1.5).double())
    own, single = torch.arange(chains), chains + torch.arange(draws)
    planted = {
        "draws of one chain": torch.cat([own.repeat(looks), torch.full((draws,), chains)]),
        "chains by snapshots": torch.cat([own.repeat_interleave(looks), single]),
        "points by themselves": torch.arange(looks * chains + draws),
        "snapshots as chains": torch.cat([torch.arange(looks).repeat_interleave(chains), single]),
    }
    z: dict[str, list[Tensor]] = {name: [] for name in ("right", *faults)}
    for seed in range(repetitions):
        g = seeded(seed)
        t = own[torch.randperm(chains, generator=g)] % 4
        x = torch.stack([level.sample(chains, g) for level in target.levels])[t, own]
        reference = Reference(base, base.sample(draws, g))
        value, error = level_normalisers(target, x.repeat(looks, 1, 1), t.repeat(looks, 1), 4, reference)
        assert value.shape == error.shape == (4,)
        z["right"].append((value - target.weights.double().log()) / error)
        u = all_energies(target, torch.cat([x.repeat(looks, 1), reference.draws]), 4, reference)
        for name in faults:
            wrong = log_normalisers(u, torch.cat([t.repeat(looks), torch.full((draws,), 4)]), planted[name])
            torch.testing.assert_close(wrong.value[:-1], value, rtol=0, atol=1e-9)  # the fault is in the error alone
            z[name].append((wrong.value[:-1] - target.weights.double().log()) / wrong.error[:-1])
    square = {name: torch.stack(values).square().mean(0) for name, values in z.items()}
    # A mean of 100 squares of N(0, 1) has a standard error of sqrt(2 / 100) = .14.
    assert bool(((square["right"] - 1).abs() < SIGMAS * 0.14).all()), square["right"]
    for name in faults:
        assert float(square[name].min()) > 1 + SIGMAS * 0.14, (name, square[name])


@pytest.mark.parametrize("fault", ["sign of a ratio", "energies of another level", "labels shifted by one"])
def test_planted_faults_show(fault: str) -> None:
    target = targets()
    u, state = exact(target, 4000, seeded(1))
    kept = torch.arange(len(u)) >= 3000  # unequal counts: with equal ones no label could be wrong
    u, state = u[kept], state[kept]
    if fault == "sign of a ratio":
        value, error = log_normalisers(u, state, torch.arange(len(u)))
        value = -value
    else:
        u = u[:, [1, 0, 2, 3]] if fault == "energies of another level" else u
        state = (state + 1) % 4 if fault == "labels shifted by one" else state
        value, error = log_normalisers(u, state, torch.arange(len(u)))
    assert float(((value - truth(target))[:-1] / error[:-1]).abs().max()) > 2 * SIGMAS


def test_constants_far_apart_and_infinite_energies() -> None:
    target = targets()
    u, state = exact(target, 1000, seeded(2))
    plain = log_normalisers(u, state, torch.arange(len(u)))
    constant = torch.tensor([300.0, -40.0, 2e3, 0.0], dtype=torch.float64)
    moved = log_normalisers(u + constant, state, torch.arange(len(u)))
    torch.testing.assert_close(moved.value, plain.value - constant, rtol=0, atol=1e-6)
    u[0, 3], u[1, 2] = torch.inf, torch.nan
    walled = log_normalisers(u, state, torch.arange(len(u)))
    assert bool(walled.value.isfinite().all())


def test_a_level_without_points_is_refused() -> None:
    with pytest.raises(InputError, match="level 1: let the chains visit"):
        log_normalisers(torch.zeros(4, 3), torch.tensor([0, 0, 2, 2]), torch.arange(4))


def test_levels_without_overlap_have_a_huge_error() -> None:
    far = LabelledLadder(
        torch.ones(2), [Gaussian(torch.tensor([m], dtype=torch.float64), torch.ones(1).double()) for m in (0.0, 60.0)]
    )
    u, state = exact(far, 500, seeded(0))
    assert float(log_normalisers(u, state, torch.arange(len(u))).error[0]) > 1


def test_snapshots_are_taken_after_a_burn_in_and_then_apart() -> None:
    """Unadjusted Langevin steps on N(0, v_t) are an AR(1): after any number of them mean and variance are known."""
    start, steps, burn_in, count, apart, n = 10.0, 2, 4, 3, 3, 4000
    variance, sigma = torch.tensor([1.0, 4.0]).double(), torch.tensor([0.5, 0.8]).double()

    def energy(x: Tensor, t: Tensor) -> Tensor:
        return x.square().sum(1) / (2 * variance[t])

    def z_scores(x: Tensor, t: Tensor, settled: int) -> Tensor:
        """Of every snapshot's mean and variance at both levels, were ``settled`` transitions made before."""
        found = []
        for k, level in ((k, level) for k in range(count) for level in (0, 1)):
            made = steps * (settled + (k + 1) * apart)
            decay, noise = 1 - sigma[level] ** 2 / (2 * variance[level]), sigma[level] ** 2
            mean, spread = start * decay**made, noise * (1 - decay ** (2 * made)) / (1 - decay**2)
            y = x[k, t[k] == level, 0] - mean
            found += [y.mean() / (spread / len(y)).sqrt(), (y.square().mean() / spread - 1) / math.sqrt(2 / len(y))]
        return torch.stack(found)

    t = torch.arange(n) % 2
    sampler = Sampler(langevin, energy, Ladder.geometric(1, floor=0.3, top=1), sigma, steps, stay)
    here = Drawn(torch.full((n, 1), start).double(), t, 0)
    x, labels = snapshots(sampler, here, seeded(9), burn_in, count, apart)
    assert x.shape == (count, n, 1) and torch.equal(labels, t.expand(count, n))
    assert float(z_scores(x, labels, burn_in).abs().max()) < SIGMAS
    for other in (0, burn_in - 1, burn_in + 1):  # planted faults: no burn-in, and one that is off by one
        assert float(z_scores(x, labels, other).abs().max()) > 2 * SIGMAS


@pytest.mark.parametrize("dimension", [1, 2])
def test_chains_of_a_model_agree_with_quadrature(dimension: int) -> None:
    """An energy with constants of its own at every level, sampled by MGMS, tied to the Gaussian of its data."""
    g = seeded(4)
    centres = torch.tensor([-1.0, 0.9]).repeat(dimension, 1).T
    data = centres[torch.randint(2, (4000,), generator=g)] + 0.3 * torch.randn(4000, dimension, generator=g)
    ladder = Ladder.geometric(dimension, first_sd=0.3, top=3)
    constants = torch.tensor([5.0, -2.0, 0.5, 11.0])

    def energy(x: Tensor, t: Tensor) -> Tensor:
        """Two clusters diffused, and bent by a cosine so that no constant is known."""
        a, v = ladder.abar.to(x.dtype)[t].sqrt(), ladder.variance.to(x.dtype)[t]
        spread = (a**2 * 0.09 + v).unsqueeze(1)
        square = torch.stack([((x - a.unsqueeze(1) * c.to(x.dtype)) ** 2 / spread).sum(1) for c in centres], 1)
        return -torch.logsumexp(-square / 2, 1) + 0.3 * (3 * x[:, 0]).cos() + constants.to(x.dtype)[t]

    sigma = torch.tensor([0.3, 0.4, 0.6, 1.0], dtype=torch.float64)
    # Labels stay, for with constants so far apart they would all end at one level: MBAR needs points, not moves.
    sampler = Sampler(mala, energy, ladder, sigma, 3, stay)
    t = torch.randint(4, (256,), generator=g)
    start = Drawn(ladder.diffuse(data[:256], t, g), t, 0)
    base = DiffusedGaussian(data, ladder)
    reference = known_reference(base, ladder, data, 2000, g)
    x, t = snapshots(sampler, start, g, burn_in=10, count=10, apart=3)
    value, error = level_normalisers(energy, x, t, 4, reference)
    line = torch.linspace(-8, 8, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * dimension).reshape(-1, dimension)
    for level in range(4):
        u = energy(grid, torch.full((len(grid),), level))
        exact_value = float(torch.logsumexp(-u, 0)) + dimension * math.log(float(line[1] - line[0]))
        assert abs(float(value[level]) - exact_value) < 0.05
        assert abs(float(value[level]) - exact_value) < SIGMAS * float(error[level]) + 1e-9
        assert float(error[level]) < 0.05


@pytest.mark.parametrize("rows", [5, 500])
def test_reference_is_normalised_and_exact(rows: int) -> None:
    """With five rows there are too few neighbours for kernels, and the Gaussian is all."""
    data = torch.randn(rows, 2, generator=seeded(5)) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]]) + 1
    ladder = Ladder.geometric(2, first_sd=0.1, top=3)
    reference = known_reference(DiffusedGaussian(data, ladder), ladder, data, 20_000, seeded(6))
    assert isinstance(reference, Reference)
    line = torch.linspace(-8, 9, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    u = torch.cat([reference.energy(part) for part in grid.split(20_000)])
    log_area = 2 * math.log(float(line[1] - line[0]))
    assert abs(float(torch.logsumexp(-u, 0)) + log_area) < 1e-3
    # The draws: their mean energy is the entropy by quadrature.
    drawn = reference.energy(reference.draws)
    entropy = float((u * (-u + log_area).exp()).sum())
    assert abs(float(drawn.mean()) - entropy) < SIGMAS * float(drawn.std()) / math.sqrt(20_000) + 1e-3
    u = all_energies(lambda x, t: x.sum(1) + t, reference.draws[:7], 4, reference)
    assert u.shape == (7, 5) and u.dtype == torch.float64


def test_reference_in_many_dimensions_is_the_gaussian() -> None:
    data = torch.randn(300, 20, generator=seeded(7))
    ladder = Ladder.geometric(20, floor=0.1)
    base = DiffusedGaussian(data, ladder)
    reference = known_reference(base, ladder, data, 100, seeded(8))
    t = torch.full((100,), ladder.top)
    expected = base(reference.draws.float(), t) + 10 * math.log(2 * math.pi)
    torch.testing.assert_close(reference.energy(reference.draws).float(), expected, rtol=1e-4, atol=1e-3)
