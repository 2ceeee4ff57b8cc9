"""What an energy says of a point at every noise level, and how far that is from what it says of the training data.

A point that one level takes for normal may stand out at another; the energies and slopes of all levels together tell
more than U(x, 0), whose size depends on how much there is in an image.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class ProfileLaw:
    """Mean (p,) and precision (p, p) of the profiles of normal points."""

    mean: Floats
    precision: Floats

    @classmethod
    def of(cls, profiles: Floats) -> ProfileLaw:
        """Ledoit and Wolf's. It shrinks towards equal variances: energies and slopes are put on one scale first."""
        from sklearn.covariance import LedoitWolf  # its import takes as long as all the rest

        sd = profiles.std(0)
        sd[sd == 0] = 1.0
        law = LedoitWolf().fit(profiles / sd)
        return cls(law.location_ * sd, law.precision_ / np.outer(sd, sd))

    def score(self, profiles: Floats) -> Floats:
        """Minus the squared Mahalanobis distance: larger is more normal."""
        away = profiles - self.mean
        distance: Floats = -np.einsum("ni,ij,nj->n", away, self.precision, away)
        return distance
