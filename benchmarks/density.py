"""KL(truth || model) of a default fit beside KernelDensity and GaussianMixture, on densities that are known exactly.

    python benchmarks/density.py [--seed 0] [--budget medium] [--data moons pinwheel grid mixture]

Prints a table in markdown. Each model sees the same 10,000 points; the KL is the mean of log p - log q over 20,000
fresh ones, with its standard error.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

Floats = np.ndarray[Any, np.dtype[np.float64]]
LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Truth:
    """A density with an exact sampler, ``sample(n, rng)``, and an exact log density."""

    title: str
    sample: Callable[[int, np.random.Generator], Floats]
    log_density: Callable[[Floats], Floats]


def isotropic(x: Floats, centres: Floats, sd: float) -> Floats:
    """log N(x; centre, sd^2 I) for every x (n, d) and centre (m, d), shape (n, m)."""
    square = (x**2).sum(1)[:, None] - 2 * x @ centres.T + (centres**2).sum(1)
    result: Floats = -square / (2 * sd**2) - x.shape[1] * (math.log(sd) + LOG_2PI / 2)
    return result


MOON_SD = 0.05  # as in scikit-learn's comparison of clusterings


def moon_arcs(angle: Floats) -> tuple[Floats, Floats]:
    upper = np.stack([np.cos(angle), np.sin(angle)], 1)
    return upper, np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], 1)


def draw_moons(n: int, rng: np.random.Generator) -> Floats:
    """scikit-learn's two half circles, an angle uniform along either, and Gaussian noise."""
    upper, lower = moon_arcs(rng.uniform(0, math.pi, n))
    on_arc = np.where(rng.random((n, 1)) < 0.5, upper, lower)
    return on_arc + MOON_SD * rng.standard_normal((n, 2))


def moons_log_density(x: Floats) -> Floats:
    """The noise integrated along the arcs by the midpoint rule: steps of a tenth of its sd leave no error to see."""
    steps = 640
    centres = np.concatenate(moon_arcs((np.arange(steps) + 0.5) * math.pi / steps))
    parts = [logsumexp(isotropic(part, centres, MOON_SD), axis=1) for part in np.array_split(x, len(x) // 2000 + 1)]
    return np.concatenate(parts) - math.log(len(centres))


ARMS, ARM_SD, TWIST = 5, np.array([0.3, 0.1]), 0.25  # along and across an arm


def rotated(x: Floats, angle: Floats) -> Floats:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * x[:, 0] - sin * x[:, 1], sin * x[:, 0] + cos * x[:, 1]], 1)


def draw_pinwheel(n: int, rng: np.random.Generator) -> Floats:
    """Five blobs around (1, 0), each turned to its arm and by the twist e^r / 4 of its radius r.

    Turning by a function of the radius keeps areas, so the density is that of the blobs where the points came from.
    (The usual recipe twists by the first coordinate, which has no such inverse.)
    """
    x = np.array([1.0, 0.0]) + ARM_SD * rng.standard_normal((n, 2))
    return rotated(x, 2 * math.pi / ARMS * rng.integers(ARMS, size=n) + TWIST * np.exp(np.hypot(*x.T)))


def pinwheel_log_density(x: Floats) -> Floats:
    straight = rotated(x, -TWIST * np.exp(np.hypot(*x.T)))
    blob = multivariate_normal([1.0, 0.0], np.diag(ARM_SD**2))
    arms = [blob.logpdf(rotated(straight, np.full(len(x), -2 * math.pi / ARMS * arm))) for arm in range(ARMS)]
    result: Floats = logsumexp(arms, axis=0) - math.log(ARMS)
    return result


GRID = np.stack(np.meshgrid(np.arange(-4.0, 5, 2), np.arange(-4.0, 5, 2)), -1).reshape(-1, 2)
GRID_SD = 0.05


def draw_grid(n: int, rng: np.random.Generator) -> Floats:
    return GRID[rng.integers(len(GRID), size=n)] + GRID_SD * rng.standard_normal((n, 2))


def grid_log_density(x: Floats) -> Floats:
    result: Floats = logsumexp(isotropic(x, GRID, GRID_SD), axis=1) - math.log(len(GRID))
    return result


def gaussian_mixture_10d() -> Truth:
    """Eight Gaussians in ten dimensions, always the same ones: weights 1 : 2 : .. : 8, sds from 0.3 to 1.2 along axes
    that are each one's own."""
    rng = np.random.default_rng(10)
    weights = np.arange(1, 9) / 36
    means = 2 * rng.standard_normal((8, 10))
    turns = [np.linalg.qr(rng.standard_normal((10, 10)))[0] for _ in weights]
    roots = [turn * np.geomspace(0.3, 1.2, 10) for turn in turns]
    parts = [multivariate_normal(mean, root @ root.T) for mean, root in zip(means, roots, strict=True)]

    def sample(n: int, rng: np.random.Generator) -> Floats:
        which = rng.choice(len(weights), n, p=weights)
        noise = rng.standard_normal((n, 10))
        result: Floats = means[which] + np.einsum("nij,nj->ni", np.stack(roots)[which], noise)
        return result

    def log_density(x: Floats) -> Floats:
        result: Floats = logsumexp([part.logpdf(x) + math.log(w) for part, w in zip(parts, weights, strict=True)], 0)
        return result

    return Truth("10-d mixture", sample, log_density)


TRUTHS = {
    "moons": Truth("two moons, noise 0.05", draw_moons, moons_log_density),
    "pinwheel": Truth("pinwheel, 5 arms", draw_pinwheel, pinwheel_log_density),
    "grid": Truth("25 Gaussians", draw_grid, grid_log_density),
    "mixture": gaussian_mixture_10d(),
}


def fit_kde(x: Floats) -> Any:
    """Gaussian kernels, one bandwidth for all columns, out of 23 on a log scale by 5-fold cross-validation."""
    from sklearn.model_selection import GridSearchCV
    from sklearn.neighbors import KernelDensity

    scale = x.std()
    search = GridSearchCV(KernelDensity(rtol=1e-4), {"bandwidth": scale * np.logspace(-2.4, -0.2, 23)}, cv=5)
    return search.fit(x).best_estimator_


def fit_mixture(x: Floats) -> Any:
    """Full covariances; the number of components, up to 60, by BIC."""
    from sklearn.mixture import GaussianMixture

    fits = [GaussianMixture(k, random_state=0, max_iter=300).fit(x) for k in (*range(1, 13), *range(14, 61, 2))]
    return min(fits, key=lambda fit: fit.bic(x))


def kl(truth: Truth, fresh: Floats, log_q: Floats) -> tuple[float, float]:
    difference = truth.log_density(fresh) - log_q
    return float(difference.mean()), float(difference.std() / math.sqrt(len(difference)))


def grid_masses(model: Any) -> Floats:
    """The model's mass nearest to each of the 25 centres over the truth's, by quadrature on a fine grid."""
    step = 0.0125
    line = np.arange(-5, 5, step) + step / 2
    points = np.stack(np.meshgrid(line, line), -1).reshape(-1, 2)
    density = np.exp(np.concatenate([model.log_density(part) for part in np.array_split(points, 20)]))
    column, row = (np.clip(np.round((points.T + 4) / 2), 0, 4)).astype(int)
    masses: Floats = np.bincount(5 * row + column, density, minlength=25) * step**2 * 25
    return masses


def main() -> None:
    import torch

    from daebm import DAEBM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", default="medium")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--data", nargs="*", default=list(TRUTHS), choices=list(TRUTHS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"`python benchmarks/{' '.join([sys.argv[0].split('/')[-1], *sys.argv[1:]])}`, one thread\n")
    print("| data | DAEBM: KL | error of log Z | KDE: KL | mixture model: KL (components) | mode masses |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in arguments.data:
        truth, rng = TRUTHS[name], np.random.default_rng(arguments.seed)
        x, fresh = truth.sample(arguments.rows, rng), truth.sample(20_000, rng)
        model = DAEBM(budget=arguments.budget, random_state=arguments.seed).fit(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mixture = fit_mixture(x)
        ours, kde = kl(truth, fresh, model.log_density(fresh)), kl(truth, fresh, fit_kde(x).score_samples(fresh))
        other = kl(truth, fresh, mixture.score_samples(fresh))
        masses = "" if name != "grid" else "{:.2f} to {:.2f}".format(*np.quantile(grid_masses(model), [0, 1]))
        cells = [f"{value:.4f} ± {error:.4f}" for value, error in (ours, kde, other)]
        print(
            f"| {truth.title} | {cells[0]} | {model.log_normaliser_se_:.4f} | {cells[1]} | "
            f"{cells[2]} ({mixture.n_components}) | {masses} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
