"""`PyODDetector`: DAEBM with the methods and attributes of PyOD's detectors. Needs the extra ``pyod``."""

from __future__ import annotations

from typing import Any

from sklearn.base import clone

from daebm.adapters import strangeness
from daebm.errors import InputError
from daebm.estimator import DAEBM
from daebm.units import Floats

try:
    from pyod.models.base import BaseDetector
except ImportError as error:
    raise InputError("daebm.adapters.pyod needs PyOD: pip install 'daebm[pyod]'") from error


class PyODDetector(BaseDetector):  # type: ignore[misc]
    """PyOD's contract: `decision_function` is larger for stranger rows, `predict` says 1 for outliers, 0 for others.

    ``threshold_`` is PyOD's: the share ``contamination`` of the rows given to `fit` lies above. These may hold
    outliers, and most were trained on, so it is no false-alarm rate for fresh rows. One that holds is that of
    ``detector_``, the fitted `DAEBM`: its ``fpr`` is set by rows that were kept apart, see `DAEBM.p_values`.

    ``estimator`` is an unfitted `DAEBM`; without one it is ``DAEBM(fpr=contamination)``.
    """

    def __init__(self, contamination: Any = 0.1, estimator: DAEBM | None = None) -> None:
        super().__init__(contamination=contamination)
        self.estimator = estimator

    def fit(self, X: Any, y: Any = None) -> PyODDetector:
        """Train on X; y is ignored."""
        rated = isinstance(self.contamination, int | float)  # otherwise it is an object of PyThresh
        default = DAEBM(fpr=self.contamination) if rated else DAEBM()
        self.detector_ = clone(self.estimator if self.estimator is not None else default).fit(X)
        self._set_n_classes(None)
        self.decision_scores_ = strangeness(self.detector_, X)
        self._process_decision_scores()
        return self

    def decision_function(self, X: Any) -> Floats:
        """Minus the score of `DAEBM`."""
        return strangeness(self.detector_, X)
