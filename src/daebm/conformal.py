"""From scores to decisions with a stated false-alarm rate: conformal p-values from points that nobody trained on.

Larger scores are more normal. If the calibration points and a new normal point are exchangeable, then its p-value is
at most alpha with probability at most alpha, whatever the score. And given the calibration points, the share of fresh
normal points that is flagged at rate ``fpr`` is a draw from Beta(k, n + 1 - k), k = floor(fpr (n + 1)) (for a score
without ties; with ties it is lower): more calibration points bring it closer to k / (n + 1), never beyond chance.
"""

from __future__ import annotations

import math

import numpy as np

from daebm.errors import InputError
from daebm.units import Floats

LEAST_RATE = 1e-9  # no calibration set is that large, and 1 / fpr must stay a number
ROUNDING = 1 + 1e-12  # .29 * 100 is 28.999999999999996


def check_rate(fpr: float) -> None:
    if isinstance(fpr, bool) or not isinstance(fpr, int | float | np.integer | np.floating) or not 0 < fpr < 1:
        raise InputError(f"fpr must be a false-alarm rate between 0 and 1, such as 0.01, got {fpr!r}")
    if fpr < LEAST_RATE:
        raise InputError(f"fpr must be at least {LEAST_RATE:g}, got {fpr!r}")


def needed(fpr: float) -> int:
    """How many calibration points can flag anything at all: 1 / fpr - 1."""
    return math.ceil(1 / (fpr * ROUNDING)) - 1


def least_rate(count: int) -> float:
    """The least false-alarm rate that n calibration points can flag at, 1 / (n + 1), rounded up to be typed."""
    digits = len(str(count + 1)) + 1
    return math.ceil(10.0**digits / (count + 1)) / 10.0**digits


def rank(count: int, fpr: float) -> int:
    """k = floor(fpr (n + 1)): a point is flagged that scores below the k-th lowest of n calibration points."""
    check_rate(fpr)
    k = math.floor(fpr * (count + 1) * ROUNDING)
    if k < 1:
        raise InputError(
            f"a false-alarm rate of fpr={fpr:g} needs at least {needed(fpr)} calibration points, and there are "
            f"{count}: give fit more rows, or set fpr to {least_rate(count):g} or more"
        )
    return k


def p_values(calibration: Floats, scores: Floats) -> Floats:
    """(1 + #{calibration scores <= score}) / (n + 1)."""
    below = np.searchsorted(np.sort(calibration), scores, side="right")
    result: Floats = (1.0 + below) / (len(calibration) + 1)
    return result


def threshold(calibration: Floats, fpr: float) -> float:
    """The score under which a point is flagged: its p-value is then at most ``fpr``, and only then."""
    return float(np.sort(calibration)[rank(len(calibration), fpr) - 1])
