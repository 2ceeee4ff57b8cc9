"""The samplers keep their targets, and the checks notice when a sampler does not.

Chains start from exact draws of a closed-form target and take a few steps. A right sampler leaves them exact draws,
so every mean over the chains has a known expectation; the chains are independent, so its standard error is the
sample's own, with no correction for autocorrelation, no burn-in and no tolerance to tune. A check fails beyond 5
standard errors: of the roughly 400 such numbers here, all together exceed 5 by chance with probability 2e-4, and the
seeds are fixed besides. The same checks are then given samplers with a planted fault and must catch each of them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from daebm.errors import InputError
from daebm.samplers import langevin, mgms
from daebm.samplers.langevin import KERNELS, Info, Kernel, State
from daebm.samplers.mgms import LabelInfo, LabelMove
from daebm.targets import Gaussian, LabelledLadder, Mixture, Skewed, Target

SIGMAS = 5.0
CAUGHT = 10.0  # a planted fault must be seen with a margin, not just beyond 5

EULER = 0.5772156649015329
ZETA3 = 1.2020569031595942


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def z_scores(values: Tensor, expected: Tensor) -> Tensor:
    """Standard errors between the column means of values (n, k) and their expectations (k,)."""
    return (values.mean(0) - expected) / (values.std(0) / math.sqrt(len(values)))


def normal_cdf(z: Tensor) -> Tensor:
    return torch.special.ndtr(z)


def statistics(target: Target, x: Tensor) -> tuple[Tensor, Tensor]:
    """Three moments and a share per coordinate: values (n, 4 d) and their exact expectations (4 d,)."""
    x = x.double()
    if isinstance(target, Skewed):
        u = x / target.scale
        one = torch.ones(target.dimension, dtype=torch.float64)
        values = [u, (u - EULER) ** 2, (u - EULER) ** 3, (u < 0).double()]
        exact = [EULER * one, math.pi**2 / 6 * one, 2 * ZETA3 * one, math.exp(-1) * one]
    else:
        parts = target.components if isinstance(target, Mixture) else [target]
        w = target.weights.double() if isinstance(target, Mixture) else torch.ones(1, dtype=torch.float64)
        m = torch.stack([part.mean.double() for part in parts])
        v = torch.stack([part.sd.double() for part in parts]) ** 2
        centre = w @ m
        m = m - centre
        u = x - centre
        values = [u, u**2, u**3, (u < 0.5).double()]
        moments = [m, m**2 + v, m**3 + 3 * m * v, normal_cdf((0.5 - m) / v.sqrt())]
        exact = [w @ moment for moment in moments]
    return torch.cat(values, dim=1), torch.cat(exact)


# ------------------------------------------------------------------------------------------------------ one energy


class Case(NamedTuple):
    """A target and a step size at which MALA accepts .5 to .8 of its proposals, so that a wrong ratio shows."""

    target: Target
    sigma: float


def cases(dtype: torch.dtype = torch.float64) -> dict[str, Case]:
    def gaussian(mean: list[float], sd: list[float]) -> Gaussian:
        return Gaussian(torch.tensor(mean, dtype=dtype), torch.tensor(sd, dtype=dtype))

    modes = [gaussian([-1.0, 0.5], [0.6, 0.8]), gaussian([1.2, -0.3], [0.4, 1.0])]
    return {
        "gaussian": Case(gaussian([0.0, 1.0, -2.0, 5.0], [0.35, 0.5, 1.0, 2.0]), 0.6),
        "skewed": Case(Skewed(2, scale=0.4), 0.48),
        "mixture": Case(Mixture(torch.tensor([0.3, 0.7], dtype=dtype), modes), 0.8),
    }


class Outcome(NamedTuple):
    """max |z| over all statistics, and the mean acceptance probability."""

    largest: float
    acceptance: float


def exact_start(kernel: Kernel, case: Case, seed: int, dtype: torch.dtype = torch.float64) -> Outcome:
    """20,000 chains from exact draws, 12 steps, all statistics of the case's target."""
    generator = seeded(seed)
    x = case.target.sample(20_000, generator).to(dtype)
    x, info = langevin.run(kernel, case.target, x, case.sigma, 12, generator)
    return Outcome(float(z_scores(*statistics(case.target, x)).abs().max()), float(info.accept_prob.mean()))


def metropolis(log_ratio: Callable[[State, State, Tensor, Tensor], Tensor]) -> Kernel:
    """A Langevin proposal accepted by any given log ratio of (old, new, eps, sigma): the mould of the faults."""

    def kernel(
        energy: langevin.PlainEnergy, state: State, sigma: Tensor, eps: Tensor, log_u: Tensor
    ) -> tuple[State, Info]:
        step = sigma.unsqueeze(1)
        new = langevin.init(energy, state.x - step**2 / 2 * state.grad + step * eps)
        log_r = log_ratio(state, new, eps, step)
        accept = log_u < log_r
        rows = accept.unsqueeze(1)
        state = State(
            torch.where(rows, new.x, state.x),
            torch.where(accept, new.energy, state.energy),
            torch.where(rows, new.grad, state.grad),
        )
        return state, Info(log_r.clamp(max=0).exp(), torch.zeros_like(accept))

    return kernel


def half_square(eps: Tensor) -> Tensor:
    return eps.square().sum(1) / 2


def textbook_ratio(old: State, new: State, eps: Tensor, step: Tensor) -> Tensor:
    back = -eps + step / 2 * (old.grad + new.grad)
    return old.energy - new.energy + half_square(eps) - half_square(back)


def energy_only_ratio(old: State, new: State, eps: Tensor, step: Tensor) -> Tensor:
    return old.energy - new.energy


def squared_step_ratio(old: State, new: State, eps: Tensor, step: Tensor) -> Tensor:
    back = -eps + step**2 / 2 * (old.grad + new.grad)
    return old.energy - new.energy + half_square(eps) - half_square(back)


KERNEL_FAULTS: dict[str, Kernel] = {
    "no Metropolis step": langevin.langevin,
    "proposal ratio forgotten": metropolis(energy_only_ratio),
    "sigma^2 where sigma belongs": metropolis(squared_step_ratio),
}


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mala_keeps_its_target(name: str, dtype: torch.dtype) -> None:
    outcome = exact_start(langevin.mala, cases(dtype)[name], seed=1, dtype=dtype)
    assert 0.5 < outcome.acceptance < 0.8  # where the ratio matters: the checks below have power
    assert outcome.largest < SIGMAS


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_exact_start_catches_a_faulty_kernel(name: str, fault: str) -> None:
    assert exact_start(KERNEL_FAULTS[fault], cases()[name], seed=1).largest > CAUGHT


def test_mala_keeps_its_target_with_a_step_size_per_chain() -> None:
    """A step that differs between chains (the levels of MGMS) but not with x must not disturb anything."""
    target = cases()["skewed"].target
    generator = seeded(2)
    x = target.sample(20_000, generator)
    sigma = torch.tensor([0.2, 0.6], dtype=torch.float64).repeat(10_000)
    x, info = langevin.run(langevin.mala, target, x, sigma, 12, generator)
    assert info.accept_prob[::2].mean() > info.accept_prob[1::2].mean() + 0.2
    for half in (x[::2], x[1::2]):
        assert z_scores(*statistics(target, half)).abs().max() < SIGMAS


@pytest.mark.parametrize("name", cases())
def test_mala_agrees_with_the_textbook_ratio(name: str) -> None:
    """The package avoids the cancellation of two squares; here they are written out. Also keeps the mould honest."""
    target, sigma = cases()[name]
    ends = []
    for kernel in (langevin.mala, metropolis(textbook_ratio)):
        x, info = langevin.run(kernel, target, target.sample(2_000, seeded(3)), sigma, 12, seeded(4))
        ends.append((x, info.accept_prob))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-9)


def log_flow(kernel: Kernel, target: Target, x: Tensor, y: Tensor, sigma: float) -> Tensor:
    """log p(x) q(x -> y) a(x -> y) up to a constant, a being what the kernel reports for the proposal y."""
    state = langevin.init(target, x)
    eps = (y - x + sigma**2 / 2 * state.grad) / sigma
    step = torch.full((len(x),), sigma, dtype=x.dtype)
    _state, info = kernel(target, state, step, eps, torch.zeros(len(x), dtype=x.dtype))
    return -state.energy - half_square(eps) + info.accept_prob.log()


@pytest.mark.parametrize("name", cases())
def test_mala_is_in_detailed_balance(name: str) -> None:
    target, sigma = cases()[name]
    x, y = target.sample(500, seeded(5)), target.sample(500, seeded(6))
    y = x + 0.5 * (y - x)  # pairs near enough for both flows to be ordinary numbers

    def gap(kernel: Kernel) -> Tensor:
        return log_flow(kernel, target, x, y, sigma) - log_flow(kernel, target, y, x, sigma)

    assert gap(langevin.mala).abs().max() < 1e-10
    for ratio in (energy_only_ratio, squared_step_ratio):
        assert gap(metropolis(ratio)).abs().median() > 1e-2


def test_unadjusted_langevin_keeps_its_own_law_and_not_the_target() -> None:
    """On a Gaussian it is an AR(1): variance sd^2 / (1 - sigma^2 / (4 sd^2)), a closed form of its bias."""
    sigma = 0.6
    target = cases()["gaussian"].target
    assert isinstance(target, Gaussian)
    own = Gaussian(target.mean, target.sd / (1 - sigma**2 / (4 * target.sd**2)).sqrt())
    generator = seeded(7)
    x, info = langevin.run(langevin.langevin, target, own.sample(40_000, generator), sigma, 12, generator)
    assert z_scores(*statistics(own, x)).abs().max() < SIGMAS
    assert z_scores(*statistics(target, x)).abs().max() > CAUGHT
    assert bool((info.accept_prob == 1).all()) and not info.nonfinite.any()


# ---------------------------------------------------------------------------------------------- a ladder of energies

LEVELS = LabelledLadder(
    torch.tensor([0.3, 0.1, 0.25, 0.15, 0.2], dtype=torch.float64),
    [
        Gaussian(torch.tensor([0.3, -0.3], dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)),
        Skewed(2, scale=0.4),
        Gaussian(torch.tensor([0.8, 0.2], dtype=torch.float64), torch.tensor([1.0, 0.7], dtype=torch.float64)),
        Skewed(2, scale=1.0),
        Gaussian(torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.6, 1.2], dtype=torch.float64)),
    ],
)
LEVEL_SIGMA = torch.tensor([0.6, 0.5, 1.1, 1.2, 1.9], dtype=torch.float64)
TOP = len(LEVELS.levels) - 1
MOVES = {"full": mgms.full(TOP), "block": mgms.block(TOP, 3), "local": mgms.local(TOP)}

Advance = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""Fifteen transitions of Algorithm 2, or of a faulty relative, from (x, t)."""


class JointOutcome(NamedTuple):
    """max |z| over the level counts, and over the statistics of x given the level."""

    levels: float
    positions: float


def joint_exact_start(advance: Advance, seed: int) -> JointOutcome:
    """40,000 chains from exact draws of (x, t). Both parts are needed: some faults show in only one of them."""
    generator = seeded(seed)
    x, t = advance(*LEVELS.sample(40_000, generator), generator)
    counts = z_scores(nn.functional.one_hot(t, TOP + 1).double(), LEVELS.weights)
    given = [z_scores(*statistics(level, x[t == k])) for k, level in enumerate(LEVELS.levels)]
    return JointOutcome(float(counts.abs().max()), float(torch.cat(given).abs().max()))


def by_transitions(move: LabelMove, kernel: Kernel = langevin.mala) -> Advance:
    def advance(x: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for _ in range(15):
            x, t, info = mgms.transition(kernel, LEVELS, x, t, LEVEL_SIGMA, 2, move, generator)
        for k in range(TOP + 1):
            assert 0.4 < info.steps.accept_prob[info.level == k].mean() <= 1
        return x, t

    return advance


def by_stale_cache(x: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Energy and gradient survive the label move, so the next step starts from those of the old level."""
    state = langevin.init(lambda y: LEVELS(y, t), x)
    for _ in range(15):
        at = t
        for _ in range(2):
            eps = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            log_u = torch.rand(len(x), generator=generator, dtype=x.dtype).log()
            state, _info = langevin.mala(lambda y, at=at: LEVELS(y, at), state, LEVEL_SIGMA[t], eps, log_u)
        t = MOVES["full"](LEVELS, state.x, t, generator).t
    return state.x, t


def centred_block(
    energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None
) -> LabelInfo:
    """Draws t from p(t | x) among t - 1, t, t + 1: the move back looks at another set."""
    labels = t.unsqueeze(1) + torch.arange(-1, 2)
    valid = (labels >= 0) & (labels <= TOP)
    u = mgms.label_energies(energy, x, labels.clamp(0, TOP))
    chosen = torch.multinomial(torch.softmax(torch.where(valid, -u, -torch.inf), 1), 1, generator=generator)
    return LabelInfo(labels.gather(1, chosen).squeeze(1), torch.zeros_like(t))


def inward_local(energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """At the ends always proposes inwards, and accepts as if that proposal had probability 1/2."""
    proposal = t + 2 * torch.randint(2, t.shape, generator=generator) - 1
    proposal = torch.where(t == 0, 1, torch.where(t == TOP, TOP - 1, proposal))
    u = mgms.label_energies(energy, x, torch.stack([t, proposal], dim=1))
    accept = torch.rand(len(t), generator=generator).log() < u[:, 0] - u[:, 1]
    return LabelInfo(torch.where(accept, proposal, t), torch.zeros_like(t))


def no_normaliser(energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """Draws t from energies that lack each level's log-normaliser and weight (the density scaled to peak at 1)."""
    spread = torch.tensor([0.24, 0.16, 0.7, 1.0, 1.92], dtype=x.dtype)  # product of each level's sds or scales
    constant = spread.log() - LEVELS.weights.log()
    return MOVES["full"](lambda y, s: energy(y, s) - constant[s], x, t, generator)


LADDER_FAULTS: dict[str, Advance] = {
    "no Metropolis step": by_transitions(MOVES["full"], langevin.langevin),
    "stale cache": by_stale_cache,
    "block centred on the label": by_transitions(centred_block),
    "always inwards at the ends": by_transitions(inward_local),
    "level normaliser dropped": by_transitions(no_normaliser),
}


@pytest.mark.parametrize("move", MOVES)
def test_mgms_keeps_its_joint_target(move: str) -> None:
    outcome = joint_exact_start(by_transitions(MOVES[move]), seed=11)
    assert outcome.levels < SIGMAS
    assert outcome.positions < SIGMAS


@pytest.mark.parametrize("fault", LADDER_FAULTS)
def test_exact_start_catches_a_faulty_mgms(fault: str) -> None:
    assert max(joint_exact_start(LADDER_FAULTS[fault], seed=11)) > CAUGHT
