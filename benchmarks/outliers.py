"""One class in, the others out: AUROC on tables that ship with scikit-learn, beside the usual detectors.

`python benchmarks/outliers.py [--seeds 5] [--tasks wine]` splits the rows of the normal class, 70 to train on and 30 to
tell from all rows of other classes, and prints a markdown table: mean over seeds, with the standard error of that mean.
No detector sees an outlier before it is asked; all have their default settings on standardised columns (one mixture
component of Gaussians to five, by BIC).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
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


def tasks() -> dict[str, tuple[Floats, NDArray[np.bool_]]]:
    """Rows, and which of them are normal."""
    found = {}
    cancer, wine, digits = load_breast_cancer(), load_wine(), load_digits()
    found["breast cancer, benign"] = (cancer.data, cancer.target == 1)
    for name, table in (("wine", wine), ("digit", digits)):
        for k in np.unique(table.target):
            found[f"{name} {k}"] = (table.data.astype(np.float64), table.target == k)
    return found


def daebm_scores(train: Floats, test: Floats, seed: int) -> list[Floats]:
    detector = daebm.DAEBM(fpr=0.2, random_state=seed).fit(train)
    return [detector.set_params(score_by=kind).score_samples(test) for kind in ("energy", "profile")]


def of(build: Callable[[int], Any]) -> Detector:
    def scores(train: Floats, test: Floats, seed: int) -> list[Floats]:
        return [make_pipeline(StandardScaler(), build(seed)).fit(train).score_samples(test)]

    return scores


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

    return [-ECOD().fit(train).decision_function(test)]


DETECTORS: dict[tuple[str, ...], Detector] = {
    ("DAEBM energy", "DAEBM profile"): daebm_scores,
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
            own = np.random.default_rng(seed).permutation(np.flatnonzero(normal))
            train, fresh = np.split(own, [round(0.7 * len(own))])
            test = np.concatenate([rows[fresh], rows[~normal]])
            is_normal = np.arange(len(test)) < len(fresh)
            scores = [s for detect in DETECTORS.values() for s in detect(rows[train], test, seed)]
            found[seed] = [roc_auc_score(is_normal, np.nan_to_num(s)) for s in scores]
        mean, error = found.mean(0), found.std(0, ddof=min(1, args.seeds - 1)) / np.sqrt(args.seeds)
        ranks.append(rankdata(-mean))
        print(
            f"| {task} | " + " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True)) + " |",
            flush=True,
        )
    print("| mean rank | " + " | ".join(f"{r:.2f}" for r in np.mean(ranks, 0)) + " |")


if __name__ == "__main__":
    main()
