"""What an energy says of a point besides U(x, 0), and how far that is from what it says of normal points.

U(x, 0) depends on how much there is in an image, and simple images of another kind may have a low one. A point that one
level takes for normal may stand out at another, and one that has the right energy may have it for the wrong reasons:
the features of the network are what its energy is a sum of, before the sum has forgotten what it sums.

What is said has a law over training points (`SAID`); a score is how normal a point is by one law or by two (`SCORES`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from daebm.samplers.langevin import energy_and_gradient
from daebm.samplers.mgms import Energy, at_level
from daebm.units import Floats

LAW_ROWS = 10_000  # rows that a law is of, at most
LEAST_SLOPE = 1e-12  # a point where U is flat has no logarithm of a slope
# Of images, chosen on the same strangers as the mixture below: four levels do as well, squares of two pixels do not.
SLOPE_LEVELS, GRID = 8, 7  # spread evenly; slopes are known by place, on a grid of so many places a side
# Of a mixture, chosen on strangers that were made of normal images (benchmarks/strangers.py); 50 to 100 axes, 20 to 40
# kinds and 10 to 100 rows are all alike.
AXES, KINDS = 100, 20  # at most
ROWS_PER_AXIS, ROWS_PER_KIND = 10, 500
PRIOR_ROWS = 100
LEAST_SCALE = 1e-9  # of a coordinate, relative to its size
EXACT_COLUMNS = 4096  # up to so many, axes are exact; a covariance of more would take gigabytes
LEAST_REST = 1e-12  # of directions, whose squares add up to 1


def slopes(energy: Energy, levels: int, z: Tensor) -> Floats:
    """[U(z, t), log |grad U(z, t)|] of standardised points, level by level, (n, p).

    Rows of a table at all of the levels, p = 2 (T + 1). Images at some of them, with the slope in each place for
    itself: a garment that is upside down has as steep an energy as any, but elsewhere.
    """
    image = z.ndim == 4
    some = np.linspace(0, levels - 1, min(SLOPE_LEVELS, levels) if image else levels).round().astype(int)
    columns = []
    for level in some.tolist():
        t = torch.full((len(z),), level, device=z.device)
        u, slope = energy_and_gradient(at_level(energy, t), z)
        if image:
            places = min(GRID, z.shape[2]), min(GRID, z.shape[3])
            steep = F.adaptive_avg_pool2d(slope.square().sum(1, keepdim=True), places).flatten(1).sqrt()
        else:
            steep = slope.norm(dim=1, keepdim=True)
        columns += [u.unsqueeze(1), steep.clamp(min=LEAST_SLOPE).log()]
    return torch.cat(columns, 1).double().cpu().numpy()


def features(network: Any, levels: int, z: Tensor) -> Floats:
    """`ResNet.features` of standardised points at level 0, (n, p)."""
    with torch.no_grad():
        said: Tensor = network.features(z, torch.zeros(len(z), dtype=torch.long, device=z.device))
    return said.double().cpu().numpy()


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Mean (p,) and precision (p, p) of what is said of normal points."""

    mean: Floats
    precision: Floats

    @classmethod
    def of(cls, said: Floats) -> Gaussian:
        """Ledoit and Wolf's. It shrinks towards equal variances: energies and slopes are put on one scale first."""
        from sklearn.covariance import LedoitWolf  # its import takes as long as all the rest

        sd = said.std(0)
        sd[sd == 0] = 1.0
        law = LedoitWolf().fit(said / sd)
        return cls(law.location_ * sd, law.precision_ / np.outer(sd, sd))

    def score(self, said: Floats) -> Floats:
        """Minus the squared Mahalanobis distance: larger is more normal."""
        away = said - self.mean
        score: Floats = -np.einsum("nj,nj->n", _product(away, self.precision), away)
        return score


@dataclass(frozen=True, eq=False)
class Mixture:
    """Normal points are of several kinds, each a Gaussian in principal components of what is said of all.

    ``mean`` (p,) and ``axes`` (p, d): the components; a last coordinate is the log of what is left of a row beside
    them. ``middle`` and ``scale`` (d + 1,) standardise these, ``centres`` (k, d + 1) are the kinds' means and ``roots``
    (k, d + 1, d + 1) those of their precisions, R R^T. ``offsets`` (k,) are log determinants of their covariances less
    twice the logs of their shares.
    """

    mean: Floats
    axes: Floats
    middle: Floats
    scale: Floats
    centres: Floats
    roots: Floats
    offsets: Floats

    @classmethod
    def of(cls, said: Floats) -> Mixture:
        """Kinds by k-means. Each has the covariance of its own points and, as so many more of them, that of all."""
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA

        most = min(AXES, len(said) // ROWS_PER_AXIS, said.shape[1])
        solver = "covariance_eigh" if said.shape[1] <= EXACT_COLUMNS else "randomized"
        found = PCA(max(1, most), svd_solver=solver, random_state=0).fit(said)
        mean, axes = found.mean_, np.ascontiguousarray(found.components_.T)
        places = _places(said - mean, axes)
        middle, scale = places.mean(0), places.std(0)
        scale[scale < LEAST_SCALE * np.maximum(1.0, np.abs(middle))] = 1.0  # of a constant one rounding is left
        white = (places - middle) / scale
        wanted = int(np.clip(len(said) // ROWS_PER_KIND, 1, KINDS))
        kind = KMeans(wanted, n_init=3, random_state=0).fit_predict(white)
        kind = np.unique(kind, return_inverse=True)[1]  # some are empty where rows repeat
        sizes = np.bincount(kind)
        kinds = len(sizes)
        centres = np.stack([white[kind == k].mean(0) for k in range(kinds)])
        away = white - centres[kind]
        sums = np.stack([away[kind == k].T @ away[kind == k] for k in range(kinds)])
        spreads = (sums + PRIOR_ROWS * np.eye(len(middle))) / (sizes + PRIOR_ROWS)[:, None, None]
        offsets = np.linalg.slogdet(spreads)[1] - 2 * np.log(sizes / len(said))
        return cls(mean, axes, middle, scale, centres, np.linalg.cholesky(np.linalg.inv(spreads)), offsets)

    def score(self, said: Floats) -> Floats:
        """Twice the log density at the likeliest kind, up to a constant: larger is more normal."""
        white = (_places(said - self.mean, self.axes) - self.middle) / self.scale
        distances = [
            np.square(_product(white - centre, root)).sum(1) + offset
            for centre, root, offset in zip(self.centres, self.roots, self.offsets, strict=True)
        ]
        score: Floats = -np.stack(distances, 1).min(1)
        return score


def _places(away: Floats, axes: Floats) -> Floats:
    """Coordinates along the axes, and the log of the squared length of the rest."""
    along = _product(away, axes)
    rest = np.square(away - _product(along, axes.T)).sum(1)
    return np.concatenate([along, np.log(rest + LEAST_REST)[:, None]], 1)


def _product(rows: Floats, matrix: Floats) -> Floats:
    """No product of matrices: a row's score must not depend on the rows beside it, not even in the last digit."""
    result: Floats = np.einsum("ni,ij->nj", rows, matrix)
    return result


Law = Gaussian | Mixture


SAID: dict[str, Callable[[Any, int, Tensor], Floats]] = {"features": features, "slopes": slopes}
"""What a network of so many levels says of points; each has a law of its own."""

SCORES: dict[str, tuple[str, ...]] = {"features": ("features",), "profile": ("slopes", "features")}
"""Of what is said, by its law, or by the sum of two, as if one knew nothing of the other; without features by one."""

NAMES = ("energy", *SCORES)
"""All scores; `energy` is -U(x, 0) or the log density and needs no law."""


def scores(laws: Collection[str]) -> list[str]:
    """Those of `NAMES` that can be had with these laws."""
    return ["energy", *(name for name, parts in SCORES.items() if parts[0] in laws)]


def needed(names: Collection[str], network: Any) -> list[str]:
    """Of what laws the scores of these names are made, for this network."""
    return [kind for kind in kinds(network) if any(kind in SCORES.get(name, ()) for name in names)]


def score(name: str, laws: Mapping[str, Law], said: Callable[[str], Floats]) -> Floats:
    """The score of that name of points of which ``said`` tells what is said of a kind: larger is more normal."""
    parts = [laws[kind].score(said(kind)) for kind in SCORES[name] if kind in laws]
    added: Floats = np.sum(parts, axis=0)
    return added


def law(event: Sequence[int]) -> type[Law]:
    """The kind of law that what is said of points of this shape has: images are of several kinds."""
    return Mixture if len(event) == 3 else Gaussian


def kinds(network: Any) -> list[str]:
    """Those of `SAID` that a network can say: only residual networks have features."""
    return [name for name in SAID if name != "features" or hasattr(network, "features")]


def law_tensors(laws: Mapping[str, Law]) -> dict[str, Tensor]:
    """To be saved with a model."""
    return {
        f"law.{name}.{part.name}": torch.from_numpy(getattr(law, part.name))
        for name, law in laws.items()
        for part in fields(law)
    }


def laws_in(tensors: Mapping[str, Tensor], event: Sequence[int]) -> dict[str, Law]:
    """Those that were saved with a model of points of this shape."""
    kind = law(event)
    array = {key: value.double().numpy() for key, value in tensors.items() if key.startswith("law.")}
    if kind is Gaussian:  # of rows the slopes' law was named after their score at first
        array = {key.replace("law.profile.", "law.slopes."): value for key, value in array.items()}
    return {
        name: kind(*(array[f"law.{name}.{part.name}"] for part in fields(kind)))
        for name in SAID
        if all(f"law.{name}.{part.name}" in array for part in fields(kind))  # else by another version
    }
