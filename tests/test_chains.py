"""The store of persistent chains: who is drawn, where they go back to, and their round trips."""

import math

import pytest
import torch

from daebm.chains import Chains
from daebm.ladder import Ladder

LADDER = Ladder.paper(6, 0.01, 0.3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(size: int) -> Chains:
    """Chain i sits at x = i."""
    return Chains.start(torch.arange(size, dtype=torch.float64).unsqueeze(1), torch.zeros(size, dtype=torch.long))


def test_draw_is_without_replacement() -> None:
    """Two copies of a chain in one batch would let the last write win and lose the other."""
    chains, generator = numbered(50), seeded(1)
    for count in (1, 20, 50):
        slots = chains.draw(count, generator)
        assert len(slots) == len(set(slots.tolist())) == count
        assert int(slots.min()) >= 0 and int(slots.max()) < 50
    assert torch.equal(chains.draw(20, seeded(2)), chains.draw(20, seeded(2)))


def test_draw_is_uniform() -> None:
    """Every slot is drawn with probability 20 / 50: binomial counts over 4,000 draws, at 5 standard errors."""
    chains, generator, rounds = numbered(50), seeded(3), 4_000
    hits = torch.zeros(50)
    for _ in range(rounds):
        hits[chains.draw(20, generator)] += 1
    z = (hits - 0.4 * rounds) / math.sqrt(rounds * 0.4 * 0.6)
    assert float(z.abs().max()) < 5


def test_put_writes_the_slots_that_were_drawn_and_no_others() -> None:
    chains = numbered(10)
    slots = torch.tensor([7, 2, 9])
    chains.put(slots, torch.tensor([[70.0], [20.0], [90.0]]).double(), torch.tensor([3, 1, 2]), torch.zeros(3))
    assert chains.x.squeeze(1).tolist() == [0, 1, 20, 3, 4, 5, 6, 70, 8, 90]
    assert chains.t.tolist() == [0, 0, 1, 0, 0, 0, 0, 3, 0, 2]


def test_founding_chains_persist() -> None:
    """After 1,000 updates every founder still has exactly one descendant, in its own slot."""
    chains, generator = numbered(100), seeded(4)
    for _ in range(1_000):
        slots = chains.draw(10, generator)
        x, t = chains.x[slots], chains.t[slots]
        chains.put(slots, x + 100, t, torch.ones(10))  # x mod 100 is the founder, x div 100 the number of moves
    assert (chains.x.squeeze(1) % 100).tolist() == list(range(100))
    assert int((chains.x.squeeze(1) // 100).sum()) == 10_000


@pytest.mark.parametrize("event", [(1,), (2,), (1, 4, 4)], ids=str)
def test_from_data(event: tuple[int, ...]) -> None:
    """Data diffused to uniform levels; at level 0 of a ladder without a floor a chain is a data point."""
    data = torch.randn(40, *event, generator=seeded(5))
    chains = Chains.from_data(2_000, data, LADDER, seeded(6))
    assert len(chains) == 2_000 and chains.x.shape == (2_000, *event) and chains.x.dtype == data.dtype
    counts = torch.bincount(chains.t, minlength=7)
    expected, spread = 2_000 / 7, math.sqrt(2_000 * 6 / 49)
    assert float(((counts - expected) / spread).abs().max()) < 5
    known = {tuple(point.flatten().tolist()) for point in data}
    at_zero = {tuple(point.flatten().tolist()) for point in chains.x[chains.t == 0]}
    above = {tuple(point.flatten().tolist()) for point in chains.x[chains.t > 0]}
    assert at_zero <= known and len(at_zero) > 30
    assert not above & known
    assert torch.equal(chains.x, Chains.from_data(2_000, data, LADDER, seeded(6)).x)


@pytest.mark.parametrize("event", [(1,), (1, 4, 4)], ids=str)
def test_from_noise(event: tuple[int, ...]) -> None:
    """N(0, I) whatever the level, with the levels in equal sorted blocks."""
    chains = Chains.from_noise(10_000, event, LADDER, seeded(7))
    assert chains.x.shape == (10_000, *event)
    assert bool((chains.t.diff() >= 0).all())
    counts = torch.bincount(chains.t, minlength=7)
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) == 10_000
    first = chains.x.flatten(1)[:, 0]
    for t in range(7):
        here = first[chains.t == t]
        n = len(here)
        assert abs(float(here.mean())) < 5 / math.sqrt(n)
        assert abs(float(here.var()) - 1) < 5 * math.sqrt(2 / n)


@pytest.mark.parametrize(
    ("path", "trips"),
    [
        ([1, 0, 1, 2, 3, 2, 1, 0, 3, 0], 2),
        ([0, 3, 0], 1),
        ([3, 0], 0),  # it comes from T, but never left 0 for it
        ([2, 3, 1, 0], 0),
        ([3, 0, 3, 0], 1),
        ([0, 1, 2, 1, 0, 1, 0], 0),  # never reaches T
        ([0, 3, 2, 3, 3, 1, 0, 0, 0], 1),  # lingering at either end is not another trip
        ([2, 3, 1, 3, 2], 0),  # never reaches 0
        ([0, 3], 0),  # not back yet
        ([0, 3, 0, 3, 0, 3, 0], 3),
    ],
)
def test_round_trips_by_hand(path: list[int], trips: int) -> None:
    """T = 3. The first label is where the chain is when the count begins."""
    chains = Chains.start(torch.zeros(1, 1), torch.tensor(path[:1]))
    for label in path[1:]:
        t = torch.tensor([label])
        chains.count_trips(torch.tensor([0]), t, top=3)
        chains.put(torch.tensor([0]), torch.zeros(1, 1), t, torch.ones(1))
    assert chains.trips.tolist() == [trips]


def test_round_trips_belong_to_their_slots() -> None:
    chains = Chains.start(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long))
    chains.count_trips(torch.tensor([2, 0]), torch.tensor([3, 1]), top=3)
    chains.count_trips(torch.tensor([0, 2]), torch.tensor([0, 0]), top=3)
    assert chains.trips.tolist() == [0, 0, 1, 0]


def test_one_level_has_no_round_trips() -> None:
    chains = Chains.start(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    for _ in range(3):
        chains.count_trips(torch.tensor([0, 1]), torch.zeros(2, dtype=torch.long), top=0)
    assert chains.trips.tolist() == [0, 0]


def test_a_chain_is_stuck_where_others_move() -> None:
    """One whose steps are refused is known after a while of its own; where all steps are too long nobody is stuck."""
    chains, generator = numbered(100), seeded(5)
    for moves in range(200):
        slots = chains.draw(50, generator)
        chains.put(slots, chains.x[slots], chains.t[slots], torch.where(slots == 7, 0.01, 0.66))
        assert moves > 40 or not bool(chains.stuck().any())
    assert chains.stuck().nonzero().flatten().tolist() == [7]
    chains.trips[7], chains.stage[7] = 3, 2
    chains.replace(torch.tensor([7]), torch.tensor([[-5.0]]).double())
    assert float(chains.x[7]) == -5 and float(chains.ease[7]) == 1 and not bool(chains.stuck().any())
    assert (int(chains.trips[7]), int(chains.stage[7])) == (3, 1)  # at level 0, where a round trip may begin
    for _ in range(400):  # planted: steps that suit no chain
        slots = chains.draw(50, generator)
        chains.put(slots, chains.x[slots], chains.t[slots], torch.full((50,), 0.01))
    assert not bool(chains.stuck().any())
