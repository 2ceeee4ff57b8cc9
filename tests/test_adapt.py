"""Step sizes: the asymmetric rule, what is left alone, and that it arrives where it should."""

import pytest
import torch

from daebm.samplers import langevin
from daebm.samplers.adapt import HIGH, LOW, StepSizes
from daebm.targets import Gaussian


def start(sigma: list[float], bounds: tuple[float, float] = (1e-3, 10.0), minimum_count: int = 10) -> StepSizes:
    return StepSizes.start(torch.tensor(sigma), bounds, minimum_count)


def record(steps: StepSizes, level: int, acceptance: float, count: int) -> None:
    steps.record(torch.full((count,), level), torch.full((count,), acceptance))


@pytest.mark.parametrize(
    ("acceptance", "factor"),
    [(0.0, 1 / 1.2), (0.59, 1 / 1.2), (0.61, 1.0), (0.7, 1.0), (0.79, 1.0), (0.81, 1.1), (1.0, 1.1)],
)
def test_the_rule(acceptance: float, factor: float) -> None:
    """Grow by 1.1 above the band, shrink by 1.2 below it, nothing inside; other levels are not touched."""
    steps = start([0.5, 0.5, 0.5])
    record(steps, 1, acceptance, count=20)
    steps.adapt()
    assert steps.sigma.tolist() == pytest.approx([0.5, 0.5 * factor, 0.5], rel=1e-6)


def test_the_factors_leave_no_grid() -> None:
    """One growth and one shrinkage do not cancel, so steps are not stuck on a few values."""
    steps = start([0.5])
    for acceptance in (1.0, 0.0):
        record(steps, 0, acceptance, count=20)
        steps.adapt()
    assert float(steps.sigma[0]) == pytest.approx(0.5 * 1.1 / 1.2)


def test_the_mean_is_over_probabilities_and_chains() -> None:
    steps = start([0.5, 0.5])
    steps.record(torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 0.5, 0.2, 0.9]))
    steps.record(torch.tensor([1]), torch.tensor([0.6]))
    assert steps.acceptance().tolist() == pytest.approx([0.8, 0.4])
    assert steps.count.tolist() == [3, 2]


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_an_unvisited_level_never_drifts(acceptance: float) -> None:
    """Read as acceptance 0, an absent level would shrink without end."""
    steps = start([0.5, 0.5])
    for _ in range(50):
        record(steps, 0, acceptance, count=20)
        steps.adapt()
    assert float(steps.sigma[1]) == 0.5 and float(steps.sigma[0]) != 0.5
    assert bool(torch.isnan(steps.acceptance()[1]))
    assert bool(torch.isfinite(steps.sigma).all())


def test_evidence_below_the_minimum_is_kept_until_there_is_enough() -> None:
    steps = start([0.5, 0.5], minimum_count=10)
    record(steps, 0, 0.1, count=10)
    for rounds in (1, 2, 3):
        record(steps, 1, 0.9, count=3)
        steps.adapt()
        assert float(steps.sigma[1]) == 0.5
        assert float(steps.count[1]) == 3 * rounds and float(steps.count[0]) == 0
    record(steps, 1, 0.9, count=1)  # the tenth
    assert float(steps.acceptance()[1]) == pytest.approx(0.9)
    steps.adapt()
    assert float(steps.sigma[1]) == pytest.approx(0.5 * 1.1)
    assert float(steps.count[1]) == 0 and float(steps.total[1]) == 0
    assert float(steps.sigma[0]) == pytest.approx(0.5 / 1.2)  # moved once, by its own ten


def test_bounds_hold_from_the_start() -> None:
    steps = start([1e-9, 0.5, 100.0], bounds=(0.1, 1.0))
    assert steps.sigma.tolist() == pytest.approx([0.1, 0.5, 1.0])
    for _ in range(30):
        record(steps, 0, 0.0, count=20)
        record(steps, 1, 1.0, count=20)
        record(steps, 2, 1.0, count=20)
        steps.adapt()
    assert steps.sigma.tolist() == pytest.approx([0.1, 1.0, 1.0])


def test_start_leaves_its_input_alone() -> None:
    sigma = torch.tensor([5.0, 0.5])
    steps = StepSizes.start(sigma, (0.1, 1.0), 1)
    record(steps, 1, 1.0, count=5)
    steps.adapt()
    assert sigma.tolist() == [5.0, 0.5] and steps.sigma.dtype == torch.float64


@pytest.mark.parametrize("first", [0.01, 20.0])
def test_adaptation_arrives_in_the_band(first: float) -> None:
    """Three levels of different widths, from steps far too short or far too long. Then frozen, and measured anew."""
    sd = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    steps = start([first] * 3, bounds=(1e-4, 100.0))
    generator = torch.Generator().manual_seed(1)
    t = torch.arange(600) % 3
    mean = torch.zeros(4, dtype=torch.float64)
    targets = [Gaussian(mean, sd[k].expand(4)) for k in range(3)]

    def energy(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([target(x) for target in targets], dim=1).gather(1, t.unsqueeze(1)).squeeze(1)

    x = sd[t].unsqueeze(1) * torch.randn(600, 4, generator=generator, dtype=torch.float64)
    for _ in range(90):
        x, info = langevin.run(langevin.mala, energy, x, steps.sigma[t], 3, generator)
        steps.record(t, info.accept_prob)
        steps.adapt()
    for _ in range(5):
        x, info = langevin.run(langevin.mala, energy, x, steps.sigma[t], 3, generator)
        steps.record(t, info.accept_prob)
    assert bool(((steps.acceptance() > LOW) & (steps.acceptance() < HIGH)).all())
    torch.testing.assert_close(
        steps.sigma / steps.sigma[1], sd / sd[1], rtol=0.25, atol=0
    )  # the step follows the width
