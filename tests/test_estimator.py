"""The scikit-learn face: its contract, densities against quadrature, units, decisions, save and load."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, multivariate_normal
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import daebm
from daebm import DAEBM, CheckpointError, Config, Dataset, InputError, checkpoint, conformal, recipe, train
from daebm.estimator import _split
from daebm.fitting import Watch, energies, normalise_trained
from daebm.profile import SAID, law
from daebm.sampling import Drawn
from daebm.units import Units, wild

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*leave .* for calibration:UserWarning"),
]
QUICK = {"iterations": 30, "checkpoint_every": 30, "log_every": 30, "warm_up": 5, "width": 16, "hidden": 2}


def quick(**parameters: Any) -> DAEBM:
    return DAEBM(**({"settings": QUICK, "random_state": 0, "fpr": 0.05} | parameters))


def clusters(n: int, seed: int = 0) -> np.ndarray:
    """Three quarters around -2, one around 2, in units that are not the model's."""
    rng = np.random.default_rng(seed)
    side = np.where(rng.random((n, 1)) < 0.75, -2.0, 2.0)
    return np.array([100.0, -5.0]) + np.array([10.0, 0.01]) * (side * [1, 0] + 0.5 * rng.standard_normal((n, 2)))


def clusters_log_density(x: np.ndarray) -> np.ndarray:
    z = (x - [100.0, -5.0]) / [10.0, 0.01]
    log_p = [math.log(w) - ((z - [m, 0]) ** 2).sum(1) / 0.5 for w, m in ((0.75, -2), (0.25, 2))]
    return np.logaddexp(*log_p) - math.log(2 * math.pi * 0.25) - math.log(10 * 0.01)


@pytest.fixture(scope="module")
def fitted() -> DAEBM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DAEBM(budget="small", random_state=0, fpr=0.05, settings={"iterations": 200}).fit(clusters(1000))


# A rate of 0.2, as most of these checks fit 10 to 60 rows, and 1 % cannot be calibrated on 20: `predict` refuses it.
@parametrize_with_checks([DAEBM(fpr=0.2, settings=QUICK)])
def test_scikit_learn_contract(estimator: DAEBM, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("dimension", [1, 2])
def test_density_agrees_with_quadrature(dimension: int, fitted: DAEBM) -> None:
    """In the user's units, where a forgotten Jacobian of log(scale) would be off by nats."""
    model = fitted if dimension == 2 else quick(budget="small").fit(clusters(400)[:, :1])
    units = model.units_
    line = np.linspace(-7, 7, 4001 if dimension == 1 else 701)
    z = np.stack(np.meshgrid(*[line] * dimension), -1).reshape(-1, dimension)
    cell = (line[1] - line[0]) ** dimension * units.scale.prod()
    log_mass = math.log(np.exp(model.log_density(units.to_user(z))).sum() * cell)
    assert abs(log_mass) < 0.05
    assert abs(log_mass) < 5 * model.log_normaliser_se_ + 1e-3 and model.log_normaliser_se_ < 0.03
    forgotten = log_mass + units.log_stretch  # the planted fault
    assert abs(forgotten) > 1


def test_density_of_known_data(fitted: DAEBM) -> None:
    fresh = clusters(4000, seed=1)
    difference = clusters_log_density(fresh) - fitted.log_density(fresh)
    assert -0.05 < difference.mean() < 0.12  # KL after 200 iterations
    assert fitted.score(fresh) == pytest.approx(fitted.log_density(fresh).mean())
    assert (fitted.sample(1000)[:, 0] > 100).mean() == pytest.approx(0.25, abs=0.06)


def test_decisions_and_p_values(fitted: DAEBM) -> None:
    fresh, far = clusters(2000, seed=2), clusters(50, seed=3) + np.array([0.0, 0.1])
    scores = fitted.score_samples(fresh)
    np.testing.assert_array_equal(scores, fitted.log_density(fresh))
    np.testing.assert_array_equal(fitted.decision_function(fresh), scores - fitted.offset_)
    np.testing.assert_array_equal(fitted.predict(fresh) == -1, fitted.p_values(fresh) <= fitted.fpr + 1e-12)
    assert (fitted.predict(far) == -1).all()
    n = len(fitted.calibration_["energy"])
    k = conformal.rank(n, fitted.fpr)
    low, high = betabinom.interval(0.9999, len(fresh), k, n + 1 - k)
    assert low <= (fitted.predict(fresh) == -1).sum() <= high


def test_no_calibration_row_was_trained_on() -> None:
    rows = _split(1000, 0.01, 0)
    parts = [rows.train, rows.validation, rows.calibration]
    assert sorted(np.concatenate(parts)) == list(range(1000))
    assert [len(part) for part in parts] == [700, 100, 200]
    assert len(_split(300, 0.01, 0).calibration) == 99  # as many as the rate needs
    assert len(_split(100_000, 0.01, 0).calibration) == 1000


def test_calibration_rows_change_nothing_but_calibration() -> None:
    """Neither units nor weights nor the normalising constant nor the law of profiles has seen them."""
    x = clusters(80)
    model = quick().fit(x)
    rows = _split(len(x), model.fpr, model.seed_).calibration
    np.testing.assert_array_equal(model.calibration_["energy"], np.sort(model.log_density(x[rows])))
    moved = x.copy()
    moved[rows] = 2 * moved[rows] + 1
    other = quick().fit(moved)
    for score_by in ("energy", "profile"):
        model.set_params(score_by=score_by)
        other.set_params(score_by=score_by)
        np.testing.assert_array_equal(other.score_samples(x), model.score_samples(x))
        np.testing.assert_array_equal(other.calibration_[score_by], np.sort(model.score_samples(moved[rows])))


def test_too_few_rows_for_a_rate() -> None:
    """Said before training; p-values are there all the same, and another rate can be set without a new fit."""
    with pytest.warns(UserWarning, match="60 rows leave 12 for calibration and fpr=0.01 needs 99: predict will refuse"):
        model = quick(fpr=0.01).fit(clusters(60))
    for ask in (model.predict, model.decision_function):
        with pytest.raises(InputError, match="at least 99 calibration points, and there are 12"):
            ask(clusters(3))
    assert model.p_values(clusters(3)).min() >= 1 / 13
    assert set(model.set_params(fpr=0.1).predict(clusters(40))) <= {-1, 1}


def test_four_rows_leave_two_to_train_on() -> None:
    rows = _split(4, 0.34, 0)
    assert [len(part) for part in (rows.train, rows.validation, rows.calibration)] == [2, 1, 1]


def test_a_fit_that_fails_leaves_the_model_that_was_there() -> None:
    x = clusters(80)
    model = quick().fit(x)
    before = model.log_density(x)
    with pytest.raises(InputError, match="budget"):
        model.set_params(budget="huge").fit(np.hstack([x, x]))
    np.testing.assert_array_equal(model.log_density(x), before)
    with pytest.raises(InputError, match="budget"):
        (unfitted := quick(budget="huge")).fit(x)
    assert not hasattr(unfitted, "n_features_in_")


def test_calibration_rows_with_other_values_in_a_constant_column() -> None:
    """A column that only calibration rows vary in: their scores are finite, and the threshold with them."""
    x = np.insert(clusters(80), 1, 7.0, axis=1)
    rows = _split(len(x), 0.1, quick().fit(x).seed_)
    x[rows.calibration[:5], 1] = 8
    for kind in ("energy", "profile"):
        model = quick(fpr=0.1, score_by=kind).fit(x)
        assert np.isfinite(model.calibration_[kind]).all() and np.isfinite(model.noisy_).all()
        np.testing.assert_array_equal(np.sort(model.score_samples(x[rows.calibration])), model.calibration_[kind])
        np.testing.assert_array_equal(model.predict(x) == -1, model.p_values(x) <= 0.1)
        assert math.isfinite(model.score(x))


def test_fit_predict_says_that_it_judges_training_rows() -> None:
    with pytest.warns(UserWarning, match="rows that the model was trained on"):
        quick(fpr=0.2).fit_predict(clusters(60))


def test_inputs_of_every_kind_agree() -> None:
    x = clusters(80)
    expected = quick().fit(x)
    answer = expected.log_density(x[:5])
    np.testing.assert_array_equal(quick().fit(torch.from_numpy(x)).log_density(torch.from_numpy(x[:5])), answer)
    coarse = torch.from_numpy(x).bfloat16()  # numpy has no such type
    np.testing.assert_array_equal(expected.log_density(coarse), expected.log_density(coarse.double().numpy()))
    np.testing.assert_array_equal(quick().fit(x.tolist()).log_density(x[:5].tolist()), answer)
    assert answer.dtype == np.float64 and expected.sample(3).shape == (3, 2)
    np.testing.assert_array_equal(expected.sample(3), expected.sample(3))
    assert not np.array_equal(expected.sample(3), expected.sample(3, random_state=5))
    assert not np.array_equal(quick(random_state=1).fit(x).log_density(x[:5]), answer)


def test_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(clusters(80), columns=["a", "b"])
    model = quick().fit(frame)
    assert list(model.feature_names_in_) == ["a", "b"]
    np.testing.assert_array_equal(model.log_density(frame), quick().fit(frame.to_numpy()).log_density(frame.to_numpy()))


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4)])
def test_images(shape: tuple[int, ...], tmp_path: Path) -> None:
    """One shift and scale for all pixels; the density is over all of them, in grey levels."""
    rng = np.random.default_rng(0)
    images = (100 + 20 * rng.standard_normal((120, 1, *shape[1:])) * np.ones((1, shape[0], *shape[1:]))).reshape(
        120, *shape
    )
    images = images + rng.standard_normal(images.shape)
    model = quick(floor=0.1).fit(images)
    assert model.sample(2).shape == (2, *shape) and model.floor_ == pytest.approx(0.1)
    assert abs(model.sample(50).mean() - 100) < 20
    numbers = math.prod(shape)
    assert model.units_.log_stretch == pytest.approx(numbers * math.log(model.units_.scale[0]))
    assert (model.p_values(-images[:5]) < 0.1).all()
    with pytest.raises(InputError, match="as in fit"):
        model.log_density(images.reshape(120, -1) if len(shape) == 2 else images[:, 0])
    model.save(tmp_path)
    np.testing.assert_array_equal(DAEBM.load(tmp_path).log_density(images[:4]), model.log_density(images[:4]))
    double = quick(floor=0.1).fit(2 * images)  # a change of units moves every log density by so many log 2
    np.testing.assert_allclose(
        double.log_density(2 * images[:4]) + numbers * math.log(2), model.log_density(images[:4])
    )


def test_units_cancel() -> None:
    x = clusters(80)
    factor, shift = np.array([8.0, 0.25]), np.array([0.5, -32.0])
    moved = quick().fit(factor * x + shift).log_density(factor * x + shift)
    np.testing.assert_allclose(moved, quick().fit(x).log_density(x) - np.log(factor).sum(), atol=0.02)


def test_constant_columns_carry_no_density() -> None:
    x = clusters(80)
    with_constant = np.insert(x, 1, 7.0, axis=1)
    model = quick().fit(with_constant)
    np.testing.assert_array_equal(model.log_density(with_constant), quick().fit(x).log_density(x))
    assert (model.sample(4)[:, 1] == 7).all() and model.n_features_in_ == 3


@pytest.mark.parametrize("score_by", ["energy", "profile"])
def test_another_value_in_a_constant_column_costs_what_laplace_says(score_by: str, tmp_path: Path) -> None:
    """One in n + 2 after n training rows, for each column, however far the value is; twice that in squared distance."""
    x = np.insert(clusters(80), [0, 1], [0.0, 7.0], axis=1)
    model = quick(score_by=score_by).fit(x)
    n = len(_split(80, 0.05, model.seed_).train)
    deviant = x[:6].copy()
    deviant[1, 0], deviant[2, 2], deviant[3, 2], deviant[4, [0, 2]] = 1e-9, 7.1, -1e308, [1.0, 8.0]
    columns = np.array([0, 1, 1, 1, 2, 0])
    model.save(tmp_path)
    for fitted in (model, DAEBM.load(tmp_path)):
        lost = fitted.log_density(x[:6]) - fitted.log_density(deviant)
        np.testing.assert_allclose(lost, columns * math.log(n + 2), rtol=0, atol=2e-9)  # both are rounded to 1e-9
        scale = 2 if score_by == "profile" else 1
        lost = fitted.score_samples(x[:6]) - fitted.score_samples(deviant)
        np.testing.assert_allclose(lost, scale * columns * math.log(n + 2), rtol=0, atol=2e-9)
    # The planted faults: all rows of X, or the rule without its two.
    assert abs(lost[1] - scale * math.log(80 + 2)) > 0.1 and abs(lost[1] - scale * math.log(n)) > 0.01
    far = deviant[4:5] + np.array([0, 0, 0, 1.0])  # and a row that is strange elsewhere too is stranger still
    assert model.score_samples(far)[0] < model.score_samples(deviant[4:5])[0]


def test_profile() -> None:
    """Larger is more normal, finite, and another score than the energy; the density stays what it was."""
    x, far = clusters(120), clusters(20) + np.array([0, 0.2])
    model = quick(score_by="profile", fpr=0.1).fit(x)
    scores = model.score_samples(x)
    assert (scores <= 0).all() and np.isfinite(scores).all()
    assert model.score_samples(far).max() < np.median(scores)
    assert (model.predict(far) == -1).all()
    energy = quick().fit(x)
    np.testing.assert_array_equal(model.log_density(x), energy.log_density(x))
    np.testing.assert_array_equal(energy.set_params(score_by="profile").p_values(x), model.p_values(x))  # without a fit
    levels = model.model_.ladder.levels
    assert model.laws_["slopes"].mean.shape == (2 * levels,)


def stripes(n: int, seed: int = 0) -> np.ndarray:
    """Images of bytes (n, 8, 8) with a bright bar somewhere."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 40, (n, 8, 8))
    for image, row in zip(images, rng.integers(1, 6, n), strict=True):
        image[row : row + 2] += 180
    return images.astype(np.uint8)


RESIDUAL = QUICK | {"network": "level-resnet", "width": 8, "hidden": 1, "floor": 0.1}


def test_features_are_a_score_of_residual_networks(tmp_path: Path) -> None:
    x = stripes(120)
    model = quick(score_by="features", settings=RESIDUAL).fit(x)
    assert set(model.calibration_) == set(model.examples_) == {"energy", "features", "profile"}
    assert (model.predict(x.transpose(0, 2, 1)[:20]) == -1).mean() > 0.8  # bars that stand
    model.save(tmp_path)
    again = DAEBM.load(tmp_path)
    for kind in model.calibration_:
        a, b = (it.set_params(score_by=kind).score_samples(x[:9]) for it in (model, again))
        np.testing.assert_array_equal(a, b)


def test_other_networks_have_no_features() -> None:
    for x, words in ((clusters(80), "take energy or profile for a table"), (stripes(80), "settings=")):
        with pytest.raises(InputError, match=f"score_by='features' needs a residual network, for images: {words}"):
            quick(score_by="features").fit(x)
    model = quick().fit(clusters(80)).set_params(score_by="features")
    for ask in (model.predict, model.score_samples, model.p_values):
        with pytest.raises(InputError, match="this model has the scores energy, profile, and no features"):
            ask(clusters(4))


def test_a_model_trained_elsewhere_becomes_an_estimator(tmp_path: Path) -> None:
    """A model of images in [-1, 1], asked in grey levels: the same energies, densities of another volume."""
    bytes_ = torch.from_numpy(stripes(300)[:, None])
    data = Dataset.standardised("stripes", bytes_[:200], bytes_[200:])
    config = Config(**RESIDUAL, batch=50, store=100, steps=3, step_size=0.5, label_move="carry")
    state, ladder = train(config, data)
    model = daebm.Model.from_training(config, data, state, ladder)
    units = Units((8, 8), np.array([True]), *(np.array([127.5 * v]) for v in (1 + data.shift, data.scale)), 200)
    chains = Drawn(state.chains.x, state.chains.t, 0)
    found = normalise_trained(model, chains, data.standardise(data.train), 0)
    rows = bytes_.numpy()[:, 0].astype(np.float64)
    laws = {kind: law(model.event).of(model.said(kind, bytes_[:200].numpy())) for kind in SAID}
    look = {"iteration": 30, "gap": 0.0, "gap_error": 1.0, "acceptance": 0.7, "round_trips": 2.0, "chosen": True}
    detector = DAEBM.from_model(model, units, found, laws, rows[200:220], rows[220:], [look], fpr=0.05)
    expected = -model.energy(bytes_[:5].numpy()) - found.value - 64 * math.log(127.5 * data.scale)
    np.testing.assert_allclose(detector.log_density(rows[:5]), expected, rtol=1e-5)
    np.testing.assert_array_equal(detector.log_density(rows[:5]), detector.log_density(bytes_[:5, 0]))
    drawn = -energies(model.network, chains.x[chains.t == 0]) - found.value - units.log_stretch
    assert np.isfinite(detector.drawn_).all() and abs(detector.drawn_.mean() - drawn.mean()) < 64  # a nat a pixel
    assert abs(detector.sample(20).mean() - rows.mean()) < 40  # grey levels, not units of [-1, 1]
    detector.save(tmp_path, {"mine": torch.ones(2)})
    again = DAEBM.load(tmp_path)
    np.testing.assert_array_equal(again.p_values(rows[:5]), detector.p_values(rows[:5]))
    np.testing.assert_array_equal(daebm.load(tmp_path).energy(bytes_[:5].numpy()), model.energy(bytes_[:5].numpy()))


def test_a_file_of_another_version_is_said(tmp_path: Path) -> None:
    quick().fit(clusters(80)).save(tmp_path)
    tensors, facts = checkpoint.read(tmp_path, "model")
    del tensors["estimator.noisy"], facts["format"]
    checkpoint.write(tmp_path, "model", tensors, facts)
    with pytest.raises(CheckpointError, match="another version of daebm"):
        DAEBM.load(tmp_path)
    for change in ({"parameters": facts["estimator"]["parameters"] | {"depth": 2}}, {"event": None}):
        checkpoint.write(tmp_path, "model", tensors, facts | {"estimator": facts["estimator"] | change})
        with pytest.raises(CheckpointError, match="another version of daebm"):
            DAEBM.load(tmp_path)


@pytest.mark.parametrize("grey", [(8, 8), (1, 8, 8)])
def test_a_channel_more_or_less_is_the_same_grey_image(grey: tuple[int, ...]) -> None:
    x = stripes(60).reshape(60, *grey)
    model = quick(floor=0.1).fit(x)
    np.testing.assert_array_equal(model.log_density(x.reshape(60, 8, 8)), model.log_density(x.reshape(60, 1, 8, 8)))
    for other in (x.reshape(60, 64), x.reshape(30, 2, 8, 8), x.reshape(60, 4, 16)):
        with pytest.raises(InputError, match="as in fit"):
            model.log_density(other)


def test_score_is_a_method_and_a_parameter_has_another_name() -> None:
    """A parameter named score would hide the method: what the docstring says."""
    assert callable(DAEBM().score) and "score" not in DAEBM().get_params()


@pytest.mark.parametrize("score_by", ["energy", "profile"])
def test_save_and_load(tmp_path: Path, score_by: str) -> None:
    x = np.insert(clusters(80), 1, 7.0, axis=1)
    model = quick(score_by=score_by, random_state=np.random.RandomState(0)).fit(x)
    model.save(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]
    again = DAEBM.load(tmp_path / "model")
    for ask in ("score_samples", "log_density", "p_values", "predict"):
        np.testing.assert_array_equal(getattr(again, ask)(x), getattr(model, ask)(x))
    np.testing.assert_array_equal(again.sample(3), model.sample(3))
    assert again.get_params() == model.get_params() | {"random_state": None}
    assert again.history_ == model.history_ and again.log_normaliser_se_ == model.log_normaliser_se_
    assert isinstance(daebm.load(tmp_path / "model"), daebm.Model)
    assert json.loads((tmp_path / "model" / "model.json").read_text())["estimator"]["event"] == [3]
    np.testing.assert_array_equal(again.noisy_, model.noisy_)
    for kind in ("energy", "profile"):
        np.testing.assert_array_equal(again.examples_[kind], model.examples_[kind])
        np.testing.assert_array_equal(again.validation_[kind], model.validation_[kind])
        ends = model.set_params(score_by=kind).score_samples(model.examples_[kind])
        np.testing.assert_array_equal(
            ends, model.calibration_[kind][[*range(len(ends) // 2), *range(-len(ends) // 2, 0)]]
        )
    model.model_.save(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="no estimator: read it with"):
        DAEBM.load(tmp_path / "bare")


def test_what_json_does_not_know_is_saved_too(tmp_path: Path) -> None:
    """Tuples in settings, and an acceptance that no report came for before the first look."""
    settings = QUICK | {"checkpoint_every": 10, "milestones": (0.5,)}
    model = quick(settings=settings).fit(clusters(80))
    assert math.isnan(model.history_[0]["acceptance"])
    model.save(tmp_path)
    again = DAEBM.load(tmp_path)
    assert again.settings == settings and math.isnan(again.history_[0]["acceptance"])
    again.fit(clusters(80))


def test_pipeline_grid_search_and_clone() -> None:
    x = clusters(90)
    pipeline = make_pipeline(StandardScaler(), quick(fpr=0.2)).fit(x)
    assert set(pipeline.predict(x)) <= {-1, 1} and math.isfinite(pipeline.score(x))
    search = GridSearchCV(quick(), {"floor": [1e-3, 0.85]}, cv=2).fit(x)
    assert search.best_params_["floor"] in (1e-3, 0.85) and math.isfinite(search.best_score_)
    copy = clone(pipeline[-1])
    assert copy.get_params() == pipeline[-1].get_params()
    with pytest.raises(NotFittedError):
        copy.predict(x)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"budget": "huge"}, "budget must be one of small, medium, large, got 'huge'"),
        ({"score_by": "score"}, "score_by must be one of energy, features, profile"),
        ({"fpr": 1.5}, "between 0 and 1"),
        ({"floor": -1}, "floor must be 'auto' or a noise sd"),
        ({"settings": {"widht": 3}}, "'widht', which is no setting of daebm.Config"),
        ({"settings": 3}, "settings must be a dictionary"),
        ({"settings": {"method": "cd"}}, "trains method=da"),
    ],
)
def test_parameters_that_make_no_sense(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick(**parameters).fit(clusters(20))


def test_columns_of_which_few_values_set_the_scale() -> None:
    """One cell or ten; not what is skewed, heavy in its tails, or one value in half of its rows."""
    rng = np.random.default_rng(0)
    fine = np.stack([rng.lognormal(0, 1, 600), rng.standard_t(3, 600), 9.0 * (rng.random(600) < 0.01)], 1)
    assert wild(fine) == []
    x = np.column_stack([rng.normal(20, 3, (600, 2)), fine])
    x[5, 1], x[::60, 4] = -9999, 999
    x[::50, 0] = 1000
    (first, value, low, high), (second, farthest, *_quartiles) = wild(x)
    assert (first, value, second, farthest) == (0, 1000, 1, -9999) and 17 < low < 20 < high < 23
    detector = quick().fit(x)
    (said,) = [concern for concern in detector.concerns() if "set the scale" in concern]
    assert said.startswith("column 0 (from 0) holds 1000, ") and "(and 1 more such columns)" in said


def test_a_model_is_saved_where_it_hides_nothing(fitted: DAEBM, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(b"")
    (tmp_path / "file").write_text("")
    train(Config(**QUICK, batch=20, store=50), Dataset("x", torch.randn(60, 2), torch.randn(9, 2)), tmp_path / "run")
    for name, words in (("pictures", "holds other files"), ("file", "is no folder"), ("run", "holds a run")):
        with pytest.raises(InputError, match=words):
            fitted.save(tmp_path / name)
    for _ in range(2):
        fitted.save(tmp_path / "new")
    assert DAEBM.load(tmp_path / "new").wild_ == []


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((30, 2)), "every column is constant: there is nothing to learn"),
        (np.full((30, 2, 2), 3.0), "all pixels are equal"),
        (np.array([[1e300, 1.0], [-1e300, 2.0]] * 10), r"column 0 \(from 0\) holds values too large to square"),
        (
            np.append(np.arange(29.0), 1e200)[:, None],
            r"row 29, column 0 \(from 0\) is too many sds|column 0 .* holds values",
        ),
        (np.zeros((9, 0, 3)), "X must hold numbers"),
        (np.array([[1.0, np.nan]] * 9), "NaN"),
        (np.array([["a", "b"]] * 9), "could not convert"),
    ],
)
def test_data_that_cannot_be_learned(x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick().fit(x)


def test_wild_points_have_an_answer(fitted: DAEBM) -> None:
    """Never NaN: what lies beyond the range of floats scores -inf, and has the least p-value."""
    wild = np.array([[1e12, 0.0], [-1e200, 1e200], [1e308, -1e308], [100.0, 1e30], [1e150, 0.0]])
    for scores in (fitted.score_samples(wild), fitted.decision_function(wild)):
        assert not np.isnan(scores).any() and (scores < 0).all()
    assert (fitted.p_values(wild) == 1 / (len(fitted.calibration_["energy"]) + 1)).all()
    with pytest.raises(InputError, match="n_samples must be a whole number"):
        fitted.sample(0)


def test_one_row_or_many_give_the_same_score(fitted: DAEBM) -> None:
    x = clusters(300, seed=5)
    one_by_one = np.concatenate([fitted.score_samples(row[None]) for row in x])
    np.testing.assert_array_equal(one_by_one, fitted.score_samples(x))


def test_convergence_warnings_say_what_to_do() -> None:
    """Sixty rows of thirty numbers with hardly a floor, long steps and no look before the end; and four iterations."""
    x = np.random.default_rng(0).standard_normal((60, 30))
    with pytest.warns(ConvergenceWarning, match=r"by heart: give more rows, a smaller budget, or a larger floor"):
        heart = {"learning_rate": 0.01, "iterations": 60, "checkpoint_every": 60}
        quick(fpr=0.2, floor=0.01, settings=QUICK | heart).fit(x)
    with pytest.warns(ConvergenceWarning, match="trips over the noise levels, too few"):
        quick(fpr=0.2, settings=QUICK | {"iterations": 4}).fit(x[:, :8])


def test_advice_knows_why_training_ended() -> None:
    """After an early end a larger budget would end there too; after the largest there is no larger one."""
    model = quick(fpr=0.2, settings=QUICK | {"iterations": 4}).fit(np.random.default_rng(0).standard_normal((60, 8)))
    assert any("raise iterations in settings (now 4)" in concern for concern in model.concerns())
    model.settings = None
    assert any(concern.endswith("take a larger budget") for concern in model.concerns())
    model.budget = "large"
    assert any("raise iterations in settings" in concern for concern in model.concerns())
    model.n_iter_ = 3
    for concern in model.concerns():
        assert "budget" not in concern or "smaller budget" in concern
    assert any("training ended at iteration 3 of 4" in concern for concern in model.concerns())


def test_noisy_densities_are_those_of_samples() -> None:
    """Without a floor those of the rows; with one those of rows and noise, which lie further out."""
    x = clusters(120)
    plain, floored = quick(floor=0.0).fit(x), quick(floor=0.5).fit(x)
    # Noise enters in float32; rows do not.
    np.testing.assert_allclose(plain.noisy_, plain.calibration_["energy"], atol=1e-4)
    assert floored.noisy_.mean() < floored.calibration_["energy"].mean()


@pytest.mark.long
def test_a_small_budget_on_a_table_of_usual_size() -> None:
    """2,000 rows of ten columns: a density above a Gaussian's, rates that hold, samples like the data."""
    rng = np.random.default_rng(0)

    def table(n: int) -> np.ndarray:
        return np.where(rng.random((n, 1)) < 0.5, -1.5, 1.5) + rng.standard_normal((n, 10))

    x, fresh = table(2000), table(2000)
    model = DAEBM(budget="small", fpr=0.05, random_state=0).fit(x)
    gaussian = multivariate_normal(x.mean(0), np.cov(x.T)).logpdf(fresh).mean()
    assert model.score(fresh) > gaussian + 0.2  # two clusters, for which a Gaussian is .88 nats short
    n = len(model.calibration_["energy"])
    k = conformal.rank(n, 0.05)
    low, high = betabinom.interval(0.9999, len(fresh), k, n + 1 - k)
    assert low <= (model.predict(fresh) == -1).sum() <= high
    # 500 draws: a share has an error of .022, and a mean of clusters 3 apart one of .08.
    drawn = model.sample(500)
    assert abs((drawn.mean(1) > 0).mean() - 0.5) < 0.15 and np.abs(drawn.mean(0) - fresh.mean(0)).max() < 0.5


def test_training_ends_early_when_it_only_overfits() -> None:
    """Few rows and a high rate: after three worse looks training ends, and the best one is kept."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 2))
    heart = {"iterations": 600, "learning_rate": 0.01, "checkpoint_every": 20, "log_every": 20, "decay_start": 1.0}
    model = DAEBM(random_state=0, fpr=0.2, settings=heart).fit(x)
    assert 200 <= model.n_iter_ < 600
    looks = [look["log_density"] for look in model.history_]
    assert np.argmax(looks) < len(looks) - Watch.PATIENCE + 1


def test_recipe_follows_shape_and_size() -> None:
    few, many = torch.randn(5000, 2), torch.randn(300, 30)
    config = recipe.choose(few, "medium", "auto", 0)
    assert config.floor == 0 and config.octaves == 3 and config.iterations == recipe.BUDGETS["medium"]
    other = recipe.choose(many, "medium", "auto", 0)
    assert other.floor > 0 and other.octaves == 0 and other.iterations == pytest.approx(0.3 * config.iterations, abs=1)
    assert other.learning_rate == config.learning_rate  # ten rows a column
    assert recipe.choose(many[:75], "medium", "auto", 0).learning_rate == pytest.approx(config.learning_rate / 2)
    assert recipe.choose(few.round(), "small", "auto", 0).floor > 0  # repeated values are spikes
    together = torch.randn(400, 1).repeat(1, 1000)  # columns that vary together need more noise to become N(0, I)
    assert recipe.choose(together, "small", "auto", 0).last_variance > config.last_variance


def test_units_of_tables_and_images() -> None:
    x = np.array([[1.0, 5.0, 1e9], [3.0, 5.0, 1e9 + 1e-3]])
    units = Units.of(x)
    assert units.varies.tolist() == [True, False, False]  # the last spread is rounding
    np.testing.assert_allclose(units.to_user(units.to_model(x))[:, 0], x[:, 0])
    other = np.array([[9.0, 5.0, 1e9], [1.0, 5.1, 1e9], [1.0, 5.1, 0.0]])
    assert units.surprise(other).tolist() == [0, math.log(4), 2 * math.log(4)]  # two rows
    same = np.array([[0.1, 1.0, 1e-200], [0.1, 2.0, 2e-200], [0.1, 3.0, 5e-200]])
    units = Units.of(same)
    assert units.varies.tolist() == [False, True, False] and not units.surprise(same).any()
    assert (units.to_user(units.to_model(same))[:, 0] == 0.1).all()  # a mean would be off in the last digit
    images = np.random.default_rng(0).normal(3, 2, (50, 4, 6))
    assert not Units.of(images).surprise(images + 1).any()
    z = Units.of(images).to_model(images)
    assert z.shape == (50, 1, 4, 6) and abs(z.mean()) < 1e-9 and abs(z.std() - 1) < 1e-9
