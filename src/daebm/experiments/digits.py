"""scikit-learn's 8x8 digits: generation from noise, long runs, and outliers that are made of digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from daebm import data
from daebm.config import Config, PresetTable
from daebm.data import Dataset
from daebm.errors import InputError
from daebm.evaluation import auroc, effective_sample_size, nearest_distance
from daebm.experiments.base import Arrays, Column, Experiment, Summary, Trained, long_run

CONFIDENT = 0.8  # the classifier's probability from which a picture counts as a clear digit
Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]

# Chosen on the training part alone, with 200 of its digits set aside: held-out likelihood, mixing, samples.
OURS: dict[str, Any] = {
    "network": "level-mlp",
    "width": 256,
    "hidden": 2,
    "floor": 0.07,
    "top": 11,
    "last_variance": 0.95,
    "iterations": 2600,
    "batch": 200,
    "learning_rate": 1e-3,
    "warm_up": 100,
    "decay_start": 0.6,
    "clip": 5.0,
    "energy_penalty": 1e-4,
    "average": 0.999,
    "store": 1000,
    # Short bursts with a label move after each let the labels travel furthest for a gradient.
    "steps": 2,
    "bursts": 4,
    "label_move": "block",
    "block": 4,
    "step_size": 0.8,
    "log_every": 20,
    "checkpoint_every": 200,
    "post_chains": 1000,
    "long_run_chains": 500,
    "long_run_steps": 10_000,
}
# The plain EBMs and DRL: the same data, floor, rate and batch, with their own chains and the paper's L.
OTHERS: dict[str, Any] = OURS | {"steps": 40, "bursts": 1, "step_size": 0.03, "adapt_every": 0}
QUICK: dict[str, Any] = {
    "iterations": 60,
    "width": 64,
    "log_every": 10,
    "checkpoint_every": 30,
    "warm_up": 10,
    "post_chains": 100,
    "long_run_chains": 50,
    "long_run_steps": 100,
}
PRESETS: PresetTable = {
    "default": {"all": OTHERS, "drl": {"step_size": 0.2}, "da": OURS},
    "quick": {"all": OTHERS | QUICK, "drl": {"step_size": 0.2}, "da": OURS | QUICK},
}


def dataset(config: Config) -> Dataset:
    if config.train_size:
        raise InputError(f"digits are what they are: leave out train_size={config.train_size}")
    return data.digits(config.standardise)


def chimeras(images: Floats, labels: np.ndarray[Any, Any], seed: int = 0) -> Floats:
    """Top half of each digit on the bottom half of one of another class."""
    rng = np.random.default_rng(seed)
    partner = np.array([rng.choice(np.flatnonzero(labels != label)) for label in labels])
    mixed: Floats = images.reshape(-1, 8, 8).copy()
    mixed[:, 4:] = images[partner].reshape(-1, 8, 8)[:, 4:]
    return mixed.reshape(len(images), -1)


def mirrored(images: Floats) -> Floats:
    """Left-right mirrored digits."""
    flipped: Floats = np.ascontiguousarray(images.reshape(-1, 8, 8)[:, :, ::-1]).reshape(len(images), -1)
    return flipped


def evaluate(trained: Trained) -> tuple[Summary, Arrays]:
    model, config, held = trained.model, trained.config, trained.dataset
    train, test = held.train.numpy(), held.held_out.numpy()
    assert held.train_labels is not None and held.held_out_labels is not None
    train_labels, test_labels = held.train_labels.numpy(), held.held_out_labels.numpy()
    classify = _classifier(train, train_labels)

    drawn = model.draw(config.post_chains, trained.generator)
    samples = model.to_data(model.cleaned(drawn.x)).numpy()
    # Real digits get the same treatment as samples: the floor's noise, then the same cleaning.
    floor = model.ladder.floor
    noisy = held.standardise(held.held_out)
    noisy = noisy + floor * torch.randn(noisy.shape, generator=trained.generator)
    real = model.to_data(model.cleaned(noisy)).numpy()
    p_samples, p_real = classify(samples), classify(real)
    shares = np.bincount(train_labels, minlength=10) / len(train_labels)
    sample_shares = np.bincount(p_samples.argmax(1), minlength=10) / len(samples)

    start = noisy[: config.long_run_chains]
    end, energies, _info = long_run(trained, start, config.kernel, "long run", every=10)
    end_clean = model.to_data(model.cleaned(end)).numpy()
    same = classify(end_clean).argmax(1) == test_labels[: len(start)]

    outliers = {"mirrored": mirrored(test), "chimera": chimeras(test, test_labels)}
    summary: Summary = {}
    scores = {"": lambda x: -model.energy(x.astype(np.float32), 0), **_baselines(train)}
    for kind, x in outliers.items():
        for name, score in scores.items():
            summary[f"auroc_{kind}{name}"] = auroc(score(test), score(x))
    # The simplest sampler beside ours: draws from the training digits' Gaussian.
    gaussian = np.random.default_rng(config.seed).multivariate_normal(train.mean(0), np.cov(train.T), len(samples))
    confident, real_confident, gaussian_confident = (
        float((p.max(1) >= CONFIDENT).mean()) for p in (p_samples, p_real, classify(gaussian))
    )
    nearest = np.median(nearest_distance(samples, train)) / np.median(nearest_distance(real, train))
    summary |= {
        "sample_class_tv": float(np.abs(sample_shares - shares).sum() / 2),
        "sample_confident": confident,
        "real_confident": real_confident,
        "gaussian_confident": gaussian_confident,
        "sample_confident_ratio": confident / real_confident if real_confident else math.nan,
        "nearest_train_ratio": float(nearest),
        "long_run_same_class": float(same.mean()),
        "gradients_per_sample": drawn.gradients / len(samples),
        "round_trips_per_chain": float(trained.chains.trips.float().mean()),
        "round_trips_median": float(trained.chains.trips.float().median()),
        "ess_energy": effective_sample_size(energies.double().numpy()),
        "ess_energy_draws": energies.numel(),
        "held_out_gap_nats": float(model.energy(test, 0).mean() - model.energy(train, 0).mean()),
    }
    kept = 60
    arrays: Arrays = {
        "samples": samples[:kept],
        "real": test[:kept],
        "long_run_start": test[:20],
        "long_run": end_clean[:20],
        "mirrored": outliers["mirrored"][:20],
        "chimera": outliers["chimera"][:20],
        "energy_train": model.energy(train, 0),
        "energy_test": model.energy(test, 0),
        "energy_mirrored": model.energy(outliers["mirrored"], 0),
        "energy_chimera": model.energy(outliers["chimera"], 0),
        "energy_long_run": energies.mean(1).numpy(),
        "class_shares": sample_shares,
    }
    return summary, arrays


def _classifier(images: Floats, labels: np.ndarray[Any, Any]) -> Any:
    """Class probabilities by a calibrated SVC trained on real digits.

    One against the rest, because calibration needs margins: those of a one-against-one SVC are mostly votes, and
    calibrated they call almost everything a clear digit, draws from a Gaussian included.
    """
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import SVC

    return CalibratedClassifierCV(OneVsRestClassifier(SVC()), ensemble=False).fit(images, labels).predict_proba


def _baselines(train: Floats) -> dict[str, Any]:
    """The simplest densities: one Gaussian with shrunk covariance, and a KDE with cross-validated bandwidth."""
    from sklearn.covariance import LedoitWolf
    from sklearn.model_selection import KFold

    gaussian = LedoitWolf().fit(train)
    folds = list(KFold(5, shuffle=True, random_state=0).split(train))
    bandwidth = max(
        np.geomspace(0.05, 0.5, 15),
        key=lambda b: np.mean([kde(train[test], train[rest], b).mean() for rest, test in folds]),
    )
    return {"_gaussian": lambda x: -gaussian.mahalanobis(x), "_kde": lambda x: kde(x, train, bandwidth)}


def kde(points: Floats, reference: Floats, bandwidth: float) -> Floats:
    """Log density of a Gaussian KDE, summed exactly.

    Not scikit-learn's tree: in 64 dimensions its default tolerances return log densities that are off by tens of
    nats (33.1 for 26.1 on average at bandwidth .113 here), which made the baseline look weak.
    """
    from scipy.spatial.distance import cdist
    from scipy.special import logsumexp

    exponent = -cdist(points, reference, "sqeuclidean") / (2 * bandwidth**2)
    constant = np.log(len(reference)) + reference.shape[1] / 2 * np.log(2 * np.pi * bandwidth**2)
    log_density: Floats = logsumexp(exponent, axis=1) - constant
    return log_density


def figures(summary: Summary, arrays: Arrays) -> dict[str, Figure]:
    pictures = Figure(figsize=(10, 2.3), layout="constrained")
    panels = (
        ("real", "held-out digits"),
        ("samples", "samples from noise"),
        ("long_run_start", "long run: start"),
        ("long_run", f"long run: end ({summary['long_run_same_class']:.2f} same class)"),
        ("mirrored", f"mirrored, AUROC {summary['auroc_mirrored']:.3f}"),
        ("chimera", f"chimeras, AUROC {summary['auroc_chimera']:.3f}"),
    )
    for axis, (key, title) in zip(pictures.subplots(3, 2, height_ratios=(3, 1, 1)).flat, panels, strict=True):
        axis.imshow(_sheet(arrays[key]), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    histogram = Figure(figsize=(7, 3), layout="constrained")
    axis = histogram.subplots()
    values = {kind: arrays[f"energy_{kind}"] for kind in ("train", "test", "mirrored", "chimera")}
    low, high = np.quantile(np.concatenate(list(values.values())), [0.002, 0.99])
    edges = np.linspace(low, high, 60)
    for kind, energy in values.items():
        axis.hist(energy, bins=edges.tolist(), density=True, histtype="step", label=kind)
    axis.set(xlabel="U(x, 0), nats", title="energies")
    axis.legend()
    return {"pictures": pictures, "energies": histogram}


def _sheet(images: Floats, columns: int = 20) -> Floats:
    """Pictures side by side in rows, with a one-pixel border."""
    missing = -len(images) % columns
    tiles = np.pad(images.reshape(-1, 8, 8), ((0, missing), (1, 1), (1, 1)))
    sheet: Floats = tiles.reshape(-1, columns, 10, 10).swapaxes(1, 2).reshape(-1, columns * 10)
    return sheet


def compare(runs: Mapping[str, tuple[Summary, Arrays]]) -> dict[str, Figure]:
    """Samples from noise and ends of long runs, a row per run."""
    figure = Figure(figsize=(10, 1.1 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False)
    for row, (title, (_summary, arrays)) in zip(axes, runs.items(), strict=True):
        for axis, key, name in ((row[0], "samples", "from noise"), (row[1], "long_run", "long run")):
            axis.imshow(_sheet(arrays[key]), cmap="gray_r", vmin=0, vmax=1)
            axis.set_title(f"{title}: {name}", fontsize=9)
            axis.set_anchor("N")
            axis.set_axis_off()
    return {"pictures": figure}


EXPERIMENT = Experiment(
    name="digits",
    title="8x8 digits: samples from noise, long runs, outliers made of digits",
    presets=PRESETS,
    dataset=dataset,
    evaluate=evaluate,
    figures=figures,
    compare=compare,
    columns=(
        Column("auroc_mirrored", "AUROC mirrored"),
        Column("auroc_mirrored_gaussian", "… Gaussian"),
        Column("auroc_mirrored_kde", "… KDE"),
        Column("auroc_chimera", "AUROC chimera"),
        Column("auroc_chimera_gaussian", "… Gaussian"),
        Column("auroc_chimera_kde", "… KDE"),
        Column("sample_class_tv", "class shares, TV", "0"),
        Column("sample_confident", "confident samples"),
        Column("real_confident", "… real digits"),
        Column("gaussian_confident", "… Gaussian draws"),
        Column("nearest_train_ratio", "nearest training digit, ratio", "1"),
        Column("long_run_same_class", "long run, same class", "1"),
        Column("gradients_per_sample", "gradients a sample"),
        Column("ess_energy", "effective draws of U in the long run"),
        Column("round_trips_per_chain", "label round trips a chain"),
        Column("train_seconds", "training, s"),
    ),
)
