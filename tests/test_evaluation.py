"""The measures against closed forms: a measure that cannot find the truth of the truth says nothing of a model."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import i0e

from daebm.data import GAUSSIAN_1D_TRUTH, RING_RADII, RING_SD, draw_rings, four_rings
from daebm.evaluation import (
    ON_RING,
    RING_BAND,
    auroc,
    effective_sample_size,
    kl_to_rings,
    line_quadrature,
    nearest_distance,
    polar_quadrature,
    ring_masses,
    ring_shares,
    rings_log_density,
)
from daebm.experiments import digits
from daebm.experiments.four_rings import ticks
from daebm.ladder import Ladder

Floats = np.ndarray[Any, Any]
ANGLES = 8  # the truth depends on the radius alone
SCALE = four_rings(torch.Generator().manual_seed(0), 10).scale
OURS = Ladder.geometric(2, first_sd=0.01, top=5)  # on standardised rings
PAPER = Ladder.paper(6, 0.01, 0.3)  # on rings as they are
LEVELS = [
    (float(abar), float(variance), scale)
    for ladder, scale in ((OURS, SCALE), (PAPER, 1.0))
    for abar, variance in zip(ladder.abar, ladder.variance, strict=True)
]
every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"v={level[1]:.3g}, scale={level[2]:.3g}")


def truth(level: tuple[float, float, float] = (1.0, 0.0, 1.0)) -> Any:
    """The exact energy at a level, as a function of points."""
    return lambda x: -rings_log_density(np.linalg.norm(x.astype(float), axis=1), *level)


def inside(x: Floats, ring: float) -> Any:
    return np.abs(np.linalg.norm(x, axis=1) - ring) < 0.5


# The four rings.


@every_level
def test_the_rings_density_integrates_to_one(level: tuple[float, float, float]):
    """The midpoint rule is exact far beyond 1e-6 for a density this smooth on this grid."""
    step = 0.001
    r = np.arange(step / 2, 14, step)
    assert (np.exp(rings_log_density(r, *level)) * 2 * math.pi * r * step).sum() == pytest.approx(1, abs=1e-6)


@every_level
def test_the_rings_density_is_that_of_simulated_points(level: tuple[float, float, float]):
    """Counts by radius, each within 5 binomial standard errors of the integral of the density over its bin."""
    abar, variance, scale = level
    generator = torch.Generator().manual_seed(1)
    count = 100_000
    z = draw_rings(count, generator).double()
    x = math.sqrt(abar) * z + scale * math.sqrt(variance) * torch.randn(z.shape, generator=generator)
    step, per_bin = 0.0005, 20
    edges = np.arange(0, 14 + 1e-9, step * per_bin)
    observed, _edges = np.histogram(x.norm(dim=1).numpy(), edges)
    r = np.arange(step / 2, 14, step)
    cells = np.exp(rings_log_density(r, *level)) * 2 * math.pi * r * step
    p = cells.reshape(-1, per_bin).sum(1)
    assert observed.sum() == count
    enough = p * count >= 25  # where a count is near enough to normal for 5 standard errors to mean what they say
    z_score = (observed - p * count)[enough] / np.sqrt(count * p * (1 - p))[enough]
    assert np.abs(z_score).max() < 5
    rest = p[~enough].sum()
    assert abs(observed[~enough].sum() - rest * count) < 5 * math.sqrt(rest * count) + 5


@pytest.mark.parametrize("sd", [0.5, 0.05, 0.01, 0.003, 0.001])
def test_a_little_noise_is_integrated_right(sd: float):
    """Against a fine sum over the ring's own radii: the quadrature must resolve noise narrower than a ring."""
    r = np.linspace(0.9, 1.1, 401)
    z = np.linspace(-8, 8, 8001)
    weight = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    expected = np.zeros_like(r)
    for centre in RING_RADII:
        rho = centre + RING_SD * z
        rice = np.exp(-((r[:, None] - rho) ** 2) / (2 * sd**2)) * i0e(r[:, None] * rho / sd**2)
        expected += rice @ weight / (2 * math.pi * sd**2) / len(RING_RADII)
    density = np.exp(rings_log_density(r, 1.0, sd**2))
    assert np.abs(density - expected).max() < 1e-5 * expected.max()


def test_quadrature_finds_the_truth_of_the_rings():
    grid = polar_quadrature(truth(), angles=ANGLES)
    assert ring_masses(grid) == pytest.approx([0.25] * 4, abs=1e-6)
    # Points go to the model as float32, whose rounding near radius 4 moves the energy by about 1e-5.
    assert abs(kl_to_rings(grid)) < 1e-4
    assert grid.mass(np.full(len(grid.radius), True)) == pytest.approx(1, abs=1e-9)


@every_level
def test_the_truth_of_every_level_has_no_divergence(level: tuple[float, float, float]):
    """On the grids that the evaluation uses: fine at level 0, coarser and wider above."""
    grid = (
        polar_quadrature(truth(level), angles=ANGLES)
        if level[1] == 0
        else polar_quadrature(truth(level), limit=12.0, step=0.004, angles=ANGLES)
    )
    assert abs(kl_to_rings(grid, *level)) < 1e-3


@pytest.mark.parametrize("constant", [-1e4, 5.0])
def test_the_energy_has_no_zero(constant: float):
    """Energies are known up to a constant. In float64, as float32 would round 1e4 to .001."""
    grid = polar_quadrature(lambda x: truth()(x) + constant, angles=ANGLES)
    assert ring_masses(grid) == pytest.approx([0.25] * 4, abs=1e-6)
    assert abs(kl_to_rings(grid)) < 1e-4


@pytest.mark.parametrize("c", [-2.0, -0.1, 0.5, 3.0])
@pytest.mark.parametrize("ring", RING_RADII)
def test_a_misaligned_ring_has_the_divergence_it_should(ring: float, c: float):
    """c added on one ring: its mass is e^-c / Z, KL(truth || model) = c / 4 + log Z, with 4 Z = 3 + e^-c."""
    grid = polar_quadrature(lambda x: truth()(x) + c * inside(x, ring), angles=ANGLES)
    z = (3 + math.exp(-c)) / 4
    expected = [math.exp(-c) / z / 4 if r == ring else 0.25 / z for r in RING_RADII]
    assert ring_masses(grid) == pytest.approx(expected, abs=1e-5)
    assert kl_to_rings(grid) == pytest.approx(c / 4 + math.log(z), abs=1e-4)
    assert kl_to_rings(grid) > 0


def test_a_model_that_depends_on_the_angle_is_averaged_over_it():
    """exp(-U) tilted by 1 + a cos(phi): masses stay, KL = -E log(1 + a cos phi) = -log((1 + sqrt(1 - a^2)) / 2)."""
    a = 0.8
    grid = polar_quadrature(lambda x: truth()(x) - np.log1p(a * x[:, 0] / np.linalg.norm(x, axis=1)))
    assert ring_masses(grid) == pytest.approx([0.25] * 4, abs=1e-5)
    assert kl_to_rings(grid) == pytest.approx(-math.log((1 + math.sqrt(1 - a**2)) / 2), abs=1e-4)


def test_divergence_at_a_level_is_measured_in_the_levels_own_truth():
    """The clean rings as a model of level 5 are far off, and the other way round."""
    last = LEVELS[5]
    assert kl_to_rings(polar_quadrature(truth(last), angles=ANGLES)) > 1
    assert kl_to_rings(polar_quadrature(truth(LEVELS[1]), angles=ANGLES), *last) > 1


def test_shares_of_points():
    """Two on ring 1, one on ring 3, one near ring 4 but off it, and one between rings."""
    radii = [1.0, 1 - ON_RING * 0.99, 3 + 0.01, 4 + RING_BAND * 0.99, 2.5]
    points = np.array([[0.0, r] for r in radii])
    masses, on = ring_shares(points)
    assert masses == pytest.approx([0.4, 0, 0.2, 0.2])
    assert on == pytest.approx(0.6)
    assert ring_shares(np.empty((0, 2))) == ([0.0] * 4, 0.0)


def test_shares_of_true_points():
    """15 standard deviations catch all; 5 of them all but 6e-7."""
    points = draw_rings(40_000, torch.Generator().manual_seed(0)).numpy()
    masses, on = ring_shares(points)
    assert sum(masses) == pytest.approx(1)
    assert np.abs(np.array(masses) - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 40_000)
    assert on > 1 - 1e-4


GOOD = {
    "ring_mass_long_run": [0.25] * 4,
    "on_ring_long_run": 0.95,
    "ring_mass_post": [0.25] * 4,
    "on_ring_post": 0.95,
    "alignment_error_nats": 0.1,
    "off_ring_mass": 0.05,
}
ALL = {"tick_long_run": True, "tick_long_run_mala": True, "tick_post": True, "tick_global": True}


@pytest.mark.parametrize(
    "changes, lost",
    [
        ({}, ()),
        ({"on_ring_long_run": 0.89}, ("tick_long_run", "tick_long_run_mala")),
        ({"ring_mass_long_run": [0.36, 0.24, 0.2, 0.2]}, ("tick_long_run", "tick_long_run_mala")),
        ({"ring_mass_long_run": [0.14, 0.3, 0.28, 0.28]}, ("tick_long_run", "tick_long_run_mala")),
        # A method that trains unadjusted has a second long run, with rejections.
        ({"ring_mass_long_run_mala": [0.25] * 4, "on_ring_long_run_mala": 0.2}, ("tick_long_run_mala",)),
        (
            {"on_ring_long_run": 0.2, "ring_mass_long_run_mala": [0.25] * 4, "on_ring_long_run_mala": 0.95},
            ("tick_long_run",),
        ),
        ({"on_ring_post": 0.79}, ("tick_post",)),
        ({"ring_mass_post": [0.09, 0.3, 0.3, 0.31]}, ("tick_post",)),
        ({"alignment_error_nats": 0.51}, ("tick_global",)),
        ({"off_ring_mass": 0.11}, ("tick_global",)),
        ({"alignment_error_nats": math.nan}, ("tick_global",)),
    ],
    ids=str,
)
def test_ticks(changes: dict[str, Any], lost: tuple[str, ...]):
    assert ticks(GOOD | changes) == ALL | dict.fromkeys(lost, False)


# The line.


@pytest.mark.parametrize("constant", [0.0, 1e4])
def test_quadrature_finds_the_truth_of_the_line(constant: float):
    line = line_quadrature(lambda x: GAUSSIAN_1D_TRUTH(torch.from_numpy(x)).numpy() + constant)
    # The truth is held in float32: .1, its sd, is known to 1e-8, and so are the masses.
    assert line.mass(line.x > 0) == pytest.approx(0.25, abs=1e-6)
    assert line.mass(np.abs(line.x + 2) < 0.1) == pytest.approx(0.75 * math.erf(1 / math.sqrt(2)), abs=1e-3)
    assert line.mass(np.full(len(line.x), True)) == pytest.approx(1)
    at_mode = line.density[np.abs(line.x - 2).argmin()]
    assert at_mode == pytest.approx(0.25 / (0.1 * math.sqrt(2 * math.pi)), rel=1e-3)


def test_a_misaligned_mode_has_the_mass_it_should():
    """c nats too low on the right: .25 e^c / (.75 + .25 e^c)."""
    c = 1.5
    line = line_quadrature(lambda x: GAUSSIAN_1D_TRUTH(torch.from_numpy(x)).numpy() - c * (x[:, 0] > 0))
    assert line.mass(line.x > 0) == pytest.approx(0.25 * math.exp(c) / (0.75 + 0.25 * math.exp(c)), abs=1e-6)


# Effective sample size.


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression(rho: float):
    """(1 - rho) / (1 + rho) of the draws. Over 256,000 draws and a window of some 50 lags the estimate is known to
    sqrt(4 * 50 / 256,000) = 3 %; 5 such are allowed."""
    rng = np.random.default_rng(0)
    length, chains = 4000, 64
    x = np.empty((length, chains))
    x[0] = rng.normal(size=chains)
    for k in range(1, length):
        x[k] = rho * x[k - 1] + math.sqrt(1 - rho**2) * rng.normal(size=chains)
    assert effective_sample_size(x) == pytest.approx(x.size * (1 - rho) / (1 + rho), rel=0.15)
    assert effective_sample_size(5 + 3 * x) == pytest.approx(effective_sample_size(x), rel=1e-6)


def test_chains_that_stand_still_are_worth_no_more_than_their_number():
    """Each stuck at its own value: time adds nothing, and the common mean shows it."""
    x = np.repeat(np.random.default_rng(0).normal(size=(1, 50)), 200, axis=0)
    assert effective_sample_size(x) <= 50


@pytest.mark.parametrize("series", [np.ones((100, 4)), np.empty((0, 4))], ids=["constant", "empty"])
def test_nothing_seen_is_not_a_number(series: Floats):
    """A series that never moves, or was too short to be recorded, tells nothing; any figure would be made up."""
    assert math.isnan(effective_sample_size(series))


# Scores and distances.


def test_auroc_is_high_when_data_score_higher():
    low, high = np.array([0.0, 1.0, 2.0]), np.array([3.0, 4.0])
    assert auroc(high, low) == 1
    assert auroc(low, high) == 0
    assert auroc(low, low) == 0.5
    # Pairs won: 4 > 1, 4 > 3, 2 > 1; lost: 2 < 3.
    assert auroc(np.array([4.0, 2.0]), np.array([1.0, 3.0])) == 0.75


def test_nearest_distance():
    points, reference = np.array([[0.0, 0.0], [5.0, 5.0]]), np.array([[3.0, 4.0], [0.0, 1.0]])
    assert nearest_distance(points, reference) == pytest.approx([1, math.sqrt(5)])


# Digits made into outliers.


def test_mirrored_digits_keep_their_rows():
    images = np.arange(128.0).reshape(2, 64)
    flipped = digits.mirrored(images)
    assert np.array_equal(flipped[0, :8], images[0, :8][::-1])
    assert np.array_equal(digits.mirrored(flipped), images)


def test_chimeras_join_halves_of_different_digits():
    labels = np.repeat(np.arange(10), 5)
    images = labels[:, None] * np.ones((1, 64))
    mixed = digits.chimeras(images, labels)
    assert np.array_equal(mixed[:, :32], images[:, :32])
    assert (mixed[:, 32:] != images[:, 32:]).all()
    assert all(len(set(row[32:])) == 1 for row in mixed)


@pytest.mark.parametrize("count", [1, 19, 20, 45])
def test_few_pictures_can_be_shown(count: int):
    """A short run has fewer samples than a row has places."""
    arrays = {"samples": np.zeros((count, 64)), "long_run": np.zeros((count, 64))}
    assert digits.compare({"one": ({}, arrays)})
