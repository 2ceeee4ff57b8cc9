"""A report on a fitted estimator: its training, its mixing, what it finds normal, and what its rates promise."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import beta, betabinom

from daebm import conformal, report
from daebm.images import contact_sheet
from daebm.units import Floats

if TYPE_CHECKING:
    from daebm.estimator import DAEBM

COLUMNS = 12  # of an example that are shown
MASS = 0.9  # of the bands


def facts(detector: DAEBM) -> list[tuple[str, str]]:
    """What a newcomer asks first, as titles and values."""
    chosen = next(look for look in detector.history_ if look["chosen"])
    calibration, noisy = detector.calibration_["energy"], report.show(float(detector.noisy_.mean()))
    return [
        ("a row is", " x ".join(map(str, detector.units_.event)) + " numbers"),
        ("scored by", detector.score_by),
        ("columns left out, constant to 64 bits", _left_out(detector)),
        ("iterations", _iterations(detector, chosen["iteration"])),
        ("noise floor, in sds", report.show(detector.floor_)),
        ("log density of calibration rows, mean in nats", report.show(float(calibration.mean()))),
        *([("the same with the floor's noise added", noisy)] if detector.floor_ else []),
        ("shared error of log densities, nats", report.show(detector.log_normaliser_se_)),
        ("acceptance of the sampler's steps", report.show(detector.history_[-1]["acceptance"])),
        ("round trips of a chain over the noise levels", report.show(detector.history_[-1]["round_trips"])),
        ("false alarms", _promise(len(calibration), detector.fpr)),
    ]


def _iterations(detector: DAEBM, kept: int) -> str:
    planned = detector.config_.iterations
    ended = f"ended at {detector.n_iter_} of {planned}, as held-out rows became less likely"
    return f"{ended if detector.n_iter_ < planned else planned}; the model of iteration {kept} was kept"


def _left_out(detector: DAEBM) -> str:
    places = np.flatnonzero(~detector.units_.varies.ravel())
    names = getattr(detector, "feature_names_in_", None)
    if not len(places) or not detector.units_.table:
        return "none"
    named = [str(names[i]) if names is not None else str(i + 1) for i in places[:COLUMNS]]
    return f"{len(places)}: {', '.join(named)}{', ..' if len(places) > COLUMNS else ''}"


def _promise(count: int, fpr: float) -> str:
    if conformal.needed(fpr) > count:
        return f"{count} calibration rows, too few for a rate of {fpr:g}: {conformal.least_rate(count):g} is the least"
    k = conformal.rank(count, fpr)
    low, high = beta.interval(MASS, k, count + 1 - k)
    return f"rate {fpr:g}, with {count} calibration rows {low:.2g} to {high:.2g} ({MASS:.0%} of the time)"


def write(path: Path, detector: DAEBM, name: str) -> None:
    """One html file that needs no other."""
    figures = {
        "training": (_training(detector), "What was seen at each checkpoint of training; the dotted one was kept."),
        "energies": (_energies(detector), _energies_said(detector)),
        "calibration": (
            _calibration(detector),
            f"Rows that training was watched by, judged by {detector.kind}: the share that is flagged should follow "
            f"the grey line. By chance it stays within the band {MASS:.0%} of the time, at any one rate.",
        ),
    }
    concerns = "".join(f"<li>{html.escape(concern)}</li>" for concern in detector.concerns())
    settings = [("setting", "value"), *((k, report.show(v)) for k, v in detector.config_.to_json().items())]
    if detector.random_state is not None:  # the setting seed is drawn from it
        settings.insert(1, ("random_state (--seed of fit)", report.show(detector.random_state)))
    body = (
        f"<h1>{html.escape(name)}</h1>"
        + report.table([("fact", "value"), *facts(detector)])
        + (f"<h2>Before you trust it</h2><ul>{concerns}</ul>" if concerns else "")
        + "".join(report.inline(title, report.png(figure), said) for title, (figure, said) in figures.items())
        + _examples(detector)
        + report.details("Settings", report.table(settings))
    )
    report.write_page(path, f"daebm: {name}", body)


def _training(detector: DAEBM) -> Figure:
    """What every look during training saw; a line where the model was kept."""
    x = [look["iteration"] for look in detector.history_]
    kept = next(look["iteration"] for look in detector.history_ if look["chosen"])
    titles = {
        "log_density": "held-out log density (model's units)",
        "gap": "training rows likelier by, nats",
        "acceptance": "acceptance",
        "round_trips": "round trips of a chain",
    }
    seen = {key: [look.get(key, math.nan) for look in detector.history_] for key in titles}
    known = [key for key, values in seen.items() if np.isfinite(values).sum() > (len(x) > 1)]  # one dot is no curve
    figure = Figure(figsize=(2.9 * max(2, len(known)), 2.8), layout="constrained")
    for axis, key in zip(figure.subplots(1, len(known), squeeze=False)[0] if known else (), known, strict=True):
        axis.plot(x, seen[key], marker="o", markersize=3, linewidth=0.8)
        axis.set_title(titles[key], fontsize=9)
        axis.axvline(kept, color="0.6", linewidth=0.8, linestyle=":")
        if key == "gap":
            axis.axhline(0, color="0.6", linewidth=0.8)
        axis.set_xlabel("iteration (dotted: kept)", fontsize=8)
    return figure


def _energies(detector: DAEBM) -> Figure:
    """Log densities of calibration rows and of the model's own draws, both with the floor's noise: do they agree?"""
    figure = Figure(figsize=(6.5, 3), layout="constrained")
    axis = figure.subplots()
    groups = {"calibration rows": detector.noisy_, "draws of the model": detector.drawn_}
    if not detector.drawn_.size:
        axis.set_title("no chain of the model was at level 0 when its constant was found", fontsize=9)
    groups = {title: kept for title, values in groups.items() if (kept := values[np.isfinite(values)]).size}
    if groups:
        everything = np.concatenate(list(groups.values()))
        lowest = np.quantile(everything, 0.01)  # one row at -1e9 would make all others one bar
        edges = np.histogram_bin_edges(everything[everything >= lowest], 25).tolist()
        for title, values in groups.items():
            label = f"{len(values)} {title}"
            axis.hist(np.clip(values, edges[0], None), edges, density=True, alpha=0.5, label=label)
        axis.legend(fontsize=8)
        axis.set_xlabel("log density, nats (the first bar is that or less)", fontsize=8)
        axis.set_ylabel("share of rows per nat", fontsize=8)
    return figure


def _energies_said(detector: DAEBM) -> str:
    said = "Calibration rows and draws of the model should be alike."
    if not detector.floor_:
        return said
    plain, noisy = (report.show(float(v.mean())) for v in (detector.calibration_["energy"], detector.noisy_))
    return (
        f"{said} Here the rows have the floor's noise added, {detector.floor_:.3g} sds, as the draws have it, and a "
        f"mean of {noisy} nats; as they are it is {plain}."
    )


def _calibration(detector: DAEBM) -> Figure:
    """The share of held-out rows that is flagged at every rate, with the band in which chance alone leaves it."""
    kind = detector.kind
    calibration, held = detector.calibration_[kind], detector.validation_[kind]
    n, m = len(calibration), len(held)
    ranks = np.unique(np.linspace(1, n, min(n, 200)).round().astype(int))
    rates = ranks / (n + 1)
    share = [(conformal.p_values(calibration, held) <= rate + 1e-12).mean() for rate in rates]
    low, high = betabinom.interval(MASS, m, ranks, n + 1 - ranks)
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    for axis, most in zip(figure.subplots(1, 2), (1.0, 0.1), strict=True):
        axis.fill_between(rates, low / m, high / m, alpha=0.2, step="post", label=f"{MASS:.0%} band")
        axis.plot([0, most], [0, most], color="0.5", linewidth=0.8)
        axis.step(rates, share, where="post", linewidth=1, label=f"{m} held-out rows")
        axis.set(xlim=(0, most), ylim=(0, min(1, 1.5 * most)))
        axis.set_xlabel("stated false-alarm rate", fontsize=8)
    figure.axes[0].set_ylabel("share of held-out rows flagged", fontsize=8)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(f"calibration, on rows that training was watched by ({kind})", fontsize=9)
    return figure


def _examples(detector: DAEBM) -> str:
    kind = detector.kind
    rows, scores = detector.examples_[kind], detector.calibration_[kind]
    half = (len(rows) + 1) // 2
    parts = {
        "Least normal calibration rows": (rows[:half], scores[:half]),
        "Most normal calibration rows": (rows[half:][::-1], scores[len(scores) - len(rows) + half :][::-1]),
    }
    return "".join(f"<h2>{title}</h2>{_shown(detector, *part)}" for title, part in parts.items() if len(part[0]))


def _shown(detector: DAEBM, rows: Floats, scores: Floats) -> str:
    if detector.units_.table:
        names = list(getattr(detector, "feature_names_in_", range(rows.shape[1])))
        more = [f".. {rows.shape[1] - COLUMNS} more"] if rows.shape[1] > COLUMNS else []
        header = ("score", *(str(name) for name in names[:COLUMNS]), *more)
        lines = [
            (f"{s:.4g}", *(f"{v:.4g}" for v in row[:COLUMNS]), *([""] if more else []))
            for s, row in zip(scores, rows, strict=True)
        ]
        return report.table([header, *lines])
    said = ", ".join(f"{s:.4g}" for s in scores)
    grey_or_rgb = detector.units_.model_event[0] in (1, 3)
    shown = report.inline("examples", contact_sheet(rows, detector.examples_["energy"])) if grey_or_rgb else ""
    return f"<p><small>scores {said}</small></p>{shown}"
