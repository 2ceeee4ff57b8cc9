"""The pictures of the image experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from daebm.experiments.base import Arrays, Summary
from daebm.samplers.adapt import HIGH, LOW

TREATMENT = "floor noise removed by Tweedie's formula, then clipped to [-1, 1]: for display only"
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def _sheets(panels: Mapping[str, Floats], columns: int = 20) -> Figure:
    """Pictures in rows under their titles, ink dark on white."""
    rows = [max(1, math.ceil(len(images) / columns)) for images in panels.values()]
    figure = Figure(figsize=(12, 0.6 + 0.6 * sum(rows) + 0.3 * len(rows)), layout="constrained")
    figure.supxlabel(TREATMENT, fontsize=8)
    axes = figure.subplots(len(rows), squeeze=False, height_ratios=rows)[:, 0]
    for axis, (title, images) in zip(axes, panels.items(), strict=True):
        axis.set_title(f"{title} ({len(images)})", fontsize=9)
        axis.set_axis_off()
        if len(images):
            tiles = np.pad(images, ((0, -len(images) % columns), (1, 1), (1, 1)), constant_values=-1)
            height, width = tiles.shape[1:]
            sheet = tiles.reshape(-1, columns, height, width).swapaxes(1, 2).reshape(-1, columns * width)
            axis.imshow(sheet, cmap="gray_r", vmin=-1, vmax=1)
    return figure


TITLES = {
    "real": "held-out images",
    "annealed": "from noise, annealed: a start, not a draw",
    "samples": "from noise, chains at t = 0",
    "store": "training chains at t = 0",
    "long_run_start": "long run: start",
    "long_run": "long run: end",
}


def figures(summary: Summary, arrays: Arrays) -> dict[str, Figure]:
    pictures = _sheets({title: arrays[key] for key, title in TITLES.items() if key in arrays})
    found = {"pictures": pictures, "energies": _energy_figure(arrays)}
    return found | ({"levels": _level_figure(summary, arrays)} if "trips" in arrays else {})


def compare(runs: Mapping[str, tuple[Summary, Arrays]]) -> dict[str, Figure]:
    """Samples from noise and ends of long runs, run by run."""
    panels = {
        f"{run}: {TITLES[key]}": arrays[key]
        for run, (_summary, arrays) in runs.items()
        for key in ("samples", "long_run")
    }
    return {"pictures": _sheets(panels)}


def _energy_figure(arrays: Arrays) -> Figure:
    """U(x, 0) of training, held-out and sampled images, and along the long run."""
    figure = Figure(figsize=(12, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = ("train", "held_out", "samples", "store", "long_run")
    values = {key: arrays[f"energy_{key}"] for key in kinds if f"energy_{key}" in arrays}
    values = {key: energy[np.isfinite(energy)] for key, energy in values.items() if np.isfinite(energy).any()}
    low, high = np.quantile(np.concatenate(list(values.values())), [0.001, 0.999])
    edges = np.linspace(low, high, 60)
    for key, energy in values.items():
        left.hist(np.clip(energy, low, high), bins=edges.tolist(), density=True, histtype="step", label=key)
    left.set(xlabel="U(x, 0), nats", title="energies at t = 0")
    left.legend(fontsize=7)
    for share, shade in ((0.9, 0.15), (0.5, 0.3)):
        tails = [(1 - share) / 2, (1 + share) / 2]
        right.axhspan(*np.quantile(arrays["energy_held_out"], tails), color="0.5", alpha=shade, linewidth=0)
        right.fill_between(arrays["along_step"], *np.quantile(arrays["along"], tails, 1), color="C0", alpha=shade)
    right.set(xlabel="step", title="long run: U(x, 0), middle 50 % and 90 % (grey: held-out)")
    return figure


BESIDE = {
    "mean_difference_by_level": "from_noise_mean_difference_by_level",
    "variance_ratio_by_level": "from_noise_variance_ratio_by_level",
    "energy_gap_by_level": "own_image_gap_by_level",
}


def _level_figure(summary: Summary, arrays: Arrays) -> Figure:
    """What the chains do at every level."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    panels = (
        ("label_share_by_level", "label share / uniform", 1),
        ("acceptance_by_level", "acceptance, frozen steps", None),
        ("step_sizes", "step size", None),
        ("neighbour_acceptance", "acceptance of t <-> t + 1", None),
        ("mean_difference_by_level", "|mean - held-out| / held-out sd; orange: from noise", 0),
        ("variance_ratio_by_level", "pixel variance / held-out; orange: from noise", 1),
        ("energy_gap_by_level", "U(held-out) - U(chains); orange: own image", 0),
    )
    figure.supxlabel("level; bars: 2 standard errors", fontsize=8)
    axes = figure.subplots(2, 4).flat
    for axis, (key, title, truth) in zip(axes, panels, strict=False):
        for name in (key, BESIDE.get(key)):
            if name in summary:
                line = np.array(summary[name], dtype=float)
                error = summary.get(name.removesuffix("_by_level") + "_se_by_level")
                bars = None if error is None else 2 * np.array(error, dtype=float)
                axis.errorbar(np.arange(len(line)), line, bars, marker=".", linewidth=0.8, elinewidth=0.8)
        axis.set_title(title, fontsize=9)
        if truth is not None:
            axis.axhline(truth, color="0.6", linewidth=0.8)
        elif key.startswith("acceptance"):
            axis.axhspan(LOW, HIGH, color="0.9")
        if key == "step_sizes":
            axis.set_yscale("log")
    trips = np.bincount(arrays["trips"])
    axes[7].bar(np.arange(len(trips)), trips)
    axes[7].set_xlim(-0.5, max(len(trips), 5) - 0.5)
    axes[7].xaxis.get_major_locator().set_params(integer=True)
    axes[7].set_title("chains by label round trips in training", fontsize=9)
    return figure
