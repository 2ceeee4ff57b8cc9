"""Every setting, its default and what it means; a preset lists only what differs; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import re
from dataclasses import dataclass
from typing import Any, get_type_hints

from daebm.errors import InputError
from daebm.methods import METHODS, method
from daebm.samplers.langevin import KERNELS

NETWORKS = ("level-mlp", "level-resnet", "relu-mlp", "gated-mlp", "relu-basis", "resnet")
PRECISIONS = ("fp32", "tf32x2", "drafted", "tf32", "fp16", "bf16")


@dataclass(frozen=True)
class Config:
    """The resolved settings of one run. Budgets are iterations: nothing reads the clock."""

    experiment: str = "own-data"  # what is trained on
    method: str = "da"  # cd, persistent, noise, hybrid, drl or da
    preset: str = "own"  # where the settings come from
    seed: int = 0  # everything random follows from it

    # Data
    train_size: int = 0  # points drawn for synthetic data; 0 takes the experiment's own number
    dequantise: bool = False  # images of bytes: add uniform noise of one grey level in training
    standardise: bool = True  # train on (x - shift) / scale; the model takes and gives data units all the same

    # Ladder (methods with levels)
    ladder: str = "geometric"  # geometric; overlap (spaced by measured overlap); paper (its cumulative sum)
    overlap: float = 0.35  # overlap: acceptance of a label move between neighbouring levels
    top: int = 0  # T; 0 lets a geometric ladder choose from the dimension
    floor: float = 0.0  # sd of the noise added to the data at level 0, in standardised units
    first_sd: float = 0.01  # geometric, or overlap, with a zero floor: noise sd of level 1
    last_variance: float = 0.95  # geometric, overlap: noise variance of level T
    delta_first: float = 0.01  # paper: first and last increment of the noise sd
    delta_last: float = 0.3

    # Network
    network: str = "level-mlp"  # level-mlp, level-resnet (ours); relu-mlp, gated-mlp, relu-basis, resnet (the paper's)
    width: int = 128  # of a layer; channels at full resolution of a residual network
    hidden: int = 3  # hidden layers; blocks per resolution of a residual network
    patch: int = 1  # residual networks: squares of so many pixels a side are the first layer's pixels
    heads: int = 1  # residual networks: at so many resolutions, from the lowest up, maps are summed up to the energy
    squares: int = 0  # level-mlp: learned constraints in the head of squares
    octaves: int = 0  # level-mlp: sin and cos features at frequencies 1, 2, 4, ..

    # Optimiser
    iterations: int = 1000  # of all parts: denoise and relate first, finish last
    batch: int = 100  # data points, and chains, per iteration
    optimiser: str = "adam"  # adam, sgd, or muon: adam but for convolutions in the warm start
    learning_rate: float = 1e-3  # while chains persist
    beta1: float = 0.0  # Adam's momentum
    denoise: int = 0  # iterations of denoising score matching first, a warm start
    denoise_rate: float = 1e-3  # learning rate then, falling linearly to 0
    relate: int = 0  # then iterations that learn to tell the level of carried data beside it (level networks)
    relate_rate: float = 1e-4  # learning rate then, falling linearly to 0
    warm_up: int = 0  # iterations of linear ramp from 0
    decay_start: float = 0.5  # linear decay to 0 from this share of the iterations on (when there are no milestones)
    milestones: tuple[float, ...] = ()  # shares of the iterations at which the rate is multiplied by decay_factor
    decay_factor: float = 0.1
    clip: float = 0.0  # largest gradient norm; 0 is off
    trust: float = 0.0  # most nats by which an update with chains lowers its batch's loss; falls as the rate; 0 is off
    energy_penalty: float = 0.0  # weight of mean U^2 over data and chains
    margin: float = 0.0  # nats a point may lie below the chain at its level before they are drawn together; 0 is off
    level_rate: float = 0.0  # share of unequal level masses made up for at an adaptation; data then take chains' levels
    finish: int = 0  # last iterations, with the averaged weights: levels get their masses and steps their sizes (da)
    gain_rate: float = 0.0  # learning rate of the gains of the levels while chains persist (level-resnet); 0: all 1
    average: float = 0.0  # decay of the exponential weight average that the final model uses; 0 is off

    # Chains
    kernel: str = ""  # mala or langevin; empty takes the method's own
    steps: int = 10  # L, Langevin steps per burst
    bursts: int = 1  # bursts per iteration, each followed by a label move (methods with levels)
    label_move: str = "full"  # full, block, local, or carry: a block that takes x along (level networks)
    block: int = 8  # labels per block
    store: int = 10_000  # chains that persist
    start: str = "data"  # the store begins as diffused data or as noise
    restart: float = -1.0  # probability of a fresh start from noise; -1 takes the method's own
    step_size: float = 0.1  # sigma of a plain EBM; with levels sigma_t is this times the level's noise sd
    adapt_every: int = 50  # iterations between step-size adaptations; 0 keeps the steps fixed
    step_minimum: float = 1e-5  # bounds of the adapted steps
    step_maximum: float = 3.0
    reject_from: int = 0  # iteration from which Metropolis rejections are on (the paper warms up without)

    # Guard and bookkeeping
    checkpoint_every: int = 500  # iterations; the precision is checked then too
    log_every: int = 50  # iterations
    maximum_gap: float = 1e5  # |mean U(data) - mean U(chains)|, or a loss, above this is an explosion
    maximum_rollbacks: int = 3  # roll-backs to the last good checkpoint before giving up
    compile: bool = False  # compile the step in training and long runs (on a GPU as a graph); changes rounding only
    device: str = "cpu"  # cpu or cuda
    precision: str = "fp32"  # guarded; a GPU also has tf32x2, drafted (fp16 bursts decided in tf32x2), tf32, fp16, bf16

    # Evaluation after training
    post_chains: int = 1000  # chains started from noise
    post_transitions: int = 250  # MGMS transitions (methods with levels)
    long_run_chains: int = 1000  # chains started from data, at t = 0
    long_run_steps: int = 10_000  # steps of each

    def __post_init__(self) -> None:
        _check_types(self)
        row = method(self.method)
        if not self.kernel:
            object.__setattr__(self, "kernel", row.kernel)
        for name in (
            "iterations",
            "batch",
            "steps",
            "bursts",
            "store",
            "width",
            "hidden",
            "patch",
            "heads",
            "checkpoint_every",
        ):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("log_every", "post_chains", "post_transitions", "long_run_chains", "long_run_steps"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "train_size",
            "squares",
            "octaves",
            "top",
            "warm_up",
            "denoise",
            "relate",
            "finish",
            "adapt_every",
            "reject_from",
            "maximum_rollbacks",
            "seed",
        ):
            _require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("floor", "clip", "trust", "energy_penalty", "margin", "level_rate", "gain_rate"):
            _require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("learning_rate", "denoise_rate", "relate_rate", "first_sd"):
            _require(self, name, getattr(self, name) > 0, "positive")
        for name in ("step_size", "step_minimum", "maximum_gap"):
            _require(self, name, getattr(self, name) > 0, "positive")
        for name in ("average", "beta1"):
            _require(self, name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        _require(self, "level_rate", self.level_rate <= 1, "at most 1")
        if self.level_rate and not self.adapt_every:
            raise InputError("level_rate balances the levels whenever step sizes adapt: adapt_every must not be 0")
        if (self.label_move == "carry" or self.relate) and not (row.name == "da" and self.network.startswith("level-")):
            raise InputError(
                "label_move=carry and relate carry x between levels: they need method=da and network=level-mlp or "
                "level-resnet"
            )
        if self.precision == "drafted" and (row.name, self.kernel) != ("da", "mala"):
            raise InputError("precision=drafted corrects whole bursts: it needs method=da and kernel=mala")
        _require(self, "overlap", 0 < self.overlap < 1, "between 0 and 1")
        _require(self, "seed", self.seed < 2**62, "below 2**62")
        _require(self, "block", self.block >= 2, "at least 2")
        _require(self, "decay_start", 0 <= self.decay_start <= 1, "between 0 and 1")
        _require(self, "decay_factor", 0 < self.decay_factor <= 1, "in (0, 1]")
        _require(self, "milestones", all(0 < m <= 1 for m in self.milestones), "shares in (0, 1]")
        _require(self, "restart", self.restart == -1 or 0 <= self.restart <= 1, "-1 or a probability")
        _require(self, "step_maximum", self.step_maximum >= self.step_minimum, "at least step_minimum")
        for name, choices in (
            ("kernel", list(KERNELS)),
            ("ladder", ["geometric", "overlap", "paper"]),
            ("network", list(NETWORKS)),
            ("optimiser", ["adam", "muon", "sgd"]),
            ("label_move", ["full", "block", "local", "carry"]),
            ("start", ["data", "noise"]),
            ("device", ["cpu", "cuda"]),
            ("precision", list(PRECISIONS)),
        ):
            value = getattr(self, name)
            _require(self, name, value in choices, f"one of {', '.join(choices)}")
        parts = f"more than denoise={self.denoise}, relate={self.relate} and finish={self.finish} together"
        _require(self, "iterations", self.iterations > self.warm + self.finish, parts)
        if self.margin and not self.level_rate:
            raise InputError("margin compares points and chains at the same levels: level_rate must not be 0")
        if self.finish and not (self.level_rate and self.average):
            raise InputError("finish balances the levels of averaged weights: level_rate and average must not be 0")
        if 0 < self.finish < self.adapt_every:
            raise InputError(f"finish={self.finish} ends before levels adapt: give {self.adapt_every} or more, or 0")
        if row.start == "store" and self.store < self.batch:
            raise InputError(f"store={self.store} must hold at least batch={self.batch} chains")

    @property
    def restart_probability(self) -> float:
        return method(self.method).restart if self.restart < 0 else self.restart

    @property
    def warm(self) -> int:
        """Iterations before the persistent chains take over."""
        return self.denoise + self.relate

    @property
    def learned(self) -> int:
        """Iterations after which the weights stay."""
        return self.iterations - self.finish

    @property
    def gradients_per_iteration(self) -> int:
        """Energy gradients per chain in one iteration: one to start each burst and one a step."""
        bursts = self.bursts if self.method == "da" else 1
        return bursts * (self.steps + 1)

    def gradients(self, iteration: int) -> int:
        """Energy gradients up to an iteration; the warm starts take one for each point, if a costly one."""
        warm = min(iteration, self.warm)
        return (warm + (iteration - warm) * self.gradients_per_iteration) * self.batch

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        if not isinstance(values, dict):
            raise InputError(f"settings must be a JSON object, got {type(values).__name__}")
        missing = {"experiment", "method", "preset"} - set(values)
        if missing:
            raise InputError(f"the setting {min(missing)!r} is missing")
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise InputError(f"unknown setting {min(unknown)!r}: this version of daebm does not have it")
        values = dict(values)
        if isinstance(values.get("milestones"), list):
            values["milestones"] = tuple(values["milestones"])
        return cls(**values)

    def difference(self, other: Config) -> str | None:
        """The first setting in which an ``other`` config, of before, differs from this one, in words."""
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            if a != b:
                return f"{field.name} was {b!r} and is {a!r} now"
        return None


def _check_types(config: Config) -> None:
    """Every setting of its declared type, every number finite."""
    for name, kind in get_type_hints(Config).items():
        value = getattr(config, name)
        parts = value if isinstance(value, tuple) else (value,)
        number = all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts)
        fits = {
            bool: isinstance(value, bool),
            str: isinstance(value, str),
            int: number and isinstance(value, int),
            float: number and not isinstance(value, tuple),
        }.get(kind, number and isinstance(value, tuple))
        if not fits:
            what = {bool: "true or false", str: "a word", int: "a whole number", float: "a number"}
            raise InputError(f"{name} must be {what.get(kind, 'a list of numbers')}, got {value!r}")
        if number and not all(math.isfinite(part) for part in parts):
            raise InputError(f"{name} must be finite, got {value!r}")


def _require(config: Config, name: str, holds: bool, what: str) -> None:
    if not holds:
        raise InputError(f"{name} must be {what}, got {getattr(config, name)!r}")


def explained() -> dict[str, str]:
    """What every setting means, as the comments of `Config` say."""
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(Config), re.MULTILINE))


PresetTable = dict[str, dict[str, dict[str, Any]]]
"""preset -> {"all" or a method -> {setting: value}}."""


def resolve(
    experiment: str,
    presets: PresetTable,
    method_name: str = "da",
    preset: str = "default",
    seed: int = 0,
    overrides: dict[str, str] | None = None,
) -> Config:
    """Defaults, then the preset's settings for all methods, then those for this one, then the overrides."""
    method(method_name)
    if preset not in presets:
        raise InputError(f"unknown preset {preset!r} of {experiment}: choose one of {', '.join(presets)}")
    values: dict[str, Any] = presets[preset].get("all", {}) | presets[preset].get(method_name, {})
    values |= _parsed(overrides or {})
    return Config(experiment=experiment, method=method_name, preset=preset, seed=seed, **values)


def again(config: Config, seed: int, overrides: dict[str, str] | None = None) -> Config:
    """The settings of another run with a seed and overrides of one's own."""
    return dataclasses.replace(config, seed=seed, **_parsed(overrides or {}))


def _parsed(overrides: dict[str, str]) -> dict[str, Any]:
    return {key: _parse(key, text) for key, text in overrides.items()}


def _parse(key: str, text: str) -> Any:
    kinds = get_type_hints(Config)
    own = ("experiment", "method", "preset", "seed")
    if key in own[1:]:
        raise InputError(f"{key} has an option of its own: write --{key} {text} and not --set {key}={text}")
    if key not in kinds or key in own:
        close = difflib.get_close_matches(key, set(kinds) - set(own), n=3, cutoff=0.5)
        hint = f"do you mean {' or '.join(close)}?" if close else "`daebm show` lists them"
        raise InputError(f"unknown setting {key!r}: {hint}")
    kind = kinds[key]
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            return float(text)
        if kind is str:
            return text
        return tuple(float(part) for part in json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        what = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "a list like [0.5, 0.8]")
        raise InputError(f"{key} must be {what}, got {text!r}") from error


def check_methods(names: list[str]) -> list[str]:
    """``all`` stands for every method."""
    return list(METHODS) if names == ["all"] else [method(name).name for name in names]
