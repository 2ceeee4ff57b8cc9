"""While an estimator trains, and after: looks at held-out rows, the model to keep, and its normalising constant."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from daebm.config import Config
from daebm.data import Dataset
from daebm.engine import exactly
from daebm.ladder import Ladder
from daebm.model import Model
from daebm.normaliser import KERNEL_DIMENSIONS, LogNormalisers, Reference, known_reference, level_normalisers, snapshots
from daebm.samplers.mgms import stay
from daebm.sampling import Drawn
from daebm.state import TrainingState
from daebm.units import Floats

LARGEST_VALIDATION = 500  # rows that are looked at
CHAINS, BURN_IN, SNAPSHOTS, APART = 2000, 15, 15, 3  # of the normalising constant, at most so many chains
LOOK_CHAINS = 1000  # for a look during training
OWN = 1000  # draws of the model's own that are kept at most, to be compared with the data
LOOK_DRAWS, DRAWS = 4, 20  # of the known density, for every chain
# Streams of their own, beside the training's, which starts at the seed itself.
LOOK_SEED, NORMALISER_SEED = 50_000_017, 60_000_011


def energies(network: nn.Module, z: Tensor, level: int = 0) -> Floats:
    with torch.no_grad():
        u: Floats = network(z, torch.full((len(z),), level, device=z.device)).cpu().numpy()
    return u


@dataclass(eq=False)
class Watch:
    """Looks at held-out rows at every checkpoint: keeps the best weights, and ends training that only overfits.

    The held-out log density is normalised by the persistent chains as they are; worse is worse by two of its errors. A
    smaller dip is left alone, and so is the first third: a model of Gaussian data begins at its best, others begin with
    a detour, and the falling learning rate of the second half makes up for much.
    """

    config: Config
    dataset: Dataset
    verbose: int
    history: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, dict[str, Any], Model, Drawn] | None = None  # log density, the look, the model and its chains
    worse: int = 0  # looks in a row
    acceptance: float = math.nan  # of the latest steps

    PATIENCE = 3

    def note(self, metrics: dict[str, Any]) -> None:
        """What training reports just before each look."""
        self.acceptance = metrics.get("acceptance", self.acceptance)

    def __call__(self, state: TrainingState, ladder: Ladder) -> bool:
        model = Model.from_training(self.config, self.dataset, state, ladder)
        network = copy.deepcopy(model.network).double()
        generator = torch.Generator().manual_seed(self.config.seed + LOOK_SEED)  # the same draws at every look
        own = energies(network, self.dataset.train[:LARGEST_VALIDATION].double())
        held = energies(network, self.dataset.held_out.double())
        look = {
            "iteration": state.iteration,
            "gap": float(held.mean() - own.mean()),
            "gap_error": float(math.hypot(held.std() / math.sqrt(len(held)), own.std() / math.sqrt(len(own)))),
            "acceptance": self.acceptance,
            "round_trips": float(state.chains.trips.double().mean()),
            "chosen": False,
        }
        x, t = state.chains.x[None, :LOOK_CHAINS], state.chains.t[None, :LOOK_CHAINS]
        reference = _reference(network, ladder, self.dataset, LOOK_DRAWS * t.shape[1], generator)
        if bool((torch.bincount(t[0], minlength=ladder.levels) > 0).all()):
            constants = level_normalisers(network, x, t, ladder.levels, reference)
            log_p, error = -float(held.mean() + constants.value[0]), float(constants.error[0])
            if math.isfinite(error):
                look |= {"log_density": log_p, "log_density_error": error}
                if self.best is None or log_p > self.best[0]:
                    self.best = (log_p, look, model, _chains(state))
                self.worse = self.worse + 1 if log_p < self.best[0] - 2 * error else 0
        self.history.append(look)
        if self.verbose:
            print(_line(look, self.config.iterations), flush=True)
        return self.worse >= self.PATIENCE and state.iteration >= self.config.iterations / 3

    def chosen(self, state: TrainingState, ladder: Ladder) -> tuple[Model, Drawn]:
        """The model at the end, or at the best look if the end is worse, and the chains that it had."""
        if self.worse and self.best is not None:
            _log_p, look, model, chains = self.best
        else:
            look, chains = self.history[-1], _chains(state)
            model = Model.from_training(self.config, self.dataset, state, ladder)
        look["chosen"] = True
        return model, chains


def _line(look: dict[str, Any], iterations: int) -> str:
    """A look in words; the log density is one of standardised rows."""
    density = f"held-out log density {look['log_density']:.4g} (standardised)" if "log_density" in look else ""
    parts = [
        density or "some level has no chain",
        f"training rows likelier by {look['gap']:.2g} nats",
        f"acceptance {look['acceptance']:.2f}",
        f"round trips {look['round_trips']:.2g}",
    ]
    return f"iteration {look['iteration']} of {iterations}: " + ", ".join(parts)


def _chains(state: TrainingState) -> Drawn:
    return Drawn(state.chains.x[:CHAINS].clone(), state.chains.t[:CHAINS].clone(), 0)


def _reference(
    network: nn.Module, ladder: Ladder, dataset: Dataset, count: int, generator: torch.Generator
) -> Reference:
    base: Any = network.base
    return known_reference(base, ladder, dataset.train, count, generator)


class Normalised(NamedTuple):
    """log Z of level 0, its standard error, and the energies of the model's own draws there, sorted."""

    value: float
    error: float
    drawn: Floats


def measured(model: Model, x: Tensor, t: Tensor, reference: Reference) -> tuple[LogNormalisers, Normalised]:
    """Of snapshots x (s, n, ...) and t (s, n) of chains, in float64."""
    network = copy.deepcopy(model.network).double()
    constants = level_normalisers(network, x, t, model.ladder.levels, reference)
    own = x[t == 0].double()
    some = torch.linspace(0, max(len(own) - 1, 0), min(len(own), OWN)).long()
    drawn = np.sort(energies(network, own[some.to(own.device)])) if len(own) else np.zeros(0)
    return constants, Normalised(float(constants.value[0]), float(constants.error[0]), drawn)


def normalise_trained(model: Model, chains: Drawn, rows: Tensor, seed: int) -> Normalised:
    """The same of a model whose chains have travelled and whose levels are in balance: nothing is changed.

    ``rows`` (n, ...) are standardised data.
    """
    generator = torch.Generator(model.device).manual_seed(seed + NORMALISER_SEED)
    base: Any = model.network.base
    reference = known_reference(base, model.ladder, rows, LOOK_DRAWS * len(chains.x), generator)
    with exactly(model.network):
        x, t = snapshots(model.sampler(), chains, generator, BURN_IN, SNAPSHOTS, APART)
    return measured(model, x, t, reference)[1]


def normalise(model: Model, chains: Drawn, dataset: Dataset, seed: int) -> Normalised:
    """Give all levels of the model mass 1, as far as chains at fixed labels tell, and then measure with moving ones.

    Chains go on from the persistent ones; some diffused rows are added at every level, so that none is empty.
    """
    generator = torch.Generator().manual_seed(seed + NORMALISER_SEED)
    ladder, levels = model.ladder, model.ladder.levels
    added = torch.arange(levels).repeat(4)
    rows = torch.randint(len(dataset.train), (len(added),), generator=generator)
    x = torch.cat([chains.x, ladder.diffuse(dataset.train[rows], added, generator)])
    start = Drawn(x, torch.cat([chains.t, added]), 0)
    few = math.prod(dataset.event) <= KERNEL_DIMENSIONS
    count = (DRAWS if few else LOOK_DRAWS) * len(chains.x)
    reference = _reference(model.network, ladder, dataset, count, generator)

    x, t = snapshots(model.sampler()._replace(move=stay), start, generator, BURN_IN, 1, APART)
    constant: Any = model.network.constant
    with torch.no_grad():
        constant += measured(model, x, t, reference)[0].value.to(constant)
    # A level's constant does not change what its points are: those above count too, and no level is without any.
    more_x, more_t = snapshots(model.sampler(), Drawn(x[-1], t[-1], 0), generator, BURN_IN, SNAPSHOTS, APART)
    return measured(model, torch.cat([x, more_x]), torch.cat([t, more_t]), reference)[1]
