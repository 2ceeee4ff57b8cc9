"""Maximum likelihood by stochastic approximation (Algorithm 1): the one training loop of all six methods."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daebm.checkpoint import write_atomically
from daebm.config import Config
from daebm.data import Dataset, check_finite
from daebm.errors import DivergenceError, InputError
from daebm.ladder import MINIMUM_NOISE_OVERLAP, Ladder, noise_overlap
from daebm.methods import draw_negatives, method
from daebm.samplers.langevin import KERNELS
from daebm.state import Saved, TrainingState, build_ladder, start

WEIGHT_LIMIT = 1e6  # networks here have weights of order 1; a float32 energy beyond this has lost its last nat
OVERLAP_SEED = 30_000_001  # a stream of its own: a check must not share noise with the chains
ROLLBACK_RATE_FACTOR = 0.5  # the learning rate after a roll-back, relative to before


def learning_rate(config: Config, iteration: int) -> float:
    """Linear warm-up, then a staircase at the milestones or, without any, constant and linear to zero."""
    share = iteration / config.iterations
    rate = config.learning_rate * min(1.0, (iteration + 1) / (config.warm_up + 1))
    if config.milestones:
        return float(rate * config.decay_factor ** sum(share >= m for m in config.milestones))
    return rate * min(1.0, (1 - share) / max(1 - config.decay_start, 1e-12))


def begin(config: Config, dataset: Dataset, network: nn.Module | None = None) -> tuple[Tensor, Ladder, TrainingState]:
    """Standardised data, the ladder and the state before the first iteration; refuses what cannot be trained."""
    data = dataset.standardise(dataset.train)
    check_finite(f"the training data of {dataset.name}", data)
    if config.batch > len(data):
        raise InputError(f"batch={config.batch} is more than the {len(data)} training points: lower it")
    ladder = build_ladder(config, data[0].numel())
    _check_overlap(config, ladder, data)
    if config.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InputError("compile=true needs a C++ compiler and none was found: install g++ or leave compile out")
    return data, ladder, start(config, data, ladder, network)


def train(
    config: Config,
    dataset: Dataset,
    folder: Path | None = None,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    network: nn.Module | None = None,
) -> tuple[TrainingState, Ladder]:
    """Train to the end of the budget; ``report`` gets the metrics every ``log_every`` iterations.

    ``network`` is an energy U(x, t) of your own on standardised x, in place of the one the config names.

    With a folder, checkpoints go to ``folder/checkpoint`` and metrics to ``folder/metrics.jsonl``, and ``resume``
    continues from there bit for bit. Without one the guard rolls back to a copy in memory.
    """
    data, ladder, state = begin(config, dataset, network)
    saved = Saved(config, dataset, ladder, folder)
    if resume and saved.exists:
        saved.load(state)
    else:
        saved.save(state)
    metrics_file = None if folder is None else _Metrics(folder / "metrics.jsonl", state.iteration)
    clock = time.perf_counter()

    while state.iteration < config.iterations:
        metrics = step(config, state, data, ladder)
        trouble = _trouble(config, metrics)
        due = state.iteration % config.checkpoint_every == 0 or state.iteration == config.iterations
        if trouble is None and due:
            trouble = _bad_weights(state.network)
        now = time.perf_counter()
        state.seconds, clock = state.seconds + now - clock, now

        if trouble is not None:
            failed, rollbacks, seconds = state.iteration, state.rollbacks, state.seconds
            if rollbacks >= config.maximum_rollbacks:
                raise DivergenceError(
                    f"training diverged at iteration {failed} ({trouble}) after {rollbacks} roll-backs: "
                    f"lower learning_rate (now {config.learning_rate:g}) or raise energy_penalty; "
                    "the last good checkpoint is kept, --overwrite starts again"
                )
            saved.load(state)
            state.rollbacks, state.seconds = rollbacks + 1, seconds
            state.rate_scale *= ROLLBACK_RATE_FACTOR
            saved.save(state)
            event = {
                "iteration": failed,
                "event": "roll-back",
                "reason": trouble,
                "to": state.iteration,
                "rate_scale": state.rate_scale,
            }
            report(event)
            if metrics_file is not None:
                metrics_file.restart(state.iteration, event)
            continue

        if state.iteration % config.log_every == 0 or state.iteration == config.iterations:
            metrics["seconds"] = round(state.seconds, 3)
            report(metrics)
            if metrics_file is not None:
                metrics_file.write(metrics)
        if config.adapt_every and state.iteration % config.adapt_every == 0:
            state.steps.adapt()
        if due:
            saved.save(state)
    return state, ladder


def step(config: Config, state: TrainingState, data: Tensor, ladder: Ladder) -> dict[str, Any]:
    """One iteration: data at random levels, chains moved, one gradient step on mean U(data) - mean U(chains)."""
    row = method(config.method)
    network, generator = state.network, state.generator

    # Data side (lines 3-4): points in shuffled order, levels uniform. DRL pairs level t with t + 1.
    z = data[_next_batch(state, len(data), config.batch)]
    highest = ladder.top - 1 if row.start == "partner" else ladder.top
    t_data = torch.randint(highest + 1, (len(z),), generator=generator)
    x_data = ladder.diffuse(z, t_data, generator)
    partner = ladder.diffuse_up(x_data, t_data, generator) if row.start == "partner" else x_data

    # Chain side (lines 5-6).
    rejecting = state.iteration >= config.reject_from
    kernel = KERNELS[config.kernel if rejecting else "langevin"]
    with torch.no_grad():
        negatives = draw_negatives(
            config,
            network,
            kernel,
            ladder,
            state.chains,
            state.steps.sigma,
            x_data,
            t_data,
            partner,
            generator,
        )
    acceptance = torch.stack([burst.steps.accept_prob for burst in negatives.bursts])
    for burst in negatives.bursts:
        if (
            rejecting and config.kernel == "mala"
        ):  # an unadjusted step is always accepted, which says nothing of its size
            state.steps.record(burst.level, burst.steps.accept_prob)
        state.nonfinite += int(burst.steps.nonfinite.sum() + burst.label_nonfinite.sum())

    # Update (line 7).
    rate = learning_rate(config, state.iteration) * state.rate_scale
    for group in state.optimiser.param_groups:
        group["lr"] = rate
    u_data = network(x_data, t_data)
    u_chains = network(negatives.x, negatives.t)
    gap = u_data.mean() - u_chains.mean()
    loss = gap + config.energy_penalty * (u_data.square().mean() + u_chains.square().mean())
    state.optimiser.zero_grad(set_to_none=True)
    loss.backward()
    limit = config.clip if config.clip else math.inf
    grad_norm = nn.utils.clip_grad_norm_(network.parameters(), limit)
    if torch.isfinite(grad_norm):
        state.optimiser.step()
    state.iteration += 1
    if config.average:
        # A young average forgets faster, so that it is never dominated by the initial weights.
        decay = min(config.average, (1 + state.iteration) / (10 + state.iteration))
        for name, weight in network.named_parameters():
            state.average[name].lerp_(weight.detach(), 1 - decay)
    return {
        "iteration": state.iteration,
        "loss": loss.item(),
        "gap": gap.item(),
        "grad_norm": grad_norm.item(),
        "acceptance": acceptance.mean().item(),
        "learning_rate": rate,
        "nonfinite": state.nonfinite,
    }


def _next_batch(state: TrainingState, size: int, batch: int) -> Tensor:
    """Indices of the next data points; a new permutation when fewer than a batch are left of the old one."""
    if state.cursor + batch > size:
        state.order = torch.randperm(size, generator=state.generator)
        state.cursor = 0
    chosen = state.order[state.cursor : state.cursor + batch]
    state.cursor += batch
    return chosen


def _check_overlap(config: Config, ladder: Ladder, data: Tensor) -> None:
    """Chains that start as noise at level T must be able to leave it."""
    if not method(config.method).ladder:
        return
    overlap = noise_overlap(ladder, data, torch.Generator().manual_seed(config.seed + OVERLAP_SEED))
    if overlap < MINIMUM_NOISE_OVERLAP:
        raise InputError(
            f"level T of the ladder overlaps the starting noise N(0, I) by only {overlap:.2g} (at least "
            f"{MINIMUM_NOISE_OVERLAP} is needed): standardise the data (mean {float(data.mean()):.3g} and sd "
            f"{float(data.std()):.3g} now; 0 and 1 are meant), or add noise to the last level"
        )


def _trouble(config: Config, metrics: dict[str, Any]) -> str | None:
    for name in ("loss", "gap", "grad_norm"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {metrics[name]}"
    for name, title in (("gap", "energy gap"), ("loss", "loss")):
        if abs(metrics[name]) > config.maximum_gap:
            return f"the {title} is {metrics[name]:.3g}, beyond maximum_gap={config.maximum_gap:g}"
    return None


def _bad_weights(network: nn.Module) -> str | None:
    """Checked before a checkpoint is written, so that the last checkpoint is always a good one."""
    for name, weight in network.named_parameters():
        largest = float(weight.detach().abs().max()) if weight.numel() else 0.0
        if not largest <= WEIGHT_LIMIT:  # also false for NaN
            return f"the largest weight of {name} is {largest:.3g}"
    return None


class _Metrics:
    """metrics.jsonl: a line per report. On resume, lines beyond the checkpoint (or cut by a kill) are dropped."""

    def __init__(self, path: Path, iteration: int) -> None:
        self.path = path
        self.restart(iteration)

    def restart(self, iteration: int, event: dict[str, Any] | None = None) -> None:
        kept = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "event" in entry or entry["iteration"] <= iteration:
                kept.append(line)
        if event is not None:
            kept.append(json.dumps(event))
        write_atomically(self.path, "".join(line + "\n" for line in kept).encode())

    def write(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
