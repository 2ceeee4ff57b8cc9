"""The ONNX file gives what torch gives, in the user's units."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daebm import DAEBM, InputError

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*leave .* for calibration:UserWarning"),
]
QUICK = {"iterations": 30, "checkpoint_every": 30, "log_every": 30, "warm_up": 5, "width": 16, "hidden": 2}
RNG = np.random.default_rng(0)


def fit(x: np.ndarray, **settings: Any) -> DAEBM:
    return DAEBM(settings=QUICK | settings, random_state=0, fpr=0.1).fit(x)


def session(model: DAEBM, path: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model.export_onnx(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # one file, and nothing left beside it
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


TABLE = np.insert(RNG.standard_normal((100, 3)) * [1, 1e3, 1e-3] + [1e6, -5e7, 0], 1, 7.0, axis=1)


@pytest.mark.parametrize(
    ("x", "settings", "error"),
    [
        # log_density is rounded to 9 decimals, and that is all of the difference.
        (TABLE, {"octaves": 2, "squares": 2}, 1e-8),
        (RNG.standard_normal((100, 12)), {}, 1e-8),
        (100 + 20 * RNG.standard_normal((100, 6, 5)), {}, 1e-8),
        # Convolutions are float32: 7 digits of energies of some hundred nats.
        (100 + 20 * RNG.standard_normal((40, 1, 8, 8)), {"network": "level-resnet", "width": 4, "hidden": 1}, 1e-4),
    ],
    ids=["few columns", "table", "images", "residual network"],
)
def test_parity_for_any_number_of_rows(x: np.ndarray, settings: dict[str, Any], error: float, tmp_path: Path) -> None:
    """Columns at 1e6 ± 1 and -5e7 ± 1000 among them, which float32 would blur."""
    model = fit(x, **settings)
    onnx = session(model, tmp_path / "model.onnx")
    for part in (x[:1], x[:2], x[:17], x):
        (answer,) = onnx.run(["log_density"], {"x": part})
        assert answer.shape == (len(part),) and answer.dtype == np.float64
        np.testing.assert_allclose(answer, model.log_density(part), rtol=0, atol=error)


def test_constant_columns_and_rows_beyond_the_range_of_floats(tmp_path: Path) -> None:
    table = np.insert(TABLE, 0, 0.0, axis=1)
    model = fit(table).set_params(score_by="profile")  # which changes nothing here
    x = table[:5].copy()
    x[0, 2], x[1, [0, 2]], x[2, 1] = 8, [1e308, 8], 1e300
    onnx = session(model, tmp_path / "model.onnx")
    (answer,), (usual,) = (onnx.run(None, {"x": rows}) for rows in (x, table[:5]))
    np.testing.assert_allclose(answer, model.log_density(x), rtol=0, atol=1e-8)  # which is rounded to 9 decimals
    assert answer[2] == -np.inf and (answer[3:] == usual[3:]).all()
    # Some 15 digits of a log density of tens of nats. In float32 the cost would be off by 1e-7.
    np.testing.assert_allclose(
        (usual - answer)[:2], np.log(model.units_.rows + 2) * np.array([1, 2]), rtol=0, atol=1e-11
    )


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fit(TABLE)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"pip install 'daebm\[onnx\]'"):
        model.export_onnx(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
