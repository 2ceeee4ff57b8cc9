"""The warm start by denoising: its loss against closed forms, the balance of the levels, the switch to likelihood."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daebm import Config, Dataset, Ladder
from daebm import denoising as module
from daebm.denoising import balance_levels, denoising_loss
from daebm.errors import InputError
from daebm.resnet import LevelResNet
from daebm.spacing import neighbour_acceptance
from daebm.training import Setup, begin, denoise, learning_rate, step

EVENT, D = (1, 4, 4), 16
FACTOR = torch.randn(D, D, generator=torch.Generator().manual_seed(0)) / math.sqrt(D)


def gaussian_images(n: int, seed: int) -> Tensor:
    """Correlated Gaussian images of mean 0.2 and variance about 1."""
    draws = torch.randn(n, D, generator=torch.Generator().manual_seed(seed)) @ FACTOR + 0.2
    return draws.reshape(n, *EVENT)


# The loss.

LADDER = Ladder.geometric(D, floor=0.2, top=4)
DRAWS = 4000


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        u: Tensor = self.factor * self.inner(x, t)
        return u


def losses(t: int, factors: list[float]) -> tuple[list[float], Tensor]:
    """The loss of each factor times the exact energy of Gaussian images at level t, on the same draws.

    Also v / c on every axis of the covariance C_t: all that closed forms need.
    """
    data = gaussian_images(500, 1)
    exact = LevelResNet(data, LADDER, width=4)
    generator = torch.Generator().manual_seed(100 + t)
    flat = data.flatten(1).double()
    truth = torch.distributions.MultivariateNormal(flat.mean(0), torch.cov(flat.T))
    white = torch.randn(DRAWS, D, generator=generator, dtype=torch.float64)
    z = (truth.mean + white @ truth.scale_tril.T).float().reshape(DRAWS, *EVENT)
    eps = torch.randn(z.shape, generator=generator)
    v, abar = LADDER.variance[t], LADDER.abar[t]
    x = float(abar.sqrt()) * z + float(v.sqrt()) * eps
    levels = torch.full((DRAWS,), t)
    found = [denoising_loss(Scaled(exact, k), x, levels, eps, LADDER.variance).item() for k in factors]
    return found, v / (abar * torch.linalg.eigvalsh(truth.covariance_matrix) + v)


@pytest.mark.parametrize("t", range(LADDER.levels))
def test_the_loss_of_the_exact_score_is_its_least(t: int) -> None:
    """On an axis with q = v / c the residual sqrt(v) y / c - eps is normal with variance r = 1 - q.

    So the loss has mean sum(r) / d and variance 2 sum(r^2) / (n d^2). It must agree at 5 standard errors.
    """
    (loss,), q = losses(t, [1.0])
    r = 1 - q
    assert abs(loss - float(r.mean())) < 5 * float((2 * r.square().sum() / DRAWS).sqrt() / D)


@pytest.mark.parametrize("t", range(LADDER.levels))
@pytest.mark.parametrize("k", [1.3, -1.0], ids=["scaled", "sign flipped"])
def test_a_wrong_energy_has_a_larger_loss(t: int, k: float) -> None:
    """Planted faults on the same draws. With g = sqrt(v) y / c, normal with variance and covariance with eps q, the
    excess is the mean of (k^2 - 1) g^2 - 2 (k - 1) g eps: (k - 1)^2 q, with the variance below."""
    (wrong, least), q = losses(t, [k, 1.0])
    variance = 2 * (k**2 - 1) ** 2 * q**2 + 4 * (k - 1) ** 2 * (q + q**2) - 8 * (k**2 - 1) * (k - 1) * q**2
    se = float((variance.sum() / DRAWS).sqrt() / D)
    assert wrong - least > 5 * se
    assert abs(wrong - least - (k - 1) ** 2 * float(q.mean())) < 5 * se


def test_the_loss_takes_each_point_at_its_own_level() -> None:
    """Levels in one batch are the levels one by one: float32 means of the same numbers."""
    network = LevelResNet(gaussian_images(500, 1), LADDER, width=4)
    generator = torch.Generator().manual_seed(2)
    t = torch.arange(LADDER.levels).repeat(20)
    x, eps = (torch.randn(len(t), *EVENT, generator=generator) for _ in range(2))
    parts = [denoising_loss(network, x[t == k], t[t == k], eps[t == k], LADDER.variance) for k in range(5)]
    torch.testing.assert_close(denoising_loss(network, x, t, eps, LADDER.variance), torch.stack(parts).mean())


def test_weights_follow_the_loss() -> None:
    """The gradient, a derivative through a derivative, against central differences in float64.

    Steps of 1e-5 are right to about 1e-9 by rounding and curvature; the gradients compared are of order .01.
    """
    torch.manual_seed(3)
    network = LevelResNet(gaussian_images(100, 1), LADDER, width=4).double()
    nn.init.normal_(network.inner.head.weight, std=0.1)
    generator = torch.Generator().manual_seed(4)
    t = torch.arange(LADDER.levels)
    x, eps = (torch.randn(len(t), *EVENT, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss() -> Tensor:
        return denoising_loss(network, x, t, eps, LADDER.variance)

    for name, weight in network.named_parameters():
        if name == "constant":
            continue  # has no slope
        weight.grad = None
        loss().backward()
        direction = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            weight.add_(direction, alpha=1e-5)
            up = loss().item()
            weight.sub_(direction, alpha=2e-5)
            down = loss().item()
            weight.add_(direction, alpha=1e-5)
        slope = 0.0 if weight.grad is None else float((weight.grad * direction).sum())
        assert slope == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-8), name


# The balance of the levels.


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "network": "level-resnet",
        "width": 4,
        "hidden": 1,
        "floor": 0.2,
        "top": 4,
        "iterations": 12,
        "denoise": 5,
        "batch": 16,
        "store": 20,
        "steps": 2,
        "average": 0.9,
    }
    return Config("test", "da", "test", **(values | changes))


def setup(**changes: Any) -> Setup:
    """Data that are Gaussian, so that the network at its start has all levels balanced."""
    data = gaussian_images(3000, 5)
    return begin(config(**changes), Dataset("gaussian", data, data[:10]))


SHIFTS = torch.tensor([3.0, -40.0, 7.0, 300.0, -5.0])


def balanced(it: Setup, shifts: Tensor) -> Tensor:
    """Constants after the balance of a network whose constants were off by ``shifts``, less that of level 0."""
    with torch.no_grad():
        it.state.network.constant += shifts
    balance_levels(it)
    constant: Tensor = it.state.network.constant.detach()
    return constant - constant[0]


def test_known_shifts_are_taken_back_exactly() -> None:
    """The same draws are balanced in the same way wherever the constants stood.

    Energies reach 400 nats, where float32 is right to 2e-5; the bisection has no error beside that.
    """
    torch.testing.assert_close(balanced(setup(), SHIFTS), balanced(setup(), torch.zeros(5)), rtol=0, atol=2e-4)


@pytest.mark.parametrize("chains", [64, 2048])
def test_balanced_levels_are_balanced_within_sampling_error(monkeypatch: pytest.MonkeyPatch, chains: int) -> None:
    """Exact constants are all equal. Five standard errors of the worst case:

    An edge's log ratio is where two means over n chains, of numbers in [0, 1], agree: their difference has a variance
    of 2 / (4 n) at most and a slope of the edge's acceptance a. Errors of T edges add up, and neighbours share
    chains: a variance of 3 T / (2 n a^2) at most.
    """
    monkeypatch.setattr(module, "BALANCE_CHAINS", chains)
    it = setup(seed=1)
    t = torch.arange(3000) % it.ladder.levels
    acceptance = neighbour_acceptance(it.state.network, it.ladder.diffuse(it.data, t, it.state.generator), t, 4)
    found = balanced(it, SHIFTS)
    bound = 5 * math.sqrt(3 * 4 / (2 * chains)) / float(acceptance.min())
    assert float(found.abs().max()) < bound
    assert bound < float(SHIFTS.diff().abs().min())  # so that a balance that does nothing fails


def test_the_balance_works_from_bytes() -> None:
    """Bytes are points in training units there too: diffused grey levels, not 0..255."""
    data = (gaussian_images(3000, 5) * 40 + 100).clamp(0, 255).byte()
    it = begin(config(dequantise=True), Dataset.standardised("bytes", data, data[:10]))
    balance_levels(it)
    # Nearly Gaussian still: the worst case of the test above with 64 chains and an acceptance of .4.
    assert float(it.state.network.constant.detach().abs().max()) < 5 * math.sqrt(3 * 4 / (2 * 64)) / 0.4


def test_a_network_without_constants_is_left_alone() -> None:
    it = setup(network="resnet")
    before = {k: v.clone() for k, v in it.state.network.state_dict().items()}
    balance_levels(it)
    assert all(torch.equal(value, before[key]) for key, value in it.state.network.state_dict().items())


# The switch.


def test_the_rate_around_the_switch() -> None:
    it = config(
        denoise=300, iterations=1300, denoise_rate=0.3, learning_rate=0.02, warm_up=9, decay_start=0.5, milestones=()
    )
    rates = [learning_rate(it, k) for k in range(1300)]
    ramp = [0.3 * (k + 1) / 100 * (1 - k / 300) for k in range(100)]
    fall = [0.3 * (1 - k / 300) for k in range(100, 300)]
    assert rates[:300] == pytest.approx(ramp + fall)
    assert rates[299] == pytest.approx(0.3 / 300)
    # From there on it is the schedule of a run of 1,000 iterations.
    alone = config(denoise=0, iterations=1000, learning_rate=0.02, warm_up=9, decay_start=0.5)
    assert rates[300:] == [learning_rate(alone, k) for k in range(1000)]
    assert rates[300] == pytest.approx(0.002) and rates[309] == pytest.approx(0.02)


def test_milestones_are_shares_of_what_follows_the_switch() -> None:
    it = config(denoise=200, iterations=1200, learning_rate=1.0, milestones=(0.5,), decay_factor=0.1)
    rates = [learning_rate(it, k) for k in range(1200)]
    assert [k for k in range(201, 1200) if rates[k] != rates[k - 1]] == [700]


@pytest.mark.parametrize("denoise_iterations", [12, 13, 10_000])
def test_a_warm_start_without_end_is_refused(denoise_iterations: int) -> None:
    with pytest.raises(InputError, match=f"denoise must be less than iterations, got {denoise_iterations}$"):
        config(denoise=denoise_iterations)
    assert config(denoise=11).denoise == 11


def test_the_switch_resets_optimiser_and_average_and_moves_no_chain() -> None:
    it = setup()
    state = it.state
    chains, balanced_before = state.chains.x.clone(), state.network.constant.detach().clone()
    for k in range(5):
        assert state.iteration == k
        denoise(it)
        assert torch.equal(state.chains.x, chains)
        # Momentum for the weights that denoising moves, until the switch.
        assert bool(state.optimiser.state) == (k < 4)
    assert not torch.equal(state.network.constant, balanced_before)
    weights = dict(state.network.named_parameters())
    assert state.average.keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in state.average.items())
    step(it)
    assert state.optimiser.state and not torch.equal(state.chains.x, chains)
    assert any(not torch.equal(value, weights[key]) for key, value in state.average.items())


def test_denoising_finds_the_slope_of_data_that_are_not_gaussian() -> None:
    """Two islands, 200 iterations: on the same fresh noise the loss ends below that of the best Gaussian, its start.

    By 30 % when this was written; a tenth is far beyond what the noise of 600 images, used twice, could do.
    """
    generator = torch.Generator().manual_seed(7)
    side = torch.randint(2, (600, 1, 1, 1), generator=generator) * 2.0 - 1
    data = side + 0.1 * torch.randn(600, *EVENT, generator=generator)
    it = begin(
        config(denoise=201, iterations=202, denoise_rate=0.003, batch=64, store=64), Dataset("islands", data, data[:10])
    )
    t = torch.randint(it.ladder.levels, (600,), generator=generator)
    eps = torch.randn(data.shape, generator=generator)
    v, abar = (part[t].float().reshape(-1, 1, 1, 1) for part in (it.ladder.variance, it.ladder.abar))
    x = abar.sqrt() * data + v.sqrt() * eps

    def loss() -> float:
        return denoising_loss(it.state.network, x, t, eps, it.ladder.variance).item()

    start = loss()
    for _ in range(200):
        denoise(it)
    assert loss() < 0.9 * start
