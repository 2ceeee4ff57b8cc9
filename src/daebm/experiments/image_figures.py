"""The pictures of the image experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from daebm.experiments.base import Arrays, Summary, log_steps
from daebm.samplers.adapt import HIGH, LOW

TREATMENT = "floor noise removed by Tweedie's formula, then clipped to [-1, 1]: for display only"
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2, "fontsize": 8}  # of a legend
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


ENERGIES = {
    "train": "training images",
    "held_out": TITLES["real"],
    "samples": TITLES["samples"],
    "store": TITLES["store"],
    "long_run": TITLES["long_run"],
}


def _energy_figure(arrays: Arrays) -> Figure:
    """U(x, 0) of training, held-out and sampled images, and along the long run."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = {key: arrays[f"energy_{key}"] for key in ENERGIES if f"energy_{key}" in arrays}
    values = {key: energy[np.isfinite(energy)] for key, energy in values.items() if np.isfinite(energy).any()}
    # A set that lies far off would leave one bar for all others: it is counted in the legend.
    usual = np.concatenate([energy for key, energy in values.items() if key in ("train", "held_out")])
    least, most = np.quantile(usual, [0.01, 0.99])
    low, high = least - (most - least) / 2, most + (most - least) / 2
    everything = np.concatenate(list(values.values()))
    edges = np.linspace(max(low, everything.min()), min(high, everything.max()), 60)
    for key, energy in values.items():
        beyond = float(((energy < low) | (energy > high)).mean())
        label = ENERGIES[key] + (f" ({beyond:.1%} beyond)" if beyond >= 0.0005 else "")
        weights = np.full(len(energy), 1 / len(energy))
        left.hist(energy, bins=edges.tolist(), weights=weights, histtype="step", label=label)
    left.set(xlabel="U(x, 0), nats", ylabel="share in each bar", title="energies at t = 0")
    left.legend(**BELOW)
    for share, shade in ((0.9, 0.15), (0.5, 0.3)):
        tails, label = [(1 - share) / 2, (1 + share) / 2], f"middle {share:.0%}"
        band = np.quantile(arrays["energy_held_out"], tails)
        right.axhspan(*band, color="0.5", alpha=shade, linewidth=0, label=f"held-out images, {label}")
        band = np.quantile(arrays["along"], tails, 1)
        right.fill_between(arrays["along_step"], *band, color="C0", alpha=shade, label=f"long run, {label}")
    right.set(xlabel="step", ylabel="U(x, 0), nats", title="long run")
    right.legend(**BELOW)
    return figure


# What is drawn beside a measure, and what to call the two.
BESIDE = {
    "mean_difference_by_level": ("from_noise_mean_difference_by_level", "training chains", "chains from noise"),
    "variance_ratio_by_level": ("from_noise_variance_ratio_by_level", "training chains", "chains from noise"),
    "energy_gap_by_level": ("own_image_gap_by_level", "training chains", "from images: own image"),
}


def _level_figure(summary: Summary, arrays: Arrays) -> Figure:
    """What the chains do at every level."""
    figure = Figure(figsize=(12, 5.8), layout="constrained")
    panels = (
        ("label_share_by_level", "label share / uniform", 1),
        ("acceptance_by_level", "acceptance, frozen steps", None),
        ("step_sizes", "step size", None),
        ("neighbour_acceptance", "acceptance of t <-> t + 1", None),
        ("mean_difference_by_level", "|mean - held-out| / held-out sd", 0),
        ("variance_ratio_by_level", "pixel variance / held-out", 1),
        ("energy_gap_by_level", "U(held-out) - U(chains), nats", 0),
    )
    figure.supxlabel("bars: 2 standard errors", fontsize=8)
    axes = figure.subplots(2, 4).flat
    for axis, (key, title, truth) in zip(axes, panels, strict=False):
        beside, *labels = BESIDE.get(key, ("", None, None))
        for name, label in zip((key, beside), labels, strict=True):
            if name == "step_sizes":
                log_steps(axis, summary[name])
            elif name in summary:
                line = np.array(summary[name], dtype=float)
                error = summary.get(name.removesuffix("_by_level") + "_se_by_level")
                bars = None if error is None else 2 * np.array(error, dtype=float)
                axis.errorbar(np.arange(len(line)), line, bars, marker=".", linewidth=0.8, elinewidth=0.8, label=label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("level", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        if truth is not None:
            axis.axhline(truth, color="0.6", linewidth=0.8)
        if beside:
            axis.legend(**BELOW)
        if key.startswith("mean_difference"):
            axis.set_ylim(bottom=0)  # of an absolute value
        elif key.startswith("acceptance"):
            axis.axhspan(LOW, HIGH, color="0.9", label="aim")
            axis.legend(fontsize=8)
    trips = np.bincount(arrays["trips"])
    axes[7].bar(np.arange(len(trips)), trips)
    axes[7].set_xlim(-0.5, max(len(trips), 5) - 0.5)
    axes[7].xaxis.get_major_locator().set_params(integer=True)
    axes[7].set_title("round trips of the labels in training", fontsize=9)
    axes[7].set_xlabel("round trips", fontsize=8)
    axes[7].set_ylabel("chains", fontsize=8)
    return figure
