"""What an energy says of a point besides U(x, 0), and how far that is from what it says of normal points.

U(x, 0) depends on how much there is in an image, and simple images of another kind may have a low one. A point that one
level takes for normal may stand out at another, and one that has the right energy may have it for the wrong reasons:
the features of the network are what its energy is a sum of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from daebm.samplers.langevin import energy_and_gradient
from daebm.samplers.mgms import Energy, at_level
from daebm.units import Floats

LEAST_SLOPE = 1e-12  # a point where U is flat has no logarithm of a slope


def profiles(energy: Energy, levels: int, z: Tensor) -> Floats:
    """[U(z, t), log |grad U(z, t)|] of standardised points at every level, (n, 2 (T + 1)), level by level."""
    columns = []
    for level in range(levels):
        t = torch.full((len(z),), level, device=z.device)
        u, slope = energy_and_gradient(at_level(energy, t), z)
        columns += [u, slope.flatten(1).norm(dim=1).clamp(min=LEAST_SLOPE).log()]
    return torch.stack(columns, 1).double().cpu().numpy()


def features(network: Any, top: int, z: Tensor) -> Floats:
    """`ResNet.features` of standardised points at levels 0 and T / 2, one after the other, (n, 2 channels)."""
    with torch.no_grad():
        parts = [network.features(z, torch.full((len(z),), level, device=z.device)) for level in (0, top // 2)]
    return torch.cat(parts, 1).double().cpu().numpy()


@dataclass(frozen=True, eq=False)
class Law:
    """Mean (p,) and precision (p, p) of what is said of normal points."""

    mean: Floats
    precision: Floats

    @classmethod
    def of(cls, said: Floats) -> Law:
        """Ledoit and Wolf's. It shrinks towards equal variances: energies and slopes are put on one scale first."""
        from sklearn.covariance import LedoitWolf  # its import takes as long as all the rest

        sd = said.std(0)
        sd[sd == 0] = 1.0
        law = LedoitWolf().fit(said / sd)
        return cls(law.location_ * sd, law.precision_ / np.outer(sd, sd))

    def score(self, said: Floats) -> Floats:
        """Minus the squared Mahalanobis distance: larger is more normal."""
        away = said - self.mean
        # Not a product of matrices: a row's score must not depend on the rows beside it, not even in the last digit.
        score: Floats = -np.einsum("nj,nj->n", np.einsum("ni,ij->nj", away, self.precision), away)
        return score
