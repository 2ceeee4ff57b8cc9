"""Fashion-MNIST and MNIST: does the chain move over all levels, is every level's energy right, are samples images?"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daebm import sampling
from daebm.config import PRECISIONS, Config, PresetTable
from daebm.data import Dataset, to_unit_range
from daebm.engine import Engine, set_precision
from daebm.errors import InputError
from daebm.experiments.base import Arrays, Column, Experiment, Summary, Trained, long_run, progress
from daebm.experiments.image_figures import TREATMENT, Floats, compare, figures
from daebm.images import load_images
from daebm.model import Model
from daebm.precision import check_precision
from daebm.samplers.adapt import StepSizes
from daebm.samplers.langevin import KERNELS
from daebm.spacing import neighbour_acceptance

HELD_OUT = 5000  # the last so many training images; the test split is for final results alone
STORE_CHAINS = 1000  # at most so many of the store are moved on; bounds memory
OWN_TRANSITIONS = 250  # in which a chain has not forgotten the image that it began from
SNAPSHOTS = 20  # of the moving chains, over the second half of their way
FRESH = 5  # times post_chains: so many chains from noise are looked at on their way down,
FRESH_STEPS = 80  # with so many steps a level: with 20 their energies lag behind by a quarter of an sd
PER_LEVEL = 1000  # diffused held-out images whose energy stands for a level's
ROWS = 500  # images per network evaluation; bounds memory
CHECKED = 8000  # draws on which precisions are compared
SHOWN = 60  # pictures kept of a kind

GPU: dict[str, Any] = {"device": "cuda", "precision": "tf32", "compile": True}
BOOKS: dict[str, Any] = {"log_every": 100, "post_chains": 200, "long_run_chains": 200}
# Appendix E.3. The rate falls linearly over the last 48,000 iterations (to 0; the paper: to a factor of 1e-5).
PAPER_PLAIN: dict[str, Any] = (
    GPU
    | BOOKS
    | {"network": "resnet", "width": 128, "hidden": 1, "standardise": False, "floor": 0.03}
    | {"batch": 200, "store": 50_000, "start": "noise", "steps": 40, "step_size": 0.005, "adapt_every": 0}
    | {"learning_rate": 2e-5, "beta1": 0.0, "iterations": 120_000, "warm_up": 6000, "decay_start": 0.6}
    | {"checkpoint_every": 3000, "long_run_steps": 100_000}
)
PAPER_LEVELS: dict[str, Any] = {"ladder": "paper", "top": 50, "delta_first": 0.0002, "delta_last": 0.02, "floor": 0.0}
# Steps start at .01 in the paper and .1 in its code, at every level alike; here .1 is times the level's increment.
PAPER: dict[str, Any] = (
    PAPER_LEVELS
    | {"dequantise": True, "learning_rate": 1e-5, "bursts": 1, "label_move": "full"}
    | {"step_size": 0.1, "adapt_every": 100, "reject_from": 6000, "precision": "drafted"}
)
# The floor is .1 in data units, over Fashion-MNIST's sd of .71: with .05 labels have more levels to travel over, and
# samples were worse after as many minutes. Level T must overlap the noise that samples start from: with a last variance
# of .95 by .05 only, with .99 by .41.
# Patches of 2 pixels make the paper's width four times cheaper. An energy that is summed up at all four resolutions
# learns to remove noise in fewer iterations; MNIST's samples have gained by it, Fashion-MNIST's not yet.
# Warm starts: denoising, after which annealed samples from noise are garments; then the labels of carried images, for
# slopes leave an image's energy at one level nats wrong against that at another, and labels stick there. A network
# whose slopes are learned is too sure of itself: with gains of .9 at the low levels its chains are as high as the data.
# 400 chains on a ladder of overlap .3 (45 levels) are few enough that half of them and more make a round trip. Labels
# wait for x: blocks of 8 are not worth their forwards. Six steps a burst, drafted in 16 bits, move them further than
# three for the time, by the times of single kernels.
# An update at 1e-5 would lower the loss of its own batch by two nats, and weights would follow the chains from one kind
# of garment to the next: it is trusted with a fortieth of that.
# Energies of images have an sd of 110 nats: one in 20,000 lies a margin of 1,000 below a chain, unless its kind falls
# because no chain is of that kind. A batch whose gap is as large is a divergence.
OURS: dict[str, Any] = (
    GPU
    | BOOKS
    | {"network": "level-resnet", "width": 128, "patch": 2, "hidden": 1, "heads": 4}
    | {"precision": "drafted"}
    | {"ladder": "overlap", "overlap": 0.3, "floor": 0.1417, "last_variance": 0.99}
    | {"batch": 200, "store": 400, "start": "data", "steps": 6, "bursts": 2, "label_move": "carry", "block": 4}
    | {"denoise": 4000, "denoise_rate": 2e-3, "relate": 1200, "relate_rate": 1e-4}
    | {"iterations": 22_000, "learning_rate": 1e-5, "decay_start": 0.15, "trust": 0.05}
    | {"level_rate": 0.3, "gain_rate": 5e-4}
    | {"margin": 1000.0, "maximum_gap": 1000.0}
    | {"finish": 600}  # constants that follow the chains are a nat wrong once they stop
    | {"average": 0.999, "step_size": 0.5, "adapt_every": 10, "checkpoint_every": 1000, "long_run_steps": 2000}
    | {"post_transitions": 2000}  # a round trip takes thousands: with few, a level is known by those that are there now
)
# The plain EBMs and DRL on the same network, data and rate, with the paper's chains. Not tuned.
OTHERS: dict[str, Any] = (
    OURS
    | {"precision": "tf32x2", "steps": 40, "bursts": 1, "step_size": 0.005, "adapt_every": 0, "learning_rate": 1e-5}
    | {"level_rate": 0.0, "relate": 0, "finish": 0, "gain_rate": 0.0, "label_move": "block"}
    | {"margin": 0.0, "maximum_gap": 1e5, "trust": 0.0, "decay_start": 0.5}
)
DRL: dict[str, Any] = {"step_size": 0.02}
QUICK: dict[str, Any] = (
    {"device": "cpu", "precision": "fp32", "compile": False, "width": 8, "train_size": 500}
    | {"ladder": "geometric", "top": 6, "denoise": 2, "relate": 2, "finish": 2}
    | {"iterations": 8, "batch": 20, "store": 40, "steps": 3, "warm_up": 2, "adapt_every": 2}
    | {"log_every": 2, "checkpoint_every": 3, "post_chains": 20, "post_transitions": 20}
    | {"long_run_chains": 20, "long_run_steps": 20}
)
# MNIST: a floor of .07 in data units, over its own sd of .62, at which long runs keep their digits and their energies,
# and a network that two models in 25 MiB have room for.
MNIST_OWN: dict[str, Any] = {"floor": 0.1135, "width": 96}


def presets(own: dict[str, Any]) -> PresetTable:
    """``own`` are the settings that a data set has for itself."""
    others, ours = OTHERS | own | {"relate": 0}, OURS | own
    return {
        "default": {"all": others, "drl": DRL, "da": ours},
        "quick": {"all": others | QUICK | {"relate": 0, "finish": 0}, "drl": DRL, "da": ours | QUICK},
        "paper": {
            "all": PAPER_PLAIN,
            "noise": {"learning_rate": 5e-6, "steps": 80},
            "drl": PAPER_LEVELS | DRL | {"learning_rate": 2e-4, "beta1": 0.9},
            "da": PAPER,
        },
    }


def dataset(name: str, config: Config) -> Dataset:
    """Bytes of the training split alone: the last 5,000 held out, the first ``train_size`` (0 is all) of the rest."""
    images, labels = (torch.from_numpy(part) for part in load_images(name, "train"))
    available = len(images) - HELD_OUT
    if config.train_size > available:
        raise InputError(f"train_size must be at most {available} for {name}, got {config.train_size}")
    size = config.train_size or available
    images = images.unsqueeze(1)
    shift, scale = 0.0, 1.0
    if config.standardise:  # from the histogram of the bytes: exact, and without 43 million float64
        count = torch.bincount(images[:size].flatten(), minlength=256).double()
        grey = to_unit_range(torch.arange(256, dtype=torch.uint8)).double()
        shift = float((count * grey).sum() / count.sum())
        scale = math.sqrt(float((count * (grey - shift).square()).sum() / count.sum()))
    return Dataset(name, images[:size], images[available:], shift, scale, labels[:size], labels[available:])


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


def at_zero(walked: Walk) -> Tensor:
    """The latest draw at t = 0 of each chain that has one: two of the same chain would look alike."""
    there = (walked.t == 0).nonzero().squeeze(1).flip(0).cpu()
    _chains, latest = np.unique(walked.chain.cpu()[there].numpy(), return_index=True)
    return walked.x[there[torch.from_numpy(latest)].to(walked.x.device)]


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
            _chain_error(brightness, chain),
            _chain_error(spread, chain),
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


def _mean_and_se(a: Tensor, b: Tensor) -> tuple[float, float]:
    """mean a - mean b of independent draws, with its standard error."""
    return float(a.mean() - b.mean()), math.sqrt(float(a.var() / len(a) + b.var() / len(b)))


def evaluate(trained: Trained) -> tuple[Summary, Arrays]:
    """Levels (for da), samples from noise, a long run from held-out images, and energies of all of them."""
    model, config, data, generator = trained.model, trained.config, trained.dataset, trained.generator
    held, train = (diffused(trained, x[:HELD_OUT]) for x in (data.held_out, data.train))
    summary: Summary = {"pictures": TREATMENT}
    shown, at_0 = {"real": held[-SHOWN:]}, {"train": train, "held_out": held}
    arrays: Arrays = {}
    if config.method == "da":
        chains, trips = trained.chains, trained.chains.trips.double()
        slots = chains.draw(min(STORE_CHAINS, len(chains)), generator)
        walked = walk(trained, chains.x[slots], chains.t[slots], config.post_transitions)
        transitions = (config.iterations - config.warm) * config.bursts * config.batch / len(chains)
        low, high = config.step_minimum, config.step_maximum
        summary |= level_measures(trained, walked) | own_image_gap(trained) | precision_changes(trained, walked)
        summary |= {
            "steps_at_bound": int(((model.sigma <= low) | (model.sigma >= high)).sum()),
            "round_trips_per_chain": float(trips.mean()),
            "round_trips_median": float(trips.median()),
            "round_trips_per_1000_transitions": 1000 * float(trips.mean()) / transitions,
        }
        start, found = descent(trained)
        each = start.gradients / len(start.x)
        summary |= found | {"annealed_gradients_per_sample": each}
        few = slice(config.post_chains)
        drawn = walk(trained, start.x[few], start.t[few], config.post_transitions)
        samples, gradients = at_zero(drawn), each * config.post_chains + drawn.gradients
        shown |= {"store": at_zero(walked), "annealed": start.x}
        at_0 |= {"store": walked.x[walked.t == 0], "samples": drawn.x[drawn.t == 0]}
        arrays["trips"] = trained.chains.trips.cpu().numpy()
    else:
        samples, _t, gradients, summary["samples_refused"] = model.draw(config.post_chains, generator)
        at_0["samples"] = samples
    summary |= {"samples_from_noise": len(samples), "gradients_per_sample": gradients / max(len(samples), 1)}
    if not len(samples):
        summary["gradients_per_sample"] = math.nan
        summary["samples_note"] = f"none of {config.post_chains} chains from noise was seen at t = 0"
    every = max(1, config.long_run_steps // 50)
    end, along, info = long_run(trained, held[: config.long_run_chains], config.kernel, "long run", every)
    shown |= {"samples": samples, "long_run_start": held[: config.long_run_chains], "long_run": end}
    u = {key: energies(model, x) for key, x in (at_0 | {"long_run": end}).items()}
    summary["held_out_gap"], summary["held_out_gap_se"] = _mean_and_se(u["held_out"], u["train"])
    moved = u["long_run"] - u["held_out"][: len(end)]  # each from its own start
    summary["long_run_energy_shift"] = float(moved.mean())
    summary["long_run_energy_shift_se"] = float(moved.std()) / math.sqrt(len(moved))
    summary["long_run_acceptance"] = float(info.accept_prob.mean())
    summary["long_run_refused"] = int(info.nonfinite.sum())
    arrays |= {key: _pictures(model, x[:SHOWN]) for key, x in shown.items()}
    arrays |= {f"energy_{key}": value.numpy() for key, value in u.items()}
    arrays |= {"along": along.cpu().numpy(), "along_step": every * np.arange(1, len(along) + 1)}
    return summary, arrays


def _pictures(model: Model, x: Tensor) -> Floats:
    """(n, 28, 28) in data units, as TREATMENT says."""
    clean: Floats = model.to_data(model.cleaned(x)).clamp(-1, 1).squeeze(1).cpu().numpy()
    return clean


COLUMNS = (
    Column("label_share_range", "label share / uniform, range", "1 1"),
    Column("acceptance_range", "acceptance, range"),
    Column("neighbour_acceptance_minimum", "neighbour acceptance, least"),
    Column("mean_difference_range", "pixel mean off by, sd", "0 0"),
    Column("variance_ratio_range", "pixel variance ratio, range", "1 1"),
    Column("energy_gap_range", "energy gap by level, nats", "0 0"),
    Column("from_noise_mean_difference_range", "from noise: pixel mean off by, sd", "0 0"),
    Column("from_noise_variance_ratio_range", "from noise: pixel variance ratio, range", "1 1"),
    Column("own_image_gap_range", "gap to the chain's own image, nats", "0 0"),
    Column("round_trips_per_chain", "label round trips a chain"),
    Column("round_trips_per_1000_transitions", "round trips per 1,000 transitions"),
    Column("samples_from_noise", "samples from noise"),
    Column("gradients_per_sample", "gradients a sample"),
    Column("long_run_energy_shift", "long run, mean U - held-out, nats", "0"),
    Column("held_out_gap", "U held-out - U train, nats", "0"),
    Column("train_seconds", "training, s"),
)


def image_experiment(name: str, title: str, own: dict[str, Any]) -> Experiment:
    return Experiment(name, title, presets(own), partial(dataset, name), evaluate, figures, compare, COLUMNS)


FASHION_MNIST = image_experiment("fashion-mnist", "Fashion-MNIST: levels, samples from noise, long runs", {})
MNIST = image_experiment("mnist", "MNIST: levels, samples from noise, long runs", MNIST_OWN)
