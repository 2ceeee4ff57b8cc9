"""The four rings of section 5: multimodal and nearly singular, with a truth that quadrature can reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from daebm import data
from daebm.config import Config, PresetTable
from daebm.data import Dataset, draw_rings
from daebm.evaluation import (
    kl_to_rings,
    polar_quadrature,
    ring_masses,
    ring_shares,
    rings_log_density,
)
from daebm.experiments.base import Arrays, Column, Experiment, Summary, Trained, long_run

# The paper's appendix E.2. Where the released code differs, the paper is followed: noise L is 4,000 (script 40,000),
# DRL's rate decays (its scheduler is detached from its optimiser in the code) and its pairs use sqrt(alpha). Where the
# paper is silent, the code is: one epoch of warm-up (none for DRL), no rejection in it, a store started from noise.
# The paper takes the better of two step sizes per method (.005 or .01; b = .02 or .01 for DRL) without naming it: .01
# and .02 came out better here, in KL after the default budget.
PAPER: dict[str, Any] = {
    "standardise": False,
    "network": "relu-mlp",
    "width": 128,
    "hidden": 3,
    "learning_rate": 5e-4,
    "milestones": (0.7, 0.8, 0.9),
    "warm_up": 500,
    "iterations": 100_000,  # 200 epochs of 500
    "batch": 100,
    "steps": 40,
    "store": 10_000,
    "start": "noise",
    "step_size": 0.01,
    "adapt_every": 0,
    "log_every": 500,
    "checkpoint_every": 2500,
    "post_chains": 10_000,
    "post_transitions": 250,
    "long_run_chains": 10_000,
    "long_run_steps": 100_000,
}
PAPER_LEVELS: dict[str, Any] = {
    "network": "gated-mlp",
    "ladder": "paper",
    "top": 6,
    "delta_first": 0.01,
    "delta_last": 0.3,
}
DRL: dict[str, Any] = PAPER_LEVELS | {"beta1": 0.9, "step_size": 0.02, "warm_up": 0}
# Ours: a network of 7,878 weights that takes the thin rings as learned constraints; the plain EBMs keep the paper's
# network and steps, with fewer iterations (`--method all` gives every method the same number of gradients).
OURS: dict[str, Any] = {
    "standardise": True,
    "network": "level-mlp",
    "width": 48,
    "hidden": 3,
    "squares": 4,
    "octaves": 4,
    "ladder": "geometric",
    "top": 5,
    "first_sd": 0.01,
    "last_variance": 0.95,
    "learning_rate": 3e-3,
    "milestones": (),
    "decay_start": 0.5,
    "warm_up": 300,
    "clip": 100.0,
    "energy_penalty": 1e-4,
    "average": 0.999,
    "iterations": 8250,
    "batch": 500,
    # Two short bursts with a label move after each make twice the round trips of one long one: it is the trips that
    # carry mass from ring to ring, and so align them.
    "steps": 3,
    "bursts": 2,
    "start": "data",
    "step_size": 0.7,
    "adapt_every": 50,
    "long_run_chains": 1000,
}
PLAIN: dict[str, Any] = PAPER | {"long_run_chains": 1000}
QUICK: dict[str, Any] = {
    "iterations": 200,
    "log_every": 20,
    "checkpoint_every": 100,
    "warm_up": 20,
    "long_run_steps": 200,
    "long_run_chains": 200,
    "post_chains": 200,
    "post_transitions": 20,
    "average": 0.95,
}
PRESETS: PresetTable = {
    "default": {"all": PLAIN, "noise": {"steps": 400}, "hybrid": {"steps": 200}, "drl": DRL, "da": OURS},
    "quick": {"all": PLAIN | QUICK, "drl": DRL | QUICK, "da": OURS | QUICK},
    "paper": {
        "all": PAPER,
        "noise": {"steps": 4000},
        "hybrid": {"steps": 200},
        "drl": DRL | {"iterations": 250_000},
        "da": PAPER_LEVELS | {"step_size": 0.1, "adapt_every": 500, "reject_from": 500},
    },
}


def dataset(config: Config) -> Dataset:
    generator = torch.Generator().manual_seed(config.seed + data.DATA_SEED)
    return data.four_rings(generator, config.train_size or 50_000, config.standardise)


def evaluate(trained: Trained) -> tuple[Summary, Arrays]:
    """Quadrature of exp(-U) at every level against the exact diffused truth; long runs; samples from noise."""
    model, config, ladder = trained.model, trained.config, trained.model.ladder

    def at(t: int) -> Callable[[Any], Any]:
        return lambda x: model.energy(x, t)

    grid = polar_quadrature(at(0))
    # Levels above 0 are wide and smooth: a coarser grid over a larger disc.
    grids = [grid, *(polar_quadrature(at(t), limit=12.0, step=0.004) for t in range(1, ladder.levels))]
    kl_by_level = [
        kl_to_rings(g, float(a), float(v), model.scale)
        for g, a, v in zip(grids, ladder.abar, ladder.variance, strict=True)
    ]
    masses = ring_masses(grid)
    floor = max(min(masses), 1e-300)
    summary: Summary = {
        "ring_mass_model": masses,
        "alignment_error_nats": max(abs(math.log(4 * max(m, floor))) for m in masses),
        "off_ring_mass": 1 - sum(masses),
        "kl_nats": kl_by_level[0],
        "kl_by_level": kl_by_level,
    }
    fresh = trained.dataset.standardise(draw_rings(config.long_run_chains, trained.generator))
    arrays: Arrays = {}
    kernels = {"": config.kernel} | ({} if config.kernel == "mala" else {"_mala": "mala"})
    for suffix, kernel in kernels.items():
        end, _energies, info = long_run(trained, fresh, kernel, f"long run, {kernel}")
        points = model.to_data(end).numpy()
        summary["ring_mass_long_run" + suffix], summary["on_ring_long_run" + suffix] = ring_shares(points)
        summary["long_run_refused" + suffix] = int(info.nonfinite.sum())
        arrays["long_run" + suffix] = points
    drawn = model.draw(config.post_chains, trained.generator, transitions=config.post_transitions)
    post = model.to_data(drawn.x).numpy()
    summary["ring_mass_post"], summary["on_ring_post"] = ring_shares(post)
    summary["post_samples"] = len(post)
    summary["gradients_per_sample"] = drawn.gradients / max(len(post), 1)
    summary |= ticks(summary)
    arrays |= {"post": post} | _curves(trained)
    return summary, arrays


def ticks(summary: Summary) -> Summary:
    """The three columns of the paper's Table 1, by fixed rules."""

    def long_run_holds(suffix: str) -> bool:
        mass = summary["ring_mass_long_run" + suffix]
        return summary["on_ring_long_run" + suffix] >= 0.9 and all(0.15 <= m <= 0.35 for m in mass)

    return {
        "tick_long_run": long_run_holds(""),
        "tick_long_run_mala": long_run_holds("_mala" if "ring_mass_long_run_mala" in summary else ""),
        "tick_post": summary["on_ring_post"] >= 0.8 and min(summary["ring_mass_post"]) >= 0.1,
        "tick_global": summary["alignment_error_nats"] <= 0.5 and summary["off_ring_mass"] <= 0.1,
    }


def _curves(trained: Trained) -> Arrays:
    """Energies along the line x_1 = 0 at every level, learned and true; and the energy on the plane."""
    model, ladder = trained.model, trained.model.ladder
    line = np.linspace(-5, 5, 4001)
    points = np.stack([np.zeros_like(line), line], axis=1).astype(np.float32)
    learned = [model.energy(points, t) for t in range(ladder.levels)]
    with np.errstate(divide="ignore"):
        truth = [
            -rings_log_density(np.maximum(np.abs(line), 1e-3), float(a), float(v), model.scale)
            for a, v in zip(ladder.abar, ladder.variance, strict=True)
        ]
    side = np.linspace(-5, 5, 400, dtype=np.float32)
    plane = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    return {
        "line": line,
        "energy": np.stack(learned),
        "truth": np.stack(truth),
        "plane": model.energy(plane, 0).reshape(len(side), len(side)),
    }


def figures(summary: Summary, arrays: Arrays) -> dict[str, Figure]:
    """A row of the paper's Table 2, the appendix's energies at all levels, and the energy on the plane."""
    row = compare({"": (summary, arrays)})["table-2"]
    levels = len(arrays["energy"])
    columns = min(levels, 4)
    rows = math.ceil(levels / columns)
    all_levels = Figure(figsize=(3.2 * columns, 2.4 * rows), layout="constrained")
    for t, axis in enumerate(all_levels.subplots(rows, columns, squeeze=False).flat):
        if t < levels:
            _energy_panel(axis, arrays, t)
            axis.set_title(f"t = {t}, KL {summary['kl_by_level'][t]:.3f} nats", fontsize=9)
        else:
            axis.set_axis_off()
    plane = Figure(figsize=(4.6, 4), layout="constrained")
    axis = plane.subplots()
    shown = arrays["plane"] - arrays["plane"].min()
    image = axis.imshow(shown, extent=(-5, 5, -5, 5), origin="lower", cmap="magma_r", vmax=150)
    plane.colorbar(image, label="U(x, 0) - min, nats")
    axis.set_title("learned energy")
    return {"table-2": row, "energies-by-level": all_levels, "energy": plane}


def _energy_panel(axis: Any, arrays: Arrays, t: int) -> None:
    """Learned and true energy along x_1 = 0, each with its minimum at 0, as in the paper."""
    line, truth = arrays["line"], arrays["truth"][t]
    inside = np.abs(line) <= 4.5
    learned = arrays["energy"][t] - arrays["energy"][t][inside].min()
    axis.plot(line, truth - truth.min(), color="0.65", linewidth=2, label="truth")
    axis.plot(line, learned, color="C3", linewidth=0.9, label="learned")
    # High enough to show every ring of the learned energy: misaligned ones lie hundreds of nats apart.
    rings = np.interp([-4, -3, -2, -1, 1, 2, 3, 4], line, learned)
    axis.set_ylim(-1, max(60 if t == 0 else 1.3 * learned[inside].max(), 1.2 * float(rings.max())))
    axis.legend(fontsize=6)


def compare(runs: Mapping[str, tuple[Summary, Arrays]]) -> dict[str, Figure]:
    """The paper's Table 2: a row per method with learned energy, long-run samples, samples from noise."""
    figure = Figure(figsize=(9, 2.8 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 3, squeeze=False)
    for row, (title, (summary, arrays)) in zip(axes, runs.items(), strict=True):
        _energy_panel(row[0], arrays, 0)
        row[0].set_title(f"{title} energy along $x_1 = 0$", fontsize=9)
        for axis, key, name in ((row[1], "long_run", "long run"), (row[2], "post", "from noise")):
            points = arrays[key][:2000]
            axis.scatter(points[:, 0], points[:, 1], s=0.5, color="C0")
            axis.set(xlim=(-5, 5), ylim=(-5, 5), aspect="equal")
            axis.set_title(f"{name}: {summary['on_ring_' + key]:.2f} on a ring", fontsize=9)
    return {"table-2": figure}


EXPERIMENT = Experiment(
    name="four-rings",
    title="Four rings in the plane (section 5)",
    presets=PRESETS,
    dataset=dataset,
    evaluate=evaluate,
    figures=figures,
    compare=compare,
    columns=(
        Column("alignment_error_nats", "alignment error, nats", "0"),
        Column("off_ring_mass", "off-ring mass", "0"),
        Column("kl_nats", "KL(truth || model), nats", "0"),
        Column("ring_mass_model", "ring masses, exp(-U)", "0.25 each"),
        Column("ring_mass_long_run", "long run, ring masses", "0.25 each"),
        Column("on_ring_long_run", "on ring", "1"),
        Column("ring_mass_post", "from noise, ring masses", "0.25 each"),
        Column("on_ring_post", "on ring", "1"),
        Column("tick_long_run", "LONG-RUN"),
        Column("tick_long_run_mala", "LONG-RUN, MALA"),
        Column("tick_post", "POST"),
        Column("tick_global", "GLOBAL"),
        Column("train_seconds", "training, s"),
    ),
)
