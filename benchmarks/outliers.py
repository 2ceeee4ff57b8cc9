"""One class in, the others out: AUROC on tables that ship inside Python packages, beside the usual detectors.

`python benchmarks/outliers.py [--seeds 5] [--tasks wine]` splits the rows of the normal class, 70 % to train on (up to
2,000) and 30 % to tell from rows of other classes (up to 1,000 of either), and prints a markdown table: mean over
seeds, with half of the 95 % interval of that mean (Student's t). No detector sees an outlier before it is asked; all
have their default settings, on standardised columns where they do not standardise themselves. The mixture has one to
five components, by BIC. The Gaussian is the simplest that can be said: the Mahalanobis distance with Ledoit and Wolf's
covariance.

Breast cancer, wine, iris and digits come with scikit-learn; image segments, bananas and shuttle with river (not needed:
without it there are fewer rows).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, t
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import LocalOutlierFactor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import OneClassSVM

import daebm

Floats = NDArray[np.float64]
Detector = Callable[[Floats, Floats, int], list[Floats]]
"""Training rows, rows to judge and a seed, to scores of the latter: larger is more normal."""


# OCSVM takes the square of the former, and ECOD judges one row at a time.
MOST_TRAINED, MOST_JUDGED = 2000, 1000


def tasks() -> dict[str, tuple[Floats, NDArray[np.bool_]]]:
    """Rows, and which of them are normal: each class in turn, or the one that is so by its meaning."""
    cancer, wine, iris, digits = load_breast_cancer(), load_wine(), load_iris(), load_digits()
    found = {"breast cancer, benign": (cancer.data, cancer.target == 1)}
    tables = {"wine": (wine.data, wine.target), "iris": (iris.data, iris.target), "digit": (digits.data, digits.target)}
    if find_spec("river") is None:
        print("river is not installed: no rows for segments, bananas and shuttle")
    else:
        from river import datasets

        shuttle, target = arrays(datasets.Shuttle())
        found["shuttle, normal"] = (shuttle, target == 0)
        tables |= {"segment": arrays(datasets.ImageSegments()), "banana": arrays(datasets.Bananas())}
    for name, (rows, target) in tables.items():
        found |= {f"{name} {k}": (rows, target == k) for k in np.unique(target)}
    return found


def arrays(rows: Any) -> tuple[Floats, NDArray[Any]]:
    x, y = zip(*rows, strict=True)
    return np.array([list(row.values()) for row in x], dtype=np.float64), np.array(y)


def daebm_scores(train: Floats, test: Floats, seed: int) -> list[Floats]:
    detector = daebm.DAEBM(fpr=0.2, random_state=seed).fit(train)
    return [detector.set_params(score_by=kind).score_samples(test) for kind in ("energy", "profile")]


def of(build: Callable[[int], Any]) -> Detector:
    def scores(train: Floats, test: Floats, seed: int) -> list[Floats]:
        return [make_pipeline(StandardScaler(), build(seed)).fit(train).score_samples(test)]

    return scores


def gaussian(train: Floats, test: Floats, seed: int) -> list[Floats]:
    scale = StandardScaler().fit(train)
    return [-LedoitWolf().fit(scale.transform(train)).mahalanobis(scale.transform(test))]


def mixture(train: Floats, test: Floats, seed: int) -> list[Floats]:
    scale = StandardScaler().fit(train)
    models = [
        GaussianMixture(k, reg_covar=1e-3, random_state=seed).fit(scale.transform(train))
        for k in range(1, 6)
        if k < len(train)
    ]
    return [min(models, key=lambda model: model.bic(scale.transform(train))).score_samples(scale.transform(test))]


def ecod(train: Floats, test: Floats, seed: int) -> list[Floats]:
    from pyod.models.ecod import ECOD

    # Row by row: it ranks a row among those that it is asked about with it, here outliers for the most part.
    model = ECOD().fit(train)
    return [-np.concatenate([model.decision_function(row[None]) for row in test])]


DETECTORS: dict[tuple[str, ...], Detector] = {
    ("DAEBM energy", "DAEBM profile"): daebm_scores,
    ("Gaussian",): gaussian,
    ("IsolationForest",): of(lambda seed: IsolationForest(random_state=seed)),
    ("LOF",): of(lambda seed: LocalOutlierFactor(novelty=True)),
    ("OCSVM",): of(lambda seed: OneClassSVM()),
    ("GaussianMixture",): mixture,
    ("ECOD",): ecod,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default="", help="only tasks whose name holds this")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("an interval needs two seeds or more")
    warnings.simplefilter("ignore")  # small tables: every fit says that it is short of rows
    if find_spec("pyod") is None:
        print("pyod is not installed: no row for ECOD")
        DETECTORS.pop(("ECOD",))
    names = [name for group in DETECTORS for name in group]
    print("| in | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    ranks = []
    for task, (rows, normal) in tasks().items():
        if args.tasks not in task:
            continue
        found = np.zeros((args.seeds, len(names)))
        for seed in range(args.seeds):
            rng = np.random.default_rng(seed)
            own, others = rng.permutation(np.flatnonzero(normal)), rng.permutation(np.flatnonzero(~normal))
            train, fresh = np.split(own, [round(0.7 * len(own))])
            train, fresh = train[:MOST_TRAINED], fresh[:MOST_JUDGED]
            test = rows[np.concatenate([fresh, others[:MOST_JUDGED]])]
            is_normal = np.arange(len(test)) < len(fresh)
            scores = [s for detect in DETECTORS.values() for s in detect(rows[train], test, seed)]
            found[seed] = [roc_auc_score(is_normal, np.nan_to_num(s)) for s in scores]
        mean = found.mean(0)
        half = t.ppf(0.975, args.seeds - 1) * found.std(0, ddof=1) / np.sqrt(args.seeds)
        ranks.append(rankdata(-mean))
        print(
            f"| {task} | " + " | ".join(f"{m:.3f} ± {h:.3f}" for m, h in zip(mean, half, strict=True)) + " |",
            flush=True,
        )
    print("| mean rank | " + " | ".join(f"{r:.2f}" for r in np.mean(ranks, 0)) + " |")


if __name__ == "__main__":
    main()
