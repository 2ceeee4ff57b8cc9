"""Learning without chains: the losses against closed forms, the balance of the levels, the switch to likelihood."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daebm import Config, Dataset, Ladder, denoising, engine, levels, resnet
from daebm.denoising import chainless_loss, denoising_loss, draw_labelled, draw_noisy, label_loss, ordering_loss
from daebm.errors import InputError
from daebm.ladder import per_chain
from daebm.levels import balance_levels, deserted, replace_stranded, settle
from daebm.resnet import LevelResNet
from daebm.samplers.mgms import Energy, blocks
from daebm.spacing import level_balance, neighbour_acceptance
from daebm.training import Setup, advance, begin, denoise, learning_rate, relate, step

EVENT, D = (1, 4, 4), 16
FACTOR = torch.randn(D, D, generator=torch.Generator().manual_seed(0)) / math.sqrt(D)


def gaussian_images(n: int, seed: int) -> Tensor:
    """Correlated Gaussian images of mean 0.2 and variance about 1."""
    draws = torch.randn(n, D, generator=torch.Generator().manual_seed(seed)) @ FACTOR + 0.2
    return draws.reshape(n, *EVENT)


# The loss.

LADDER = Ladder.geometric(D, floor=0.2, top=4)
DRAWS = 4000


def noise_sd(t: Tensor, like: Tensor) -> Tensor:
    return per_chain(LADDER.variance.sqrt(), t, like)


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
    found = [denoising_loss(Scaled(exact, k), x, levels, eps, noise_sd(levels, x)).item() for k in factors]
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
    parts = [denoising_loss(network, x[t == k], t[t == k], eps[t == k], noise_sd(t[t == k], x)) for k in range(5)]
    torch.testing.assert_close(denoising_loss(network, x, t, eps, noise_sd(t, x)), torch.stack(parts).mean())


def test_weights_follow_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient, a derivative through a derivative, against central differences in float64.

    Steps of 1e-5 are right to about 1e-9 by rounding and curvature; the gradients compared are of order .01. Weights of
    11 bits would not feel such a step.
    """
    monkeypatch.setattr(resnet, "eleven_bits", lambda weight: weight)
    torch.manual_seed(3)
    network = LevelResNet(gaussian_images(100, 1), LADDER, width=4).double()
    nn.init.normal_(network.inner.head.weight, std=0.1)
    generator = torch.Generator().manual_seed(4)
    t = torch.arange(LADDER.levels)
    x, eps = (torch.randn(len(t), *EVENT, generator=generator, dtype=torch.float64) for _ in range(2))

    def loss() -> Tensor:
        return denoising_loss(network, x, t, eps, noise_sd(t, x))

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


# The order of the levels.

DOUBLING = 0.5 * 2.0 ** torch.arange(5, dtype=torch.float64)  # variances of levels N(0, v I) in two dimensions
BATCHES, PAIRS = 100, 200


def doubling(x: Tensor, t: Tensor) -> Tensor:
    """The exact energies."""
    v = DOUBLING[t]
    return x.square().sum(1) / (2 * v) + v.log()


def ordering(energy: Energy, swapped: bool = False) -> Tensor:
    """The loss of each of 100 batches of pairs; the same draws in every call. Has the gradient of the energy."""
    generator = torch.Generator().manual_seed(10)
    found = []
    for _ in range(BATCHES):
        t = torch.randint(4, (PAIRS,), generator=generator)
        x, y = (
            DOUBLING[k].sqrt().unsqueeze(1) * torch.randn(PAIRS, 2, generator=generator, dtype=torch.float64)
            for k in (t, t + 1)
        )
        found.append(ordering_loss(energy, *((y, x) if swapped else (x, y)), t, t + 1))
    return torch.stack(found)


class Carried:
    """The exact energies, or others, with a map between levels that makes up for half of the change of scale."""

    def __init__(self, energy: Energy = doubling, stretched: bool = True) -> None:
        self.energy, self.stretched = energy, stretched

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return self.energy(x, t)

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        factor = (DOUBLING[labels] / DOUBLING[t].unsqueeze(1)) ** 0.25
        return factor.unsqueeze(2) * x.unsqueeze(1), 2 * factor.log() * self.stretched


def standard_errors(values: Tensor) -> float:
    """Of the mean of independent values from zero."""
    return float(values.mean() / values.std() * math.sqrt(len(values)))


def test_the_order_of_exact_levels_costs_what_it_must() -> None:
    """|x|^2 / 2 is exponential with mean v, so s = U(x, t) + U(y, t + 1) - U(x, t + 1) - U(y, t) is Laplace, with the
    density 2/3 e^(-2 s) above and 2/3 e^s below zero. Then E log(1 + e^s) = (4 log 2 - 1) / 3, at any t."""
    assert abs(standard_errors(ordering(doubling) - (4 * math.log(2) - 1) / 3)) < 5


def test_the_masses_of_the_levels_cancel() -> None:
    """Float64: constants of 1000 nats leave 1e-12."""
    constant = torch.tensor([0.0, 1000.0, -300.0, 7.0, -1000.0], dtype=torch.float64)
    shifted = ordering(lambda x, t: doubling(x, t) + constant[t])
    torch.testing.assert_close(shifted, ordering(doubling), rtol=0, atol=1e-11)


ORDERING_FAULTS: dict[str, Any] = {
    "scaled": lambda: ordering(lambda x, t: 1.5 * doubling(x, t)),
    "weakened": lambda: ordering(lambda x, t: 0.5 * doubling(x, t)),
    "sign flipped": lambda: ordering(lambda x, t: -doubling(x, t)),
    "swapped": lambda: ordering(doubling, swapped=True),
    "level before": lambda: ordering(lambda x, t: doubling(x, (t - 1).clamp(min=0))),
    "blind": lambda: ordering(lambda x, t: doubling(x, torch.zeros_like(t))),
}


LABELLING_FAULTS: dict[str, Energy] = {
    "scaled": Carried(lambda x, t: 1.5 * doubling(x, t)),
    "sign flipped": Carried(lambda x, t: -doubling(x, t)),
    "masses unequal": Carried(lambda x, t: doubling(x, t) + t / 2),
    "volume forgotten": Carried(stretched=False),
    "blind": Carried(lambda x, t: doubling(x, torch.zeros_like(t))),
}


def labelling(energy: Energy) -> Tensor:
    """The loss of each of 100 batches of exact draws in blocks of 3; the same draws in every call."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(BATCHES):
        t = torch.randint(5, (PAIRS,), generator=generator)
        x = DOUBLING[t].sqrt().unsqueeze(1) * torch.randn(PAIRS, 2, generator=generator, dtype=torch.float64)
        found.append(label_loss(energy, x, t, *blocks(t, 4, 3, generator)))
    return torch.stack(found)


@pytest.mark.parametrize("fault", LABELLING_FAULTS)
def test_exact_energies_tell_the_level_best(fault: str) -> None:
    """Whatever the map is, as long as its volume is counted."""
    exact = labelling(Carried())
    assert standard_errors(labelling(LABELLING_FAULTS[fault]) - exact) > 5


def test_the_loss_of_a_label_is_that_of_a_draw() -> None:
    """By hand for two points: level 1 of a block 0..2, and level 4 of a block that has levels 3 and 4 only."""
    energy, x = Carried(), torch.tensor([[0.3, -1.0], [2.0, 1.0]], dtype=torch.float64)
    t, labels = torch.tensor([1, 4]), torch.tensor([[0, 1, 2], [3, 4, 4]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    expected = []
    for i, choices in enumerate(([0, 1, 2], [3, 4])):
        factors = [float((DOUBLING[s] / DOUBLING[t[i]]) ** 0.25) for s in choices]
        points = torch.stack([f * x[i] for f in factors])
        log_p = [
            -float(u) + 2 * math.log(f) for u, f in zip(doubling(points, torch.tensor(choices)), factors, strict=True)
        ]
        own = log_p[choices.index(int(t[i]))]
        expected.append(math.log(sum(math.exp(v - own) for v in log_p)))
    assert float(label_loss(energy, x, t, labels, valid)) == pytest.approx(sum(expected) / 2, rel=1e-12)


@pytest.mark.parametrize("fault", ORDERING_FAULTS)
def test_a_wrong_change_with_the_level_has_a_larger_loss(fault: str) -> None:
    """On the same draws, by more than 5 standard errors; an energy that does not see the level costs log 2."""
    assert standard_errors(ORDERING_FAULTS[fault]() - ordering(doubling)) > 5


@pytest.mark.parametrize("direction", ["scale", "level", "shape"])
def test_the_loss_is_flat_at_the_exact_energies(direction: str) -> None:
    """The slope along any direction is a mean of numbers of mean zero there, and not on either side of it."""

    def slopes(at: float) -> Tensor:
        extra = torch.full((BATCHES,), at, dtype=torch.float64, requires_grad=True)
        batch = iter(extra.repeat_interleave(2))  # the energy is asked twice a batch: own levels, other levels

        def energy(x: Tensor, t: Tensor) -> Tensor:
            change = {"scale": doubling(x, t), "level": doubling(x, t) * (t == 2), "shape": t * x[:, 0].square() / 8}
            return doubling(x, t) + next(batch) * change[direction]

        (grad,) = torch.autograd.grad(ordering(energy).sum(), extra)
        return grad

    assert abs(standard_errors(slopes(0.0))) < 5
    assert standard_errors(slopes(0.5)) > 5 and standard_errors(slopes(-0.5)) < -5


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
    return Config(**(values | {"experiment": "test", "preset": "test", "method": "da"} | changes))


def setup(**changes: Any) -> Setup:
    """Data that are Gaussian, so that the network at its start has all levels balanced."""
    data = gaussian_images(3000, 5)
    return begin(config(**changes), Dataset("gaussian", data, data[:10]))


SHIFTS = torch.tensor([3.0, -40.0, 7.0, 300.0, -5.0])


def balanced(it: Setup, shifts: Tensor) -> Tensor:
    """Constants after the balance of a network whose constants were off by ``shifts``, less that of level 0."""
    with torch.no_grad():
        it.state.network.constant += shifts
    settle(it)
    constant: Tensor = it.state.network.constant.detach()
    return constant - constant[0]


def worst_case(chains: int, acceptance: float, top: int = 4) -> float:
    """Five standard errors, or more, of constants that are balanced on ``chains`` exact draws per level.

    An edge's log ratio is where two means over n chains, of numbers in [0, 1], agree: their difference has a variance
    of 2 / (4 n) at most and a slope of the edge's acceptance a. Errors of T edges add up, and neighbours share
    chains: a variance of 3 T / (2 n a^2) at most. Chains that are seen more than once can only lower it.
    """
    return 5 * math.sqrt(3 * top / (2 * chains)) / acceptance


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_share_of_the_difference_is_taken_back(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Constants that are off by known amounts, on exact draws of levels that are otherwise equal.

    How many chains a level has must not matter. Float32 at 400 nats is right to 2e-5, and five edges add up.
    """
    monkeypatch.setattr(levels, "HISTOGRAM", ())
    it = setup()
    t = torch.arange(5).repeat_interleave(torch.tensor([300, 900, 200, 500, 1100]))
    x = it.ladder.diffuse(it.data, t, it.state.generator)
    balance_levels(it, x, t)
    constant = it.state.network.constant
    equal = constant.detach().clone()
    with torch.no_grad():
        constant += SHIFTS
    balance_levels(it, x, t, share)
    torch.testing.assert_close(
        constant.detach(), equal + (1 - share) * (SHIFTS - SHIFTS[0]) + SHIFTS[0], rtol=0, atol=5e-4
    )
    # Each on its own level: the Gaussian data have nothing else to take back than sampling error.
    acceptance = neighbour_acceptance(it.state.network, x, t, 4)
    assert float(equal.abs().max()) < worst_case(200, float(acceptance.min()))


def test_a_crowded_level_is_raised() -> None:
    """Equal chains in all edges but not in number: a level with k times its share rises by k - 1 of a share."""
    counts = torch.tensor([300, 900, 200, 500, 1100])
    it = setup()
    t = torch.arange(5).repeat_interleave(counts)
    x = it.ladder.diffuse(it.data, t, it.state.generator)
    constants = []
    for here in (t, t.sort(descending=True).values):  # the second time other chains, with masses of their own
        it.state.network.constant.detach().zero_()
        ratio, _acceptance = level_balance(it.state.network, x, here, 4)
        balance_levels(it, x, here, 0.5)
        change = it.state.network.constant.detach() - 0.5 * torch.cat([torch.zeros(1), ratio.cumsum(0).float()])
        constants.append(change)
    shares, nats = counts / 600 - 1, sum(nats for _part, nats in levels.HISTOGRAM)
    for change in constants:
        torch.testing.assert_close(change, 0.5 * nats * (shares - shares[0]), rtol=1e-4, atol=1e-4)


def test_stranded_chains_begin_anew_at_their_levels() -> None:
    """As diffused data of the level that they had. Others are left alone: the refused that are as low as data (a narrow
    kind of them), and the high whose steps are accepted (they are on their way down)."""
    it = setup(margin=1000.0, level_rate=0.3, store=3000)
    chains, before = it.state.chains, it.state.chains.x.clone()
    replace_stranded(it)
    assert it.state.replaced == 0 and torch.equal(chains.x, before)
    refused, high = torch.arange(0, 2000), torch.arange(1000, 3000)
    chains.x[high] += 1e3
    chains.x[1999] = torch.nan
    chains.ease[refused], kept, t = 1e-3, chains.x.clone(), chains.t.clone()
    replace_stranded(it)
    changed = (chains.x != kept).flatten(1).any(1).nonzero().flatten()
    assert torch.equal(changed, torch.arange(1000, 2000)) and it.state.replaced == 1000 and torch.equal(chains.t, t)
    # Data at level T vary by its noise alone, nearly: those of level 0 would not.
    now, fresh = it.state.network, it.ladder.diffuse(it.data[:1000], t[1000:2000], it.state.generator)
    with torch.no_grad():
        gap = now(chains.x[1000:2000], t[1000:2000]) - now(fresh, t[1000:2000])
    for level in range(it.ladder.levels):
        own = gap[t[1000:2000] == level]
        assert abs(float(own.mean())) < 5 * float(own.std()) / math.sqrt(len(own))
    advance(it)  # the rest of the state goes on


class Walled(nn.Module):
    """A network's energy, and beyond 10 in the first pixel a wall so steep that no step is ever short enough."""

    def __init__(self, inner: LevelResNet) -> None:
        super().__init__()
        self.inner, self.constant = inner, inner.constant

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        u: Tensor = self.inner(x, t) + 1e7 * (x.flatten(1)[:, 0] - 10).clamp(min=0)
        return u


@pytest.mark.parametrize("margin", [1000.0, 0.0])
def test_a_chain_that_is_held_far_above_the_data_begins_anew_in_training(margin: float) -> None:
    """Known after some sixty moves; four chains in five move. Planted: without a margin it is held for ever."""
    settings = config(denoise=0, iterations=200, level_rate=0.3, adapt_every=10, step_size=1.2, margin=margin, clip=1.0)
    data = gaussian_images(3000, 5)
    ladder = Ladder.geometric(D, floor=0.2, top=4)
    it = begin(settings, Dataset("gaussian", data, data[:10]), Walled(LevelResNet(data, ladder, width=4)))
    chains = it.state.chains
    chains.x[3, 0, 0, 0] = 11.0
    for _ in range(60):
        step(it)
    assert it.state.replaced == 0 and float(chains.x[3, 0, 0, 0]) == 11
    for _ in range(60):
        step(it)
    assert it.state.replaced == bool(margin) and bool(chains.x[3, 0, 0, 0] < 10) == bool(margin)
    others = chains.ease[torch.arange(len(chains)) != 3]
    assert float(others.min()) > 0.4 and float(others.max()) < 0.95  # as often as steps are accepted


def test_deserted_levels_are_said() -> None:
    """400 chains on 68 levels: 13 levels around one should have 76, and 7 at an end 41. Chance leaves none empty."""
    everywhere = torch.arange(400) * 68 // 400
    assert deserted(everywhere, 68) == []
    (sentence,) = deserted(everywhere.clamp(max=33), 68)
    assert sentence.startswith("no chain is near levels 40 to 67 (of 0 to 67)") and "relate" in sentence
    assert deserted(everywhere.clamp(max=61), 68) == []  # the last ones have neighbours
    assert deserted(torch.zeros(100, dtype=torch.long), 68) == []  # too few to tell


def test_known_shifts_are_taken_back_exactly() -> None:
    """The same chains are balanced in the same way wherever the constants stood, which have no slope.

    Float64: no decision of a chain hangs on the 1e-13 by which 400 nats are wrong, nor does the bisection.
    """
    ends = []
    for shifts in (SHIFTS, torch.zeros(5)):
        it = setup()
        it.data, it.state.network = it.data.double(), it.state.network.double()
        ends.append(balanced(it, shifts))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chains", [32, 256])
def test_balanced_levels_are_balanced_within_sampling_error(monkeypatch: pytest.MonkeyPatch, chains: int) -> None:
    """Exact constants are all equal, and chains that start from Gaussian data are exact from the first step on."""
    monkeypatch.setattr(levels, "SETTLE_CHAINS", chains)
    it = setup(seed=1)
    t = torch.arange(3000) % it.ladder.levels
    acceptance = neighbour_acceptance(it.state.network, it.ladder.diffuse(it.data, t, it.state.generator), t, 4)
    found = balanced(it, SHIFTS)
    bound = worst_case(chains, float(acceptance.min()))
    assert float(found.abs().max()) < bound
    assert bound < float(SHIFTS.diff().abs().min())  # so that a balance that does nothing fails


def test_the_balance_works_from_bytes() -> None:
    """Bytes are points in training units there too: diffused grey levels, not 0..255."""
    data = (gaussian_images(3000, 5) * 40 + 100).clamp(0, 255).byte()
    it = begin(config(dequantise=True), Dataset.standardised("bytes", data, data[:10]))
    settle(it)
    # The chains leave for the Gaussian: the worst case of sampling at an acceptance of .4.
    assert float(it.state.network.constant.detach().abs().max()) < worst_case(levels.SETTLE_CHAINS, 0.4)


@pytest.mark.parametrize("moving", [True, False], ids=["moving", "standing still"])
def test_the_balance_is_that_of_the_model_and_not_of_the_data(monkeypatch: pytest.MonkeyPatch, moving: bool) -> None:
    """One in ten of the data is rough, the others are flat: nothing like the Gaussian that the network starts as.

    That is normalised at every level, so exact constants are all equal, to the worst case of sampling. The data
    that are seen most have less of every level's variance than it allows: from them, with steps that go nowhere, each
    of 8 edges looks nats wrong.
    """
    generator, n = torch.Generator().manual_seed(1), 3000
    rough = torch.rand(n, 1, generator=generator) < 0.1
    data = torch.randn(n, 1, generator=generator) + rough * torch.randn(n, 64, generator=generator)
    monkeypatch.setattr(levels, "SETTLE_CHAINS", 1000)
    steps = {"step_size": 0.6} if moving else {"step_size": 1e-6, "step_minimum": 1e-9, "step_maximum": 1e-6}
    it = begin(config(network="level-mlp", top=8, **steps), Dataset("rough", data, data[:10]))
    # Exact draws of the model: z = m + C^(1/2) w with the data's moments, diffused.
    t = torch.arange(n) % it.ladder.levels
    z = data.mean(0) + torch.randn(n, 64, generator=generator) @ torch.linalg.cholesky(torch.cov(data.T)).T
    acceptance = neighbour_acceptance(it.state.network, it.ladder.diffuse(z, t, generator), t, 8)
    bound = worst_case(1000, float(acceptance.min()), top=8)
    off = float(balanced(it, torch.zeros(9)).abs().max())
    assert bound < 3
    assert off < bound if moving else off > 3 * bound


def test_the_balance_lets_the_step_sizes_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that all chains accept grow by a tenth a round, steps that none accepts shrink by a sixth."""
    monkeypatch.setattr(levels, "SETTLE_ROUNDS", 8)
    for size, factor in {0.05: 1.1, 50.0: 1 / 1.2}.items():
        it = setup(step_size=size, step_maximum=1000.0)
        before = it.state.steps.sigma.clone()
        settle(it)
        torch.testing.assert_close(it.state.steps.sigma, before * factor**levels.SETTLE_ROUNDS)
        assert not it.state.steps.count.any()


@pytest.mark.parametrize("changes", [{"network": "resnet"}, {"method": "persistent"}, {"method": "drl"}], ids=str)
def test_a_network_without_constants_or_levels_is_left_alone(changes: dict[str, Any]) -> None:
    it = setup(**changes)
    before = {k: v.clone() for k, v in it.state.network.state_dict().items()}
    settle(it)
    assert all(torch.equal(value, before[key]) for key, value in it.state.network.state_dict().items())


# Both losses together.


def test_what_is_learned_without_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a denoising loss per pixel, and the ordering of independent pairs one level apart.

    What the two are given must be diffused data, each row of its own: the noise in them is then standard normal, so
    the mean square of N numbers is 1 with an sd of sqrt(2 / N).
    """
    it, seen = setup(), {}

    def removed(x: Tensor, t: Tensor, eps: Tensor, sd: Tensor) -> Tensor:
        seen["denoising"] = x, t, eps, sd
        return torch.tensor(3.0)

    def ordered(energy: Energy, x: Tensor, y: Tensor, t: Tensor, above: Tensor) -> Tensor:
        seen["ordering"] = x, y, t
        assert torch.equal(above, t + 1)
        assert energy is it.state.network
        return torch.tensor(5.0)

    monkeypatch.setattr(denoising, "ordering_loss", ordered)
    z, v, abar = it.data, it.ladder.variance, it.ladder.abar
    noisy = draw_noisy(it.ladder, z, it.state.generator)
    assert float(chainless_loss(removed, it.state.network, *noisy)) == pytest.approx(3 / 2 + 5 / D)

    def noise(x: Tensor, z: Tensor, t: Tensor) -> Tensor:
        return (x - per_chain(abar.sqrt(), t, x) * z) / per_chain(v.sqrt(), t, x)

    def standard(eps: Tensor) -> bool:
        return abs(float(eps.square().mean()) - 1) < 5 * math.sqrt(2 / eps.numel())

    x, t, eps, sd = seen["denoising"]
    assert len(x) == len(t) == 3000 and t.unique().tolist() == [0, 1, 2, 3, 4] and standard(eps)
    assert torch.equal(sd, noise_sd(t, x))
    torch.testing.assert_close(noise(x, z, t), eps, rtol=0, atol=1e-5)  # float32, over a noise sd of .2
    low, high, t = seen["ordering"]
    assert len(low) == len(high) == len(t) == 3000 // 4 and t.unique().tolist() == [0, 1, 2, 3]
    first, second = noise(low, z[:750], t), noise(high, z[750:1500], t + 1)
    assert standard(first) and standard(second) and abs(float((first * second).mean())) < 5 / math.sqrt(first.numel())
    # Planted: the pair of one row, or the level of the other one.
    assert not standard(noise(high, z[:750], t + 1)) and not standard(noise(high, z[750:1500], t))


def weights(it: Setup) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in it.state.network.named_parameters()}


@pytest.mark.parametrize("changes", [{"method": "persistent"}, {"batch": 3}, {"batch": 1}], ids=str)
def test_one_level_or_few_data_have_no_pairs(changes: dict[str, Any]) -> None:
    """The warm start does not need them: the weights move, and to numbers."""
    it = setup(denoise=2, **changes)
    for go in (denoise, denoise, step, step):
        before = weights(it)
        assert torch.isfinite(go(it)).all()
        assert all(torch.isfinite(value).all() for value in weights(it).values())
        assert any(not torch.equal(value, before[key]) for key, value in weights(it).items())


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
    for changes in ({"denoise": denoise_iterations}, {"denoise": 4, "relate": denoise_iterations - 4}):
        given = {"relate": 0} | changes
        parts = f"denoise={given['denoise']}, relate={given['relate']} and finish=0 together, got 12$"
        with pytest.raises(InputError, match=f"iterations must be more than {parts}"):
            config(**changes)
    assert config(denoise=11).warm == config(denoise=4, relate=7).warm == 11


@pytest.mark.parametrize(("first", "second"), [(5, 0), (3, 2), (0, 5)])
def test_a_switch_resets_optimiser_and_average_and_moves_no_chain(first: int, second: int) -> None:
    it = setup(denoise=first, relate=second, beta1=0.5)
    state = it.state
    chains, balanced_before = state.chains.x.clone(), state.network.constant.detach().clone()
    for k in range(5):
        assert state.iteration == k and state.optimiser.defaults["betas"][0] == 0.9
        advance(it)
        assert torch.equal(state.chains.x, chains)
        # Momentum for the weights that move, until a switch.
        assert bool(state.optimiser.state) == (state.iteration not in (first, 5))
    assert state.optimiser.defaults["betas"][0] == 0.5
    assert not torch.allclose(state.network.constant, balanced_before, atol=1e-3)
    weights = dict(state.network.named_parameters())
    assert state.average.keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in state.average.items())
    advance(it)
    assert state.optimiser.state and not torch.equal(state.chains.x, chains)
    assert any(not torch.equal(value, weights[key]) for key, value in state.average.items())


def test_the_levels_of_carried_images_are_learned() -> None:
    """Images of two contrasts, where the Gaussian of the network's start can only guess among the labels of a block.

    By .4 nats when this was written; .1 is far beyond what the noise of 1,000 images could do.
    """
    generator = torch.Generator().manual_seed(8)
    contrast = torch.where(torch.rand(1000, 1, 1, 1, generator=generator) < 0.5, 0.1, 1.4)
    data = contrast * torch.randn(1000, *EVENT, generator=generator)
    it = begin(
        config(denoise=0, relate=300, iterations=301, relate_rate=0.02, batch=64, store=64),
        Dataset("contrasts", data, data[:10]),
    )
    labelled = draw_labelled(it.ladder, data, generator)

    def loss() -> float:
        return label_loss(it.state.network, *labelled).item()

    start = loss()
    assert start == pytest.approx(float(labelled.valid.sum(1).float().log().mean()), abs=1e-3)  # a guess
    for _ in range(299):
        relate(it)
    assert loss() < start - 0.1


def test_scores_are_learned_without_the_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for its slope is U with gains of 1; what tells the levels has them."""
    it = setup(relate=2, gain_rate=0.01)
    network, seen = it.state.network, {}
    with torch.no_grad():
        network.log_gain += 0.3
        network.inner.head.weight.normal_()

    def told(score: Any, energy: Energy, *given: Tensor) -> Tensor:
        x, t = given[:2]
        seen.update(score=score(*given[:4]), plain=denoising_loss(network.ungained, *given[:4]), energy=energy(x, t))
        seen.update(gained=network(x, t), ungained=network.ungained(x, t))
        return network(x, t).mean()

    monkeypatch.setattr(engine, "relating_loss", told)
    relate(it)
    assert torch.equal(seen["score"], seen["plain"]) and torch.equal(seen["energy"], seen["gained"])
    assert not torch.allclose(seen["gained"], seen["ungained"])


# Gains.


def test_gains_take_newtons_step() -> None:
    """Chains whose parts are off by what known gains would do: the slope of a mean is minus the covariance.

    Differences of independent draws have twice the covariance, so the step is half of the way; 4,000 of them a knot
    know a mean of size 3 with an sd of 4 and its covariance to some percent.
    """
    network = LevelResNet(gaussian_images(500, 1), LADDER, width=4)
    knots, generator = len(network.log_gain), torch.Generator().manual_seed(2)
    t = torch.arange(LADDER.levels).repeat(4000)
    root = torch.tensor([[4.0, 0.0], [-2.0, 3.0]])
    change = torch.tensor([0.1, -0.2])
    data, chains = (torch.randn(len(t), 2, generator=generator) @ root.T for _ in range(2))
    network.regain(data, chains - root @ root.T @ change, t, share=1.0)
    assert network.log_gain.shape == (knots, 2)
    torch.testing.assert_close(network.log_gain.detach(), (-change / 2).expand(knots, 2), rtol=0, atol=0.02)
    off = data[:, 1].reshape(-1, LADDER.levels).mean(0) / network.scale
    torch.testing.assert_close(network.mean, off, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_a_settled_model_has_chains_like_its_data(rate: float) -> None:
    """A Gaussian that is a fifth too narrow in every direction gets the gain that makes up for it, if it may.

    32 chains at each of 5 levels of d = 16 know a mean square to sqrt(2) sqrt(2 / (160 d)) = .04.
    """
    it = setup(gain_rate=rate)
    network = it.state.network
    with torch.no_grad():
        network.base.precision *= math.sqrt(1.25)
    settle(it)
    gain = float(network.log_gain[:, 0].detach().exp().mean())
    assert gain == pytest.approx(1 / 1.25, abs=0.05) if rate else gain == 1


def test_gains_move_with_a_rate_of_their_own() -> None:
    """Adam without momentum moves every weight by its rate at first: gains by theirs, and not in the warm start."""
    it = setup(denoise=1, gain_rate=0.01, learning_rate=1e-4, level_rate=0.1, adapt_every=100)
    network = it.state.network
    advance(it)
    before = {k: v.detach().clone() for k, v in network.named_parameters()}
    step(it)
    moved = {k: float((v - before[k]).detach().abs().max()) for k, v in network.named_parameters()}
    assert moved["log_gain"] == pytest.approx(0.01, rel=1e-3)
    assert moved["inner.head.weight"] == pytest.approx(1e-4, rel=1e-2) and moved["constant"] == 0


def test_gains_are_for_networks_that_have_them() -> None:
    with pytest.raises(InputError, match="gain_rate needs a network with gains for its levels: level-resnet"):
        setup(network="level-mlp", gain_rate=0.1)


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
        return denoising_loss(it.state.network, x, t, eps, v.sqrt()).item()

    start = loss()
    for _ in range(200):
        denoise(it)
    assert loss() < 0.9 * start
