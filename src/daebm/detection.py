"""Out-of-distribution detection with a trained image model: its scores, baselines without one, and how well each does.

Scores are deterministic, on clean images, larger = more normal, and fitted on training images alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from daebm import checkpoint, profile
from daebm.images import load_images
from daebm.model import Model
from daebm.profile import LAW_ROWS, SCORES, Law, laws_in
from daebm.units import Floats

SETS = ("fashion-mnist", "mnist", "emnist-letters", "kmnist")
COMPONENTS = 50
NEIGHBOURS, NEIGHBOUR_IMAGES = 5, 10_000
GAUSSIAN_FLOOR = 0.3  # sd of the noise that the one Gaussian is given, in units of [-1, 1]
RESAMPLES, TOGETHER = 1000, 50  # of the bootstrap, and how many at a time; bounds memory
INTERVAL = (2.5, 97.5)  # percentiles
MEASURES = {"auroc": "AUROC", "pr_in": "AUC-PR in", "pr_out": "AUC-PR out", "fpr95": "FPR at 95 % TPR"}

Images = np.ndarray[Any, np.dtype[np.uint8]]  # (n, h, w)
Score = Callable[[Images], Floats]


def fit_law(name: str, model: Model, train: Images) -> Law:
    return profile.law(model.event).of(model.said(name, train[:LAW_ROWS, None]))


def saved_laws(folder: Path) -> dict[str, Law]:
    """Those that were saved with a model."""
    if not checkpoint.exists(folder, "model"):
        return {}
    tensors, facts = checkpoint.read(folder, "model")
    return laws_in(tensors, facts["data"]["event"])


def model_scores(model: Model, laws: Mapping[str, Law]) -> dict[str, Score]:
    """``energy``, -U(x, 0) as in the paper, and what can be had with the laws."""

    def energy(images: Images) -> Floats:
        return -model.energy(images[:, None]).astype(np.float64)

    def of(name: str) -> Score:
        if name == "energy":
            return energy
        return lambda images: profile.score(name, laws, lambda kind: model.said(kind, images[:, None]))

    return {name: of(name) for name in profile.scores(laws)}


def baseline_scores(train: Images) -> dict[str, Score]:
    """What needs no energy: they are in every table, because they already reach what deep models publish."""
    from sklearn.decomposition import PCA
    from sklearn.neighbors import NearestNeighbors

    flat = _flat(train)
    mean = flat.mean(0)
    components = PCA(COMPONENTS, svd_solver="covariance_eigh").fit(flat).components_
    near = NearestNeighbors(n_neighbors=NEIGHBOURS, algorithm="brute").fit(flat[:NEIGHBOUR_IMAGES])
    root = np.linalg.cholesky(np.cov(flat.T) + GAUSSIAN_FLOOR**2 * np.eye(flat.shape[1]))

    def residual(images: Images) -> Floats:
        away = _flat(images) - mean
        score: Floats = -np.linalg.norm(away - (away @ components.T) @ components, axis=1)
        return score

    def distance(images: Images) -> Floats:
        return -np.asarray(near.kneighbors(_flat(images))[0][:, -1], dtype=np.float64)

    def gaussian(images: Images) -> Floats:
        score: Floats = -np.square(np.linalg.solve(root, (_flat(images) - mean).T)).sum(0)
        return score

    return {f"PCA-{COMPONENTS}": residual, f"{NEIGHBOURS}-neighbour": distance, "Gaussian": gaussian}


def sets_of_images(inside: str, count: int = 0) -> dict[str, Images]:
    """The test splits of all sets, the model's own first; at most ``count`` of each, spread evenly (0 is all)."""
    found = {}
    for name in (inside, *(name for name in SETS if name != inside)):
        images, _labels = load_images(name, "test")
        found[name] = images[np.linspace(0, len(images) - 1, count).astype(int)] if 0 < count < len(images) else images
    return found


class Separation(NamedTuple):
    """How well a score tells one set from normal images: each of the `MEASURES`, with its bootstrap draws."""

    value: Floats  # (4,)
    draws: Floats  # (resamples, 4)

    def interval(self) -> Floats:
        """(2, 4)"""
        result: Floats = np.percentile(self.draws, INTERVAL, axis=0)
        return result


def separation(inside: Floats, outside: Floats, seed: int = 0) -> Separation:
    """Of scores of normal images from those of others. Equal seeds resample equal images: differences are paired."""
    _values, rank = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    rank_in, rank_out = rank[: len(inside)], rank[len(inside) :]
    ranks = int(rank.max()) + 1

    def counts(rank: np.ndarray[Any, Any], weights: Floats) -> Floats:
        return np.stack([np.bincount(rank, row, ranks) for row in weights])

    value = _measures(counts(rank_in, np.ones((1, len(rank_in)))), counts(rank_out, np.ones((1, len(rank_out)))))[0]
    random, draws = np.random.default_rng(seed), []
    for _ in range(RESAMPLES // TOGETHER):
        drawn = [
            counts(own, random.multinomial(len(own), np.full(len(own), 1 / len(own)), TOGETHER).astype(np.float64))
            for own in (rank_in, rank_out)
        ]
        draws.append(_measures(*drawn))
    return Separation(value, np.concatenate(draws))


def _measures(inside: Floats, outside: Floats) -> Floats:
    """The `MEASURES` (m, 4) from how many of either have each score, (m, ranks), lowest first."""
    total_in, total_out = inside.sum(1, keepdims=True), outside.sum(1, keepdims=True)
    out_below, in_below = outside.cumsum(1), inside.cumsum(1)  # with the own rank
    auroc = (inside * (out_below - outside / 2)).sum(1) / (total_in * total_out)[:, 0]
    in_above, out_above = total_in - in_below + inside, total_out - out_below + outside
    pr_in = (inside * in_above / np.maximum(in_above + out_above, 1)).sum(1) / total_in[:, 0]
    pr_out = (outside * out_below / np.maximum(in_below + out_below, 1)).sum(1) / total_out[:, 0]
    kept = (in_above >= 0.95 * total_in).sum(1) - 1  # the highest threshold that keeps 95 % of the normal ones
    fpr95 = out_above[np.arange(len(kept)), kept] / total_out[:, 0]
    return np.stack([auroc, pr_in, pr_out, fpr95], 1)


class Detection(NamedTuple):
    """Scores by name and set, how well they separate the sets, and seconds for 10,000 images."""

    scores: Mapping[str, Mapping[str, Floats]]
    separations: Mapping[str, Mapping[str, Separation]]  # by score, then set
    seconds: Mapping[str, float]


def detect(scores: Mapping[str, Score], sets: Mapping[str, Images], seed: int = 0) -> Detection:
    """Score every set and compare each with the first one, whose images are the normal ones."""
    found: dict[str, dict[str, Floats]] = {}
    seconds = {}
    for name, score in scores.items():
        clock = time.perf_counter()
        found[name] = {key: score(images) for key, images in sets.items()}
        seconds[name] = 1e4 * (time.perf_counter() - clock) / sum(map(len, sets.values()))
    inside, *others = sets
    separations = {
        name: {key: separation(values[inside], values[key], seed + i) for i, key in enumerate(others)}
        for name, values in found.items()
    }
    return Detection(found, separations, seconds)


def rows(detection: Detection) -> list[dict[str, Any]]:
    """A row for every score and set: the measures with their intervals, and seconds."""
    found = []
    for name, by_set in detection.separations.items():
        for key, it in by_set.items():
            low, high = it.interval()
            row: dict[str, Any] = {"score": name, "set": key}
            for i, measure in enumerate(MEASURES):
                row[measure] = [float(it.value[i]), float(low[i]), float(high[i])]
            found.append(row | {"seconds_per_10000": detection.seconds[name]})
    return found


def lines(detection: Detection) -> list[tuple[str, ...]]:
    """The same to be read: AUROC with its interval, the rest without."""
    table: list[tuple[str, ...]] = [("score", "set", *MEASURES.values())]
    for row in rows(detection):
        auroc, *others = (row[measure] for measure in MEASURES)
        cells = [f"{auroc[0]:.3f} ({auroc[1]:.3f} to {auroc[2]:.3f})", *(f"{value[0]:.3f}" for value in others)]
        table.append((row["score"], row["set"], *cells))
    return table


def difference(one: Separation, other: Separation) -> tuple[float, float, float]:
    """AUROC of ``one`` less that of ``other`` on the same images, with its paired bootstrap interval."""
    low, high = np.percentile(one.draws[:, 0] - other.draws[:, 0], INTERVAL)
    return float(one.value[0] - other.value[0]), float(low), float(high)


def differences(detection: Detection, names: Collection[str]) -> list[dict[str, Any]]:
    """AUROC of each of the scores ``names`` less that of every other one, set by set, with paired intervals."""
    return [
        {"score": name, "less": other, "set": key, "auroc": difference(it, detection.separations[other][key])}
        for name in names
        for other in detection.separations
        if other not in names
        for key, it in detection.separations[name].items()
    ]


def figures(detection: Detection) -> dict[str, Figure]:
    """Histograms of every score, and ROC and precision-recall curves of every set."""
    names = list(detection.scores)
    inside, *others = detection.scores[names[0]]
    columns = math.ceil(len(names) / 2)
    histograms = Figure(figsize=(3.4 * columns, 5.2), layout="constrained")
    axes = np.asarray(histograms.subplots(2, columns, squeeze=False))
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        values = detection.scores[name]
        if name in SCORES:  # squared distances reach a hundred times further out than normal images do
            top = max(float(part.max()) for part in values.values())
            values = {key: -np.sqrt(top - part) for key, part in values.items()}
        everything = np.concatenate(list(values.values()))
        # What decides is where normal images end: others lie many of their widths below them, and are counted there.
        least, middle = np.percentile(values[inside], [1, 50])
        low, high = max(middle - 6 * (middle - least), everything.min()), everything.max()
        for i, (key, part) in enumerate(values.items()):
            weights, bins = np.full(len(part), 1 / len(part)), np.linspace(low, high, 50).tolist()
            axis.hist(part, bins=bins, weights=weights, histtype="step", label=key)
            if beyond := (part < low).mean():
                at = (0.03, 0.9 - 0.09 * i)
                axis.text(*at, f"← {beyond:.1%}", color=f"C{i}", fontsize=9, transform=axis.transAxes)
        axis.set_title(f"{name}, as minus a distance" if name in SCORES else name, fontsize=10)
        axis.locator_params(axis="x", nbins=5)
    histograms.supylabel("share of a set in each bar (arrows: share further left)", fontsize=9)
    histograms.supxlabel("score, larger is more normal", fontsize=9)
    histograms.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(others) + 1)
    curves = Figure(figsize=(3.4 * len(others), 6), layout="constrained")
    axes = np.asarray(curves.subplots(2, len(others), squeeze=False, sharex="row", sharey="row"))
    none = 0.5 / max(len(detection.scores[names[0]][key]) for key in others)  # a log axis has no 0
    for i, key in enumerate(others):
        for name in names:
            tpr, fpr, precision = _curve(detection.scores[name][inside], detection.scores[name][key])
            axes[0, i].plot(fpr.clip(none), tpr, linewidth=1.2, label=name)
            axes[1, i].plot(tpr, precision, linewidth=1.2)
        axes[0, i].set_title(f"{inside} against {key}", fontsize=10)
        axes[0, i].set(xscale="log", xlim=(0.8 * none, 1.25), ylim=(0, 1.03), xlabel="FPR (0 at the left end)")
        axes[1, i].set(xlim=(0, 1.03), ylim=(0, 1.03), xlabel="recall of normal images")
    axes[0, 0].set_ylabel("TPR")
    axes[1, 0].set_ylabel("precision")
    curves.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(names))
    return {"histograms": histograms, "curves": curves}


def _curve(inside: Floats, outside: Floats) -> tuple[Floats, Floats, Floats]:
    """TPR, FPR and precision of normal images at 500 thresholds."""
    thresholds = np.quantile(np.concatenate([inside, outside]), np.linspace(1, 0, 500))
    kept_in = 1 - np.searchsorted(np.sort(inside), thresholds) / len(inside)
    kept_out = 1 - np.searchsorted(np.sort(outside), thresholds) / len(outside)
    share = kept_in * len(inside) / np.maximum(kept_in * len(inside) + kept_out * len(outside), math.ulp(1.0))
    return kept_in, kept_out, share


def _flat(images: Images) -> Floats:
    return images.reshape(len(images), -1) / 127.5 - 1
