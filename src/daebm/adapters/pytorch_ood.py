"""`PytorchOODDetector`: DAEBM behind the interface of pytorch-ood's detectors. Needs the extra ``pytorch-ood``."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.base import clone
from torch import Tensor

from daebm.adapters import strangeness
from daebm.errors import InputError
from daebm.estimator import DAEBM

try:
    from pytorch_ood.api import Detector, RequiresFittingException
except ImportError as error:
    raise InputError("daebm.adapters.pytorch_ood needs pytorch-ood: pip install 'daebm[pytorch-ood]'") from error


class PytorchOODDetector(Detector):  # type: ignore[misc]
    """The density of the inputs themselves, without a classifier; for features let the loader give features.

    ``estimator`` is a `DAEBM`, fitted or not; without one it is ``DAEBM()``.
    """

    requires_fit = True

    def __init__(self, estimator: DAEBM | None = None) -> None:
        self.estimator = estimator if estimator is not None else DAEBM()

    def fit(self, data_loader: Any) -> PytorchOODDetector:
        """Train on the x of all batches (x, y), but those with y < 0, which are out of distribution here."""
        batches = [x[y.reshape(len(x)) >= 0] for x, y in data_loader]
        self.estimator = clone(self.estimator).fit(torch.cat(batches))
        return self

    def predict(self, x: Tensor) -> Tensor:
        """Minus the score of `DAEBM`, (n,): larger is further out."""
        if not self.estimator.__sklearn_is_fitted__():
            raise RequiresFittingException
        return torch.from_numpy(strangeness(self.estimator, x)).to(x.device)
