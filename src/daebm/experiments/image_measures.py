"""What chains of images do at every level, against diffused held-out images; every error is over chains."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from daebm import sampling
from daebm.config import PRECISIONS
from daebm.engine import Engine, set_precision
from daebm.experiments.base import Summary, Trained, progress
from daebm.model import Model
from daebm.precision import check_precision
from daebm.samplers.adapt import StepSizes
from daebm.samplers.langevin import KERNELS
from daebm.spacing import neighbour_acceptance

STORE_CHAINS = 1000  # at most so many of the store are moved on; bounds memory
OWN_TRANSITIONS = 250  # in which a chain has not forgotten the image that it began from
SNAPSHOTS = 20  # of the moving chains, over the second half of their way
FRESH = 5  # times post_chains: so many chains from noise are looked at on their way down,
FRESH_STEPS = 80  # with so many steps a level: with 20 their energies lag behind by a quarter of an sd
PER_LEVEL = 1000  # diffused held-out images whose energy stands for a level's
ROWS = 500  # images per network evaluation; bounds memory
CHECKED = 8000  # draws on which precisions are compared


class Walk(NamedTuple):
    """Draws (x, t) of moving chains pooled over snapshots, the chain of each, and MALA acceptance by level."""

    x: Tensor
    t: Tensor
    chain: Tensor
    acceptance: Tensor
    gradients: int


def walk(trained: Trained, x: Tensor, t: Tensor, total: int) -> Walk:
    """``total`` transitions from (x, t) with frozen weights and steps; the first half is burn-in.

    A training batch of chains at a time, so that on a GPU what was compiled for training serves here too.
    """
    model, config = trained.model, trained.config
    seen = StepSizes.start(model.sigma, (config.step_minimum, config.step_maximum), 1)  # its sums only: nothing adapts
    every = max(1, total // (2 * SNAPSHOTS))
    draws = []
    chains, starts = len(x), range(0, len(x), config.batch)
    with progress("transitions", total * len(starts)) as bar:
        for start in starts:
            y, level = x[start : start + config.batch], t[start : start + config.batch]
            chain = torch.arange(start, start + len(y), device=x.device)
            if start == 0 or len(y) < config.batch:  # a graph has the shapes it was recorded with
                engine = Engine(config, model.network, model.ladder, trained.generator)
            for left in range(total - 1, -1, -1):
                y, level, info = engine.transition(KERNELS[config.kernel])(y, level, model.sigma)
                if 2 * left < total:
                    seen.record(info.level, info.steps.accept_prob * info.kept)
                    if left % every == 0:
                        draws.append((y, level, chain))
                bar.update()
    x, t, chain = (torch.cat(part) for part in zip(*draws, strict=True))
    return Walk(x, t, chain, seen.acceptance(), total * (config.steps + 1) * chains)


def at_zero(walked: Walk, generator: torch.Generator) -> Tensor:
    """Of the draws at t = 0 as many as there are chains that have one, at random.

    One of each chain would look less alike, but that a chain is ever seen there favours what travels fast.
    """
    there = (walked.t == 0).nonzero().squeeze(1)
    chosen = torch.randperm(len(there), generator=generator, device=there.device)
    return walked.x[there[chosen[: len(torch.unique(walked.chain[there]))]]]


def diffused(trained: Trained, images: Tensor, level: int = 0) -> Tensor:
    """Images at a level, in training units on the model's device; level 0 has the floor's noise."""
    device = trained.model.device
    z = trained.dataset.standardise(images.to(device), trained.generator if trained.config.dequantise else None)
    return trained.model.ladder.diffuse(z, torch.full((len(z),), level, device=device), trained.generator)


def energies(model: Model, x: Tensor, t: Tensor | int = 0) -> Tensor:
    """U(x, t) of standardised x, as float64 on the CPU."""
    level = torch.as_tensor(t, device=x.device).expand(len(x))
    starts = range(0, max(len(x), 1), ROWS)
    with torch.no_grad():
        return torch.cat([model.network(x[i : i + ROWS], level[i : i + ROWS]) for i in starts]).double().cpu()


class Moments(NamedTuple):
    """Chains at one level against diffused held-out images, with standard errors; gaps in nats."""

    mean_difference: float = math.nan
    variance_ratio: float = math.nan
    energy_gap: float = math.nan
    mean_difference_se: float = math.nan
    variance_ratio_se: float = math.nan
    energy_gap_se: float = math.nan


class HeldOut:
    """What held-out images are like at any level.

    The mean is that of all pixels, the variance that of a pixel averaged over pixels; both are exact, not of diffused
    draws. Energies are of draws.
    """

    def __init__(self, trained: Trained) -> None:
        self.trained, self.images = trained, trained.dataset.held_out
        z = trained.dataset.standardise(self.images)
        self.mean, self.variance = float(z.mean()), float(z.var(0).mean())
        brightness, spread = z.flatten(1).mean(1), (z - z.mean(0)).square().flatten(1).mean(1)
        self.mean_se, self.variance_se = (float(part.std()) / math.sqrt(len(z)) for part in (brightness, spread))

    def against(self, level: int, x: Tensor, chain: Tensor) -> Moments:
        """Draws x at a level of the chains that ``chain`` names; nothing is known of fewer than two."""
        if len(torch.unique(chain)) < 2:
            return Moments()
        model, ladder = self.trained.model, self.trained.model.ladder
        abar, noise = float(ladder.abar[level]), float(ladder.variance[level])
        variance = abar * self.variance + noise
        u = energies(model, x, level)
        u_held = energies(model, diffused(self.trained, self.images[:PER_LEVEL], level), level)
        brightness = x.flatten(1).mean(1).double().cpu() / math.sqrt(variance)
        spread = (x - x.mean(0)).square().flatten(1).mean(1).double().cpu() / variance
        return Moments(
            abs(float(x.mean()) - math.sqrt(abar) * self.mean) / math.sqrt(variance),
            _variance(x, chain) / variance,
            float(u_held.mean() - u.mean()),
            math.hypot(_chain_error(brightness, chain), math.sqrt(abar / variance) * self.mean_se),
            math.hypot(_chain_error(spread, chain), abar / variance * self.variance_se),
            math.hypot(math.sqrt(float(u_held.var() / len(u_held))), _chain_error(u, chain)),
        )


def level_measures(trained: Trained, walked: Walk) -> Summary:
    """Chains against diffused held-out images, level by level; NaN where fewer than two chains have been.

    Draws of one chain are dependent: standard errors add up each chain's first.
    """
    model, top, held = trained.model, trained.model.ladder.top, HeldOut(trained)
    t, chain = walked.t.cpu(), walked.chain.cpu()
    own = [(t == level).nonzero().squeeze(1) for level in range(top + 1)]
    rows = [held.against(level, walked.x[i.to(walked.x.device)], chain[i]) for level, i in enumerate(own)]
    carry = trained.config.label_move == "carry"
    edges = neighbour_acceptance(model.network, walked.x, walked.t, top, carry=carry).tolist()
    share: Summary = {"label_share_by_level": (torch.bincount(t, minlength=top + 1) * (top + 1) / len(t)).tolist()}
    found = share | {"acceptance_by_level": walked.acceptance.tolist()} | _by_level(rows)
    overlap = {"neighbour_acceptance": edges, "neighbour_acceptance_minimum": _range(edges)[0]}
    return _with_ranges(found) | overlap


def descent(trained: Trained) -> tuple[sampling.Drawn, Summary]:
    """Chains from noise, annealed with `FRESH_STEPS` a level, and how each level leaves them.

    Neither training's chains nor its images have a part in them, and every level sees them all: so many independent
    images know means and variances better than the chains that training left at a level. They lag behind it a little,
    as annealed chains do.
    """
    model, config, held = trained.model, trained.config, HeldOut(trained)
    count, levels, carry = FRESH * config.post_chains, model.ladder.levels, config.label_move == "carry"
    seen: list[list[Tensor]] = [[] for _level in range(levels)]
    gradients = refused = 0
    with torch.no_grad(), progress("levels from noise", levels * math.ceil(count / ROWS)) as bar:

        def observe(level: int, x: Tensor) -> None:
            seen[level].append(x.cpu())
            bar.update()

        for start in range(0, count, ROWS):
            noise = sampling.from_noise(model.sampler(), model.event, min(ROWS, count - start), trained.generator)
            drawn = sampling.annealed(model.sampler(), noise, FRESH_STEPS, trained.generator, carry, observe)
            gradients, refused = gradients + drawn.gradients, refused + drawn.refused
    at_level = [torch.cat(parts).to(model.device) for parts in seen]
    rows = [held.against(level, x, torch.arange(count)) for level, x in enumerate(at_level)]
    found = {f"from_noise_{key}": values for key, values in _by_level(rows).items()}
    end = sampling.Drawn(at_level[0], torch.zeros(count, dtype=torch.long, device=model.device), gradients, refused)
    return end, _with_ranges(found)


def _by_level(rows: list[Moments]) -> Summary:
    return {f"{name}_by_level": [getattr(row, name) for row in rows] for name in Moments._fields}


def _with_ranges(by_level: Summary) -> Summary:
    """Least and largest of each, but of errors, beside them."""
    known = {key: values for key, values in by_level.items() if not key.endswith("_se_by_level")}
    return by_level | {key.replace("_by_level", "_range"): _range(values) for key, values in known.items()}


def own_image_gap(trained: Trained) -> Summary:
    """U of held-out images less U of the chains that began from them, level by level, after `OWN_TRANSITIONS`.

    Energies of images differ by a hundred nats, so that a thousand chains know their gap to other images badly. A chain
    and its own image, diffused to the level where the chain is now, have most of that in common.
    """
    model, count = trained.model, min(STORE_CHAINS, len(trained.dataset.held_out))
    z = trained.dataset.standardise(trained.dataset.held_out[:count].to(model.device))
    levels = torch.arange(count, device=z.device) * model.ladder.levels // count
    total = min(OWN_TRANSITIONS, trained.config.post_transitions)
    walked = walk(trained, model.ladder.diffuse(z, levels, trained.generator), levels, total)
    own = model.ladder.diffuse(z[walked.chain], walked.t, trained.generator)
    gaps = energies(model, own, walked.t) - energies(model, walked.x, walked.t)
    t, chain, rows = walked.t.cpu(), walked.chain.cpu(), []
    for level in range(model.ladder.levels):
        here = t == level
        known = len(torch.unique(chain[here])) > 1
        rows.append(
            (float(gaps[here].mean()), _chain_error(gaps[here], chain[here])) if known else (math.nan, math.nan)
        )
    gap, error = ([row[k] for row in rows] for k in (0, 1))
    return {"own_image_gap_by_level": gap, "own_image_gap_range": _range(gap), "own_image_gap_se_by_level": error}


def _variance(x: Tensor, chain: Tensor) -> float:
    """Variance of a pixel, averaged over pixels: half the squared difference of two draws of different chains.

    Draws of one chain resemble each other: with m chains in all, that of all draws would be short by 1 / m.
    """
    flat = x.flatten(1).double().cpu()
    names, index, count = torch.unique(chain.cpu(), return_inverse=True, return_counts=True)
    sums = torch.zeros(len(names), flat.shape[1], dtype=flat.dtype).index_add_(0, index, flat)
    squares = torch.bincount(index, flat.square().sum(1))
    n, within = len(flat), (count * squares - sums.square().sum(1)).sum()
    pairs = n * squares.sum() - sums.sum(0).square().sum() - within
    return float(pairs / (n**2 - count.square().sum())) / flat.shape[1]


def _chain_error(values: Tensor, chain: Tensor) -> float:
    """Standard error of a mean of values that depend on each other within a chain: each chain's are added up first."""
    names, index = torch.unique(chain, return_inverse=True)
    sums = torch.bincount(index, values - values.mean())
    return math.sqrt(float(sums.square().sum()) * len(names) / (len(names) - 1)) / len(values)


def precision_changes(trained: Trained, walked: Walk) -> Summary:
    """What each arithmetic would change at its worst level on the trained model: acceptance, label probabilities.

    And the share of bursts that are kept, at the worst level and on the whole, where they are drafted.
    """
    network, changes = trained.model.network, {}
    for precision in PRECISIONS if trained.model.device.type == "cuda" else ():
        report = check_precision(
            network,
            precision,
            walked.x[-CHECKED:],
            walked.t[-CHECKED:],
            trained.model.sigma,
            trained.generator,
            steps=trained.config.steps,
        )
        changes[precision] = [float(report.acceptance.max()), float(report.labels.max())]
        if report.kept is not None:
            changes[precision] += [float(report.kept.min()), float(report.kept.mean())]
    set_precision(network, trained.precision)
    return {"precision_changes": changes} if changes else {}


def _range(values: list[float]) -> list[float]:
    """Least and largest of those that were measured."""
    known = [v for v in values if math.isfinite(v)]
    return [min(known), max(known)] if known else [math.nan, math.nan]
