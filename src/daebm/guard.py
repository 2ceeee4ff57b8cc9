"""What is watched in training: measures of every iteration, signs of divergence, and the log of both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import nn

from daebm.checkpoint import write_atomically
from daebm.config import Config

MEASURES = ("loss", "gap", "grad_norm", "acceptance")  # what an iteration returns
GAP = MEASURES.index("gap")
WEIGHT_LIMIT = 1e6  # networks here have weights of order 1; a float32 energy beyond this has lost its last nat
WARM_LIMIT = 20.0  # times what knowing nothing costs, in a warm start


def trouble(config: Config, measures: list[float], iteration: int, nothing_known: float) -> str | None:
    """Of the measures of an iteration, the first is number 1; ``nothing_known`` is what that costs in a warm start."""
    named = dict(zip(MEASURES, measures, strict=True))
    for name in ("loss", "gap", "grad_norm"):
        if not math.isfinite(named[name]):
            return f"{name} is {named[name]}"
    if iteration <= config.warm and named["loss"] > WARM_LIMIT * nothing_known:
        return f"the loss of the warm start is {named['loss']:.3g}, and {nothing_known:.3g} if nothing is known"
    for name, title in (("gap", "energy gap"), ("loss", "loss")):
        if abs(named[name]) > config.maximum_gap:
            return f"the {title} is {named[name]:.3g}, beyond maximum_gap={config.maximum_gap:g}"
    return None


def bad_weights(network: nn.Module) -> str | None:
    """Checked before a checkpoint is written, so that the last checkpoint is always a good one."""
    for name, weight in network.named_parameters():
        largest = float(weight.detach().abs().max()) if weight.numel() else 0.0
        if not largest <= WEIGHT_LIMIT:  # also false for NaN
            return f"the largest weight of {name} is {largest:.3g}"
    return None


LASTING = ("roll-back", "divergence")  # events of iterations that are not in the state


class MetricsLog:
    """metrics.jsonl: a line per report. On resume, lines beyond the checkpoint (or cut by a kill) are dropped."""

    def __init__(self, path: Path, iteration: int) -> None:
        self.path = path
        self.restart(iteration)

    def restart(self, iteration: int, event: dict[str, Any] | None = None) -> None:
        kept = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["iteration"] <= iteration or entry.get("event") in LASTING:
                kept.append(line)
        if event is not None:
            kept.append(json.dumps(event))
        write_atomically(self.path, "".join(line + "\n" for line in kept).encode())

    def write(self, entry: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")
