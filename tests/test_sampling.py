"""Sampling after training, on ladders in closed form: the laws are known, and so is what each sample costs.

Statements about laws start chains from exact draws, so that they hold at once and without burn-in, or take so many
steps that what is left of the start is far below the test's resolution. They fail beyond 5 standard errors.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from daebm import model, sampling
from daebm.config import Config
from daebm.errors import DaebmError, InputError
from daebm.ladder import Ladder
from daebm.networks import DiffusedGaussian
from daebm.samplers.langevin import KERNELS
from daebm.samplers.mgms import LabelInfo, block, full, local
from daebm.sampling import Drawn, Sampler
from daebm.targets import Gaussian, LabelledLadder, Mixture

SIGMAS = 5.0
MEAN, SD = 0.8, 0.5  # of the data, in standardised units


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Closed(NamedTuple):
    """Gaussian data on a ladder: N(sqrt(abar) m, abar s^2 + v) at every level."""

    ladder: Ladder
    energy: LabelledLadder
    sampler: Sampler


def closed(dimension: int = 1, top: int = 3, floor: float = 0.0, steps: int = 3, move: Any = None) -> Closed:
    ladder = Ladder.geometric(dimension, floor, 0.3, 0.95, top)
    mean = ladder.abar.sqrt() * MEAN
    sd = (ladder.abar * SD**2 + ladder.variance).sqrt()
    one = torch.ones(dimension, dtype=torch.float64)
    levels = [Gaussian(m * one, s * one) for m, s in zip(mean, sd, strict=True)]
    energy = LabelledLadder(torch.full((top + 1,), 1 / (top + 1), dtype=torch.float64), levels)
    move = move or full(top)
    return Closed(ladder, energy, Sampler(KERNELS["mala"], energy, ladder, sd, steps, move))


def exact(it: Closed, count: int, seed: int) -> Drawn:
    x, t = it.energy.sample(count, seeded(seed))
    return Drawn(x, t, 0)


def assert_gaussian(x: Tensor, mean: float, sd: float) -> None:
    """Mean and variance of draws (n, d), 5 standard errors; and all of them finite."""
    z = (x.double().reshape(-1) - mean) / sd
    n = len(z)
    assert torch.isfinite(z).all()
    assert abs(float(z.mean())) < SIGMAS / math.sqrt(n)
    assert abs(float(z.square().mean()) - 1) < SIGMAS * math.sqrt(2 / n)


# Starting points.


def test_chains_start_as_noise_at_the_top():
    it = closed(dimension=2)
    start = sampling.from_noise(it.sampler, (2,), 5000, seeded())
    assert start.x.shape == (5000, 2)
    assert (start.t == 3).all()
    assert start.gradients == 0
    assert_gaussian(start.x, 0, 1)


# Algorithm 2, a number of times.


@pytest.mark.parametrize("move", [full(3), block(3, 2), local(3)], ids=["full", "block", "local"])
def test_transitions_keep_the_law_at_level_zero(move: Any):
    """And at every other level, and the labels uniform."""
    it, count = closed(move=move), 20_000
    drawn = sampling.transitions(it.sampler, exact(it, count, 1), 4, seeded(2))
    for level, target in enumerate(it.energy.levels):
        here = drawn.t == level
        share = float(here.double().mean())
        assert abs(share - 0.25) < SIGMAS * math.sqrt(0.25 * 0.75 / count)
        assert isinstance(target, Gaussian)
        assert_gaussian(drawn.x[here], float(target.mean), float(target.sd))


def test_transitions_are_counted():
    it = closed(steps=3)
    start = exact(it, 50, 1)._replace(gradients=7)
    assert sampling.transitions(it.sampler, start, 4, seeded()).gradients == 7 + 4 * (3 + 1) * 50


def counted(it: Closed) -> tuple[Sampler, list[int]]:
    """The sampler with an energy that counts the points whose gradient is asked for."""
    rows = [0]

    def energy(x: Tensor, t: Tensor) -> Tensor:
        rows[0] += len(x) if x.requires_grad else 0
        return it.energy(x, t)

    return it.sampler._replace(energy=energy), rows


@pytest.mark.parametrize("way", ["transitions", "until_visits", "looked_at", "annealed", "recovery"])
def test_every_way_of_sampling_counts_its_gradients_right(way: str):
    it = closed()
    sampler, rows = counted(it)
    start = Drawn(torch.randn(40, 1, generator=seeded(3), dtype=torch.float64), torch.full((40,), 3), 0)
    if way == "transitions":
        drawn = sampling.transitions(sampler, start, 3, seeded(4))
    elif way == "until_visits":
        drawn = sampling.until_visits(sampler, start, 2, seeded(4))
    elif way == "looked_at":
        drawn = sampling.looked_at(sampler, start, 25, 2, seeded(4))
    elif way == "annealed":
        drawn = sampling.annealed(sampler, start, 5, seeded(4))
    else:
        drawn = sampling.recovery(sampler, start, seeded(4))
    assert drawn.gradients == rows[0]
    assert drawn.refused == 0
    nowhere = sampler._replace(energy=lambda x, t: x.sum(1) * torch.nan)
    broken = {
        "transitions": lambda: sampling.transitions(nowhere, start, 3, seeded(4)),
        "until_visits": lambda: sampling.until_visits(nowhere, start._replace(t=0 * start.t), 1, seeded(4), 50),
        "looked_at": lambda: sampling.looked_at(nowhere, start._replace(t=0 * start.t), 20, 2, seeded(4)),
        "annealed": lambda: sampling.annealed(nowhere, start, 5, seeded(4)),
        "recovery": lambda: sampling.recovery(nowhere, start, seeded(4)),
    }[way]()
    assert broken.refused > 0


# At set times, or when a chain arrives.


def wide_and_narrow() -> tuple[Sampler, Any]:
    """A ladder of .7 N(0, I) and, six sds away, .3 of a kind that is 33 times as narrow; which of points are of it."""
    means, sds = torch.tensor([[0.0, 0.0], [6.0, 0.0]], dtype=torch.float64), torch.tensor([1, 0.03]).double()
    weights = torch.tensor([0.7, 0.3], dtype=torch.float64)
    middle = weights @ means
    scale = ((weights @ (means - middle).square()).sum() / 2 + weights @ sds.square()).sqrt()
    means, sds = (means - middle) / scale, sds / scale
    ladder = Ladder.geometric(2, floor=0.05)
    levels = [
        Mixture(
            weights, [Gaussian(a.sqrt() * m, (a * s**2 + v).sqrt().expand(2)) for m, s in zip(means, sds, strict=True)]
        )
        for a, v in zip(ladder.abar, ladder.variance, strict=True)
    ]
    energy = LabelledLadder(torch.full((ladder.levels,), 1 / ladder.levels, dtype=torch.float64), levels)
    sigma = 0.9 * (ladder.abar * sds[1] ** 2 + ladder.variance).sqrt()

    def narrow(x: Tensor) -> Tensor:
        return (x - means[1]).norm(dim=1) < (x - means[0]).norm(dim=1)

    return Sampler(KERNELS["mala"], energy, ladder, sigma, 10, full(ladder.top)), narrow


class Known(nn.Module):
    """The energy of a `Sampler` as a network."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.energy = sampler.energy

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.energy(x.double(), t).to(x.dtype)


COUNT = 1200


def seen_by(way: str, sampler: Sampler) -> Tensor:
    """Samples in one of the ways that a model has, its round trips of 14 transitions; standardised."""
    config = Config(label_move="full", steps=sampler.steps)
    known = model.Model(config, Known(sampler), sampler.ladder, sampler.sigma, (2,), 0.0, 1.0, trip=14)
    return torch.from_numpy(known.sample(COUNT, visits=2 if way == "second visit" else None, clean=False))


@pytest.mark.parametrize(("way", "right"), [("set times", True), ("unsettled", False), ("second visit", False)])
def test_kinds_have_their_shares_however_narrow_they_are(
    way: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: chains that have hardly left the noise, and each chain at its second arrival.

    A chain is seen twice on average, a few transitions apart, and may be of one kind both times: at worst the samples
    are worth half as many.
    """
    sampler, narrow = wide_and_narrow()
    if way == "unsettled":
        monkeypatch.setattr(model, "SETTLED", 0.1)
    x = seen_by(way, sampler)
    assert len(x) == COUNT
    z = (float(narrow(x.double()).double().mean()) - 0.3) / math.sqrt(0.3 * 0.7 / (COUNT / 2))
    assert (abs(z) < SIGMAS) == right


def test_looks_that_find_nothing_end():
    it = closed()
    start = Drawn(torch.zeros(10, 1, dtype=torch.float64), torch.full((10,), 3), 0)
    nowhere = it.sampler._replace(energy=lambda x, t: x.sum(1) * torch.nan)
    with pytest.raises(DaebmError, match="0 of 5 samples were found in 40 looks at 10 chains"):
        sampling.looked_at(nowhere, start, 5, 2, seeded(2))


# Algorithm 3.


def scripted(path: list[list[int]]) -> tuple[Any, list[int]]:
    """A label move that follows a script: path[k] gives the labels of the chains still running at transition k."""
    sizes: list[int] = []

    def move(_energy: Any, x: Tensor, t: Tensor, _generator: Any) -> LabelInfo:
        labels = torch.tensor(path[len(sizes)])
        assert len(labels) == len(t)
        sizes.append(len(t))
        return LabelInfo(x, labels, torch.zeros_like(labels))

    return move, sizes


def test_each_chain_stops_at_its_own_last_visit():
    """Three chains, two visits to level 0 each. A visit counts however long the chain has been there."""
    # Chain 0 is at 0, 0 and done; chain 1 at 2, 0, 1, 0; chain 2 at 1, 1, 0, 2, 0.
    move, sizes = scripted([[0, 2, 1], [0, 0, 1], [1, 0], [0, 2], [0]])
    it = closed(move=move)
    start = exact(it, 3, 0)._replace(t=torch.full((3,), 3))
    drawn = sampling.until_visits(it.sampler, start, 2, seeded())
    assert sizes == [3, 3, 2, 2, 1]
    assert drawn.t.tolist() == [0, 0, 0]
    assert drawn.gradients == (it.sampler.steps + 1) * sum(sizes)


def test_a_stopped_chain_does_not_move():
    """The sample is x at the moment of the last visit."""
    seen: list[Tensor] = []
    move, _sizes = scripted([[0, 3], [3], [0]])

    def watch(energy: Any, x: Tensor, t: Tensor, generator: Any) -> LabelInfo:
        seen.append(x.clone())
        return move(energy, x, t, generator)

    it = closed(move=watch)
    start = exact(it, 2, 0)._replace(t=torch.full((2,), 3))
    drawn = sampling.until_visits(it.sampler, start, 1, seeded())
    assert torch.equal(drawn.x[0], seen[0][0])
    assert torch.equal(drawn.x[1], seen[2][0])


def test_the_start_is_left_as_it_was():
    it = closed()
    start = exact(it, 20, 0)
    x, t = start.x.clone(), start.t.clone()
    sampling.until_visits(it.sampler, start, 2, seeded())
    sampling.transitions(it.sampler, start, 2, seeded())
    assert torch.equal(start.x, x)
    assert torch.equal(start.t, t)


@pytest.mark.parametrize("visits", [1, 3])
def test_every_chain_ends_at_level_zero(visits: int):
    it = closed(dimension=2)
    drawn = sampling.until_visits(it.sampler, exact(it, 200, 0), visits, seeded(1))
    assert (drawn.t == 0).all()
    assert drawn.gradients >= visits * 200 * (it.sampler.steps + 1)


def test_many_visits_forget_the_start():
    """A sample at a visit is not exact, but 25 visits from noise are: Gaussian levels mix within a few."""
    it, count = closed(steps=5), 2000
    noise = torch.randn(count, 1, generator=seeded(5), dtype=torch.float64)
    drawn = sampling.until_visits(it.sampler, Drawn(noise, torch.full((count,), 3), 0), 25, seeded(6))
    assert_gaussian(drawn.x, MEAN, SD)


def test_labels_that_never_arrive_are_an_error_and_no_endless_loop():
    move, _sizes = scripted([[0, 3]] + [[3]] * 9)
    it = closed(move=move)
    with pytest.raises(DaebmError, match="1 of 2 chains"):
        sampling.until_visits(it.sampler, exact(it, 2, 0), 1, seeded(), maximum=10)


def test_a_wait_is_counted_from_the_last_visit():
    """Ten transitions in all, but never more than three between visits: that is within a patience of three."""
    move, _sizes = scripted([[3], [2], [0], [1], [2], [0], [0], [1], [3], [0]])
    it = closed(move=move)
    assert sampling.until_visits(it.sampler, exact(it, 1, 0), 4, seeded(), maximum=3).t.tolist() == [0]
    move, _sizes = scripted([[0], [1], [2], [0]])
    with pytest.raises(DaebmError, match="waited for it for 2 transitions"):
        sampling.until_visits(closed(move=move).sampler, exact(it, 1, 0), 2, seeded(), maximum=2)


def test_patience_outlasts_exponential_waits():
    """Of so many waits with a mean of one trip even the longest, and still if a trip takes twice as long."""
    waits, trip = 1000, 7.0
    allowed = sampling.patience(waits, trip)
    assert waits * math.exp(-allowed / trip) < 1e-6 and waits * math.exp(-allowed / (2 * trip)) < 0.01
    draws = torch.empty(200, waits).exponential_(1 / trip, generator=seeded())
    assert float(draws.max()) < allowed < 10 * float(draws.max(1).values.mean())  # and is no invitation to hang


def test_the_last_allowed_transition_counts():
    """A chain that arrives with the last one has arrived."""
    move, _sizes = scripted([[3], [0]])
    it = closed(move=move)
    assert sampling.until_visits(it.sampler, exact(it, 1, 0), 1, seeded(), maximum=2).t.tolist() == [0]


# The other ways.


def test_an_annealed_start_ends_at_level_zero():
    """With many steps a level, in its law: the last level's chain is MALA, whatever came before."""
    it, count = closed(), 3000
    noise = torch.randn(count, 1, generator=seeded(7), dtype=torch.float64)
    drawn = sampling.annealed(it.sampler, Drawn(noise, torch.full((count,), 3), 0), 60, seeded(8))
    assert (drawn.t == 0).all()
    assert drawn.x.shape == (count, 1)
    assert drawn.gradients == 4 * 61 * count
    assert_gaussian(drawn.x, MEAN, SD)


def test_an_annealed_start_goes_through_every_level_from_the_top():
    it, seen = closed(), []

    def energy(x: Tensor, t: Tensor) -> Tensor:
        assert (t == t[0]).all()
        seen.append(int(t[0]))
        return it.energy(x, t)

    sampling.annealed(it.sampler._replace(energy=energy), exact(it, 5, 0), 1, seeded())
    assert seen == [3, 3, 2, 2, 1, 1, 0, 0]


def test_an_annealed_start_that_carries_needs_no_steps_where_levels_are_gaussian():
    """The map between Gaussian levels is exact: a step a level that hardly moves, and x has the law of level 0."""
    ladder, count = Ladder.geometric(3, 0.1), 4000
    energy = DiffusedGaussian(torch.randn(2000, 3, generator=seeded(1)) * torch.tensor([2.0, 1.0, 0.5]) + 1, ladder)
    top, bottom = torch.full((count,), ladder.top), torch.zeros(count, dtype=torch.long)
    white = torch.randn(count, 3, generator=seeded(2))
    start = Drawn((white / energy.precision[-1] + energy.centre[-1]) @ energy.axes.T, top, 0)
    sampler = Sampler(KERNELS["mala"], energy, ladder, torch.full((ladder.levels,), 1e-4), 1, full(ladder.top))

    def worst(carry: bool) -> float:
        """|z| of means and mean squares of what should be N(0, I)."""
        y = energy.whiten(sampling.annealed(sampler, start, 1, seeded(8), carry).x, bottom).double()
        return float(torch.cat([y.mean(0), (y.square().mean(0) - 1) / math.sqrt(2)]).abs().max()) * math.sqrt(count)

    assert worst(carry=True) < SIGMAS
    assert worst(carry=False) > 4 * SIGMAS  # nobody takes the noise off


def test_an_annealed_start_without_a_way_to_carry_is_refused():
    it = closed()
    with pytest.raises(InputError, match="carry x between levels"):
        sampling.annealed(it.sampler, exact(it, 5, 0), 1, seeded(), carry=True)


def conditional_sd(it: Closed) -> Tensor:
    """sd of x_t given x_(t+1) for Gaussian levels: precision 1 / s_t^2 + alpha / (1 - alpha)."""
    variance = it.ladder.abar * SD**2 + it.ladder.variance
    alpha, step = it.ladder.alpha[1:], it.ladder.step_variance[1:]
    return torch.cat([(1 / variance[:-1] + alpha / step).rsqrt(), torch.ones(1, dtype=torch.float64)])


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_recovery_is_right_for_gaussian_levels(floor: float):
    """From exact draws of level T, exact conditional sampling gives exact draws of level 0.

    MALA with a step of the conditional's own sd forgets its start at about half per step: 40 steps leave 1e-12.
    (The sampler lengthens its steps by 1 / sqrt(alpha), which is taken back here.)
    """
    it, count = closed(floor=floor), 10_000
    sigma = conditional_sd(it)
    sigma[:-1] *= it.ladder.alpha[1:].sqrt()
    sampler = it.sampler._replace(sigma=sigma, steps=40)
    last = it.energy.levels[-1]
    start = Drawn(last.sample(count, seeded(9)), torch.full((count,), 3), 0)
    drawn = sampling.recovery(sampler, start, seeded(10))
    assert (drawn.t == 0).all()
    assert drawn.gradients == 3 * 41 * count
    assert_gaussian(drawn.x, MEAN, math.sqrt(SD**2 + floor**2))


def test_recovery_stays_with_its_partner():
    """One level down with a tiny diffusion step: x_0 given x_1 lies within a few of that step's sd of x_1."""
    ladder = Ladder(torch.tensor([1.0, 1 - 1e-4]).double(), torch.tensor([0.0, 1e-4]).double())
    target = Gaussian(torch.zeros(1).double(), torch.ones(1).double())
    energy = LabelledLadder(torch.tensor([0.5, 0.5]).double(), [target, target])
    sampler = Sampler(KERNELS["mala"], energy, ladder, torch.full((2,), 0.01).double(), 20, full(1))
    start = Drawn(torch.linspace(-2, 2, 50).double().unsqueeze(1), torch.ones(50).long(), 0)
    drawn = sampling.recovery(sampler, start, seeded())
    assert (drawn.x - start.x).abs().max() < 6 * 0.01
    assert not torch.equal(drawn.x, start.x)


def test_recovery_starts_each_level_at_its_partner():
    """At x_(t+1) / sqrt(alpha_(t+1)), the partner without its shrinking, as in training."""
    it, first = closed(), {}

    def energy(x: Tensor, t: Tensor) -> Tensor:
        first.setdefault(int(t[0]), x.detach().clone())
        return it.energy(x, t)

    start = exact(it, 5, 0)._replace(t=torch.full((5,), 3))
    # Steps so short that x hardly moves.
    sampler = it.sampler._replace(energy=energy, sigma=torch.full((4,), 1e-9).double(), steps=1)
    sampling.recovery(sampler, start, seeded())
    x = start.x
    for level in (2, 1, 0):
        x = x / it.ladder.alpha[level + 1].sqrt()
        assert torch.allclose(first[level], x, atol=1e-6)


def test_a_long_run_stays_at_level_zero_and_keeps_its_law():
    it, count = closed(), 5000
    x = it.energy.levels[0].sample(count, seeded(11))
    levels: set[int] = set()

    def energy(y: Tensor, t: Tensor) -> Tensor:
        levels.update(t.tolist())
        return it.energy(y, t)

    seen: list[int] = []
    end, info = sampling.long_run(KERNELS["mala"], energy, x, 0.5, 12, seeded(12), lambda k, _state: seen.append(k))
    assert levels == {0}
    assert seen == list(range(1, 13))
    assert_gaussian(end, MEAN, SD)
    assert 0 < float(info.accept_prob.min()) <= float(info.accept_prob.max()) <= 1
    assert not info.nonfinite.any()


# Tweedie's formula.


@pytest.mark.parametrize("floor", [0.1, 0.5, 2.0])
def test_tweedie_is_the_posterior_mean_of_a_gaussian(floor: float):
    """Clean N(m, s^2) plus noise of sd f: E[clean | x] = (s^2 x + f^2 m) / (s^2 + f^2)."""
    noisy = Gaussian(torch.full((2,), MEAN).double(), torch.full((2,), math.sqrt(SD**2 + floor**2)).double())
    energy = LabelledLadder(torch.ones(1).double(), [noisy])
    x = torch.randn(20, 2, generator=seeded(), dtype=torch.float64) * 3
    expected = (SD**2 * x + floor**2 * MEAN) / (SD**2 + floor**2)
    assert torch.allclose(sampling.tweedie(energy, x, floor), expected, atol=1e-12)


def test_tweedie_is_the_posterior_mean_of_a_mixture():
    """Two points -1 and 1 plus noise of sd f: E[clean | x] = tanh(x / f^2)."""
    floor = 0.7
    one = torch.ones(1).double()
    noisy = Mixture(torch.tensor([0.5, 0.5]).double(), [Gaussian(-one, floor * one), Gaussian(one, floor * one)])
    energy = LabelledLadder(one, [noisy])
    x = torch.linspace(-3, 3, 31).double().unsqueeze(1)
    assert torch.allclose(sampling.tweedie(energy, x, floor), torch.tanh(x / floor**2), atol=1e-12)


def test_tweedie_without_noise_changes_nothing():
    it = closed()
    x = torch.randn(5, 1, generator=seeded(), dtype=torch.float64)
    assert torch.equal(sampling.tweedie(it.energy, x, 0.0), x)


# Bad requests.


@pytest.mark.parametrize("count", [0, -3])
def test_counts_below_one_are_refused(count: int):
    it = closed()
    start = exact(it, 3, 0)
    for ask in (
        lambda: sampling.from_noise(it.sampler, (1,), count, seeded()),
        lambda: sampling.transitions(it.sampler, start, count, seeded()),
        lambda: sampling.until_visits(it.sampler, start, count, seeded()),
        lambda: sampling.until_visits(it.sampler, start, 1, seeded(), maximum=count),
        lambda: sampling.annealed(it.sampler, start, count, seeded()),
    ):
        with pytest.raises(InputError, match=str(count)):
            ask()
