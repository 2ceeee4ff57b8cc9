"""DAEBM in PyOD and pytorch-ood: their contracts and their metrics, with the signs that they expect."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

from daebm import DAEBM

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*leave .* for calibration:UserWarning"),
]
QUICK = {"iterations": 30, "checkpoint_every": 30, "log_every": 30, "warm_up": 5, "width": 16, "hidden": 2}
RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((200, 2)) * [1, 0.2]
FRESH = np.concatenate([RNG.standard_normal((80, 2)) * [1, 0.2], [0, 2] + 0.2 * RNG.standard_normal((20, 2))])
STRANGE = np.arange(100) >= 80  # ten sds away


def quick(**parameters: Any) -> DAEBM:
    return DAEBM(**({"settings": QUICK, "random_state": 0, "fpr": 0.1} | parameters))


@pytest.mark.parametrize(
    ("extra", "library", "module"),
    [("pyod", "pyod", "daebm.adapters.pyod"), ("pytorch-ood", "pytorch_ood", "daebm.adapters.pytorch_ood")],
)
def test_without_the_library_the_extra_is_named(extra: str, library: str, module: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import {module}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode and answer.stderr.strip().endswith(f"pip install 'daebm[{extra}]'")


@pytest.fixture(scope="module")
def detector() -> Any:
    pytest.importorskip("pyod")
    from daebm.adapters.pyod import PyODDetector

    return PyODDetector(contamination=0.1, estimator=quick()).fit(ROWS)


def test_pyod_attributes(detector: Any) -> None:
    """Those that every PyOD detector has after `fit`, and that its combinations of detectors read."""
    from pyod.models.base import BaseDetector

    assert isinstance(detector, BaseDetector)
    np.testing.assert_array_equal(detector.decision_scores_, detector.decision_function(ROWS))
    np.testing.assert_array_equal(detector.labels_, detector.decision_scores_ > detector.threshold_)
    assert detector.labels_.sum() == 20 and detector.threshold_ == np.quantile(detector.decision_scores_, 0.9)
    assert np.isfinite([detector._mu, detector._sigma]).all()


def test_pyod_predictions(detector: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from pyod.utils.data import evaluate_print

    scores = detector.decision_function(FRESH)
    np.testing.assert_array_equal(scores, -detector.detector_.score_samples(FRESH))
    evaluate_print("DAEBM", STRANGE, scores)
    assert capsys.readouterr().out == "DAEBM ROC:1.0, precision @ rank n:1.0\n"  # wrong signs would give 0
    assert (detector.predict(FRESH)[STRANGE] == 1).all()
    for method in ("linear", "unify"):
        chances = detector.predict_proba(FRESH, method=method)
        assert chances.shape == (100, 2) and (chances >= 0).all() and (chances <= 1).all()
        np.testing.assert_allclose(chances.sum(1), 1)  # one is 1 minus the other
        assert chances[STRANGE, 1].min() >= chances[~STRANGE, 1].max()
    _labels, confidence = detector.predict(FRESH, return_confidence=True)
    assert (confidence >= 0).all() and (confidence <= 1).all()
    assert detector._predict_rank(FRESH, normalized=True).max() == 1
    assert set(detector.predict_with_rejection(FRESH, c_r=0.1)) <= {-2, 0, 1}


def test_pyod_clone_and_parameters(detector: Any) -> None:
    again = clone(detector).set_params(estimator__random_state=1, contamination=0.2)
    assert detector.estimator.random_state == 0 and not hasattr(again, "detector_")
    assert again.fit(ROWS).labels_.sum() == 40 and again.detector_.random_state == 1
    assert not hasattr(again.estimator, "calibration_")  # what was given is not fitted itself
    with pytest.raises(ValueError, match="contamination"):
        type(detector)(contamination=0.9)


def test_pyod_scores_are_finite() -> None:
    """PyOD takes means and squares of the scores, also of rows beyond the range of floats."""
    pytest.importorskip("pyod")
    from daebm.adapters.pyod import PyODDetector

    rows = np.insert(ROWS, 1, 7.0, axis=1)
    detector = PyODDetector(estimator=quick()).fit(rows)
    usual = detector.decision_function(rows)
    rows[0, 1], rows[1, 0] = 8, 1e300
    scores = detector.decision_function(rows)
    assert np.isfinite(scores).all() and scores.argmax() == 1 and (scores[2:] == usual[2:]).all()
    cost = np.log(detector.detector_.units_.rows + 2)
    assert scores[0] - usual[0] == pytest.approx(cost, abs=2e-9)  # both are rounded to 1e-9
    assert np.isfinite(detector.predict_proba(rows)).all() and detector.predict(rows)[1] == 1


def test_pyod_default_is_calibrated_at_the_contamination(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyod")
    from daebm.adapters.pyod import PyODDetector

    monkeypatch.setattr("daebm.recipe.BUDGETS", {"medium": 30})
    assert PyODDetector(contamination=0.25).fit(ROWS).detector_.fpr == 0.25


MISSING = torch.library.Library("torchvision", "FRAGMENT")  # operators live as long as what they were defined in


@pytest.fixture(scope="module")
def ood() -> Any:
    """pytorch-ood imports torchvision for its data sets. One for CUDA beside a torch for CPUs cannot be imported, for
    it lacks its own operators; two are named on import, and nothing here calls them."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            MISSING.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("pytorch_ood")


@pytest.mark.parametrize("event", [(4,), (1, 2, 2)])
def test_pytorch_ood(ood: Any, event: tuple[int, ...]) -> None:
    """Tables and images from a loader, by the library's own metrics; batches with y < 0 are not trained on."""
    from daebm.adapters.pytorch_ood import PytorchOODDetector

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, *event, generator=generator)
    y = torch.zeros(200, dtype=torch.int64)
    x[::10], y[::10] = 100.0, -1
    detector = PytorchOODDetector(quick(floor=0.1))
    assert isinstance(detector, ood.api.Detector) and detector.requires_fit
    with pytest.raises(ood.api.RequiresFittingException):
        detector.predict(x)
    detector.fit(DataLoader(TensorDataset(x, y), batch_size=32))

    metrics = ood.metrics.OODMetrics()
    fresh, labels = torch.randn(60, *event, generator=generator), torch.arange(60) % 2 - 1
    fresh[labels < 0] += 10
    for i in range(0, 60, 20):
        metrics.update(detector(fresh[i : i + 20]), labels[i : i + 20])
    found = metrics.compute()
    assert found["AUROC"] == 1 and found["FPR95TPR"] == 0
    scores = detector.predict(fresh)
    assert scores.shape == (60,) and scores.device == fresh.device
    assert roc_auc_score(labels < 0, scores) == 1


def test_pytorch_ood_takes_a_fitted_estimator(ood: Any) -> None:
    from daebm.adapters.pytorch_ood import PytorchOODDetector

    fitted = quick().fit(ROWS)
    scores = PytorchOODDetector(fitted).predict(torch.from_numpy(FRESH))
    np.testing.assert_array_equal(scores.numpy(), -fitted.score_samples(FRESH))
