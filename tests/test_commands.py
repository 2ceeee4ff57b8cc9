"""daebm fit, score, sample and inspect: what they write, that nothing is lost, and that bad input is one sentence."""

import csv
import re
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from daebm import DAEBM, InputError, checkpoint, inspection, load, recipe, tables
from test_cli import Cli, assert_one_sentence, assert_self_contained, call, cli, tree

__all__ = ["cli"]  # a fixture
QUICK = {"iterations": 30, "checkpoint_every": 10, "log_every": 10, "warm_up": 5, "width": 16, "hidden": 2}


@pytest.fixture(autouse=True, scope="module")
def quick_recipe() -> Any:
    """The command line has no settings, so the recipe itself is cut short."""
    real = recipe.choose

    def choose(z: Any, budget: str, floor: Any, seed: int, settings: Any = None) -> Any:
        return real(z, budget, floor, seed, QUICK | (settings or {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "choose", choose)
        yield


def rows(n: int = 80, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.normal(20, 3, n), rng.normal(0, 0.1, n), np.full(n, 7.0)], 1)


def write_csv(path: Path, x: np.ndarray, header: str = "") -> Path:
    lines = [header] * bool(header) + [",".join(map(repr, row)) for row in x.tolist()]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_pictures(folder: Path, n: int = 40, side: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    (folder / "sub").mkdir(parents=True)
    for i in range(n):
        grey = np.clip(rng.normal(120, 20) + rng.normal(0, 5, (side, side)), 0, 255).astype(np.uint8)
        Image.fromarray(grey).save(folder / ("sub" if i % 2 else "") / f"{i:03}.png")
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with table.csv, its model and nothing else; not to be changed."""
    folder = tmp_path_factory.mktemp("fitted")
    write_csv(folder / "table.csv", rows(), "temperature,pressure,site")
    assert call("fit", folder / "table.csv", "--out", folder / "model", "--fpr", 0.1) == 0
    return folder


@pytest.fixture
def model(fitted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fitted / "model", tmp_path / "model"))


@pytest.fixture(scope="module")
def picture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder / "data")
    assert call("fit", folder / "data", "--out", folder / "model", "--fpr", 0.2) == 0
    return folder / "model"


def read_scores(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Fitting.


def test_fit_is_what_the_estimator_does(fitted: Path) -> None:
    assert sorted(path.name for path in (fitted / "model").iterdir()) == ["model.json", "model.safetensors"]
    detector = DAEBM.load(fitted / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        expected = DAEBM(fpr=0.1, random_state=0).fit(rows())
        np.testing.assert_array_equal(detector.log_density(rows(9, 1)), expected.log_density(rows(9, 1)))
    assert list(detector.feature_names_in_) == ["temperature", "pressure", "site"]
    assert (detector.fpr, detector.score_by, detector.budget) == (0.1, "energy", "medium")


@pytest.mark.parametrize("kind", ["npy", "npz", "csv", "semicolons"])
def test_one_table_in_every_format(cli: Cli, fitted: Path, tmp_path: Path, kind: str) -> None:
    x = rows()
    name = f"x.{'csv' if kind == 'semicolons' else kind}"
    if kind == "npy":
        np.save(tmp_path / name, x)
    elif kind == "npz":
        np.savez(tmp_path / name, X=x, y=np.zeros(len(x)))
    else:
        separator = ";" if kind == "semicolons" else ","
        lines = [separator.join(map(repr, row)) for row in x.tolist()]
        (tmp_path / name).write_bytes(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8-sig"))
    ended = cli(
        "fit",
        name,
        "--out",
        "m",
        "--fpr",
        "0.1",
        "--budget",
        "small",
        "--score-by",
        "profile",
        "--seed",
        3,
        "--floor",
        0.2,
    )
    assert ended.status == 0 and "model: m" in ended.out
    detector = DAEBM.load(tmp_path / "m")
    assert (detector.fpr, detector.score_by, detector.budget, detector.random_state) == (0.1, "profile", "small", 3)
    assert detector.floor_ == pytest.approx(0.2) and not hasattr(detector, "feature_names_in_")
    np.testing.assert_array_equal(tables.whole(tmp_path / name, tables.open_data(tmp_path / name)), x)


def test_notes_are_sentences(cli: Cli, tmp_path: Path) -> None:
    """A warning of Python's would name a file and a line of code."""
    write_csv(tmp_path / "x.csv", rows(20))
    ended = cli("fit", "x.csv", "--out", "m", "--fpr", 0.01)
    assert ended.status == 0
    notes = ended.err.splitlines()
    assert notes and all(note.startswith("daebm: note: ") for note in notes)
    assert any("20 rows leave 4 for calibration" in note for note in notes)


def test_columns_are_chosen_by_name_and_found_again(cli: Cli, tmp_path: Path) -> None:
    """Also when they come in another order, beside columns that are no numbers."""
    x = rows()
    lines = [f"{a!r},id{i},{b!r}" for i, (a, b, _c) in enumerate(x.tolist())]
    (tmp_path / "x.csv").write_text("a,name,b\n" + "\n".join(lines))
    assert_one_sentence(cli("fit", "x.csv", "--out", "m"), "x.csv, line 2, column 'name' holds 'id0'", "--columns")
    assert cli("fit", "x.csv", "--out", "m", "--fpr", 0.1, "--columns", "b", "a").status == 0
    assert cli("score", "m", "x.csv", "-o", "s.csv").status == 0
    write_csv(tmp_path / "y.csv", x[:, :2])  # no header: by order
    assert cli("score", "m", "y.csv", "-o", "t.csv", "--columns", 2, 1).status == 0
    assert (tmp_path / "s.csv").read_bytes() == (tmp_path / "t.csv").read_bytes()
    write_csv(tmp_path / "z.csv", x, "a,q,c")
    assert_one_sentence(cli("score", "m", "z.csv", "-o", "u.csv"), "z.csv has no column 'b', only a, q, c")
    assert_one_sentence(cli("fit", "x.csv", "--out", "n", "--columns", "q"), "no column 'q'")


def test_a_header_that_counts_is_no_row(tmp_path: Path) -> None:
    """pandas calls the columns of an array 0, 1, 2: were that a row, every score would belong to the row before."""
    (tmp_path / "x.csv").write_text("0,1\n5,6\n7,8\n")
    data = tables.open_data(tmp_path / "x.csv")
    assert data.columns == ["0", "1"] and tables.whole(tmp_path, data).tolist() == [[5, 6], [7, 8]]
    (tmp_path / "x.csv").write_text("0\n1\n")
    assert tables.whole(tmp_path, tables.open_data(tmp_path / "x.csv")).tolist() == [[0], [1]]


# Scoring.


def test_scores_are_those_of_the_estimator(cli: Cli, model: Path, tmp_path: Path) -> None:
    x = rows(50, seed=1)
    x[0], x[1, 2] = [90.0, 5.0, 7.0], 8.0  # far away, and another value in a constant column
    write_csv(tmp_path / "new.csv", x, "temperature,pressure,site")
    ended = cli("score", model, "new.csv", "-o", "scores.csv")
    assert ended.status == 0 and ended.err == ""
    detector = DAEBM.load(model)
    del detector.feature_names_in_
    found = read_scores(tmp_path / "scores.csv")
    np.testing.assert_array_equal([float(row["score"]) for row in found], detector.score_samples(x))
    np.testing.assert_array_equal([float(row["p_value"]) for row in found], detector.p_values(x))
    np.testing.assert_array_equal([row["flag"] == "1" for row in found], detector.predict(x) == -1)
    flagged = sum(row["flag"] == "1" for row in found)
    assert found[0]["flag"] == "1"
    usual = detector.score_samples(rows(50, seed=1))[1]
    cost = np.log(detector.units_.rows + 2)
    assert float(found[1]["score"]) == pytest.approx(usual - cost, abs=2e-9)  # both are rounded to 1e-9
    assert f"50 rows, {flagged} flagged at a false-alarm rate of 0.1" in ended.out
    # Another rate and another score, without another fit.
    assert cli("score", model, "new.csv", "-o", "other.csv", "--fpr", 0.5, "--score-by", "profile").status == 0
    detector.set_params(fpr=0.5, score_by="profile")
    other = read_scores(tmp_path / "other.csv")
    np.testing.assert_array_equal([row["flag"] == "1" for row in other], detector.predict(x) == -1)


@pytest.mark.parametrize("kind", ["csv", "npy"])
def test_scores_come_in_batches(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Equal to those at once; and while they are written no more than a batch is held."""
    x = rows(1000, seed=2)
    write_csv(tmp_path / "x.csv", x) if kind == "csv" else np.save(tmp_path / "x.npy", x)
    assert cli("score", model, f"x.{kind}", "-o", "whole.csv").status == 0
    monkeypatch.setattr(tables, "BATCH", 30)
    sizes = [len(batch.x) for batch in tables.open_data(tmp_path / f"x.{kind}").batches]
    assert sizes == [10] * 100
    assert cli("score", model, f"x.{kind}", "-o", "parts.csv").status == 0
    assert (tmp_path / "whole.csv").read_bytes() == (tmp_path / "parts.csv").read_bytes()


def test_a_long_table_takes_the_memory_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as many lines, the same peak, up to what the garbage collector leaves lying for a while."""
    peaks = []
    monkeypatch.setattr(tables, "BATCH", 4000)
    for n in (6_000, 60_000):
        (tmp_path / "x.csv").write_text("a,b\n" + "1.5,2.5\n" * n)
        tracemalloc.start()
        assert sum(len(batch.x) for batch in tables.open_data(tmp_path / "x.csv").batches) == n
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# Sampling.


def test_samples(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("sample", model, "-n", 5, "-o", "a.npy").status == 0
    assert cli("sample", model, "-n", 5, "-o", "a.csv").status == 0
    x = np.load(tmp_path / "a.npy")
    detector = DAEBM.load(model)
    np.testing.assert_array_equal(x, detector.sample(5))
    assert (tmp_path / "a.csv").read_text().startswith("temperature,pressure,site\n")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1), x)
    assert cli("sample", model, "-n", 5, "-o", "b.npy", "--seed", 3).status == 0
    np.testing.assert_array_equal(np.load(tmp_path / "b.npy"), detector.sample(5, 3))
    assert_one_sentence(cli("sample", model, "-o", "a.png"), "a.png", ".csv or .npy")
    assert_one_sentence(cli("sample", model, "-o", "a.txt"), "a.txt must end in .npy or .csv or .png")


def test_samples_of_a_bare_model(cli: Cli, model: Path, tmp_path: Path) -> None:
    load(model).save(tmp_path / "bare")
    assert cli("sample", "bare", "-n", 4, "-o", "a.npy").status == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), load(tmp_path / "bare").sample(4))
    assert_one_sentence(cli("score", "bare", "a.npy", "-o", "s.csv"), "bare holds a model but no estimator")


# Pictures.


def test_pictures(cli: Cli, picture_model: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "new", 10, seed=1)
    Image.fromarray(np.arange(36, dtype=np.uint8).reshape(6, 6) * 7).save(folder / "zebra.png")
    assert cli("score", picture_model, "new", "-o", "s.csv").status == 0
    found = read_scores(tmp_path / "s.csv")
    assert [row["file"] for row in found] == sorted(str(p.relative_to(folder)) for p in folder.rglob("*.png"))
    assert found[-1]["file"] == "zebra.png" and found[-1]["flag"] == "1"
    assert cli("sample", picture_model, "-n", 5, "-o", "s.png").status == 0
    sheet = np.array(Image.open(tmp_path / "s.png"))
    assert sheet.shape == (2 * 104, 3 * 104)  # 6 pixels 17 times as large, and a line around
    assert (sheet[104:, 208:] == 255).all() and 90 < np.median(sheet[2:102, 2:102]) < 150
    assert cli("inspect", picture_model, "-o", "r.html").status == 0
    assert_self_contained(tmp_path / "r.html")


def test_pictures_of_other_sizes(cli: Cli, picture_model: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "large", 8, side=12)
    before = tree(tmp_path)
    assert_one_sentence(cli("score", picture_model, "large", "-o", "s.csv"), "(1, 12, 12)", "(1, 6, 6)", "--size")
    assert tree(tmp_path) == before
    assert cli("score", picture_model, "large", "-o", "s.csv", "--size", 6).status == 0
    Image.new("L", (5, 5)).save(tmp_path / "large" / "odd.png")
    assert_one_sentence(cli("fit", "large", "--out", "m"), "odd.png", "resize it or give --size")
    assert cli("fit", "large", "--out", "m", "--size", 4, "--fpr", 0.5).status == 0


# Inspecting.


def test_the_report(cli: Cli, model: Path, tmp_path: Path) -> None:
    ended = cli("inspect", model)
    assert ended.status == 0 and str(model / "report.html") in ended.out
    concerns = DAEBM.load(model).concerns()
    assert concerns and ended.err.splitlines() == [f"daebm: note: {concern}" for concern in concerns]
    assert_self_contained(model / "report.html")
    text = (model / "report.html").read_text()
    for name in ("training", "energies", "calibration"):
        assert f'alt="{name}"' in text
    for words in ("Least normal", "Most normal", "temperature", "round trips", "Before you trust it"):
        assert words in text
    least = DAEBM.load(model).examples_["energy"][0]
    assert f"<td>{least[0]:.4g}</td><td>{least[1]:.4g}</td>" in text
    assert_one_sentence(cli("inspect", model), "report.html is there already", "--overwrite")
    assert cli("inspect", model, "--overwrite").status == 0
    assert cli("inspect", model, "-o", "mine.html").status == 0 and (tmp_path / "mine.html").exists()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("shape", [(5, 2), (60, 20), (30, 2, 3, 3)], ids=str)
def test_the_report_of_odd_data(cli: Cli, tmp_path: Path, shape: tuple[int, ...]) -> None:
    """A single calibration row; more columns than fit on a page; images that are neither grey nor RGB."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal(shape))
    assert cli("fit", "x.npy", "--out", "m", "--fpr", 0.5).status == 0
    assert cli("inspect", "m").status == 0
    assert_self_contained(tmp_path / "m" / "report.html")


def test_the_report_of_labels_that_do_not_mix(model: Path, tmp_path: Path) -> None:
    """No draws at level 0 then, but a report."""
    detector = DAEBM.load(model)
    detector.drawn_ = np.zeros(0)
    inspection.write(tmp_path / "report.html", detector, "m")
    assert_self_contained(tmp_path / "report.html")


# Nothing is lost, nothing is half-written.


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ctrl-c"]
)
@pytest.mark.parametrize("command", ["fit", "score", "sample", "inspect"])
def test_a_write_that_fails_leaves_nothing(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, command: str
) -> None:
    write_csv(tmp_path / "x.csv", rows())
    before = tree(tmp_path)

    def fail(*args: object) -> None:
        raise failure

    monkeypatch.setattr("os.fsync", fail)
    words = {
        "fit": ["x.csv", "--out", "deep/er/new", "--fpr", 0.1],
        "score": [model, "x.csv", "-o", "s.csv"],
        "sample": [model, "-n", 2, "-o", "s.npy"],
        "inspect": [model],
    }
    ended = cli(command, *words[command])
    assert ended.status == (130 if isinstance(failure, KeyboardInterrupt) else 2)
    assert ended.err.count("\n") - ended.err.count("daebm: note:") == 1
    assert tree(tmp_path) == before


def test_a_full_memory_is_one_sentence(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(tables, "whole", fail)
    write_csv(tmp_path / "x.csv", rows())
    assert_one_sentence(cli("fit", "x.csv", "--out", "m"), "out of memory: give smaller data")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_ctrl_c_in_training_leaves_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_csv(tmp_path / "x.csv", rows())
    before = tree(tmp_path)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("daebm.estimator.normalise", stop)
    assert cli("fit", "x.csv", "--out", "m").status == 130
    assert tree(tmp_path) == before


def test_a_failed_overwrite_keeps_the_old_model(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(tmp_path / "x.csv", rows(seed=5))
    before = tree(model)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert "No space left" in cli("fit", "x.csv", "--out", model, "--overwrite", "--fpr", 0.1).err
    assert tree(model) == before


def test_nothing_is_overwritten_unasked(cli: Cli, model: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", rows())
    (tmp_path / "mine.csv").write_text("mine")
    (tmp_path / "mine.npy").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("mine")
    before = tree(tmp_path)
    for words in (
        ["fit", "x.csv", "--out", model],
        ["fit", "x.csv", "--out", "photos"],
        ["fit", "x.csv", "--out", "photos", "--overwrite"],
        ["fit", "x.csv", "--out", "mine.csv", "--overwrite"],
        ["fit", "x.csv", "--out", "mine.csv/m"],
        ["score", model, "x.csv", "-o", "mine.csv"],
        ["score", model, "x.csv", "-o", "photos"],
        ["score", model, "x.csv", "-o", "x.csv", "--overwrite"],
        ["score", model, "x.csv", "-o", "nowhere/s.csv"],
        ["sample", model, "-o", "mine.npy"],
        ["sample", model, "-o", "nowhere/s.npy"],
    ):
        assert_one_sentence(cli(*words), "--out")
        assert tree(tmp_path) == before
    assert cli("score", model, "x.csv", "-o", "mine.csv", "--overwrite").status == 0
    assert cli("sample", model, "-o", "mine.npy", "--overwrite").status == 0
    (model / "report.html").write_text("on the old model")
    assert cli("fit", "x.csv", "--out", model, "--overwrite", "--fpr", 0.2).status == 0
    assert DAEBM.load(model).fpr == 0.2 and not (model / "report.html").exists()


# Bad input.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "x.csv is empty"),
        ("a,b\n", "a header and no rows"),
        ("a,b\n1,2\n3,\n", "x.csv, line 3, column 'b' is empty: fill it in"),
        ("1,2\n3,x\n", "x.csv, line 2, column '2' holds 'x', which is no number"),
        ("a,b\n1,2\n3,NaN\n", "x.csv, line 3, column 'b' holds 'NaN': fill in a finite number"),
        ("a,b\n1,1e999\n", "line 2, column 'b' holds '1e999'"),
        ("a,b\n1,2,3\n", "line 2 has 3 cells, and the first one has 2"),
        ("a\n1\n\n2\n", "line 3 is empty"),
        (",a\n0,1\n1,2\n", "column 1 has no name; an index of rows is no data"),
        (",0,1\n0,5,6\n1,7,8\n", "column 1 has no name; an index of rows is no data"),
        ("a,a\n0,1\n", "two columns are called 'a'"),
        ("a;b\n1,5;2\n", "column 'a' holds '1,5'"),
        ('a,b\n"1,2\n', "cannot be read as csv"),
        ("a,b\n1,2\n3,4\n", "has 2 rows, too few to learn from: give at least 4"),
        ("a,b\n" + "1,2\n" * 9, "every column is constant"),
    ],
    ids=str,
)
def test_bad_tables(cli: Cli, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    assert_one_sentence(cli("fit", "x.csv", "--out", "m"), words)
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_a_value_that_sets_the_scale_is_said(cli: Cli, tmp_path: Path) -> None:
    """A code for a missing value, with the name of its column, in the fit and whenever it is looked at."""
    x = rows()
    x[7, 0] = -9999
    write_csv(tmp_path / "x.csv", x, "temperature,pressure,site")
    ended = cli("fit", "x.csv", "--out", "m", "--fpr", 0.1)
    (note,) = [line for line in ended.err.splitlines() if "set the scale" in line]
    assert note.startswith("daebm: note: column 'temperature' holds -9999, and half of its values lie in ")
    assert cli("inspect", "m").err.splitlines().count(note) == 1
    write_csv(tmp_path / "y.csv", x)
    assert "note: column 0 (from 0) holds -9999" in cli("fit", "y.csv", "--out", "n", "--fpr", 0.1).err


def test_what_was_read_is_said(cli: Cli, fitted: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", rows(), "temperature,pressure,site")
    ended = cli("fit", "x.csv", "--out", "m", "--fpr", 0.1, "--columns", "site", "pressure")
    assert "x.csv: 80 rows of 2 columns (site, pressure)\n" in ended.out
    assert "iteration 10 of 30: held-out log density " in ended.out and "training rows likelier by " in ended.out
    ended = cli("score", fitted / "model", "x.csv", "-o", "s.csv")
    assert re.search(r"^80 rows, \d+ flagged at a false-alarm rate of 0.1 by energy: s.csv$", ended.out, re.MULTILINE)
    assert "nearly everything" not in ended.err
    write_csv(tmp_path / "far.csv", rows() + 1000, "temperature,pressure,site")
    assert "note: nearly everything is flagged" in cli("score", fitted / "model", "far.csv", "-o", "t.csv").err


@pytest.mark.parametrize(
    ("header", "options", "words"),
    [
        (
            "temperature,pressure,site",
            ["--columns", "pressure", "temperature", "site"],
            "found by name: leave --columns",
        ),
        (
            "temperature,pressure,where",
            [],
            "no column 'site', only temperature, pressure, where: add it, the model was",
        ),
        ("", ["--columns", "1", "2"], "and the model (3,): give what fit had (temperature, pressure, site)"),
    ],
    ids=str,
)
def test_columns_of_a_model(
    cli: Cli, fitted: Path, tmp_path: Path, header: str, options: list[str], words: str
) -> None:
    write_csv(tmp_path / "x.csv", rows(), header)
    assert_one_sentence(cli("score", fitted / "model", "x.csv", "-o", "s.csv", *options), words)


def test_a_cell_that_a_model_needs(cli: Cli, fitted: Path, tmp_path: Path) -> None:
    """The column cannot be left out, so that is no advice."""
    (tmp_path / "x.csv").write_text("temperature,pressure,site\n20,,7\n")
    ended = cli("score", fitted / "model", "x.csv", "-o", "s.csv")
    assert_one_sentence(ended, "column 'pressure' is empty: fill it in, take the line out")
    assert "--columns" not in ended.err


@pytest.mark.parametrize("option", ["--columns", "--budget"])
def test_an_option_is_given_once(cli: Cli, tmp_path: Path, option: str) -> None:
    write_csv(tmp_path / "x.csv", rows(), "a,b,c")
    assert_one_sentence(cli("fit", "x.csv", "--out", "m", option, "a", f"{option}=b"), f"{option} is given twice")


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("x.npy", np.zeros(5), "shape (5,): give rows (n, d) or images"),
        ("x.npy", np.zeros((0, 2)), "shape (0, 2)"),
        ("x.npy", np.array([["a"]]), "give an array of real numbers"),
        ("x.npy", np.array([[1.0, 2.0], [3.0, np.nan]]), "x.npy, row 1, column 1 (from 0) holds nan"),
        ("x.npy", np.array([[None]]), "x.npy is no npy file of numbers"),
        ("x.npz", {"a": np.zeros((4, 1)), "b": np.zeros(4)}, "x.npz holds a, b: give a file with one array"),
        ("x.npz", b"PK", "x.npz is no npz file"),
        ("x.npy", b"\x93NUMPY", "x.npy is no npy file"),
        ("x.xlsx", b"PK", "x.xlsx is none of .csv, .tsv, .npy, .npz"),
    ],
    ids=str,
)
def test_bad_arrays(cli: Cli, model: Path, tmp_path: Path, name: str, array: Any, words: str) -> None:
    if isinstance(array, bytes):
        (tmp_path / name).write_bytes(array)
    elif isinstance(array, dict):
        np.savez(tmp_path / name, **array)
    else:
        np.save(tmp_path / name, array)
    assert_one_sentence(cli("fit", name, "--out", "m"), words)
    assert_one_sentence(cli("score", model, name, "-o", "s.csv"), words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit", "no.csv", "--out", "m"], "there is no no.csv"),
        (["fit", "empty", "--out", "m"], "empty holds no .png"),
        (["fit", "x.csv", "--out", "m", "--budget", "huge"], "budget must be one of small"),
        (["fit", "x.csv", "--out", "m", "--score-by", "p"], "--score-by of fit is energy or profile, got p"),
        (["fit", "x.csv", "--out", "m", "--fpr", "2"], "fpr must be a false-alarm rate"),
        (["fit", "x.csv", "--out", "m", "--floor", "2"], "floor must be 'auto' or a noise sd from 0 up to 0.9"),
        (["fit", "x.csv", "--out", "m", "--seed", "-1"], "--seed must lie in 0.."),
        (["fit", "x.csv", "--out", "m", "--size", "3"], "--size is for folders"),
        (["score", "nowhere", "x.csv", "-o", "s.csv"], "nowhere"),
        (["score", "empty", "x.csv", "-o", "s.csv"], "empty holds no estimator"),
        (["score", "nope", "x.csv", "-o", "s.csv"], "there is no folder nope: name a folder that"),
        (["sample", "nope", "-o", "s.npy"], "there is no folder nope: name the --out folder"),
        (["fit", "x.csv", "--out", "m", "--score-by", "features"], "--score-by of fit is energy or profile"),
        (["score", "model", "x.csv", "-o", "s.csv", "--fpr", "0.001"], "needs at least 999 calibration points"),
        (["score", "model", "two.csv", "-o", "s.csv"], "two.csv has rows of shape (2,), and the model (3,)"),
        (["sample", "model", "-n", "0", "-o", "s.npy"], "-n must be at least 1"),
        (["sample", "model", "-n", "1000000000000", "-o", "s.npy"], "too many for one call"),
        (["sample", "empty", "-o", "s.npy"], "empty holds no daebm run or model"),
        (["inspect", "nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_bad_words(cli: Cli, model: Path, tmp_path: Path, words: list[str], said: str) -> None:
    write_csv(tmp_path / "x.csv", rows())
    write_csv(tmp_path / "two.csv", rows()[:, :2])
    (tmp_path / "empty").mkdir()
    before = tree(tmp_path)
    assert_one_sentence(cli(*words), said)
    assert tree(tmp_path) == before


def test_a_score_that_the_model_has_not_is_said(cli: Cli, model: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", rows())
    DAEBM.load(model).set_params(score_by="features").save(tmp_path / "m")
    for words in (["score", "m", "x.csv", "-o", "s.csv"], ["inspect", "m"]):
        assert_one_sentence(cli(*words), "this model has the scores energy, profile, and no features")


def test_a_damaged_model_is_said(cli: Cli, model: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", rows())
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    for words in (["score", model, "x.csv", "-o", "s.csv"], ["sample", model, "-o", "s.npy"], ["inspect", model]):
        assert_one_sentence(cli(*words), "model.safetensors is truncated or damaged")


def test_a_model_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = checkpoint.read

    def read(*args: Any) -> Any:
        reads.append(args)
        return real(*args)

    monkeypatch.setattr(checkpoint, "read", read)
    DAEBM.load(model)
    assert len(reads) == 1


def test_the_command_line_starts_without_scikit_learn() -> None:
    import subprocess

    code = "import sys, daebm.cli; sys.exit('sklearn' in sys.modules or 'scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_names_what_a_newcomer_needs(cli: Cli) -> None:
    for command, options in {
        "fit": ["DATA", "--out", "--fpr", "--budget", "--score-by", "--columns", "--size"],
        "score": ["MODEL", "DATA", "-o", "--overwrite"],
        "sample": ["MODEL", "-n", "-o"],
        "inspect": ["MODEL", "-o"],
    }.items():
        out = re.sub(r"\s+", " ", cli(command, "--help").out)
        assert all(option in out for option in options), out


def test_a_column_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(InputError, match="--columns names 'a' twice"):
        tables.open_data(tmp_path / "x.csv", ["a", "b", "a"])


def test_large_rows_are_refused_before_all_of_them_are_read(tmp_path: Path) -> None:
    read = []

    def batches() -> Iterator[tables.Batch]:
        for k in range(5):
            read.append(k)
            yield tables.Batch(np.zeros((1, 1, 100, 100)), [])

    with pytest.raises(InputError, match="pictures has 10000 numbers, and at most 4096 are practical"):
        tables.whole(tmp_path / "pictures", tables.Data([], batches()))
    assert read == [0]


def test_columns_belong_to_csv_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", rows())
    with pytest.raises(InputError, match="--columns chooses from a csv file"):
        tables.open_data(tmp_path / "x.npy", ["a"])
