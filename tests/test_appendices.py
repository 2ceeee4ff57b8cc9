"""What the paper's appendices A to D claim of local energies, enhanced sampling, SAMS and recovery likelihood.

Chains are independent and start from exact draws where they can, so every mean is judged by its own standard error.
Beyond 5 of them a check fails; about 40 such numbers appear here, so chance is no explanation.
"""

import math
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from daebm.chains import Chains
from daebm.config import Config
from daebm.ladder import Ladder
from daebm.methods import conditional, draw_negatives
from daebm.samplers import langevin, mgms
from daebm.samplers.langevin import KERNELS
from daebm.targets import Gaussian, LabelledLadder

SIGMAS = 5.0


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def z_score(values: Tensor, expected: float) -> float:
    """Standard errors between a mean over independent chains and its expectation."""
    return float((values.mean() - expected) / (values.std() / math.sqrt(len(values))))


# ------------------------------------------------------------- appendices A and B: two disjoint densities, local energy


class Bump:
    """N(centre, sd^2) cut to z in (low, high): compact support, closed moments, exact draws.

    Its slope is bounded on purpose. A density that falls to zero at an edge is infinitely steep there, and once in a
    while the gradient throws MALA across the gap, rightly.
    """

    def __init__(self, centre: float, sd: float, low: float, high: float) -> None:
        self.centre, self.sd = centre, sd
        self.low, self.high = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        self.mass = float(torch.special.ndtr(self.high) - torch.special.ndtr(self.low))

        def phi(z: float) -> float:
            return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

        shift = (phi(low) - phi(high)) / self.mass
        self.mean = centre + sd * shift
        self.variance = sd**2 * (1 + (low * phi(low) - high * phi(high)) / self.mass - shift**2)

    def z(self, x: Tensor) -> Tensor:
        return (x.squeeze(1) - self.centre) / self.sd

    def inside(self, x: Tensor) -> Tensor:
        return (self.z(x) > self.low) & (self.z(x) < self.high)

    def __call__(self, x: Tensor) -> Tensor:
        """-log density, +inf with zero gradient off the support."""
        log_normaliser = math.log(self.sd * self.mass * math.sqrt(2 * math.pi))
        return torch.where(self.inside(x), self.z(x) ** 2 / 2 + log_normaliser, torch.inf)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        uniform = torch.rand(n, 1, generator=generator, dtype=torch.float64)
        return self.centre + self.sd * torch.special.ndtri(torch.special.ndtr(self.low) + self.mass * uniform)


# Supports (-2.7, -1.3) and (0.9, 1.95). A step of .3 crosses the gap with noise beyond 7 sds only: never.
LEFT, RIGHT = Bump(-2.0, 0.35, -2.0, 2.0), Bump(1.2, 0.3, -1.0, 2.5)


class LocalEnergy:
    """-log p_j + c_j on region j and +inf elsewhere: the weight of region j under exp(-U) is e^(-c_j), normalised."""

    def __init__(self, c_left: float, c_right: float) -> None:
        self.constants = c_left, c_right

    @property
    def left_share(self) -> float:
        return 1 / (1 + math.exp(self.constants[0] - self.constants[1]))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(x.squeeze(1) < 0, LEFT(x) + self.constants[0], RIGHT(x) + self.constants[1])

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return mixture(n, self.left_share, generator)


def mixture(n: int, left_share: float, generator: torch.Generator | None) -> Tensor:
    """Exact draws of the two bumps with any weights."""
    left = torch.rand(n, 1, generator=generator, dtype=torch.float64) < left_share
    return torch.where(left, LEFT.sample(n, generator), RIGHT.sample(n, generator))


def region_z(x: Tensor, left_share: float) -> dict[str, float]:
    """The share of the left region, and mean and variance within each."""
    z = {"share": z_score((x < 0).double(), left_share)}
    for name, bump in (("left", LEFT), ("right", RIGHT)):
        here = x[bump.inside(x)]
        z[f"{name} mean"] = z_score(here, bump.mean)
        z[f"{name} variance"] = z_score((here - bump.mean) ** 2, bump.variance)
    return z


@pytest.mark.parametrize("constants", [(0.0, 0.0), (0.0, 2.0), (3.0, -1.0)])
@pytest.mark.parametrize("left_share", [0.75, 0.25])
def test_mala_keeps_any_weights_of_disjoint_modes(constants: tuple[float, float], left_share: float) -> None:
    """Every local energy leaves every mixture of the modes invariant: stable chains do not prove the weights right."""
    energy = LocalEnergy(*constants)
    generator = seeded(1)
    start = mixture(40_000, left_share, generator)
    x, info = langevin.run(langevin.mala, energy, start, 0.3, 15, generator)
    assert 0.5 < info.accept_prob.mean() < 0.9
    assert torch.equal(x < 0, start < 0)  # no chain crosses
    assert bool((LEFT.inside(x) | RIGHT.inside(x)).all())
    for name, z in region_z(x, left_share).items():
        assert abs(z) < SIGMAS, name

    # The density exp(-U) itself has other weights: a sum over a fine grid.
    grid = torch.linspace(-3, 2, 500_001, dtype=torch.float64).unsqueeze(1)
    density = (-energy(grid)).exp()
    left = float(density[grid.squeeze(1) < 0].sum() / density.sum())
    assert left == pytest.approx(energy.left_share, abs=1e-6)
    assert abs(left - left_share) > 0.1


def test_unadjusted_steps_do_not_keep_the_bumps() -> None:
    """The check above has power: without the Metropolis step the same chains miss by far."""
    generator = seeded(1)
    start = mixture(40_000, 0.75, generator)
    x, _info = langevin.run(langevin.langevin, LocalEnergy(0.0, 2.0), start, 0.3, 15, generator)
    assert max(map(abs, region_z(x, 0.75).values())) > 10


def test_mala_cannot_tell_local_energies_apart() -> None:
    """Appendix B: constants that differ by region change neither gradients nor, within a region, any ratio."""
    ends = []
    for constants in ((0.0, 0.0), (3.0, -1.0)):
        start = mixture(2_000, 0.5, seeded(2))
        ends.append(langevin.run(langevin.mala, LocalEnergy(*constants), start, 0.3, 15, seeded(3))[0])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["full", "local"])
def test_an_umbrella_level_restores_the_weights(name: str) -> None:
    """All chains start in the left mode at level 0. MALA leaves them there; MGMS brings back exp(-U(., 0))."""
    energy = LocalEnergy(1.0, 0.0)  # left share .27
    umbrella = Gaussian(torch.tensor([-0.25], dtype=torch.float64), torch.tensor([1.8], dtype=torch.float64))
    # Weights that give both levels about half: the two bumps together have mass e^-1 + 1 before the weight.
    joint = LabelledLadder(torch.tensor([0.42, 0.58], dtype=torch.float64), [energy, umbrella])
    sigma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    n, generator = 10_000, seeded(4)

    x, t = LEFT.sample(n, generator), torch.zeros(n, dtype=torch.long)
    stuck, _info = langevin.run(langevin.mala, energy, x, 0.3, 200, generator)
    assert bool((stuck < 0).all())

    for _ in range(80):
        x, t, _info = mgms.transition(langevin.mala, joint, x, t, sigma, 3, mgms.label_move(name, 1, 2), generator)
    mass = 0.42 * (1 + math.exp(-1))
    assert abs(z_score((t == 0).double(), mass / (mass + 0.58))) < SIGMAS
    for check, z in region_z(x[t == 0], energy.left_share).items():
        assert abs(z) < SIGMAS, check
    below = x[t == 1]
    assert abs(z_score(below, -0.25)) < SIGMAS
    assert abs(z_score((below + 0.25) ** 2, 1.8**2)) < SIGMAS


# --------------------------------------------------------------------------------------------------- appendix C: SAMS


class Intercepts(nn.Module):
    """Fixed level energies plus a learned constant per level."""

    def __init__(self) -> None:
        super().__init__()
        self.zeta = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("precision", torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.precision[t] * x.square().sum(1) / 2 + self.zeta[t]


def test_the_gradient_of_an_intercept_is_a_difference_of_label_shares() -> None:
    energy = Intercepts()
    x = torch.randn(60, 1, generator=seeded(5), dtype=torch.float64)
    t_data, t_chains = torch.arange(60) % 3, torch.arange(60) // 40
    (energy(x, t_data).mean() - energy(x, t_chains).mean()).backward()
    shares = [torch.bincount(t, minlength=3).double() / 60 for t in (t_data, t_chains)]
    torch.testing.assert_close(energy.zeta.grad, shares[0] - shares[1], rtol=0, atol=1e-15)


def test_algorithm_1_with_intercepts_is_sams() -> None:
    """Both recursions side by side, one chain: gradient descent on mean U(data) - mean U(chain), and
    zeta_k <- zeta_k + gamma (1{s = k} - 1/3), each moving its own chain by MGMS with its own zeta."""
    gamma, sigma = 0.3, torch.tensor([0.5, 1.0, 1.4], dtype=torch.float64)
    learned, sams = Intercepts(), Intercepts()
    optimiser = torch.optim.SGD(learned.parameters(), lr=gamma)
    x_data, t_data = torch.ones(3, 1, dtype=torch.float64), torch.arange(3)  # uniform labels
    a = b = (torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long))
    one, two = seeded(6), seeded(6)
    for _ in range(30):
        a = mgms.transition(langevin.mala, learned, *a, sigma, 2, mgms.full(2), one)[:2]
        optimiser.zero_grad()
        (learned(x_data, t_data).mean() - learned(*a).mean()).backward()
        optimiser.step()

        b = mgms.transition(langevin.mala, sams, *b, sigma, 2, mgms.full(2), two)[:2]
        with torch.no_grad():
            sams.zeta += gamma * (nn.functional.one_hot(b[1][0], 3).double() - 1 / 3)
        torch.testing.assert_close(learned.zeta, sams.zeta, rtol=0, atol=1e-12)
        assert torch.equal(a[1], b[1])
    assert learned.zeta.std() > 0.05  # they went somewhere


# ---------------------------------------------------------------------------- appendix D: diffusion recovery likelihood

LADDERS = {
    "paper": Ladder.paper(6, 0.01, 0.3),
    "with a floor": Ladder.geometric(2, floor=0.3, top=4),
}


class Network(nn.Module):
    """A small U(x, t)."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, levels)).double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.body(x).gather(1, t.unsqueeze(1)).squeeze(1) + x.square().sum(1) / 2


def drl_config(kernel: str) -> Config:
    return Config(experiment="test", method="drl", preset="test", kernel=kernel, steps=5)


def pairs(ladder: Ladder, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Observed (x_t, x_(t+1)) with t spread over all levels that have one above."""
    t = torch.arange(n) % ladder.top
    x = ladder.diffuse(torch.randn(n, 2, generator=generator, dtype=torch.float64) * 0.7 + 0.4, t, generator)
    return x, ladder.diffuse_up(x, t, generator), t


def never(*args: Tensor) -> NoReturn:
    raise AssertionError("recovery likelihood moves no labels")


def recovery_negatives(
    network: Network, kernel: str, ladder: Ladder, x: Tensor, partner: Tensor, t: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """Points and levels that `draw_negatives` gives for DRL, which keeps no chains."""
    sigma = 0.1 * ladder.variance.sqrt().clamp(min=0.01)
    none = Chains.start(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    drawn = draw_negatives(
        drl_config(kernel), network, KERNELS[kernel], ladder, none, sigma, x, t, partner, seeded(seed), never
    )
    return drawn.x, drawn.t


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LADDERS)
def test_recovery_negatives_lie_at_the_levels_of_the_data(kernel: str, name: str) -> None:
    ladder = LADDERS[name]
    network = Network(ladder.levels)
    x, partner, t = pairs(ladder, 30, seeded(7))
    negatives, levels = recovery_negatives(network, kernel, ladder, x, partner, t, seed=8)
    assert torch.equal(levels, t)
    assert negatives.shape == x.shape and negatives.dtype == x.dtype and not negatives.requires_grad
    assert bool(torch.isfinite(negatives).all()) and not torch.equal(negatives, x)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", LADDERS)
def test_recovery_likelihood_is_contrastive_divergence_on_pairs(kernel: str, name: str) -> None:
    """The parameter gradients of DRL and of Gibbs-CD on the bivariate EBM of (x_t, x_(t+1)) are the same numbers."""
    ladder = LADDERS[name]
    network = Network(ladder.levels)
    x, partner, t = pairs(ladder, 30, seeded(9))

    negatives, levels = recovery_negatives(network, kernel, ladder, x, partner, t, seed=10)
    recovery = torch.autograd.grad(network(x, t).mean() - network(negatives, levels).mean(), list(network.parameters()))

    alpha = (ladder.abar[1:] / ladder.abar[:-1])[t].unsqueeze(1)

    def bivariate(lower: Tensor, upper: Tensor) -> Tensor:
        return network(lower, t) + ((upper - alpha.sqrt() * lower) ** 2 / (2 * (1 - alpha))).sum(1)

    # One Gibbs sweep from the observed pair: Langevin steps on the lower point, then an exact draw of the upper. The
    # step is stated for y = sqrt(alpha) x, so that in x it is longer.
    sigma = (0.1 * ladder.variance.sqrt().clamp(min=0.01))[t] / alpha.squeeze(1).sqrt()
    generator = seeded(10)
    lower, _info = langevin.run(
        KERNELS[kernel], lambda y: bivariate(y, partner), partner / alpha.sqrt(), sigma, 5, generator
    )
    noise = torch.randn(lower.shape, generator=generator, dtype=lower.dtype)
    upper = alpha.sqrt() * lower + (1 - alpha).sqrt() * noise
    divergence = torch.autograd.grad(
        bivariate(x, partner).mean() - bivariate(lower, upper).mean(), list(network.parameters())
    )
    torch.testing.assert_close(lower, negatives, rtol=0, atol=1e-12)
    torch.testing.assert_close(recovery, divergence, rtol=0, atol=1e-12)
    assert max(float(g.abs().max()) for g in recovery) > 1e-3


def gaussian_conditional(ladder: Ladder, t: int, upper: Tensor) -> tuple[Tensor, float, Callable[..., Tensor]]:
    """For N(.4, .7^2) data: mean (n, 2) and sd of x_t given x_(t+1), and the energy of x_t."""
    mean = math.sqrt(float(ladder.abar[t])) * 0.4
    variance = float(ladder.abar[t]) * 0.7**2 + float(ladder.variance[t])
    shrink, added = float(ladder.alpha[t + 1].sqrt()), float(ladder.step_variance[t + 1])
    precision = 1 / variance + shrink**2 / added
    centre = (mean / variance + shrink * upper / added) / precision
    return centre, precision**-0.5, lambda x, s: ((x - mean) ** 2).sum(1) / (2 * variance)


Conditional = Callable[[mgms.Energy, Ladder, Tensor, Tensor], langevin.PlainEnergy]


def conditional_z(build: Conditional, ladder: Ladder, t: int) -> tuple[list[float], float]:
    """z-scores of chains that start from exact draws of p(x_t | x_(t+1)), and their mean acceptance."""
    n, generator = 20_000, seeded(11)
    levels = torch.full((n,), t)
    data = torch.randn(n, 2, generator=generator, dtype=torch.float64) * 0.7 + 0.4
    upper = ladder.diffuse(data, levels + 1, generator)
    centre, sd, energy = gaussian_conditional(ladder, t, upper)
    exact = centre + sd * torch.randn(n, 2, generator=generator, dtype=torch.float64)

    x, info = langevin.run(langevin.mala, build(energy, ladder, levels, upper), exact, 1.5 * sd, 10, generator)
    u = (x - centre) / sd
    z = [z_score(x[:, 0], math.sqrt(float(ladder.abar[t])) * 0.4)]  # marginally, x_t is diffused data
    for i in range(2):
        z += [z_score(u[:, i], 0.0), z_score(u[:, i] ** 2, 1.0), z_score(u[:, i] * upper[:, i], 0.0)]
    return z, float(info.accept_prob.mean())


def wrong_variance(energy: mgms.Energy, ladder: Ladder, t: Tensor, upper: Tensor) -> langevin.PlainEnergy:
    """All the noise of level t + 1 where that of one step belongs."""
    shrink, v = ladder.alpha.sqrt()[t + 1].unsqueeze(1), ladder.variance[t + 1]
    return lambda x: energy(x, t) + (upper - shrink * x).square().sum(1) / (2 * v)


def no_shrinkage(energy: mgms.Energy, ladder: Ladder, t: Tensor, upper: Tensor) -> langevin.PlainEnergy:
    v = ladder.step_variance[t + 1]
    return lambda x: energy(x, t) + (upper - x).square().sum(1) / (2 * v)


@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize("t", [1, 3])
def test_the_conditional_is_the_right_density(name: str, t: int) -> None:
    """With Gaussian data p(x_t | x_(t+1)) is Gaussian in closed form: exact draws of it stay exact under MALA."""
    z, acceptance = conditional_z(conditional, LADDERS[name], t)
    assert 0.5 < acceptance < 0.8
    assert max(map(abs, z)) < SIGMAS


@pytest.mark.parametrize("fault", [wrong_variance, no_shrinkage])
def test_a_wrong_conditional_is_caught(fault: Conditional) -> None:
    z, _acceptance = conditional_z(fault, LADDERS["with a floor"], 2)
    assert max(map(abs, z)) > 10
