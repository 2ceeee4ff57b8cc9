"""The 1-D example of section 3.1: persistent training learns a local energy; diffusion assistance aligns it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from daebm import data
from daebm.config import Config, PresetTable
from daebm.data import GAUSSIAN_1D_TRUTH, Dataset
from daebm.evaluation import line_quadrature
from daebm.experiments.base import Arrays, Column, Experiment, Summary, Trained, long_run
from daebm.methods import METHODS

PAPER: dict[str, Any] = {
    "standardise": False,
    "network": "relu-basis",
    "kernel": "mala",
    "optimiser": "sgd",
    "learning_rate": 0.2,
    # The paper's milestones; the released script has a further one at 400.
    "milestones": (0.5, 2 / 3, 5 / 6),
    "decay_factor": 0.2,
    "iterations": 1200,
    "batch": 100,
    "steps": 10,
    "store": 1000,
    "start": "noise",
    "step_size": 0.1,
    "adapt_every": 0,
    "log_every": 20,
    "checkpoint_every": 200,
    "long_run_chains": 1000,
    "long_run_steps": 1000,
    "post_chains": 1000,
    "post_transitions": 100,
}
# The paper has no levels in 1-D; a ladder of its own kind, for the methods that need one.
LADDER: dict[str, Any] = {"ladder": "geometric", "first_sd": 0.2, "last_variance": 0.95, "top": 3}
OURS: dict[str, Any] = LADDER | {
    # The paper's rate of 0.2 lets one mode take everything.
    "learning_rate": 0.1,
    "batch": 500,
    "store": 2000,
    "start": "data",
    "iterations": 2500,
    "milestones": (),
    "decay_start": 0.2,
    "steps": 5,
    "bursts": 2,
    "step_size": 0.5,
    "adapt_every": 20,
    "average": 0.998,
    "post_chains": 20_000,  # about 5,000 of them end at t = 0: a share is then known to .006
    "post_transitions": 80,
}
QUICK: dict[str, Any] = {
    "iterations": 100,
    "long_run_steps": 50,
    "post_transitions": 20,
    "checkpoint_every": 50,
}

PRESETS: PresetTable = {
    "default": {"all": PAPER, "da": OURS, "drl": LADDER | {"learning_rate": 0.02}},
    "quick": {"all": PAPER | QUICK, "da": OURS | QUICK, "drl": LADDER | QUICK | {"learning_rate": 0.02}},
    "paper": {"all": PAPER, "da": LADDER | {"learning_rate": 0.02}, "drl": LADDER | {"learning_rate": 0.02}},
}


def dataset(config: Config) -> Dataset:
    return data.gaussian_1d(
        torch.Generator().manual_seed(config.seed + data.DATA_SEED), config.train_size or 1000, config.standardise
    )


def evaluate(trained: Trained) -> tuple[Summary, Arrays]:
    """Shares right of 0 (truth .25) in the store, a long run, samples from noise, and under exp(-U) itself."""
    model, config = trained.model, trained.config
    line = line_quadrature(lambda x: model.energy(x.astype(np.float32), 0))
    at_zero = model.to_data(trained.chains.x[trained.chains.t == 0])
    # Rows come in the order of their modes.
    rows = torch.linspace(0, len(trained.dataset.train) - 1, min(config.long_run_chains, len(trained.dataset.train)))
    held = trained.dataset.standardise(trained.dataset.train[rows.round().long()])
    long_end = model.to_data(long_run(trained, held, config.kernel, "long run")[0])
    post = model.to_data(_post(trained))
    modes = model.energy(np.array([[-2.0], [2.0]], dtype=np.float32), 0)
    summary: Summary = {
        # cd and drl have no buffer: their chains end with the iteration.
        "mass_right_buffer": _share(at_zero) if METHODS[config.method].start == "store" else math.nan,
        "mass_right_long_run": _share(long_end),
        "mass_right_post": _share(post),
        "mass_right_model": line.mass(line.x > 0),
        "energy_gap_nats": float(modes[0] - modes[1]),
        "post_samples": len(post),
    }
    shown = np.abs(line.x) <= 4.5
    arrays = {
        "x": line.x[shown],
        "energy": line.energy[shown],
        "data": trained.dataset.train.numpy()[:, 0],
        "buffer": at_zero.numpy()[:, 0],
        "long_run": long_end.numpy()[:, 0],
        "post": post.numpy()[:, 0],
    }
    return summary, arrays


def _post(trained: Trained) -> torch.Tensor:
    """Samples from N(0, 1): as many MALA steps as the long run for plain EBMs, as in the paper."""
    model, config, generator = trained.model, trained.config, trained.generator
    if METHODS[config.method].ladder:
        return model.draw(config.post_chains, generator, transitions=config.post_transitions).x
    noise = torch.randn(config.post_chains, 1, generator=generator)
    return model.run_at_zero(noise, config.long_run_steps, generator, config.kernel)[0]


def _share(x: torch.Tensor) -> float:
    return float((x > 0).float().mean()) if len(x) else math.nan


def figures(summary: Summary, arrays: Arrays) -> dict[str, Figure]:
    """Figure 1 of the paper: store, long run, samples from noise, learned energy against the truth."""
    figure = Figure(figsize=(13, 2.8), layout="constrained")
    axes = figure.subplots(1, 4)
    panels = (("buffer", "replay buffer"), ("long_run", "long run from data"), ("post", "from noise"))
    for axis, (key, title) in zip(axes, panels, strict=False):
        axis.hist(arrays["data"], bins=60, range=(-4, 4), density=True, color="0.75", label="data")
        if len(arrays[key]):  # a density of nothing is 0 / 0
            axis.hist(arrays[key], bins=60, range=(-4, 4), density=True, histtype="step", color="C0", label=title)
        axis.set_title(f"{title}: {summary['mass_right_' + key]:.3f} right of 0")
        axis.legend(fontsize=7)
    _energy_panel(axes[3], arrays, "learned")
    return {"figure-1": figure}


def compare(runs: Mapping[str, tuple[Summary, Arrays]]) -> dict[str, Figure]:
    """Learned energies of several runs side by side, as in the appendix's figure of independent runs."""
    columns = min(3, len(runs))
    rows = math.ceil(len(runs) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes[len(runs) :]:
        axis.set_axis_off()
    for axis, (title, (_summary, arrays)) in zip(axes, runs.items(), strict=False):
        _energy_panel(axis, arrays, title)
    return {"energies": figure}


def _energy_panel(axis: Any, arrays: Arrays, title: str) -> None:
    x = arrays["x"]
    truth = GAUSSIAN_1D_TRUTH(torch.from_numpy(x[:, None])).numpy()
    axis.plot(x, truth - truth.min(), color="0.6", label="truth")
    axis.plot(x, arrays["energy"] - arrays["energy"].min(), color="C3", label="learned")
    axis.set_ylim(-1, 60)
    axis.set_title(f"U(x, 0): {title}", fontsize=10)
    axis.legend(fontsize=7)


EXPERIMENT = Experiment(
    name="gaussian-1d",
    title="Two Gaussians in one dimension (section 3.1)",
    presets=PRESETS,
    dataset=dataset,
    evaluate=evaluate,
    figures=figures,
    compare=compare,
    columns=(
        Column("mass_right_buffer", "store right of 0", "0.25"),
        Column("mass_right_long_run", "long run right of 0", "0.25"),
        Column("mass_right_post", "from noise right of 0", "0.25"),
        Column("mass_right_model", "exp(-U) right of 0", "0.25"),
        Column("energy_gap_nats", "U(-2) - U(2), nats", "-1.10"),
    ),
)
