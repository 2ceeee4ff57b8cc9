"""Settings for data of one's own, from their shape and size: what the estimator trains with.

Chosen on seed 0 of the density benchmark and, for few rows, by the held-out density of normal rows of the outlier
benchmark, other splits than those reported; a budget is a number of iterations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daebm.config import Config
from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.networks import ENOUGH_ROWS
from daebm.spacing import MINIMUM_NOISE_OVERLAP, noise_overlap

BUDGETS = {"small": 600, "medium": 2000, "large": 8000}  # iterations
FEW_DIMENSIONS = 4  # up to here fine structure can be resolved, and level 0 can be the data themselves
ROWS = 1000  # fewer rows than this take a share of the budget: they have less to say
LARGEST_DIMENSION = 4096  # the data's own Gaussian has as many squared numbers
LOOKS = 20  # at the held-out points during training


def check_dimension(what: str, dimension: int) -> None:
    if dimension > LARGEST_DIMENSION:
        raise InputError(
            f"{what} has {dimension} numbers, and at most {LARGEST_DIMENSION} are practical here: reduce it first, "
            "by PCA, or to smaller images"
        )


def choose(z: Tensor, budget: str, floor: float | str, seed: int, settings: dict[str, Any] | None = None) -> Config:
    """The settings for standardised training points ``z`` (n, ...); ``settings`` overrule any of them."""
    if not isinstance(budget, str) or budget not in BUDGETS:
        raise InputError(f"budget must be one of {', '.join(BUDGETS)}, got {budget!r}")
    if settings is not None and not isinstance(settings, dict):
        raise InputError(f"settings must be a dictionary of daebm.Config settings, got {type(settings).__name__}")
    rows, dimension = len(z), z[0].numel()
    check_dimension("a row of X", dimension)
    iterations = max(30, round(BUDGETS[budget] * min(1, rows / ROWS)))
    values: dict[str, Any] = {
        "network": "level-mlp",
        "iterations": iterations,
        "batch": min(rows, 500),
        # Few rows are soon known by heart, and shorter steps see in time where to stop.
        "learning_rate": 3e-3 * min(1.0, math.sqrt(rows / (ENOUGH_ROWS * dimension))),
        "warm_up": iterations // 10,
        "clip": 100.0,
        "energy_penalty": 1e-4,
        "average": 0.999,
        "decay_start": 0.5,
        # Short bursts with a label move after each make most round trips for a gradient.
        "steps": 3,
        "bursts": 2,
        "store": min(2000, max(200, 2 * rows)),
        "step_size": 0.7,
        "adapt_every": max(1, min(50, iterations // 20)),
        "log_every": max(15, iterations // LOOKS),
        "checkpoint_every": max(15, iterations // LOOKS),
    }
    if dimension <= FEW_DIMENSIONS:
        values |= {
            "width": 48,
            "hidden": 3,
            "squares": 4,
            "octaves": min(4, max(1, round(math.log10(rows)) - 1)),  # finer detail is learned by heart, not from rows
            "top": 5,
            "first_sd": 0.01,
        }
    else:
        values |= {
            "width": 64 if dimension <= 32 else 128 if dimension <= 128 else 256,
            "hidden": 3,
            "first_sd": 0.05,
            "label_move": "block",
        }
    values["floor"] = _floor(z) if isinstance(floor, str) and floor == "auto" else _checked(floor)
    values |= {"seed": seed} | (settings or {})
    try:
        config = Config(**values)
    except TypeError as error:
        unknown = sorted(set(settings or {}) - set(Config.__dataclass_fields__))
        raise InputError(f"settings holds {unknown[0]!r}, which is no setting of daebm.Config") from error
    if config.method != "da" or not config.network.startswith("level-") or config.device != "cpu":
        raise InputError(
            "DAEBM trains method=da on network=level-mlp or level-resnet with device=cpu: take others out of settings"
        )
    if "last_variance" not in (settings or {}):  # one that suits the noise below it, whoever chose that
        config = replace(config, last_variance=_last_variance(z, _checked(config.floor), config.first_sd))
    return config


def _checked(floor: float | str) -> float:
    if isinstance(floor, bool) or not isinstance(floor, int | float | np.integer | np.floating) or not 0 <= floor < 0.9:
        raise InputError(
            f"floor must be 'auto' or a noise sd from 0 up to 0.9, in units of the data's sd, got {floor!r}"
        )
    return float(floor)


def _floor(z: Tensor) -> float:
    """Noise that is part of the model's level 0, in sds of the data.

    None where a density of the data themselves can be learned: in few dimensions, with values that do not repeat. In
    many dimensions columns depend on each other, and repeated values are spikes: both have densities without bound.
    """
    flat = z.flatten(1)
    distinct = min(len(column.unique()) for column in flat.T) / len(flat)
    if distinct < 0.5:
        return 0.1
    return 0.0 if flat.shape[1] <= FEW_DIMENSIONS else 0.05


def _last_variance(z: Tensor, floor: float, first_sd: float) -> float:
    """The least noise at level T that N(0, I) can begin from: data that vary together need more of it."""
    for variance in (0.95, 0.99, 0.999):
        ladder = Ladder.geometric(z[0].numel(), floor, first_sd, variance, top=2)
        if noise_overlap(ladder, z, torch.Generator().manual_seed(0)) > 2 * MINIMUM_NOISE_OVERLAP:
            return variance
    return 0.9999
