"""Maximum likelihood by stochastic approximation (Algorithm 1): the one training loop of all six methods."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from daebm import engine
from daebm.config import Config
from daebm.data import Dataset, check_finite
from daebm.denoising import draw_labelled, draw_noisy, nothing_known
from daebm.engine import Engine
from daebm.errors import DivergenceError, InputError
from daebm.guard import GAP, MEASURES, MetricsLog, bad_weights, trouble
from daebm.ladder import Ladder
from daebm.levels import balance_levels, deserted, replace_stranded, settle
from daebm.methods import draw_negatives, method
from daebm.precision import settle_precision
from daebm.samplers.langevin import KERNELS
from daebm.spacing import MINIMUM_NOISE_OVERLAP, noise_overlap
from daebm.state import Saved, TrainingState, build_ladder, optimiser, start
from daebm.updates import learning_rate, update

OVERLAP_SEED = 30_000_001  # a stream of its own: a check must not share noise with the chains
ROLLBACK_SEED = 90_000_049
TRAIL = 20  # the last energy gaps, so many at most, that a roll-back reports
FINISHING = 50  # iterations with the final weights after which levels are corrected half as much
ROLLBACK_RATE_FACTOR = 0.5  # the learning rate after a roll-back, relative to before


@dataclass(eq=False)
class Setup:
    """A run that is ready to train: what stays the same, the state, and the engine that moves it."""

    config: Config
    dataset: Dataset
    data: Tensor  # training events on the device: standardised, or as bytes
    ladder: Ladder
    state: TrainingState
    engine: Engine

    def points(self, rows: Tensor) -> Tensor:
        """Standardised training events."""
        z = self.data[rows]
        if z.dtype != torch.uint8:
            return z
        return self.dataset.standardise(z, self.state.generator if self.config.dequantise else None)


def begin(config: Config, dataset: Dataset, network: nn.Module | None = None) -> Setup:
    """Data on the device, the ladder and the state before the first iteration; refuses what cannot be trained."""
    device = engine.check(config)
    if not isinstance(dataset, Dataset):
        raise InputError(f"train takes a daebm.Dataset, got {type(dataset).__name__}: see Dataset.standardised")
    points = dataset.standardise(dataset.train)
    check_finite(f"the training data of {dataset.name}", points)
    if config.batch > len(points):
        raise InputError(f"batch={config.batch} is more than the {len(points)} training points: lower it")
    ladder = build_ladder(config, points)
    _check_overlap(config, ladder, points)
    if config.denoise and ladder.top == 0 and ladder.floor == 0:
        raise InputError("denoise needs noise to remove: give the data a floor, or train a method with levels")
    state = start(config, points.to(device), ladder, network)
    data = dataset.train if dataset.train.dtype == torch.uint8 else points
    engine.set_precision(state.network, config.precision)
    return Setup(
        config, dataset, data.to(device), ladder, state, Engine(config, state.network, ladder, state.generator)
    )


def train(
    config: Config,
    dataset: Dataset,
    folder: Path | None = None,
    resume: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda metrics: None,
    network: nn.Module | None = None,
    stop: Callable[[TrainingState, Ladder], bool] = lambda state, ladder: False,
) -> tuple[TrainingState, Ladder]:
    """Train to the end of the budget; ``report`` gets the metrics every ``log_every`` iterations.

    ``network`` is an energy U(x, t) of your own on standardised x, in place of the one the config names. ``stop`` is
    asked at every checkpoint whether to end early; it must leave the state as it is.

    With a folder, checkpoints go to ``folder/checkpoint`` and metrics to ``folder/metrics.jsonl``, and ``resume``
    continues from there bit for bit. Without one the guard rolls back to a copy in memory.
    """
    setup = begin(config, dataset, network)
    state = setup.state
    saved = Saved(config, dataset, setup.ladder, folder)
    refused: list[str] = []
    if resume and saved.exists:
        saved.load(state)
        setup.engine.use(state.precision)
    else:
        refused = check_precision(setup)
        saved.save(state)
    metrics_file = None if folder is None else MetricsLog(folder / "metrics.jsonl", state.iteration)

    def say(kind: str, reasons: list[str]) -> None:
        for reason in reasons:
            event = {"iteration": state.iteration, "event": kind, "reason": reason}
            report(event)
            if metrics_file is not None:
                metrics_file.write(event)

    say("precision", refused)
    clock = time.perf_counter()
    check_every = config.log_every if config.device == "cuda" else 1  # reading from a GPU stops it
    unread: list[Tensor] = []
    recent: deque[tuple[int, float]] = deque(maxlen=TRAIL)  # energy gaps, to see how a divergence came about
    told = state.replaced

    while state.iteration < config.iterations:
        unread.append(advance(setup))
        due = state.iteration % config.checkpoint_every == 0 or state.iteration == config.iterations
        logged = state.iteration % config.log_every == 0 or state.iteration == config.iterations
        if not (due or logged or state.iteration % check_every == 0):
            continue
        history = torch.stack(unread).tolist()
        unread.clear()
        problem = None
        for at, row in enumerate(history, state.iteration - len(history) + 1):
            recent.append((at, row[GAP]))
            if problem := trouble(config, row, at, nothing_known(setup.data[0].numel())):
                break
        if problem is None and due:
            problem = bad_weights(state.network)
        now = time.perf_counter()
        state.seconds, clock = state.seconds + now - clock, now

        if problem is not None:
            failed, rollbacks, seconds = state.iteration, state.rollbacks, state.seconds
            nonfinite, replaced = state.nonfinite.clone(), state.replaced
            event: dict[str, Any] = {
                "iteration": failed,
                "reason": problem,
                "gaps": [(at, float(f"{gap:.3g}") if math.isfinite(gap) else None) for at, gap in recent],
            }
            recent.clear()
            if rollbacks >= config.maximum_rollbacks:
                limit, more = "trust" if config.trust else "learning_rate", " or raise energy_penalty"
                if at <= config.warm:
                    limit, more = "denoise_rate" if at <= config.denoise else "relate_rate", ""
                if metrics_file is not None:
                    metrics_file.write(event | {"event": "divergence"})
                raise DivergenceError(
                    f"training diverged at iteration {failed} ({problem}) after {rollbacks} roll-backs: "
                    f"lower {limit} (now {getattr(config, limit):g}){more}; "
                    "the last good checkpoint is kept, --overwrite starts again"
                )
            saved.load(state)
            setup.engine.use(state.precision)
            state.rollbacks, state.seconds = rollbacks + 1, seconds
            state.nonfinite.copy_(nonfinite)  # what led here stays counted
            state.replaced = replaced
            state.rate_scale *= ROLLBACK_RATE_FACTOR
            if state.iteration >= config.learned:  # no rate is left to lower: the same noise would end in the same way
                state.generator.manual_seed(config.seed + ROLLBACK_SEED * state.rollbacks)
            saved.save(state)
            event |= {"event": "roll-back", "to": state.iteration, "rate_scale": state.rate_scale}
            report(event)
            if metrics_file is not None:
                metrics_file.restart(state.iteration, event)
            continue

        if logged:
            metrics = _metrics(config, state, history[-1])
            report(metrics)
            if metrics_file is not None:
                metrics_file.write(metrics)
        if due:
            say("precision", check_precision(setup))
            # Chains that start as noise take their time to come down.
            due_there = config.warm if config.start == "data" else (config.warm + config.iterations) // 2
            if config.method == "da" and state.iteration > due_there:
                say("labels", deserted(state.chains.t, setup.ladder.levels))
            if state.replaced > told:
                say("chains", [f"{state.replaced - told} stranded chains began anew, {state.replaced} so far"])
                told = state.replaced
            saved.save(state)
            if stop(state, setup.ladder):
                break
    return state, setup.ladder


def check_precision(setup: Setup) -> list[str]:
    """Go on in the first precision, from the present one on, that passes; returns why others do not.

    A model outgrows a coarse arithmetic as it learns, so this is asked again before every checkpoint.
    """
    state = setup.state
    precision, refused = settle_precision(
        state.network, state.precision, state.chains, state.steps.sigma, setup.config.seed, setup.config.steps
    )
    if precision != state.precision:
        state.precision = precision
        setup.engine.use(precision)
    return refused


def advance(setup: Setup) -> Tensor:
    """One iteration of whichever part of the plan it is in. Returns the `MEASURES`, (4,), still on the device."""
    config, state = setup.config, setup.state
    part = step
    if state.iteration < config.warm:
        part = denoise if state.iteration < config.denoise else relate
    measures = part(setup)
    if config.warm and state.iteration in (config.denoise, config.warm):  # the next part begins
        settle(setup)
        state.optimiser = optimiser(config, state.network, state.iteration < config.warm)
        state.rate_scale = 1.0  # what was too fast for one part says nothing of the rates of the next
        state.average = {k: v.detach().clone() for k, v in state.network.named_parameters() if config.average}
    if config.finish and state.iteration == config.learned:
        with torch.no_grad():  # in place: graphs read them there
            for name, weight in state.network.named_parameters():
                weight.copy_(state.average[name])
    return measures


def step(setup: Setup) -> Tensor:
    """One iteration: data at random levels, chains moved, one gradient step on mean U(data) - mean U(chains).

    For `da` nothing in here waits for the device but the look at stuck chains and the balance of the levels, once in
    ``adapt_every`` iterations.
    """
    config, state, ladder = setup.config, setup.state, setup.ladder
    row = method(config.method)
    network, generator = state.network, state.generator

    # Data side (lines 3-4): points in shuffled order, levels uniform. DRL pairs level t with t + 1.
    z = setup.points(_next_batch(state, len(setup.data), config.batch))
    highest = ladder.top - 1 if row.start == "partner" else ladder.top
    t_data = torch.randint(highest + 1, (len(z),), generator=generator, device=z.device)
    eps = torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
    x_data = ladder.noised(z, t_data, eps)
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
            setup.engine.transition(kernel),
        )
    for burst in negatives.bursts:
        if rejecting and config.kernel == "mala":  # an unadjusted step says nothing of its size
            state.steps.record(burst.level, burst.steps.accept_prob)
        state.nonfinite += burst.refused.long()
    acceptance = torch.stack([burst.steps.accept_prob * burst.kept for burst in negatives.bursts]).mean()

    # With level_rate the data take the chains' levels, so that no difference between levels is in the gap: neither its
    # value nor its gradient is noisy by how many of either happen to be at which level. The masses of the levels are
    # then balanced by themselves.
    if config.level_rate:
        t_data = negatives.t
        x_data = ladder.noised(z, t_data, eps)

    # Update (line 7).
    (loss, u_data, u_chains), gradient = setup.engine.likelihood(x_data, t_data, negatives.x, negatives.t)
    gap = u_data.mean() - u_chains.mean()
    grad_norm = update(config, state, gradient)
    if config.adapt_every and state.iteration % config.adapt_every == 0:
        state.steps.adapt()
        if config.level_rate:
            finishing = max(0, state.iteration - config.learned)  # weights stay: ever smaller corrections find the rest
            share = config.level_rate / (1 + finishing / FINISHING)
            if config.margin:
                replace_stranded(setup)
            balance_levels(setup, state.chains.x, state.chains.t, share)
    return torch.stack([loss, gap, grad_norm, acceptance])


def denoise(setup: Setup) -> Tensor:
    """One iteration of the first warm start: noise is removed and noisy images are put in order; no chains."""
    config, state = setup.config, setup.state
    z = setup.points(_next_batch(state, len(setup.data), config.batch))
    (loss,), gradient = setup.engine.chainless(*draw_noisy(setup.ladder, z, state.generator))
    grad_norm = update(config, state, gradient)
    return torch.stack([loss, torch.zeros_like(loss), grad_norm, torch.zeros_like(loss)])


def relate(setup: Setup) -> Tensor:
    """One iteration of the second: noise is removed, and the levels of carried images are told; no chains.

    Slopes leave the energy of an image at one level nats wrong against that at another, and labels stick where it is
    too low. What a label move would draw from is known for data: their own label.
    """
    config, state, ladder, generator = setup.config, setup.state, setup.ladder, setup.state.generator
    z = setup.points(_next_batch(state, len(setup.data), config.batch))
    given = (*draw_noisy(ladder, z, generator)[:4], *draw_labelled(ladder, z, generator))
    (loss,), gradient = setup.engine.relating(*given)
    grad_norm = update(config, state, gradient)
    return torch.stack([loss, torch.zeros_like(loss), grad_norm, torch.zeros_like(loss)])


def _metrics(config: Config, state: TrainingState, measures: list[float]) -> dict[str, Any]:
    return {
        "iteration": state.iteration,
        **dict(zip(MEASURES, measures, strict=True)),
        "learning_rate": learning_rate(config, state.iteration - 1) * state.rate_scale,
        "nonfinite": int(state.nonfinite),
        "replaced": state.replaced,
        "seconds": round(state.seconds, 3),
    }


def _next_batch(state: TrainingState, size: int, batch: int) -> Tensor:
    """Indices of the next data points; a new permutation when fewer than a batch are left of the old one."""
    if state.cursor + batch > size:
        state.order = torch.randperm(size, generator=state.generator, device=state.order.device)
        state.cursor = 0
    chosen = state.order[state.cursor : state.cursor + batch]
    state.cursor += batch
    return chosen


def _check_overlap(config: Config, ladder: Ladder, data: Tensor) -> None:
    """Chains that start as noise at level T must be able to leave it. The paper's ladder is taken as it is."""
    if not method(config.method).ladder or config.ladder == "paper":
        return
    overlap = noise_overlap(ladder, data, torch.Generator().manual_seed(config.seed + OVERLAP_SEED))
    if overlap < MINIMUM_NOISE_OVERLAP:
        raise InputError(
            f"level T of the ladder overlaps the starting noise N(0, I) by only {overlap:.2g} (at least "
            f"{MINIMUM_NOISE_OVERLAP} is needed): standardise the data (mean {float(data.mean()):.3g} and sd "
            f"{float(data.std()):.3g} now; 0 and 1 are meant), or add noise to the last level"
        )
