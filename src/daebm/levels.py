"""The levels' constants, found from chains and not by the optimiser, and a start for likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from daebm.resnet import LevelResNet
from daebm.samplers import langevin
from daebm.samplers.adapt import StepSizes
from daebm.samplers.mgms import at_level
from daebm.spacing import level_balance

if TYPE_CHECKING:
    from daebm.training import Setup

BALANCED = 8192  # at most so many chains are looked at
# Edges know the masses of neighbours well, but what they err adds up over a long ladder to a drift of two nats, which
# only the number of chains shows: levels around which there are twice as many as should be are raised by so many nats.
# The number around a level is that in a share of the ladder to each side of it: a tenth, which few chains know well,
# and a fortieth, for the lowest levels keep chains for longer than those next to them.
HISTOGRAM = ((10, 3.0), (40, 1.0))  # levels over the window, nats
DESERTED = 20  # chains that should be around a level, at its narrowest at an end of the ladder, when none is
SETTLE_CHAINS = 32  # per level
SETTLE_ROUNDS, SETTLE_STEPS = 20, 10  # an adaptation of steps and gains each; the second half is measured
GAIN_SHARE = 1.5  # of half a Newton step, a round
SETTLE_ROWS = 256  # chains moved together; bounds memory
BESIDE = 16  # diffused data whose mean energy a stuck chain is held against


def balance_levels(setup: Setup, x: Tensor, t: Tensor, share: float = 1.0) -> None:
    """Take back, by the network's constants, a share of the levels' difference in mass, seen on chains (x, t).

    Edge by edge, and by how many chains there are around a level.
    """
    constant = cast(Tensor, setup.state.network.constant)
    carry = setup.config.label_move == "carry"
    ratio, _acceptance = level_balance(setup.state.network, x[:BALANCED], t[:BALANCED], setup.ladder.top, carry=carry)
    levels = torch.arange(len(constant), device=t.device)
    distance = (levels - levels.unsqueeze(1)).abs()
    count = torch.bincount(t, minlength=len(levels)).to(constant) * (len(levels) / len(t))  # 1 each, if all is well
    with torch.no_grad():  # mass e^(ratio) too much is energy too low
        constant[1:] += share * ratio.cumsum(0).to(constant)
        for part, nats in HISTOGRAM:
            around = (distance <= len(levels) // part).to(constant)
            excess = (around @ count) / around.sum(1)
            constant += share * nats * (excess - excess[0])


def replace_stranded(setup: Setup) -> None:
    """Begin chains anew, as diffused data of their levels, where the model has no mass; counted in the state.

    Steps of a chain that is far above the data should take it down. An energy that bends sharply holds it: all steps
    are too long there, training raises it up to the margin, and its level is given its mass. A chain is stranded if its
    steps have long been refused **and** it is half a margin or more above the data at its level, or has no energy.
    Chains of a narrow kind of data may be refused as often, but are as low as these data.
    """
    state, ladder, generator = setup.state, setup.ladder, setup.state.generator
    chains, stuck = state.chains, state.chains.stuck().nonzero().squeeze(1)
    for slots in torch.split(stuck, SETTLE_ROWS // BESIDE) if len(stuck) else ():
        t = chains.t[slots].repeat_interleave(BESIDE)
        rows = torch.randint(len(setup.data), t.shape, generator=generator, device=t.device)
        data = ladder.diffuse(setup.points(rows), t, generator)
        with torch.no_grad():
            low = state.network(data, t).reshape(-1, BESIDE).mean(1)
            held = state.network(chains.x[slots], chains.t[slots]) <= low + setup.config.margin / 2
        stranded = ~held  # so are those without an energy
        chains.replace(slots[stranded], data[::BESIDE][stranded])
        state.replaced += int(stranded.sum())


def deserted(t: Tensor, levels: int) -> list[str]:
    """A sentence if there is no chain around some levels, where by their number there should be twenty.

    By chance that would happen once in e^20 times. Chains that never get there learn nothing there.
    """
    radius = levels // HISTOGRAM[0][0]
    count = torch.bincount(t, minlength=levels).double().cpu()
    padded = torch.nn.functional.pad(count, (radius, radius)).unfold(0, 2 * radius + 1, 1).sum(1)
    empty = (padded == 0).nonzero().flatten().tolist()
    if not empty or len(t) * (radius + 1) < DESERTED * levels:
        return []
    return [
        f"no chain is near levels {empty[0]} to {empty[-1]} (of 0 to {levels - 1}): labels do not travel there, and "
        "these levels are not learned; a higher floor or more iterations of relate help"
    ]


def settle(setup: Setup) -> None:
    """After a warm start: step sizes that suit the energy, gains, and levels of equal mass.

    On chains at fixed levels that have left the diffused data for what the model itself holds likely near them: as long
    as the two differ, the masses seen from the data are nats wrong at every edge. Energies whose slopes are learned
    have chains fall tens of nats below the data, for their errors are holes too; the gains make up for it.
    """
    state, ladder, generator = setup.state, setup.ladder, setup.state.generator
    if setup.config.method != "da":
        return
    t = torch.arange(ladder.levels, device=setup.data.device).repeat(SETTLE_CHAINS)
    rows = torch.randint(len(setup.data), (len(t),), generator=generator, device=t.device)
    x = ladder.diffuse(setup.points(rows), t, generator)
    gained = state.network if setup.config.gain_rate and isinstance(state.network, LevelResNet) else None
    start = None if gained is None else _parts(gained, x, t)
    steps = StepSizes.start(state.steps.sigma, state.steps.bounds, SETTLE_CHAINS)
    draws = []
    for settled in (k >= SETTLE_ROUNDS // 2 for k in range(SETTLE_ROUNDS)):
        for i in range(0, len(t), SETTLE_ROWS):
            here, sigma = slice(i, i + SETTLE_ROWS), steps.sigma[t[i : i + SETTLE_ROWS]].to(x.dtype)
            x[here], info = langevin.run(
                langevin.mala, at_level(state.network, t[here]), x[here], sigma, SETTLE_STEPS, generator
            )
            steps.record(t[here], info.accept_prob)
            state.nonfinite += info.nonfinite.sum().long()
        steps.adapt()
        if gained is not None and start is not None:
            gained.regain(start, _parts(gained, x, t), t, GAIN_SHARE)
        draws += [x.clone()] if settled else []
    state.steps.sigma = steps.sigma
    constant = getattr(state.network, "constant", None)
    if isinstance(constant, Tensor) and constant.shape == (ladder.levels,):
        late = slice(-BALANCED, None)
        balance_levels(setup, torch.cat(draws)[late], t.repeat(len(draws))[late])


def _parts(network: LevelResNet, x: Tensor, t: Tensor) -> Tensor:
    rows = [slice(i, i + SETTLE_ROWS) for i in range(0, len(t), SETTLE_ROWS)]
    with torch.no_grad():
        return torch.cat([network.parts(x[here], t[here]) for here in rows])
