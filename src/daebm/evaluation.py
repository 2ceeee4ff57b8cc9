"""Measures of a model against a known truth and of samples against data. Pure functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import i0e, logsumexp

from daebm.data import RING_RADII, RING_SD

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Energy = Callable[[Floats], Floats]

RING_BAND = 0.15  # a ring's mass is what lies within this distance of its radius
ON_RING = 0.05  # "on a ring": within five of its standard deviations


class Line(NamedTuple):
    """exp(-U) normalised on an equally spaced 1-D grid."""

    x: Floats
    energy: Floats
    density: Floats

    def mass(self, inside: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
        return float(self.density[inside].sum() * (self.x[1] - self.x[0]))


def line_quadrature(energy: Energy, limit: float = 40.0, step: float = 0.002) -> Line:
    """Normalise exp(-U(x)) over [-limit, limit] by the midpoint rule."""
    x = np.arange(-limit + step / 2, limit, step)
    u = energy(x[:, None]).astype(float)
    return Line(x, u, np.exp(-u - logsumexp(-u) - math.log(step)))


class Polar(NamedTuple):
    """exp(-U) normalised on a polar grid: log density (radii, angles), and cell areas by radius."""

    radius: Floats
    log_density: Floats
    area: Floats

    def mass(self, inside: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
        return float((np.exp(self.log_density[inside]) * self.area[inside, None]).sum())


def polar_quadrature(energy: Energy, limit: float = 8.0, step: float = 0.001, angles: int = 128) -> Polar:
    """Normalise exp(-U(x)) over the disc |x| <= limit; the cell at radius r has area r dr dphi."""
    radius = np.arange(step / 2, limit, step)
    phi = 2 * math.pi * np.arange(angles) / angles
    points = radius[:, None, None] * np.stack([np.cos(phi), np.sin(phi)], axis=-1)
    u = energy(points.reshape(-1, 2).astype(np.float32)).astype(float).reshape(len(radius), angles)
    area = radius * step * (2 * math.pi / angles)
    return Polar(radius, -u - logsumexp(-u + np.log(area)[:, None]), area)


def rings_log_density(radius: Floats, abar: float = 1.0, variance: float = 0.0, scale: float = 1.0) -> Floats:
    """log density of the diffused four rings at distance ``radius`` from the origin, in data units.

    Clean: (1/4) sum_k N(r; k, .01^2) / (2 pi r), with the 1/r of Cartesian coordinates. Diffused in standardised
    units, x / scale = sqrt(abar) z / scale + sqrt(v) eps: each point of radius rho spreads into a Rice law, whose
    density I_0 gives; the ring's width is integrated by the trapezoidal rule.
    """
    r = np.asarray(radius, dtype=float)
    noise = variance * scale**2
    centres = np.asarray(RING_RADII)
    if noise == 0:
        z = (r[:, None] - centres) / RING_SD
        log_ring = -(z**2) / 2 - math.log(RING_SD * math.sqrt(2 * math.pi))
        mixed: Floats = logsumexp(log_ring, axis=1) - math.log(len(centres)) - np.log(2 * math.pi * r)
        return mixed
    # Nodes no further apart than half a ring's width or the noise: their sum is then exact to 1e-8.
    spacing = min(0.5, math.sqrt(noise / abar) / RING_SD)
    nodes = np.arange(-6, 6 + spacing, spacing)
    weights = np.exp(-(nodes**2) / 2)
    rho = math.sqrt(abar) * (centres[:, None] + RING_SD * nodes).reshape(-1)
    log_w = np.log(np.tile(weights / weights.sum(), len(centres)) / len(centres))
    total = np.empty_like(r)
    for rows in np.array_split(np.arange(len(r)), max(1, len(r) // 2000)):
        a = r[rows, None]
        log_rice = -((a - rho) ** 2) / (2 * noise) + np.log(i0e(a * rho / noise))
        total[rows] = logsumexp(log_rice + log_w, axis=1) - math.log(2 * math.pi * noise)
    return total


def kl_to_rings(grid: Polar, abar: float = 1.0, variance: float = 0.0, scale: float = 1.0) -> float:
    """KL(truth || model) in nats at one level, over the grid."""
    truth = rings_log_density(grid.radius, abar, variance, scale)
    p = np.exp(truth) * grid.area
    # The truth's own sum differs from 1 by the grid's error only; dividing by it keeps that error out of the KL.
    return float((p[:, None] * (truth[:, None] - grid.log_density)).sum() / (p.sum() * grid.log_density.shape[1]))


def ring_masses(grid: Polar) -> list[float]:
    return [grid.mass(np.abs(grid.radius - r) <= RING_BAND) for r in RING_RADII]


def ring_shares(points: Floats) -> tuple[list[float], float]:
    """Share of points within .15 of each ring, and share within .05 of any."""
    if len(points) == 0:
        return [0.0] * len(RING_RADII), 0.0
    distance = np.abs(np.linalg.norm(points, axis=1)[:, None] - np.asarray(RING_RADII))
    return [float(s) for s in (distance <= RING_BAND).mean(0)], float((distance.min(1) <= ON_RING).mean())


def effective_sample_size(series: Floats) -> float:
    """Effective number of independent draws in ``series`` (length, chains), summed over chains.

    Autocovariances are averaged over chains about the common mean, and summed in Geyer's initial positive pairs.
    """
    length, chains = series.shape
    if length == 0 or np.ptp(series) == 0:
        return math.nan
    centred = series - series.mean()
    size = 1 << (2 * length - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(centred, n=size, axis=0)) ** 2
    # Divided by the length, not by the number of terms: late lags have few terms, and their noise must not count.
    covariance = np.fft.irfft(spectrum, n=size, axis=0)[:length].mean(1) / length
    rho = covariance / covariance[0]
    pairs = rho[: length // 2 * 2].reshape(-1, 2).sum(1)
    positive = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    monotone = np.minimum.accumulate(pairs[:positive])
    draws = length * chains
    # Antithetic chains may beat independent draws, but not without bound: at most N log10 N.
    return float(draws / max(2 * monotone.sum() - 1, 1 / max(math.log10(draws), 1)))


def nearest_distance(points: Floats, reference: Floats) -> Floats:
    """Euclidean distance of each point to its nearest reference point."""
    from sklearn.neighbors import NearestNeighbors

    distance, _index = NearestNeighbors(n_neighbors=1).fit(reference).kneighbors(points)
    nearest: Floats = distance[:, 0]
    return nearest


def auroc(score_in: Floats, score_out: Floats) -> float:
    """Probability that an in-distribution score exceeds an outlier's. Larger is more normal."""
    from sklearn.metrics import roc_auc_score

    labels = np.r_[np.ones(len(score_in)), np.zeros(len(score_out))]
    return float(roc_auc_score(labels, np.r_[score_in, score_out]))
