"""The training state: all that a run's future depends on, how it starts, and how it is saved and restored."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daebm import checkpoint, networks, portable
from daebm.chains import Chains
from daebm.config import Config
from daebm.data import Dataset
from daebm.errors import CheckpointError, InputError
from daebm.ladder import Ladder
from daebm.methods import method
from daebm.muon import Muon
from daebm.samplers.adapt import StepSizes
from daebm.spacing import overlapping

CONVOLUTION = 4  # dimensions of its weight
MUON_FACTOR = 15.0  # rate of the convolutions, in units of their norm, over that of all else
CHECKPOINT, STATE = "checkpoint", "state"  # folder and file name inside a run


@dataclass(eq=False)
class TrainingState:
    """Everything that a run's future depends on. What is not in here cannot influence the result."""

    network: nn.Module
    optimiser: torch.optim.Optimizer
    average: dict[str, Tensor]  # averaged weights; empty when averaging is off
    chains: Chains
    steps: StepSizes
    generator: torch.Generator
    order: Tensor  # this epoch's permutation of the data
    cursor: int  # how much of it is used up
    iteration: int
    rate_scale: float  # lowered at each roll-back
    rollbacks: int
    replaced: int  # chains that were stranded and began anew
    nonfinite: Tensor  # proposals and label energies refused so far; on the device, where it is counted
    precision: str  # the one that passed the last check: a resumed run goes on in it
    seconds: float  # spent in training, over all sessions; reported, never read by a schedule


def build_ladder(config: Config, data: Tensor) -> Ladder:
    """The ladder that a config describes for standardised data: one level for the plain EBMs."""
    if not method(config.method).ladder:
        return Ladder.single(config.floor)
    if config.ladder == "paper":
        return Ladder.paper(config.top, config.delta_first, config.delta_last)
    if config.ladder == "overlap":
        generator = torch.Generator().manual_seed(0)  # not the run's seed: one data set, one ladder
        return overlapping(data, config.floor, config.last_variance, config.overlap, generator, config.first_sd)
    return Ladder.geometric(data[0].numel(), config.floor, config.first_sd, config.last_variance, config.top or None)


def initial_sigma(config: Config, ladder: Ladder) -> Tensor:
    """step_size itself for a plain EBM; step_size times a noise sd per level otherwise.

    The sd is the level's own increment sqrt(1 - alpha_t) on the paper's ladder (which writes sqrt(1 - alpha_t^2),
    with the square root already in its alpha), the total noise sqrt(v_t) on a geometric one. DRL's chain at level
    t moves on the scale of the increment to t + 1. A clean level 0 takes the step of level 1.
    """
    if ladder.levels == 1:
        return torch.full((1,), config.step_size, dtype=torch.float64)
    increment = ladder.step_variance.sqrt()
    if config.method == "drl":
        return config.step_size * torch.cat([increment[1:], increment[-1:]])
    sd = increment if config.ladder == "paper" else ladder.variance.sqrt()
    return config.step_size * torch.where(sd > 0, sd, sd[1])


def start(config: Config, data: Tensor, ladder: Ladder, network: nn.Module | None = None) -> TrainingState:
    """The state before the first iteration, from the seed alone (and the network, if given). Data standardised."""
    device = data.device
    generator = torch.Generator(device).manual_seed(config.seed)
    event = tuple(data.shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator, device=device)))
        network = network if network is not None else networks.build(config, data.cpu(), ladder)
    network = network.to(device)
    if config.level_rate:
        constant = getattr(network, "constant", None)
        if not isinstance(constant, nn.Parameter) or constant.shape != (ladder.levels,) or ladder.levels == 1:
            raise InputError(
                "level_rate needs levels and a network with a constant for each: level-mlp or level-resnet"
            )
        constant.requires_grad_(False)  # it follows the masses of the levels, not the optimiser
    if hasattr(network, "log_gain"):
        network.log_gain.requires_grad_(config.gain_rate > 0)
    elif config.gain_rate:
        raise InputError("gain_rate needs a network with gains for its levels: level-resnet")
    if config.optimiser == "muon" and not (config.warm and any(w.ndim == CONVOLUTION for w in network.parameters())):
        raise InputError(
            "optimiser=muon moves the convolutions of a warm start: it needs denoise or relate, and a network with "
            "convolutions (level-resnet or resnet)"
        )
    if config.start == "data":
        chains = Chains.from_data(config.store, data, ladder, generator)
    else:
        chains = Chains.from_noise(config.store, event, ladder, generator)
    return TrainingState(
        network=network,
        optimiser=optimiser(config, network, warm_start=config.warm > 0),
        average={k: v.detach().clone() for k, v in network.named_parameters()} if config.average else {},
        chains=chains,
        steps=StepSizes.start(
            initial_sigma(config, ladder).to(device),
            (config.step_minimum, config.step_maximum),
            minimum_count=max(20, config.batch // ladder.levels),
        ),
        generator=generator,
        order=torch.randperm(len(data), generator=generator, device=device),
        cursor=0,
        iteration=0,
        rate_scale=1.0,
        rollbacks=0,
        replaced=0,
        nonfinite=torch.zeros((), dtype=torch.long, device=device),
        precision=config.precision,
        seconds=0.0,
    )


def optimiser(config: Config, network: nn.Module, warm_start: bool = False) -> torch.optim.Optimizer:
    """The config's own; for the warm start, whose gradients have little noise, Adam with momentum, or Muon.

    Muon is for the warm start alone. With chains it gains nothing: how fast anything is learned is set by their noise.

    Rates are set at every update, as a group's ``factor`` times that of the schedule. The gains of levels have a group
    of their own: they wait for persistent chains.
    """
    muon = warm_start and config.optimiser == "muon"
    weights: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    gains: list[nn.Parameter] = []
    for name, weight in network.named_parameters():
        own = gains if config.gain_rate and name == "log_gain" else weights
        (matrices if muon and weight.ndim == CONVOLUTION else own).append(weight)
    groups: list[dict[str, Any]] = [{"params": weights, "factor": 1.0}]
    if matrices:
        groups.append({"params": matrices, "factor": MUON_FACTOR, "matrices": True})
    if gains:
        groups.append({"params": gains, "factor": 0.0 if warm_start else config.gain_rate / config.learning_rate})
    if config.optimiser == "sgd" and not warm_start:
        return torch.optim.SGD(groups, lr=config.learning_rate)
    betas = (0.9 if warm_start else config.beta1, 0.999)
    return (Muon if muon else torch.optim.Adam)(groups, lr=config.learning_rate, betas=betas)


def holds_state(folder: Path) -> bool:
    """Whether a run folder has a checkpoint, whole or portable."""
    return checkpoint.exists(folder / CHECKPOINT, STATE) or portable.exists(folder / CHECKPOINT)


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint of a run folder; the whole one if there is one, for it is the later one."""
    if checkpoint.exists(folder / CHECKPOINT, STATE) or not portable.exists(folder / CHECKPOINT):
        return checkpoint.read(folder / CHECKPOINT, STATE)
    return portable.read(folder / CHECKPOINT)


def read_resumable(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same, to go on from: a model can be had of what another version wrote, a run cannot."""
    tensors, facts = read_state(folder)
    if not set(_FACTS) <= set(facts) or set(_part(tensors, "chains")) != set(_CHAINS):
        raise CheckpointError(
            f"the checkpoint in {folder} was written by another version of daebm: go on with that one, or begin again"
        )
    return tensors, facts


@dataclass(eq=False)
class Saved:
    """The last good state, in ``folder/checkpoint`` or, without a folder, in memory."""

    config: Config
    dataset: Dataset
    ladder: Ladder
    folder: Path | None
    memory: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    @cached_property
    def data_facts(self) -> dict[str, Any]:
        """What the run was begun on; the order of the data is part of the state."""
        train = self.dataset.train.contiguous()
        return {
            "event": list(self.dataset.event),
            "shift": self.dataset.shift,
            "scale": self.dataset.scale,
            "rows": len(train),
            "sha256": hashlib.sha256(train.numpy().tobytes()).hexdigest(),
        }

    @property
    def exists(self) -> bool:
        if self.folder is None:
            return self.memory is not None
        return holds_state(self.folder)

    def save(self, state: TrainingState) -> None:
        tensors, facts = _pack(state)
        facts["config"] = self.config.to_json()
        facts["data"] = self.data_facts
        tensors["ladder.abar"], tensors["ladder.variance"] = self.ladder.abar, self.ladder.variance
        if self.folder is None:
            self.memory = copy.deepcopy((tensors, facts))
        else:
            checkpoint.write(self.folder / CHECKPOINT, STATE, tensors, facts)

    def load(self, state: TrainingState) -> None:
        """Overwrite ``state`` by what was saved last."""
        if self.folder is None:
            assert self.memory is not None
            tensors, facts = copy.deepcopy(self.memory)
        else:
            tensors, facts = read_resumable(self.folder)
            difference = self.config.difference(Config.from_json(facts["config"]))
            if difference is not None:
                raise CheckpointError(
                    f"{self.folder} was begun with other settings ({difference}): "
                    "resume with the same ones or choose another --out"
                )
            if facts["data"] != self.data_facts:
                raise CheckpointError(
                    f"{self.folder} was begun on other data ({facts['data'].get('rows')} rows of shape "
                    f"{facts['data']['event']} there, {self.data_facts['rows']} of {self.data_facts['event']} here, or "
                    "other values): resume on the same data or choose another --out"
                )
        # The warm start has an optimiser of its own, and a roll-back may lead into it.
        state.optimiser = optimiser(self.config, state.network, facts["iteration"] < self.config.warm)
        _unpack(state, tensors, facts)


def _pack(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"network.{k}": v for k, v in state.network.state_dict().items()}
    tensors |= {f"average.{k}": v for k, v in state.average.items()}
    for index, entries in state.optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{k}": torch.as_tensor(v) for k, v in entries.items()}
    for name in _CHAINS:
        tensors[f"chains.{name}"] = getattr(state.chains, name)
    for name in ("sigma", "total", "count"):
        tensors[f"steps.{name}"] = getattr(state.steps, name)
    tensors["generator"] = state.generator.get_state()
    tensors["order"] = state.order
    return tensors, {name: getattr(state, name) for name in _FACTS} | {"nonfinite": int(state.nonfinite)}


def _unpack(state: TrainingState, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    state.network.load_state_dict(_part(tensors, "network"))
    device, weights = state.order.device, dict(state.network.named_parameters())
    # Laid out as the weights are, which no file knows: only then are all of them updated at once.
    for name, value in _part(tensors, "average", device).items():
        state.average[name] = torch.empty_like(weights[name]).copy_(value)
    moved = [weight for group in state.optimiser.param_groups for weight in group["params"]]
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in _part(tensors, "optimiser").items():
        index, name = int(key.split(".")[0]), key.split(".")[1]
        like = moved[index] if value.shape == moved[index].shape else value
        entries.setdefault(index, {})[name] = torch.empty_like(like, dtype=value.dtype).copy_(value)
    groups = state.optimiser.state_dict()["param_groups"]
    state.optimiser.load_state_dict({"state": entries, "param_groups": groups})
    state.chains = Chains(**_part(tensors, "chains", device))
    for name, value in _part(tensors, "steps", device).items():
        setattr(state.steps, name, value)
    state.generator.set_state(tensors["generator"].cpu())
    state.order = tensors["order"].to(device)
    state.nonfinite.fill_(facts["nonfinite"])
    for name in _FACTS:
        setattr(state, name, facts[name])


_CHAINS = tuple(field.name for field in fields(Chains))
_FACTS = ("cursor", "iteration", "rate_scale", "rollbacks", "replaced", "precision", "seconds")


def _part(tensors: dict[str, Tensor], prefix: str, device: torch.device | None = None) -> dict[str, Tensor]:
    return {k.removeprefix(prefix + "."): v.to(device) for k, v in tensors.items() if k.startswith(prefix + ".")}
