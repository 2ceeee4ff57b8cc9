"""What an energy says of a point besides U(x, 0), and how far that is from what it says of normal points.

U(x, 0) depends on how much there is in an image, and simple images of another kind may have a low one. A point that one
level takes for normal may stand out at another, and one that has the right energy may have it for the wrong reasons:
the features of the network are what its energy is a sum of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def features(network: Any, levels: int, z: Tensor) -> Floats:
    """`ResNet.features` of standardised points at levels 0 and T / 2, one after the other, (n, 2 channels)."""
    with torch.no_grad():
        parts = [network.features(z, torch.full((len(z),), level, device=z.device)) for level in (0, (levels - 1) // 2)]
    return torch.cat(parts, 1).double().cpu().numpy()


SAID: dict[str, Callable[[Any, int, Tensor], Floats]] = {"features": features, "profile": profiles}
"""What a network of so many levels says of points; scores of these names are how far that is from a `Law`."""


def kinds(network: Any) -> list[str]:
    """Those of `SAID` that a network can say: only residual networks have features."""
    return [name for name in SAID if name != "features" or hasattr(network, "features")]


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


def law_tensors(laws: Mapping[str, Law]) -> dict[str, Tensor]:
    """To be saved with a model."""
    parts = {f"law.{name}.{part}": getattr(law, part) for name, law in laws.items() for part in ("mean", "precision")}
    return {key: torch.from_numpy(value) for key, value in parts.items()}


def laws_in(tensors: Mapping[str, Tensor]) -> dict[str, Law]:
    """Those that were saved with a model."""
    array = {key: value.double().numpy() for key, value in tensors.items() if key.startswith("law.")}
    names = [name for name in SAID if f"law.{name}.mean" in array]
    return {name: Law(array[f"law.{name}.mean"], array[f"law.{name}.precision"]) for name in names}
