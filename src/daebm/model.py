"""A trained model: energies, samples and long runs in the data's own units; save and load."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from daebm import checkpoint, networks, profile, sampling
from daebm.config import Config
from daebm.data import Dataset, to_unit_range
from daebm.engine import exactly
from daebm.errors import CheckpointError, InputError
from daebm.ladder import Ladder
from daebm.methods import method
from daebm.samplers.langevin import KERNELS, Info
from daebm.samplers.mgms import label_move
from daebm.state import TrainingState, holds_state, read_state

Array = TypeVar("Array", np.ndarray[Any, Any], Tensor)
CHUNK = 1 << 17  # numbers per network evaluation; bounds memory
PROFILE_CHUNK = 1 << 19  # a GPU wants more at a time, and there is a level at a time
SHIPPED = ("fashion-mnist", "mnist")  # trained models that come with this package
ANNEALED_STEPS = 20  # per level, on the way down from noise
LEAST_TRIP = 100  # transitions: a training shorter than this has not shown how long a round trip is
# Round trips after which chains from noise have settled: of a kind of points that is ten or thirty times as narrow as
# the rest (three closed forms) they find .4 to .9 of its share after 3, .8 to 1 after 5, all of it after 10.
SETTLED, LEAST_CHAINS = 10, 64
SAMPLE_SEED = 100_000_007  # a stream of its own: training starts at the seed itself
SAMPLE_CHUNK, LARGEST_SAMPLE = 1 << 20, 1 << 28  # numbers that are drawn at once, and in a call: a GiB


@dataclass(eq=False)
class Model:
    """U(x, t) with its ladder, frozen step sizes and units. x is in data units; a level-t point is
    shift + scale * (sqrt(abar_t) z + sqrt(v_t) eps) for standardised z.

    ``trip`` is how many transitions a chain took for a round trip over the levels in training; None is not known."""

    config: Config
    network: nn.Module
    ladder: Ladder
    sigma: Tensor
    event: tuple[int, ...]
    shift: float
    scale: float
    trip: float | None = None

    def __post_init__(self) -> None:
        self.network.eval().requires_grad_(False)

    @classmethod
    def from_training(cls, config: Config, dataset: Dataset, state: TrainingState, ladder: Ladder) -> Model:
        """The model that `train` has arrived at, with averaged weights if there are any; the state stays as it is."""
        network = copy.deepcopy(state.network)
        network.load_state_dict(network.state_dict() | state.average)
        sigma = state.steps.sigma.clone()
        trip = _trip(config, state.iteration, state.chains.trips)
        return cls(config, network, ladder, sigma, dataset.event, dataset.shift, dataset.scale, trip)

    @property
    def device(self) -> torch.device:
        return self.sigma.device

    def to(self, device: str | torch.device) -> Model:
        """The model itself, moved to ``device``."""
        self.network.to(device)
        self.sigma = self.sigma.to(device)
        return self

    def energy(self, x: Array, t: int | Array = 0) -> Array:
        """U(x, t) for x of shape (n, ...) and one level or n of them; numpy in, numpy out; torch in, torch out."""
        points = self._points(x)
        given = t.cpu().numpy() if isinstance(t, Tensor) else np.asarray(t)
        if given.dtype.kind not in "iu" or given.size not in (1, len(points)):
            kind = f"{given.size} of type {given.dtype}" if given.size != 1 else repr(t)
            raise InputError(f"t must be one whole number or {len(points)} of them, got {kind}")
        if given.size and not 0 <= given.min() <= given.max() <= self.ladder.top:
            raise InputError(
                f"t must lie in 0..{self.ladder.top}, the levels of this model, got {given.min()}..{given.max()}"
            )
        levels = torch.from_numpy(given.astype(np.int64).reshape(-1)).to(self.device).expand(len(points))
        with torch.no_grad(), exactly(self.network):
            rows = max(1, CHUNK // math.prod(self.event))
            starts = range(0, max(len(points), 1), rows)
            parts = [self.network(points[i : i + rows], levels[i : i + rows]) for i in starts]
        return self._like(torch.cat(parts), x, torch.float32)

    def said(self, name: str, x: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
        """What the network says of x (n, ...) besides its energy, (n, p).

        ``slopes``: [U(x, t), log |grad U(x, t)|] level by level, for images place by place. ``features``: the last
        map of a residual network at level 0 that its energy is summed up from, as a direction.
        """
        if name not in profile.kinds(self.network):
            raise InputError(f"network {self.config.network!r} says no {name!r}: slopes, and features of a resnet")
        points, rows = self._points(x), max(1, PROFILE_CHUNK // math.prod(self.event))
        starts = range(0, max(len(points), 1), rows)
        with exactly(self.network):
            parts = [profile.SAID[name](self.network, self.ladder.levels, points[i : i + rows]) for i in starts]
        return np.concatenate(parts)

    def sample(self, count: int, seed: int = 0, visits: int | None = None, clean: bool = True) -> np.ndarray[Any, Any]:
        """``count`` samples at t = 0, started from noise, shape (count, ...).

        With levels: x of the chains that are at t = 0 at set times, once they have had time for several round trips
        (`sampling.looked_at`). With ``visits`` Algorithm 3 with stopping rule M = ``visits``, which is quicker and no
        exact draw from exp(-U(x, 0)): what travels fast over the levels is seen too often, kinds of points that are
        narrower than others too seldom, after 8 visits still by half. A model whose label move carries x goes down the
        levels once, with some steps at each: no exact draw either, and close enough for pictures. A plain EBM runs the
        Langevin steps its method uses. ``clean`` removes the noise floor by Tweedie's formula. A model whose labels do
        not reach level 0, by what a round trip took in training, is an error and no endless run.
        """
        each = math.prod(self.event)
        if count * each > LARGEST_SAMPLE:
            raise InputError(
                f"{count} samples of {each} numbers are too many for one call: draw at most {LARGEST_SAMPLE // each}, "
                "and more with other seeds"
            )
        generator = torch.Generator(self.device).manual_seed(seed + SAMPLE_SEED)
        rows, row = max(1, SAMPLE_CHUNK // each), method(self.config.method)
        parts = []
        with exactly(self.network):
            for done in range(0, max(count, 1), rows):
                some = min(rows, count - done)
                if visits is None and row.name == "da":
                    x = self._settled(some, generator)
                else:
                    x = self.draw(some, generator, 1 if visits is None else visits).x
                parts.append(self.to_data(self.cleaned(x) if clean else x).cpu().numpy())
        return np.concatenate(parts)

    def long_run(self, x: Array, steps: int, seed: int = 0, kernel: str = "mala", clean: bool = True) -> Array:
        """``steps`` Langevin steps at t = 0 from data points x; how many steps a chain keeps its place tells a lot.

        Level 0 holds the floor's noise, which x gets first: without it every step would be refused. ``clean`` takes it
        off again at the end, by Tweedie's formula.
        """
        with exactly(self.network):
            generator = torch.Generator(self.device).manual_seed(seed + SAMPLE_SEED)
            z = self._points(x)
            if self.ladder.floor > 0:
                z = self.ladder.diffuse(z, torch.zeros(len(z), dtype=torch.long, device=z.device), generator)
            end, _info = self.run_at_zero(z, steps, generator, kernel)
            end = self.cleaned(end) if clean else end
        return self._like(self.to_data(end.double()), x)

    def _settled(self, count: int, generator: torch.Generator) -> Tensor:
        if self.config.label_move == "carry":
            return self.draw(count, generator, transitions=0, annealed_steps=ANNEALED_STEPS).x
        start = sampling.from_noise(self.sampler(), self.event, max(count, LEAST_CHAINS), generator)
        settle = math.ceil(SETTLED * self._round_trip)
        with torch.no_grad():
            return sampling.looked_at(self.sampler(), start, count, settle, generator).x

    @property
    def _round_trip(self) -> float:
        """Transitions of a round trip: a walk between neighbouring levels takes their number squared, as a guess."""
        return self.ladder.levels**2 if self.trip is None else max(self.trip, self.ladder.levels)

    # The same in standardised units, for whoever wants every detail.

    def sampler(self) -> sampling.Sampler:
        config = self.config
        move = label_move(config.label_move, self.ladder.top, config.block)
        return sampling.Sampler(KERNELS[config.kernel], self.network, self.ladder, self.sigma, config.steps, move)

    def draw(
        self,
        count: int,
        generator: torch.Generator,
        visits: int = 1,
        transitions: int | None = None,
        annealed_steps: int = 0,
    ) -> sampling.Drawn:
        """Samples from noise by the method's own way.

        With MGMS: Algorithm 3 with M = ``visits`` or, given ``transitions``, those of ``count`` chains that are at
        t = 0 after so many; ``annealed_steps`` at every level on the way down make a quicker start for either, which
        is all that there is after 0 transitions.
        """
        row, sampler = method(self.config.method), self.sampler()
        start = sampling.from_noise(sampler, self.event, count, generator)
        with torch.no_grad():
            if row.name == "drl":
                return sampling.recovery(sampler, start, generator)
            if not row.ladder:
                steps = row.post_steps * self.config.steps
                x, info = self.run_at_zero(start.x, steps, generator, self.config.kernel)
                return sampling.Drawn(x, start.t, (steps + 1) * count, int(info.nonfinite.sum()))
            if annealed_steps:
                start = sampling.annealed(sampler, start, annealed_steps, generator, self.config.label_move == "carry")
            if transitions == 0:
                return start
            if transitions is None:
                patience = sampling.patience(count * max(visits, 1), max(self._round_trip, LEAST_TRIP))
                return sampling.until_visits(sampler, start, visits, generator, patience)
            end = sampling.transitions(sampler, start, transitions, generator)
            return end._replace(x=end.x[end.t == 0], t=end.t[end.t == 0])

    def run_at_zero(
        self, x: Tensor, steps: int, generator: torch.Generator, kernel: str, observe: Any = None, every: int = 1
    ) -> tuple[Tensor, Info]:
        if kernel not in KERNELS:
            raise InputError(f"unknown kernel {kernel!r}: choose one of {', '.join(KERNELS)}")
        with torch.no_grad():
            return sampling.long_run(
                KERNELS[kernel],
                self.network,
                x,
                float(self.sigma[0]),
                steps,
                generator,
                observe,
                every,
                self.config.compile and self.device.type == self.config.device,  # elsewhere nobody has asked for it
            )

    def cleaned(self, x: Tensor) -> Tensor:
        return sampling.tweedie(self.network, x, self.ladder.floor) if self.ladder.floor > 0 else x

    def to_data(self, x: Tensor) -> Tensor:
        return self.shift + self.scale * x

    def standardise(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale

    def save(
        self,
        folder: str | Path,
        more_tensors: dict[str, Tensor] | None = None,
        more_facts: dict[str, Any] | None = None,
    ) -> None:
        """Write model.safetensors and model.json: weights, ladder and step sizes, without the training state.

        Who builds on a model puts ``more`` into the same file, so that the whole is written in one step. A folder that
        holds a model is written over; one that holds a run, or other files and no model, is refused.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is no folder: name another one to save the model in")
        if holds_state(folder):
            raise InputError(f"{folder} holds a run, which the model would hide: name another folder to save it in")
        others = folder.exists() and any(path.suffix != ".partial" for path in folder.iterdir())
        if others and not checkpoint.exists(folder, "model"):
            raise InputError(f"{folder} holds other files and no model: name another folder to save it in")
        tensors = (more_tensors or {}) | {f"network.{k}": v for k, v in self.network.state_dict().items()}
        tensors |= {
            "ladder.abar": self.ladder.abar,
            "ladder.variance": self.ladder.variance,
            "sigma": self.sigma,
        }
        data = {"event": list(self.event), "shift": self.shift, "scale": self.scale}
        facts = {"config": self.config.to_json(), "data": data, "trip": self.trip} | (more_facts or {})
        checkpoint.write(folder, "model", tensors, facts)

    def _points(self, x: Array) -> Tensor:
        if isinstance(x, Tensor):
            points = x
        else:
            array = np.array(x)  # a copy: torch takes neither reversed nor read-only arrays as they are
            if array.dtype.kind not in "fiub":
                raise InputError(f"x must hold real numbers, got an array of {array.dtype}")
            points = torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float64))
        if points.is_complex():
            raise InputError(f"x must hold real numbers, got {points.dtype}")
        if tuple(points.shape[1:]) != self.event or points.ndim < 2:
            raise InputError(f"x must have shape (n, {', '.join(map(str, self.event))}), got {tuple(points.shape)}")
        points = points.to(self.device)
        # Bytes are grey levels. In float32 a shift of millions would leave little of what it is subtracted from.
        points = self.standardise(to_unit_range(points) if points.dtype == torch.uint8 else points.double()).float()
        if not torch.isfinite(points).all():
            raise InputError("x holds a NaN or infinite (in float32) value: remove or impute such rows")
        return points

    @staticmethod
    def _like(result: Tensor, x: Array, least: torch.dtype = torch.float16) -> Array:
        """``result`` as an array of the kind, device and float type of x, of ``least`` precision at the least."""
        given = x.dtype if isinstance(x, Tensor) else torch.from_numpy(np.zeros(0, np.asarray(x).dtype)).dtype
        dtype = torch.promote_types(given, least) if given.is_floating_point else torch.float32
        result = result.to(x.device if isinstance(x, Tensor) else "cpu", dtype)
        return result if isinstance(x, Tensor) else result.numpy()


def model_folder(name: str | Path) -> Path:
    """Where a model lies: the folder called ``name`` if it holds one, or one that comes with this package."""
    folder = Path(name)
    if str(name) in SHIPPED and not holds_state(folder) and not checkpoint.exists(folder, "model"):
        return Path(__file__).parent / "shipped" / str(name)
    return folder


def load(folder: str | Path, network: nn.Module | None = None) -> Model:
    """The model in a run folder (its latest checkpoint, averaged weights if it has them) or in a model folder.

    fashion-mnist and mnist are trained models that come with this package. A model that was trained on a network of
    your own needs that network again, to put the weights into.
    """
    folder = model_folder(folder)
    if holds_state(folder):
        tensors, facts = read_state(folder)
        tensors["sigma"] = tensors["steps.sigma"]
        facts["trip"] = _trip(Config.from_json(facts["config"]), facts["iteration"], tensors["chains.trips"])
    elif checkpoint.exists(folder, "model"):
        tensors, facts = checkpoint.read(folder, "model")
    else:
        what = f"{folder} holds no daebm run or model" if folder.exists() else f"there is no folder {folder}"
        names = " or ".join(("the --out folder of `daebm run` or `daebm fit`", *SHIPPED))
        raise CheckpointError(f"{what}: name {names}")
    return assembled(folder, tensors, facts, network)


def assembled(
    folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any], network: nn.Module | None = None
) -> Model:
    """The model of what was read from ``folder``."""
    config = Config.from_json(facts["config"])
    ladder = Ladder(tensors["ladder.abar"], tensors["ladder.variance"])
    event = tuple(facts["data"]["event"])
    # Buffers that were taken from the data come with the weights; two made-up points give them their shapes.
    with torch.random.fork_rng(devices=[]):
        network = network if network is not None else networks.build(config, torch.zeros(2, *event), ladder)
    weights = {k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")}
    weights |= {k.removeprefix("average."): v for k, v in tensors.items() if k.startswith("average.")}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {folder} do not fit network {config.network!r}: for a network of your own call "
            "load(folder, network)"
        ) from error
    shift, scale = facts["data"]["shift"], facts["data"]["scale"]
    return Model(config, network, ladder, tensors["sigma"], event, shift, scale, facts.get("trip"))


def _trip(config: Config, iteration: int, trips: Tensor) -> float:
    """Transitions per round trip: those of a chain in training over its trips. Fewer than one trip count as one."""
    made = max(0, iteration - config.warm) * config.bursts * config.batch / len(trips)
    return made / max(1.0, float(trips.double().mean()))
