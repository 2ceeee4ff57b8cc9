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
        values = [u, u**2, u**3, (u < 0.25).double()]
        moments = [m, m**2 + v, m**3 + 3 * m * v, torch.special.ndtr((0.25 - m) / v.sqrt())]
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

    modes = [gaussian([-0.6, 0.3], [0.35, 0.5]), gaussian([0.7, -0.2], [0.25, 0.6])]
    return {
        "gaussian": Case(gaussian([0.0, 1.0, -2.0, 5.0], [0.35, 0.5, 1.0, 2.0]), 0.6),
        "skewed": Case(Skewed(2, scale=0.4), 0.48),
        "mixture": Case(Mixture(torch.tensor([0.3, 0.7], dtype=dtype), modes), 0.5),
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


# Seen over 40 seeds: at most 3.6 for the right kernel; at least 38, 63 and 21 for these faults on any of the targets.
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
            x, t, _info = mgms.transition(kernel, LEVELS, x, t, LEVEL_SIGMA, 2, move, generator)
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


def centred_block(energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """Draws t from p(t | x) among t - 1, t, t + 1: the move back looks at another set."""
    labels = t.unsqueeze(1) + torch.arange(-1, 2)
    valid = (labels >= 0) & (labels <= TOP)
    u = mgms.label_energies(energy, x, labels.clamp(0, TOP))
    chosen = torch.multinomial(torch.softmax(torch.where(valid, -u, -torch.inf), 1), 1, generator=generator)
    return LabelInfo(x, labels.gather(1, chosen).squeeze(1), torch.zeros_like(t))


def inward_local(energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """At the ends always proposes inwards, and accepts as if that proposal had probability 1/2."""
    proposal = t + 2 * torch.randint(2, t.shape, generator=generator) - 1
    proposal = torch.where(t == 0, 1, torch.where(t == TOP, TOP - 1, proposal))
    u = mgms.label_energies(energy, x, torch.stack([t, proposal], dim=1))
    accept = torch.rand(len(t), generator=generator).log() < u[:, 0] - u[:, 1]
    return LabelInfo(x, torch.where(accept, proposal, t), torch.zeros_like(t))


def no_normaliser(energy: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
    """Draws t from energies that lack each level's log scale and log weight. Of x given t nothing is wrong."""
    spread = torch.tensor([0.24, 0.16, 0.7, 1.0, 1.92], dtype=x.dtype)  # product of each level's sds or scales
    constant = spread.log() - LEVELS.weights.log()
    return MOVES["full"](lambda y, s: energy(y, s) - constant[s], x, t, generator)


# Seen over 12 seeds: at most 3.5 for the three right moves; at least 55, 27, 30, 45 and 197 for these faults. The
# last two show in the level counts only (45 and 197 against 1.9 in x), hence both parts of the check.
LADDER_FAULTS: dict[str, Advance] = {
    "no Metropolis step": by_transitions(MOVES["full"], langevin.langevin),
    "stale cache": by_stale_cache,
    "block centred on the label": by_transitions(centred_block),
    "always inwards at the ends": by_transitions(inward_local),
    "level normaliser dropped": by_transitions(no_normaliser),
}


class Carrying:
    """The ladder with an affine map between any two levels, each level with a centre and scales of its own.

    They are near the levels' own, not equal: for a map that is exact the label would be free of x.
    """

    centre = torch.tensor([[0.2, -0.2], [0.3, 0.1], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)
    scale = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.9, 0.8], [1.4, 1.1], [1.5, 1.3]], dtype=torch.float64)

    def __init__(self, stretched: bool = True, inverted: bool = True) -> None:
        self.stretched, self.inverted = stretched, inverted

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return LEVELS(x, t)

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = self.scale[t].unsqueeze(1)
        y = (x - self.centre[t]).unsqueeze(1) / (own if self.inverted else own.sqrt())
        log_stretch = self.scale[labels].log().sum(2) - own.log().sum(2)
        return y * self.scale[labels] + self.centre[labels], log_stretch if self.stretched else 0 * log_stretch


def by_carrying(energy: Carrying, left_behind: bool = False) -> Advance:
    carry = mgms.carry(TOP, 3)

    def move(given: mgms.Energy, x: Tensor, t: Tensor, generator: torch.Generator | None) -> LabelInfo:
        info = carry(given, x, t, generator)
        return info._replace(x=x) if left_behind else info

    def advance(x: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        for _ in range(15):
            x, t, _info = mgms.transition(langevin.mala, energy, x, t, LEVEL_SIGMA, 2, move, generator)
        return x, t

    return advance


CARRY_FAULTS: dict[str, Advance] = {
    "volume forgotten": by_carrying(Carrying(stretched=False)),
    "back is not there": by_carrying(Carrying(inverted=False)),
    "x left behind": by_carrying(Carrying(), left_behind=True),
}


def test_a_label_move_that_carries_x_keeps_the_joint_target() -> None:
    outcome = joint_exact_start(by_carrying(Carrying()), seed=11)
    assert outcome.levels < SIGMAS
    assert outcome.positions < SIGMAS


@pytest.mark.parametrize("fault", CARRY_FAULTS)
def test_exact_start_catches_a_faulty_carrying_move(fault: str) -> None:
    assert max(joint_exact_start(CARRY_FAULTS[fault], seed=11)) > CAUGHT


def test_a_carrying_move_leaves_those_who_stay_and_costs_a_block() -> None:
    calls = []

    class Counted(Carrying):
        def __call__(self, x: Tensor, t: Tensor) -> Tensor:
            calls.append(len(x))
            return super().__call__(x, t)

    x, t = LEVELS.sample(200, seeded(13))
    info = mgms.carry(TOP, 3)(Counted(), x, t, seeded(14))
    stays = info.t == t
    assert calls == [600] and 20 < int(stays.sum()) < 180
    assert torch.equal(info.x[stays], x[stays]) and not torch.isclose(info.x[~stays], x[~stays]).all(1).any()


def test_only_an_energy_that_can_carry_is_carried() -> None:
    with pytest.raises(InputError, match="carry needs an energy that can carry x"):
        mgms.carry(TOP, 3)(LEVELS, torch.zeros(2, 2), torch.zeros(2, dtype=torch.long), seeded(15))


@pytest.mark.parametrize("move", MOVES)
def test_mgms_keeps_its_joint_target(move: str) -> None:
    outcome = joint_exact_start(by_transitions(MOVES[move]), seed=11)
    assert outcome.levels < SIGMAS
    assert outcome.positions < SIGMAS


@pytest.mark.parametrize("fault", LADDER_FAULTS)
def test_exact_start_catches_a_faulty_mgms(fault: str) -> None:
    assert max(joint_exact_start(LADDER_FAULTS[fault], seed=11)) > CAUGHT


RIGHT_RATIO = mgms.draft_log_ratio


class Drafted(NamedTuple):
    """The target with another width and place at every level: cheap and wrong, by half a nat or so."""

    wrong: float = 0.12

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return LEVELS(x * (1 + self.wrong) - self.wrong / 2, t) + 0.3 * t


DRAFT = Drafted()


def by_drafts(log_ratio: Callable[..., Tensor] = mgms.draft_log_ratio, draft: mgms.Energy = DRAFT) -> Advance:
    def advance(x: Tensor, t: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mgms, "draft_log_ratio", log_ratio)
            for _ in range(15):
                move, sigma = MOVES["block"], LEVEL_SIGMA
                x, t, _info = mgms.transition(langevin.mala, LEVELS, x, t, sigma, 4, move, generator, draft=draft)
        return x, t

    return advance


DRAFT_FAULTS: dict[str, Advance] = {
    "never undone": by_drafts(lambda energy, t, start, end: torch.zeros_like(start.energy)),
    "by the draft's own energy": by_drafts(lambda energy, t, start, end: start.energy - end.energy),
    "by the energy alone": by_drafts(lambda energy, t, start, end: energy(start.x, t) - energy(end.x, t)),
    "wrong way round": by_drafts(lambda *given: -RIGHT_RATIO(*given)),
}


def test_drafted_steps_keep_the_joint_target() -> None:
    outcome = joint_exact_start(by_drafts(), seed=11)
    assert outcome.levels < SIGMAS
    assert outcome.positions < SIGMAS


@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_exact_start_catches_a_faulty_draft(fault: str) -> None:
    assert max(joint_exact_start(DRAFT_FAULTS[fault], seed=11)) > CAUGHT


def test_drafts_are_kept_or_undone_as_a_whole() -> None:
    """A draft that is the energy itself is always kept; one whose end has no energy is undone and counted."""
    x, t = LEVELS.sample(2000, seeded(12))
    keywords = {"steps": 4, "move": mgms.stay}
    same = mgms.transition(langevin.mala, LEVELS, x, t, LEVEL_SIGMA, generator=seeded(1), draft=LEVELS, **keywords)
    plain = mgms.transition(langevin.mala, LEVELS, x, t, LEVEL_SIGMA, generator=seeded(1), **keywords)
    assert torch.equal(same[0], plain[0]) and torch.allclose(same[2].kept, torch.ones(2000).double())
    assert (plain[2].kept == 1).all()
    moved, _t, info = mgms.transition(
        langevin.mala, LEVELS, x, t, LEVEL_SIGMA, generator=seeded(1), draft=Drafted(), **keywords
    )
    stayed = (moved == x).all(1)
    assert 0.05 < float(stayed.double().mean()) < 0.5 and 0.5 < float(info.kept.mean()) < 0.95

    def nowhere(y: Tensor, s: Tensor) -> Tensor:
        return torch.where((y[:, 0] > 0), torch.nan, LEVELS(y, s))

    moved, _t, info = mgms.transition(
        langevin.mala, nowhere, x, t, LEVEL_SIGMA, generator=seeded(1), draft=LEVELS, **keywords
    )
    lost = (same[0][:, 0] > 0) | (x[:, 0] > 0)
    assert torch.equal(moved[lost], x[lost]) and int(info.steps.nonfinite.sum()) == int(lost.sum()) > 100
    assert (info.kept[lost] == 0).all()


def test_ladder_steps_have_power() -> None:
    """Every level's acceptance is in the range in which a wrong ratio shows."""
    generator = seeded(12)
    x, t = LEVELS.sample(20_000, generator)
    _x, _t, info = mgms.transition(langevin.mala, LEVELS, x, t, LEVEL_SIGMA, 2, MOVES["full"], generator)
    for k in range(TOP + 1):
        assert 0.5 < info.steps.accept_prob[info.level == k].mean() < 0.8


# ------------------------------------------------------------------------------- label moves as transition matrices

LABEL_ENERGY = torch.tensor([0.0, 1.0, -0.7, 0.4, 1.5], dtype=torch.float64)
LABEL_LAW = torch.softmax(-LABEL_ENERGY, 0)


def among(labels: list[int]) -> Tensor:
    """p(t | x) restricted to some labels."""
    row = torch.zeros_like(LABEL_LAW)
    row[labels] = LABEL_LAW[labels]
    return row / row.sum()


def full_matrix() -> Tensor:
    return LABEL_LAW.expand(TOP + 1, -1)


def block_matrix(size: int) -> Tensor:
    """The average over the border positions of a draw within the block that holds the label."""
    rows = []
    for i in range(TOP + 1):
        blocks = [[j for j in range(TOP + 1) if (j + offset) // size == (i + offset) // size] for offset in range(size)]
        rows.append(torch.stack([among(block) for block in blocks]).mean(0))
    return torch.stack(rows)


def local_matrix(inwards: bool = False) -> Tensor:
    matrix = torch.zeros(TOP + 1, TOP + 1, dtype=torch.float64)
    for i in range(TOP + 1):
        for j in (i - 1, i + 1):
            if 0 <= j <= TOP:
                offered = 1.0 if inwards and i in (0, TOP) else 0.5
                matrix[i, j] = offered * min(1.0, float(LABEL_LAW[j] / LABEL_LAW[i]))
    return matrix + torch.diag(1 - matrix.sum(1))


def centred_matrix() -> Tensor:
    near = [[j for j in (i - 1, i, i + 1) if 0 <= j <= TOP] for i in range(TOP + 1)]
    return torch.stack([among(labels) for labels in near])


def matrix_z(move: LabelMove, matrix: Tensor, seed: int, n: int = 100_000) -> float:
    """max |z| between the frequencies of n moves from every label and the rows of a matrix; inf if impossible."""
    t = torch.arange(TOP + 1).repeat_interleave(n)
    moved = move(lambda x, s: LABEL_ENERGY[s] + 0 * x[:, 0], torch.zeros(len(t), 1).double(), t, seeded(seed)).t
    counts = torch.bincount(t * (TOP + 1) + moved, minlength=(TOP + 1) ** 2).reshape(TOP + 1, TOP + 1)
    if counts[matrix == 0].any():
        return math.inf
    spread = (n * matrix * (1 - matrix)).sqrt()
    return float(((counts - n * matrix) / spread)[(matrix > 0) & (matrix < 1)].abs().max())


@pytest.mark.parametrize(
    ("move", "matrix"),
    [
        pytest.param(mgms.full(TOP), full_matrix(), id="full"),
        pytest.param(mgms.block(TOP, 2), block_matrix(2), id="block of 2"),
        pytest.param(mgms.block(TOP, 3), block_matrix(3), id="block of 3"),
        pytest.param(mgms.block(TOP, 8), block_matrix(8), id="block beyond the ladder"),
        pytest.param(mgms.local(TOP), local_matrix(), id="local"),
    ],
)
def test_label_moves_follow_their_exact_matrix(move: LabelMove, matrix: Tensor) -> None:
    """The frequencies are those of a matrix that is in detailed balance with p(t | x) and can reach every label."""
    flow = LABEL_LAW.unsqueeze(1) * matrix
    torch.testing.assert_close(flow, flow.T, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(LABEL_LAW @ matrix, LABEL_LAW, rtol=1e-13, atol=1e-15)
    assert bool((torch.linalg.matrix_power(matrix, TOP) > 0).all())
    assert matrix_z(move, matrix, seed=21) < SIGMAS


@pytest.mark.parametrize(
    ("move", "own", "right"),
    [
        pytest.param(centred_block, centred_matrix(), block_matrix(3), id="block centred on the label"),
        pytest.param(inward_local, local_matrix(inwards=True), local_matrix(), id="always inwards at the ends"),
    ],
)
def test_matrices_catch_a_faulty_label_move(move: LabelMove, own: Tensor, right: Tensor) -> None:
    """The fault is what it says it is, its matrix does not keep p(t | x), and it does not pass for the right move."""
    assert matrix_z(move, own, seed=21) < SIGMAS
    assert (LABEL_LAW @ own - LABEL_LAW).abs().max() > 0.01
    assert matrix_z(move, right, seed=21) > CAUGHT


@pytest.mark.parametrize(("name", "size"), [("full", 2), ("block", 3), ("block", 5), ("local", 2)])
def test_label_move_by_name(name: str, size: int) -> None:
    """By name the moves are the same; a block that holds every label is the global jump."""
    matrix = {"full": full_matrix(), "block": block_matrix(3), "local": local_matrix()}
    expected = matrix["full" if size > TOP else name]
    assert matrix_z(mgms.label_move(name, TOP, size), expected, seed=22) < SIGMAS


# ------------------------------------------------------------------------------------------------------- the contract


class Plain(nn.Module):
    """A small energy U(x) of events of any shape."""

    def __init__(self, event: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        d = math.prod(event)
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(d, 6, dtype=dtype), nn.Softplus(), nn.Linear(6, 1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.body(flat).squeeze(1) + flat.square().sum(1) / 2


class Levelled(Plain):
    """The same with a level: U(x, t)."""

    def __init__(self, event: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(event, dtype)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, TOP + 1, dtype=dtype))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.scale[t] * super().forward(x)


EVENTS = [(1,), (2,), (1, 4, 4)]
DTYPES = [torch.float32, torch.float64]


def untouched(network: nn.Module, training: bool) -> bool:
    """No parameter has a gradient and every part is still in the mode it was put in."""
    modes = [part.training == training for part in network.modules()]
    return all(modes) and all(p.grad is None and p.requires_grad for p in network.parameters())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5])
def test_kernel_contract(kernel: str, event: tuple[int, ...], dtype: torch.dtype, n: int) -> None:
    network = Plain(event, dtype).train(n == 1)
    x = torch.randn(n, *event, generator=seeded(31), dtype=dtype)
    kept = x.clone()
    x.requires_grad_()
    before = torch.get_rng_state()
    first, info = langevin.run(KERNELS[kernel], network, x, 0.3, 4, seeded(32))
    again, _info = langevin.run(KERNELS[kernel], network, x, 0.3, 4, seeded(32))
    other, _info = langevin.run(KERNELS[kernel], network, x, 0.3, 4, seeded(33))

    assert first.shape == x.shape and first.dtype == dtype and not first.requires_grad
    assert info.accept_prob.shape == (n,) and info.accept_prob.dtype == dtype
    assert bool(((info.accept_prob > 0) & (info.accept_prob <= 1)).all())
    assert info.nonfinite.shape == (n,) and not info.nonfinite.any()
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)  # all randomness came from the generator
    assert torch.equal(x, kept) and x.grad is None
    assert untouched(network, training=n == 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5])
def test_transition_contract(kernel: str, move: str, event: tuple[int, ...], dtype: torch.dtype, n: int) -> None:
    network = Levelled(event, dtype).train(n == 1)
    x = torch.randn(n, *event, generator=seeded(34), dtype=dtype)
    t = torch.arange(n) % (TOP + 1)
    sigma = LEVEL_SIGMA / 4  # float64, whatever the chains are
    kept = x.clone(), t.clone(), sigma.clone()
    x.requires_grad_()
    before = torch.get_rng_state()

    def go(seed: int) -> tuple[Tensor, Tensor, mgms.TransitionInfo]:
        return mgms.transition(KERNELS[kernel], network, x, t, sigma, 3, MOVES[move], seeded(seed))

    new_x, new_t, info = go(35)
    again_x, again_t, _info = go(35)
    other_x, _t, _info = go(36)

    assert new_x.shape == x.shape and new_x.dtype == dtype and not new_x.requires_grad
    assert new_t.shape == (n,) and new_t.dtype == torch.int64
    assert bool(((new_t >= 0) & (new_t <= TOP)).all())
    assert torch.equal(info.level, t)
    assert info.steps.accept_prob.shape == info.steps.nonfinite.shape == info.label_nonfinite.shape == (n,)
    assert torch.equal(new_x, again_x) and torch.equal(new_t, again_t) and not torch.equal(new_x, other_x)
    assert torch.equal(torch.get_rng_state(), before)
    for now, then in zip((x, t, sigma), kept, strict=True):
        assert torch.equal(now, then)
    assert untouched(network, training=n == 1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_function_and_a_module_are_the_same_energy(kernel: str) -> None:
    network = Plain((2,), torch.float64)
    x = torch.randn(6, 2, generator=seeded(37), dtype=torch.float64)
    ends = []
    for energy in (network, network.forward):
        with torch.no_grad():  # as the training loop calls it: the kernels switch gradients on for themselves
            ends.append(langevin.run(KERNELS[kernel], energy, x, 0.3, 4, seeded(38))[0])
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_gradient_per_step(kernel: str) -> None:
    calls = []

    def energy(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x.square().sum(1)

    langevin.run(KERNELS[kernel], energy, torch.zeros(3, 2), 0.1, 7, seeded(39))
    assert calls == [3] * (7 + 1)  # one at the start, one for each proposal


@pytest.mark.parametrize(("move", "labels"), [("full", TOP + 1), ("block", 3), ("local", 2)])
def test_a_transition_costs_its_steps_and_one_label_evaluation(move: str, labels: int) -> None:
    calls = []

    def energy(x: Tensor, t: Tensor) -> Tensor:
        calls.append((len(x), torch.is_grad_enabled()))
        return x.square().sum(1) * (t + 1)

    x, t = torch.zeros(3, 2), torch.tensor([0, 2, 4])
    mgms.transition(langevin.mala, energy, x, t, LEVEL_SIGMA, 7, MOVES[move], seeded(40))
    assert calls == [(3, True)] * 8 + [(3 * labels, False)]


class Asked:
    """Energies of levels that can be asked for beforehand, with a record of who asked for what."""

    def __init__(self) -> None:
        self.levels: list[Tensor] = []
        self.calls = 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return LEVELS(x, t)

    def at(self, t: Tensor) -> langevin.PlainEnergy:
        self.levels.append(t)
        return lambda x: LEVELS(x, t)


def test_an_energy_is_asked_for_its_levels_where_it_can_be() -> None:
    generator = seeded(42)
    (x, t), asked = LEVELS.sample(50, generator), Asked()
    values = mgms.at_level(asked, t)(x), mgms.at_level(LEVELS, t)(x), LEVELS(x, t)
    assert torch.equal(values[0], values[2]) and torch.equal(values[1], values[2])
    assert [given is t for given in asked.levels] == [True] and asked.calls == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("move", MOVES)
def test_levels_asked_for_beforehand_change_nothing(kernel: str, move: str) -> None:
    """Bit for bit, over transitions that change the levels; each asks once, and its label move calls the energy."""
    ends = []
    for energy in (LEVELS, asked := Asked()):
        generator = seeded(43)
        x, t = LEVELS.sample(50, generator)
        for _ in range(3):
            x, t, info = mgms.transition(KERNELS[kernel], energy, x, t, LEVEL_SIGMA, 2, MOVES[move], generator)
        ends.append((x, t, info.steps.accept_prob, generator.get_state()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert len(asked.levels) == asked.calls == 3 and not torch.equal(asked.levels[0], asked.levels[2])


def test_observe_sees_every_step() -> None:
    seen: list[tuple[int, Tensor]] = []
    x, _info = langevin.run(
        langevin.mala,
        cases()["skewed"].target,
        torch.ones(4, 2, dtype=torch.float64),
        0.4,
        5,
        seeded(41),
        lambda k, state: seen.append((k, state.x)),
    )
    assert [k for k, _x in seen] == [1, 2, 3, 4, 5]
    assert torch.equal(seen[-1][1], x)


# --------------------------------------------------------------------------------------- wrong and unbounded energies


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("energy", "shape"),
    [
        (lambda x: x.square().sum(1, keepdim=True), r"\(5, 1\)"),
        (lambda x: x.square().sum(), r"\(\)"),
        (lambda x: x.square(), r"\(5, 2\)"),
    ],
    ids=["a column", "a total", "one per coordinate"],
)
def test_an_energy_of_the_wrong_shape_is_refused(kernel: str, energy: langevin.PlainEnergy, shape: str) -> None:
    """A column would otherwise broadcast against a row and mix the chains."""
    x = torch.zeros(5, 2)
    with pytest.raises(InputError, match=r"x of shape \(5, 2\) to shape \(5,\), but it returned " + shape):
        langevin.run(KERNELS[kernel], energy, x, 0.1, 2, seeded(42))
    with pytest.raises(InputError, match=shape):
        mgms.transition(
            KERNELS[kernel],
            lambda y, t: energy(y),
            x,
            torch.zeros(5, dtype=torch.long),
            LEVEL_SIGMA,
            2,
            MOVES["full"],
            seeded(42),
        )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: langevin.run(langevin.mala, Plain((2,), torch.float32), torch.zeros(1, 2), 0.1, 0), "steps .* 0"),
        (lambda: mgms.block(4, 1), "at least 2 labels, got 1"),
        (lambda: mgms.label_move("sideways", 4, 2), "'sideways'.*full, block, local or carry"),
        (lambda: LabelledLadder(torch.ones(2), [Skewed(1)]), "1 levels.* got 2"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def inside(x: Tensor) -> Tensor:
    return (x.abs() < 1).all(1)


def fenced(value: float) -> langevin.PlainEnergy:
    """A Gaussian energy in the square |x_i| < 1 and ``value`` outside."""
    return lambda x: torch.where(inside(x), x.square().sum(1), value)


def broken_gradient(x: Tensor) -> Tensor:
    """Finite everywhere, but its gradient is NaN outside the square: 0 times the infinite slope of a root at 0."""
    return x.square().sum(1) + ((1 - x.abs().amax(1)) * inside(x)).sqrt()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "energy",
    [fenced(math.inf), fenced(-math.inf), fenced(math.nan), broken_gradient],
    ids=["inf", "-inf", "nan", "nan gradient"],
)
def test_nonfinite_proposals_are_refused_and_counted(kernel: str, energy: langevin.PlainEnergy) -> None:
    outside = []

    def watched(x: Tensor) -> Tensor:
        outside.append(~inside(x.detach()))
        return energy(x)

    x = torch.rand(50, 2, generator=seeded(43), dtype=torch.float64) - 0.5
    steps = []
    x, info = langevin.run(KERNELS[kernel], watched, x, 0.5, 20, seeded(44), lambda k, state: steps.append(state))
    assert info.nonfinite.sum() > 50
    assert torch.equal(info.nonfinite.long(), torch.stack(outside).sum(0))
    assert bool((info.accept_prob <= 1 - info.nonfinite / 20 + 1e-12).all())  # a refusal counts as acceptance 0
    for state in steps:
        assert bool(inside(state.x).all())
        assert bool(torch.isfinite(state.energy).all()) and bool(torch.isfinite(state.grad).all())


def test_overflow_is_refused() -> None:
    """A step far too long for exp(-x): float32 energies overflow, and the chain must stay where it is."""
    x = torch.full((20, 2), -3.0)
    end, info = langevin.run(langevin.mala, Skewed(2, scale=0.02), x, 5.0, 10, seeded(45))
    assert bool(torch.isfinite(end).all()) and info.nonfinite.sum() > 0


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_labels_have_probability_zero(move: str, value: float) -> None:
    """Levels 3 and 4 are unusable. They are never drawn, and each time one is looked at it is counted."""
    values = torch.tensor([0.0, 0.3, 0.1, value, value])
    x, t = torch.zeros(2_000, 1), torch.arange(2_000) % 3
    looked = []

    def energy(y: Tensor, s: Tensor) -> Tensor:
        looked.append(s)
        return values[s]

    info = MOVES[move](energy, x, t, seeded(46))
    assert info.t.max() == 2 and set(info.t.tolist()) == {0, 1, 2}
    assert info.nonfinite.sum() > 0 and info.nonfinite.max() <= 2
    if move != "block":  # a block pads itself at the ends with labels that it does not use
        assert info.nonfinite.sum() == (looked[0] > 2).sum()


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_label_stays_when_no_energy_is_finite(move: str, value: float) -> None:
    t = torch.arange(500) % (TOP + 1)
    info = MOVES[move](lambda y, s: torch.full((len(s),), value), torch.zeros(500, 1), t, seeded(47))
    assert torch.equal(info.t, t) and bool((info.nonfinite > 0).all())


# ------------------------------------------------------------------------------------------ the targets themselves


@pytest.mark.parametrize("name", cases())
def test_targets_are_sampled_exactly(name: str) -> None:
    """The starting draws have the expectations that everything above relies on."""
    target = cases()[name].target
    assert z_scores(*statistics(target, target.sample(40_000, seeded(51)))).abs().max() < SIGMAS


def test_targets_are_normalised() -> None:
    """exp(-U) integrates to 1: by a sum over a fine grid, exact to rounding for smooth densities."""
    grid = torch.linspace(-12, 30, 40_001, dtype=torch.float64)
    width = float(grid[1] - grid[0])
    one = Gaussian(torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64))
    both = Mixture(torch.tensor([0.2, 0.8], dtype=torch.float64), [one, Skewed(1, 1.3)])
    for target in (one, Skewed(1, 0.8), both):
        assert float((-target(grid.unsqueeze(1))).exp().sum()) * width == pytest.approx(1, abs=1e-9)
    for k, weight in enumerate(LEVELS.weights):
        x, t = LEVELS.levels[k].sample(3, seeded(52)), torch.full((3,), k)
        torch.testing.assert_close(LEVELS(x, t), LEVELS.levels[k](x) - weight.log())
