"""Scores that tell sets of images apart: measures against scikit-learn's, the bootstrap, and the command."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from daebm import DAEBM, checkpoint, cli, detection, load, profile, sampling
from daebm.detection import MEASURES, Images, separation
from daebm.model import SHIPPED, Model, model_folder
from daebm.profile import Gaussian, Mixture, law_tensors, laws_in

DATA = Path(os.environ.get("DAEBM_DATA") or Path(__file__).parents[2] / "shared" / "data")
RANDOM = np.random.default_rng(5)


@pytest.mark.parametrize("ties", [False, True])
def test_measures_are_those_of_scikit_learn(ties: bool) -> None:
    inside, outside = RANDOM.normal(1, 1, 300), RANDOM.normal(0, 1.5, 450)
    if ties:
        inside, outside = inside.round(1), outside.round(1)
    truth, score = np.repeat([1, 0], [300, 450]), np.concatenate([inside, outside])
    fpr, tpr, _thresholds = roc_curve(truth, score, drop_intermediate=False)
    expected = [
        roc_auc_score(truth, score),
        average_precision_score(truth, score),
        average_precision_score(1 - truth, -score),
        fpr[np.argmax(tpr >= 0.95)],
    ]
    np.testing.assert_allclose(separation(inside, outside).value, expected, rtol=1e-12)


def test_intervals_are_as_wide_as_the_error_of_auroc() -> None:
    """Hanley and McNeil's standard error for two equal normals; the bootstrap of 1,000 knows its own to 2 %."""
    n = 400
    draws = separation(RANDOM.normal(0, 1, n), RANDOM.normal(0, 1, n)).draws[:, 0]
    # The formula is for the population, the bootstrap for these 800 numbers: a tenth apart at most.
    assert abs(draws.std() / np.sqrt((2 * n + 1) / (12 * n * n)) - 1) < 0.1


def test_a_difference_is_paired() -> None:
    """A score that is another one plus a little noise: the difference is known far better than either."""
    inside, outside = RANDOM.normal(1, 1, 500), RANDOM.normal(0, 1, 500)
    one = separation(inside, outside, seed=3)
    other = separation(inside + RANDOM.normal(0, 0.05, 500), outside + RANDOM.normal(0, 0.05, 500), seed=3)
    value, low, high = detection.difference(one, other)
    assert low <= value <= high
    width = np.diff(one.interval()[:, 0])[0]
    assert high - low < width / 3
    unpaired = separation(inside, outside, seed=4)
    assert np.ptp(np.percentile(one.draws[:, 0] - unpaired.draws[:, 0], [2.5, 97.5])) > width  # the planted fault


def test_a_law_measures_distances_in_sds() -> None:
    """Of correlated Gaussian numbers, so many that shrinkage is negligible: chi-square with as many degrees."""
    root = np.array([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [50.0, 10.0, 5.0]])
    x = RANDOM.normal(size=(20_000, 3)) @ root.T
    law = Gaussian.of(x)
    assert abs(-law.score(x).mean() - 3) < 5 * np.sqrt(6 / 20_000) + 0.01  # Ledoit and Wolf shrink by about n^-1
    far = law.score(np.array([[1.0, -1.0, 0.0]]))  # against the correlation: far, for all its small size
    assert far[0] < -15


def test_a_constant_number_is_no_distance() -> None:
    said = np.concatenate([RANDOM.normal(size=(50, 2)), np.ones((50, 1))], 1)
    assert np.isfinite(Gaussian.of(said).score(said)).all()


def kinds_of_rows(count: int) -> np.ndarray:
    """Two crossing lines in three dimensions: halfway between their middles is the mean of all rows, and no kind."""
    rows, first = 0.05 * RANDOM.normal(size=(count, 3)), np.arange(count) % 2 == 0
    rows[first, 0] += 3 + RANDOM.normal(size=first.sum())
    rows[~first, 1] += 3 + RANDOM.normal(size=(~first).sum())
    return rows


def test_a_mixture_knows_kinds() -> None:
    """Against one Gaussian, which holds what is between two kinds for more normal than most."""
    rows, usual, between = kinds_of_rows(40_000), kinds_of_rows(4000), np.array([[1.5, 1.5, 0.0]])
    one, several = Gaussian.of(rows), Mixture.of(rows)
    assert (one.score(usual) < one.score(between)).mean() > 0.9
    assert (several.score(usual) < several.score(between)).mean() < 0.02
    assert several.centres.shape == (20, 4)  # of 80: 500 rows a kind, 20 at most


def test_one_kind_is_a_gaussian_of_its_rows_and_the_prior() -> None:
    """Its score is twice the log density of scipy's, but for constants; a part of all rows, so that shares are 1."""
    rows = RANDOM.normal(size=(400, 3)) @ np.array([[1.0, 0.0, 0.0], [0.9, 0.3, 0.0], [5.0, 1.0, 0.5]]).T
    law = Mixture.of(rows)
    assert law.centres.shape == (1, 4)
    places = np.concatenate([(rows - rows.mean(0)) @ law.axes, np.full((400, 1), law.middle[-1])], 1)
    white = (places - law.middle) / law.scale
    covariance = (white.T @ white + 100 * np.eye(4)) / 500
    expected = 2 * stats.multivariate_normal.logpdf(white, np.zeros(4), covariance)
    # What is left beside three axes of three is rounding: the last coordinate is 0 for all.
    np.testing.assert_allclose(law.score(rows), expected + 4 * math.log(2 * math.pi), atol=1e-6)


def test_kinds_weigh_by_their_shares_and_widths() -> None:
    """A row on the border of two kinds, which k-means would give to either: density decides, and size counts."""
    wide, narrow = RANDOM.normal(size=(9000, 1)) * 3, 20 + 0.3 * RANDOM.normal(size=(1000, 1))
    rows = np.concatenate([wide, narrow]) + 0.0
    law = Mixture.of(np.concatenate([rows, 0.3 * RANDOM.normal(size=(10_000, 1))], 1))
    sizes = np.exp(-law.offsets / 2)  # shares over sds, both of which must be in
    precision = np.linalg.det(law.roots)  # 1 / sd
    np.testing.assert_allclose((sizes / precision).sum(), 1.0, rtol=1e-6)  # shares add up to 1


def test_a_mixture_of_few_different_rows() -> None:
    """Rows that repeat leave kinds empty, constant ones no spread: scores are finite, and rounding is no distance."""
    two = np.repeat(RANDOM.normal(size=(2, 6)), 2500, 0)
    same = np.zeros((50, 4))
    for rows in (two, same):
        law = Mixture.of(rows)
        assert np.isfinite(law.score(rows)).all() and np.isfinite(law.score(rows + 1.0)).all()
        np.testing.assert_allclose(law.score(rows * (1 + 1e-7)), law.score(rows), atol=1e-3)


def test_laws_of_another_version_are_left_alone() -> None:
    """Those of images are mixtures, those of rows Gaussians."""
    rows = kinds_of_rows(100)
    tensors = law_tensors({"slopes": Gaussian.of(rows), "features": Mixture.of(rows)})
    assert list(laws_in(tensors, (3,))) == ["slopes"] and list(laws_in(tensors, (1, 8, 8))) == ["features"]


def test_a_mixture_sees_what_lies_beside_its_axes() -> None:
    """50 rows have five axes; a row that is strange in a direction beside them is a strange row."""
    rows = RANDOM.normal(size=(50, 20)) * np.r_[np.ones(5), np.full(15, 1e-3)]
    law = Mixture.of(rows)
    assert law.axes.shape == (20, 5) and law.centres.shape == (1, 6)
    strange = rows[:1].copy()
    strange[0, 12] += 0.1
    assert law.score(strange)[0] < law.score(rows).min() - 5


def test_laws_are_read_as_they_were_written_and_row_by_row() -> None:
    rows = kinds_of_rows(1200)
    for event in ((3,), (1, 8, 8)):
        law = profile.law(event).of(rows)
        whole = law.score(rows)
        np.testing.assert_array_equal(laws_in(law_tensors({"slopes": law}), event)["slopes"].score(rows), whole)
        np.testing.assert_array_equal(np.concatenate([law.score(rows[:7]), law.score(rows[7:])]), whole)


def test_a_profile_adds_up_what_two_laws_say() -> None:
    """Of residual networks; others have no features, and a model without slopes has no profile."""
    rows = {"slopes": kinds_of_rows(600), "features": RANDOM.normal(size=(600, 2))}
    laws = {kind: Gaussian.of(said) for kind, said in rows.items()}
    both = laws["slopes"].score(rows["slopes"]) + laws["features"].score(rows["features"])
    np.testing.assert_array_equal(profile.score("profile", laws, rows.__getitem__), both)
    alone = {"slopes": laws["slopes"]}
    np.testing.assert_array_equal(
        profile.score("profile", alone, rows.__getitem__), laws["slopes"].score(rows["slopes"])
    )
    assert profile.scores(laws) == ["energy", "features", "profile"] and profile.scores(alone) == ["energy", "profile"]
    assert profile.scores({"features": laws["features"]}) == ["energy", "features"]


def test_laws_of_tables_that_were_saved_under_the_name_of_their_score() -> None:
    """Of rows they are the same; of images slopes were no part of a sum then."""
    fitted = profile.Gaussian.of(np.random.default_rng(0).normal(size=(50, 4)))
    old = {key.replace("slopes", "profile"): value for key, value in profile.law_tensors({"slopes": fitted}).items()}
    np.testing.assert_array_equal(
        profile.laws_in(old, (2,))["slopes"].score(np.ones((1, 4))), fitted.score(np.ones((1, 4)))
    )
    assert profile.laws_in(old, (1, 8, 8)) == {}


def test_slopes_of_images_are_known_by_place() -> None:
    """Of |z|^2 / 2 the slope is z itself: a bright square is seen in its own place, and nowhere else."""
    z = torch.full((2, 1, 28, 28), 1e-3)
    z[1, 0, 4:8, 8:12] = 2.0
    said = profile.slopes(lambda x, t: x.square().flatten(1).sum(1) / 2 + t, 20, z).reshape(2, 8, 50)
    np.testing.assert_allclose(said[0, :, 0] - said[0, 0, 0], [0, 3, 5, 8, 11, 14, 16, 19], atol=1e-5)  # the levels
    places = said[:, :, 1:].reshape(2, 8, 7, 7)
    np.testing.assert_allclose(places[1, :, 1, 2], math.log(2.0), rtol=1e-6)
    places[1, :, 1, 2] = math.log(1e-3)
    np.testing.assert_allclose(places, math.log(1e-3), rtol=1e-6)
    rows = profile.slopes(lambda x, t: x.square().sum(1) / 2, 20, torch.tensor([[3.0, 4.0]]))
    np.testing.assert_allclose(rows.reshape(20, 2), [[12.5, math.log(5.0)]] * 20, rtol=1e-6)  # of a table: all at once
    few = profile.slopes(lambda x, t: x.square().flatten(1).sum(1), 3, torch.ones(1, 3, 4, 5))
    assert few.shape == (1, 3 * (1 + 4 * 5))  # a grid is no finer than the pixels


def strokes(count: int, kind: int) -> Images:
    """Made-up images: bars that lie, and bars that stand."""
    found = np.zeros((count, 28, 28), np.uint8)
    for image in found:
        i, j = RANDOM.integers(4, 18, 2)
        image[i : i + 4, j : j + 9] = RANDOM.integers(100, 256)
    return found if kind else found.transpose(0, 2, 1).copy()


def test_baselines_tell_bars_that_lie_from_bars_that_stand() -> None:
    train, inside, outside = strokes(2000, 1), strokes(200, 1), strokes(200, 0)
    found = detection.detect(detection.baseline_scores(train), {"lie": inside, "stand": outside})
    for name, by_set in found.separations.items():
        assert by_set["stand"].value[0] > 0.8, name
    table = detection.rows(found)
    assert {row["score"] for row in table} == {"PCA-50", "5-neighbour", "Gaussian"}
    assert all(len(row[measure]) == 3 for row in table for measure in MEASURES)
    assert len(detection.lines(found)) == 1 + len(table)
    drawn = detection.figures(found)
    assert set(drawn) == {"histograms", "curves"}
    roc, precision = drawn["curves"].axes
    assert roc.get_xscale() == "log" and roc.get_xlim()[0] < 1 / 200 and precision.get_ylim()[0] == 0


def test_scores_far_out_are_counted_and_leave_room_for_the_others() -> None:
    inside, outside = RANDOM.normal(size=400), RANDOM.normal(size=400)
    outside[:100] = -1e6
    found = detection.Detection({"Gaussian": {"mine": inside, "others": outside}}, {}, {})
    axis = detection.figures(found)["histograms"].axes[0]
    assert axis.get_xlim()[0] > -30 and [text.get_text() for text in axis.texts] == ["← 25.0%"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scores", "density"], "--scores takes energy, features, profile"),
        (["--images", "-1"], "--images must be 0 or more"),
        (["--device", "tpu"], "--device tpu is not to be had here"),
        (["--out", "."], ". is there already"),
    ],
)
def test_bad_words(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["daebm", "ood", "--model", "fashion-mnist", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_compares_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On made-up images: what it prints and writes, and that no law is fitted where one is saved."""

    def made_up(name: str, split: str) -> tuple[Images, np.ndarray]:
        count = 60 if split == "train" else 12
        return strokes(count, name == "fashion-mnist"), np.zeros(count, np.int64)

    monkeypatch.setattr(detection, "load_images", made_up)
    monkeypatch.setattr(cli, "load_images", made_up)
    monkeypatch.setattr(detection, "fit_law", None)
    words = ["ood", "--model", "fashion-mnist", "--images", "10", "--out", str(tmp_path / "o")]
    monkeypatch.setattr("sys.argv", ["daebm", *words])
    cli.main()
    assert "features" in capsys.readouterr().out
    rows = json.loads((tmp_path / "o" / "ood.json").read_text())["rows"]
    assert {(row["score"], row["set"]) for row in rows} >= {("energy", "mnist"), ("features", "kmnist")}
    assert (tmp_path / "o" / "report.html").stat().st_size > 10_000


# The models that come with the package.


@pytest.mark.parametrize("model_name", SHIPPED)
def test_a_shipped_model_gives_the_stored_scores(model_name: str) -> None:
    folder = model_folder(model_name)
    tensors, _facts = checkpoint.read(folder, "model")
    model, laws = load(model_name), detection.saved_laws(folder)
    shown = tensors["stored.images"].numpy()
    for name, score in detection.model_scores(model, laws).items():
        stored = tensors[f"stored.{name}"].numpy()
        np.testing.assert_allclose(score(shown), stored, rtol=1e-3, err_msg=name)
    assert np.ptp(tensors["stored.energy"].numpy()) > 50  # nats: a tolerance of a thousandth of 300 is small


def test_the_shipped_model_is_an_estimator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name: scores with p-values and flags, a report, and samples in grey levels."""
    tensors, _facts = checkpoint.read(model_folder("fashion-mnist"), "model")
    garments = tensors["stored.images"].numpy()
    np.save(tmp_path / "images.npy", np.concatenate([garments, 255 - garments[:4]]))
    np.save(tmp_path / "channels.npy", garments[:2, None] / 255)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fashion-mnist").mkdir()  # an empty folder hides nothing
    monkeypatch.setattr("daebm.model.ANNEALED_STEPS", 1)  # pictures are not looked at here
    for words in (
        ["score", "fashion-mnist", "images.npy", "-o", "scores.csv"],
        ["score", "fashion-mnist", "channels.npy", "-o", "other.csv"],
        ["inspect", "fashion-mnist"],
        ["sample", "fashion-mnist", "-n", "2", "-o", "new.npy"],
    ):
        monkeypatch.setattr("sys.argv", ["daebm", *words])
        cli.main()
    score, p, flag = np.loadtxt("scores.csv", delimiter=",", skiprows=1).T
    np.testing.assert_allclose(score[:8], tensors["stored.features"].numpy(), rtol=1e-3)  # float32 there, float64 here
    assert (flag == (p <= 0.01)).all() and not flag[:8].any() and flag[8:].all()
    said = capsys.readouterr()
    assert "false alarms" in said.out and said.err.count("note: values of channels.npy lie in 0..1") == 1
    assert np.loadtxt("other.csv", delimiter=",", skiprows=1)[:, 2].all()  # other units: all are strange
    monkeypatch.setattr(Model, "sample", None)
    monkeypatch.setattr("sys.argv", ["daebm", "sample", "fashion-mnist", "-o", "new.csv"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "go to .png or .npy" in capsys.readouterr().err
    assert (tmp_path / "fashion-mnist-report.html").stat().st_size > 10_000
    assert not (model_folder("fashion-mnist") / "report.html").exists()
    new = np.load("new.npy")
    assert new.shape == (2, 28, 28) and 20 < new.mean() < 160
    detector = DAEBM.load("fashion-mnist")
    energy = detector.log_density(garments) - tensors["stored.energy"].numpy()
    assert np.ptp(energy) < 0.05 and not detector.concerns()  # one constant for all; energies are float32 there
    # The model's own draws are as likely as images with the floor's noise: se of 125 draws with an sd of 120 nats.
    assert abs(detector.drawn_.mean() - detector.noisy_.mean()) < 4 * 120 / math.sqrt(len(detector.drawn_))


@pytest.mark.parametrize("model_name", SHIPPED)
def test_chains_of_a_shipped_model_can_be_advanced(model_name: str) -> None:
    tensors, _facts = checkpoint.read(model_folder(model_name), "model")
    model = load(model_name)
    start = sampling.Drawn(tensors["chains.x"][:16].float(), tensors["chains.t"][:16], 0)
    with torch.no_grad():
        drawn = sampling.transitions(model.sampler(), start, 2, torch.Generator().manual_seed(1))
        before, after = (model.network(d.x, d.t) for d in (start, drawn))
    assert torch.isfinite(after).all() and (drawn.x != start.x).flatten(1).any(1).double().mean() > 0.5
    # Chains at equilibrium stay there: their energies have an sd of some 100 nats, so their mean of 16 one of 25.
    assert abs(float((after - before).mean())) < 100


@pytest.mark.skipif(not (DATA / "kmnist").is_dir(), reason="needs the real files: set DAEBM_DATA to their folder")
@pytest.mark.parametrize("model_name", SHIPPED)
def test_a_shipped_model_tells_other_images_from_its_own(model_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 images a set; the features' AUROC is .998 for garments, known here to .003, and .989 for digits, to .006."""
    least = {"fashion-mnist": 0.985, "mnist": 0.965}[model_name]
    monkeypatch.setenv("DAEBM_DATA", str(DATA))
    sets = detection.sets_of_images(model_name, 200)
    model, laws = load(model_name), detection.saved_laws(model_folder(model_name))
    score = detection.model_scores(model, laws)["features"]
    found = detection.detect({"features": score}, sets).separations["features"]
    for name, it in found.items():
        assert it.value[0] > least, name
