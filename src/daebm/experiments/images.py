"""Fashion-MNIST and MNIST: does the chain move over all levels, is every level's energy right, are samples images?"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daebm.config import Config, PresetTable
from daebm.data import Dataset, to_unit_range
from daebm.errors import InputError
from daebm.experiments.base import Arrays, Column, Experiment, Summary, Trained, long_run
from daebm.experiments.image_figures import TREATMENT, Floats, compare, figures
from daebm.experiments.image_measures import (
    STORE_CHAINS,
    at_zero,
    descent,
    diffused,
    energies,
    level_measures,
    own_image_gap,
    precision_changes,
    walk,
)
from daebm.images import load_images
from daebm.model import Model

HELD_OUT = 5000  # the last so many training images; the test split is for final results alone
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
# slopes leave an image's energy at one level nats wrong against that at another, and labels stick there. Muon leaves
# less to learn after 600 iterations of denoising than Adam after 1,500 (width 32). A network
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
    | {"optimiser": "muon", "denoise": 4000, "denoise_rate": 2e-3, "relate": 1200, "relate_rate": 1e-4}
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
        samples, gradients = at_zero(drawn, generator), each * config.post_chains + drawn.gradients
        shown |= {"store": at_zero(walked, generator), "annealed": start.x}
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
