"""`DAEBM` as a detector of other libraries: `daebm.adapters.pyod` and `daebm.adapters.pytorch_ood`.

In both of them larger scores are stranger, the opposite of scikit-learn and of `DAEBM.score_samples`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daebm.estimator import DAEBM
from daebm.units import Floats

LARGEST = 1e100  # the most a row scores, however far away: both libraries square their scores, and want them finite


def strangeness(detector: DAEBM, X: Any) -> Floats:
    """Minus the score, and finite."""
    return np.minimum(-detector.score_samples(X), LARGEST)
