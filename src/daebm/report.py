"""Figures as PNG files and a report.html that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from daebm import checkpoint
from daebm.config import Config
from daebm.experiments import experiment
from daebm.experiments.base import Arrays, Column, Experiment, Summary, log_steps
from daebm.methods import METHODS

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}td,th{border-bottom:1px solid #ddd;
padding:.25rem .7rem;text-align:left;white-space:nowrap}img{max-width:100%}summary{cursor:pointer}small{color:#666}"""

# Table 1 of the paper, to stand beside ours: LONG-RUN, POST, GLOBAL.
PAPER_TABLE_1 = {
    "persistent": "yes / no / no",
    "cd": "no / no / no",
    "noise": "no / yes / no",
    "hybrid": "no / yes / no",
    "drl": "mixed / yes / no",
    "da": "yes / yes / yes",
}


def write_run(folder: Path, config: Config, summary: Summary, arrays: Arrays) -> None:
    """figures/*.png and report.html of one run."""
    it = experiment(config.experiment)
    figures = {"training": _training_figure(folder, config, summary), **it.figures(summary, arrays)}
    results = [
        ("measure", "this run", "truth"),
        *((c.title, show(summary.get(c.key)), c.truth) for c in it.columns if c.key in summary),
    ]
    settings = [("setting", "value"), *((k, show(v)) for k, v in config.to_json().items())]
    everything = [("key", "value"), *((k, show(v)) for k, v in summary.items())]
    body = (
        _heading(it, METHODS[config.method].title, summary)
        + table(results)
        + _pictures(figures, folder / "figures")
        + details("Every figure of summary.json", table(everything))
        + details("Settings", table(settings))
    )
    write_page(folder / "report.html", f"daebm: {config.experiment}, {config.method}", body)


def write_comparison(folder: Path, runs: Mapping[str, tuple[Config, Summary, Arrays]]) -> None:
    """comparison.json, figures/*.png and report.html over several runs of one experiment."""
    configs = [config for config, _summary, _arrays in runs.values()]
    it = experiment(configs[0].experiment)
    figures = it.compare({title: (summary, arrays) for title, (_config, summary, arrays) in runs.items()})
    rows = comparison_table(it, {title: summary for title, (_config, summary, _arrays) in runs.items()})
    if it.name == "four-rings":
        rows[0] += ("paper's Table 1: LONG-RUN / POST / GLOBAL",)
        for i, config in enumerate(configs):
            rows[i + 2] += (PAPER_TABLE_1[config.method],)
        rows[1] += ("",)
    commands = sorted({summary.get("command", "") for _config, summary, _arrays in runs.values()} - {""})
    body = (
        f"<h1>{html.escape(it.title)}</h1>"
        + "".join(f"<p><small>{html.escape(c)}</small></p>" for c in commands)
        + table(rows)
        + _pictures(figures, folder / "figures")
    )
    checkpoint.write_json(
        folder / "comparison.json", {title: summary for title, (_config, summary, _arrays) in runs.items()}
    )
    write_page(folder / "report.html", f"daebm: {it.name}", body)


def comparison_table(it: Experiment, summaries: Mapping[str, Summary]) -> list[tuple[str, ...]]:
    """A header, the truths, and a row per run."""
    columns = [c for c in it.columns if any(c.key in s for s in summaries.values())]
    return [
        ("run", *(c.title for c in columns)),
        ("truth", *(c.truth for c in columns)),
        *((title, *(show(s.get(c.key)) for c in columns)) for title, s in summaries.items()),
    ]


def short_table(it: Experiment, summary: Summary) -> str:
    """The result table of one run for a terminal."""
    rows = [(c, show(summary[c.key])) for c in it.columns if c.key in summary]
    width = max(len(c.title) for c, _value in rows)
    return "\n".join(_line(c, value, width) for c, value in rows)


def _line(column: Column, value: str, width: int) -> str:
    truth = f"  (truth {column.truth})" if column.truth else ""
    return f"  {column.title:<{width}}  {value}{truth}"


def show(value: Any) -> str:
    """A figure as people read it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):  # not measured
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(show(v) for v in value)
    return str(value)


def _training_figure(folder: Path, config: Config, summary: Summary) -> Figure:
    """Energy gap, acceptance and learning rate over the iterations; step size and label share by level."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    entries = [e for e in entries if "event" not in e]
    chained = [e for e in entries if e["iteration"] > config.warm]  # no chains move in the warm starts
    figure = Figure(figsize=(12, 2.8), layout="constrained")
    axes = figure.subplots(1, 5)
    panels = (
        ("gap", "U(data) - U(chains), nats", chained),
        ("acceptance", "mean acceptance", chained),
        ("learning_rate", "learning rate", entries),
    )
    for axis, (key, title, shown) in zip(axes, panels, strict=False):
        marker = "." if len(entries) <= 50 else ""
        axis.plot([e["iteration"] for e in shown], [e[key] for e in shown], marker=marker, linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlim(0, 1.03 * config.iterations)
        axis.set_xlabel("iteration (grey: warm start)" if config.warm else "iteration", fontsize=8)
        axis.axvspan(0, config.warm, color="0.92", linewidth=0)
    axes[0].axhline(0, color="0.5", linewidth=0.8)
    if config.warm:  # rates of the warm starts are a hundred times as large
        axes[2].set_yscale("log", nonpositive="mask")
        axes[2].set_ylim(bottom=config.learning_rate / 100)
    log_steps(axes[3], summary["step_sizes"])
    axes[3].set_title("final step size", fontsize=9)
    share = summary.get("label_share_of_uniform")
    if share is None:
        axes[4].set_axis_off()
    else:
        axes[4].bar(np.arange(len(share)), share)
        axes[4].axhline(1, color="0.5", linewidth=0.8)
        axes[4].set_title("label share / uniform", fontsize=9)
        axes[4].set_xlabel("level", fontsize=8)
    axes[3].set_xlabel("level", fontsize=8)
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _heading(it: Experiment, title: str, summary: Summary) -> str:
    facts = ("command", "preset", "seed", "date", "machine", "threads", "torch")
    line = ", ".join(f"{key} {summary[key]}" for key in facts if summary.get(key) not in ("", None))
    return f"<h1>{html.escape(it.title)}</h1><h2>{html.escape(title)}</h2><p><small>{html.escape(line)}</small></p>"


def table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if i == 0 else "td"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def details(title: str, content: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"


def _pictures(figures: Mapping[str, Figure], folder: Path) -> str:
    """Save every figure and return it as an inline picture."""
    folder.mkdir(exist_ok=True)
    parts = []
    for name, figure in figures.items():
        content = png(figure)
        checkpoint.write_atomically(folder / f"{name}.png", content)
        parts.append(inline(name, content))
    return "\n".join(parts)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def inline(name: str, content: bytes, caption: str = "") -> str:
    """A PNG as part of a page, with a few words under it."""
    encoded = base64.b64encode(content).decode()
    said = f"<br><small>{html.escape(caption)}</small>" if caption else ""
    return f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{encoded}">{said}</p>'


def write_page(path: Path, title: str, body: str) -> None:
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{body}</body></html>"
    )
    checkpoint.write_atomically(path, page.encode())
