"""Whatever goes in, a correct answer or a clear error comes out: never NaN, a hang, a traceback or half of a model.

300 examples in `make test` and 3,000 in `make test-full`, the same ones in every run.
"""

import io
import math
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from daebm import DAEBM, Config, DaebmError, recipe
from test_cli import call

pytestmark = pytest.mark.filterwarnings("ignore")  # of a fit on a handful of rows there is much to warn
TINY = {
    "iterations": 3,
    "checkpoint_every": 3,
    "log_every": 3,
    "warm_up": 0,
    "width": 8,
    "hidden": 1,
    "batch": 2,
    "store": 20,
}
tally: Counter[str] = Counter()
often = pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])


def fuzz(examples: int, times: int, *strategies: Any) -> Callable[[Callable[..., None]], None]:
    """Run a check on so many examples, at once."""

    def run(check: Callable[..., None]) -> None:
        profile = settings(
            max_examples=examples * times,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        tally.clear()
        profile(given(*strategies)(check))()
        # A fuzz that is always refused, or never, looks at half of what it should.
        assert tally["answered"] > examples * times / 20 and tally["refused"] > examples * times / 20, tally

    return run


numbers = st.one_of(
    st.floats(-100, 100),
    st.integers(-3, 3).map(float),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, 1e-320, 5e-324, 1e38, 0.0, -0.0]),
)
tame = st.one_of(st.floats(-10, 10), st.integers(-3, 3).map(float))


def tables(elements: Any, least: int = 0, most: int = 24) -> Any:
    shape = st.tuples(st.integers(least, most), st.integers(least and 1, 4))
    return shape.flatmap(lambda s: arrays.arrays(np.float64, s, elements=elements))


odd_arrays = st.one_of(
    arrays.arrays(np.float64, arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5), elements=numbers),
    arrays.arrays(
        st.sampled_from([np.int8, np.uint8, np.bool_, np.float16, np.complex64, "U3", "datetime64[s]"]),
        arrays.array_shapes(min_dims=1, max_dims=3, max_side=6),
    ),
    st.sampled_from([None, "rows", 3, [], [[]], [[1.0], [1.0, 2.0]], {"a": 1}, [["a", "b"]] * 9, [[None, 1.0]] * 9]),
)
# No count of samples that would be right and take an hour.
whole = st.one_of(st.integers(-2, 9), st.integers(10**9, 10**30))
anything = st.one_of(st.none(), st.booleans(), whole, st.floats(), st.text(max_size=4), st.just([]))


def is_clear(error: BaseException) -> bool:
    """Ours, or one of the kinds that scikit-learn raises for input that is not usable; with something to read."""
    return isinstance(error, DaebmError | ValueError | TypeError) and len(str(error)) > 15


def answers(model: DAEBM, x: Any) -> None:
    """Scores without NaN and p-values within their range, that agree with each other and with the decisions."""
    scores, p = model.score_samples(x), model.p_values(x)
    tally["answered"] += 1
    assert scores.shape == p.shape == (len(x),)
    assert not np.isnan(scores).any() and (scores < np.inf).all()
    assert (p > 0).all() and (p <= 1).all()
    try:
        flags = model.predict(x)
    except DaebmError as error:
        assert "calibration points" in str(error)
    else:
        assert math.isfinite(model.offset_)
        np.testing.assert_array_equal(flags == -1, scores < model.offset_)


@pytest.fixture(scope="module")
def fitted() -> DAEBM:
    x = np.random.default_rng(0).standard_normal((40, 3))
    x[:, 2] = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return DAEBM(fpr=0.2, settings=TINY, random_state=0).fit(x)


@pytest.fixture(scope="module")
def saved(fitted: DAEBM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    fitted.save(folder)
    return folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def tiny_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line trains with, cut to the least."""
    real = recipe.choose

    def choose(z: Any, budget: str, floor: Any, seed: int, changes: Any = None) -> Any:
        return real(z, budget, floor, seed, TINY | (changes or {}))

    monkeypatch.setattr(recipe, "choose", choose)


@often
def test_fit_on_any_table(times: int) -> None:
    @fuzz(40, times, st.one_of(tables(tame, 4), tables(numbers)), st.sampled_from([0.5, 0.2, 0.01]))
    def check(x: np.ndarray, fpr: float) -> None:
        model = DAEBM(fpr=fpr, settings=TINY, random_state=0)
        try:
            model.fit(x)
        except Exception as error:
            tally["refused"] += 1
            assert is_clear(error), repr(error)
            assert not hasattr(model, "calibration_")
        else:
            answers(model, x)
            assert math.isfinite(model.log_normaliser_)


@often
def test_fit_on_any_object_with_any_parameter(times: int) -> None:
    good = np.random.default_rng(1).standard_normal((12, 2))
    usual = {"fpr": 0.5, "settings": TINY, "random_state": 0}
    # Whoever asks for 10^9 iterations or chains gets them, as far as time and memory go.
    small = anything.filter(lambda value: not isinstance(value, int) or value < 10)
    changes = {
        "fpr": st.one_of(st.floats(0, 1), anything),
        "score_by": st.one_of(st.sampled_from(["energy", "profile"]), anything),
        "budget": st.one_of(st.sampled_from(list(recipe.BUDGETS)), anything),
        "floor": st.one_of(st.floats(0, 1), st.just("auto"), anything),
        "random_state": st.one_of(st.none(), st.integers(0, 99), anything),
        "settings": st.one_of(
            st.sampled_from(sorted(Config.__dataclass_fields__)).flatmap(
                lambda name: small.map(lambda value: TINY | {name: value})
            ),
            anything.filter(lambda value: value is not None),  # None is the full recipe
        ),
    }
    changed = st.sampled_from(sorted(changes)).flatmap(lambda k: changes[k].map(lambda v: (good, usual | {k: v})))

    @fuzz(40, times, st.one_of(changed, changed, odd_arrays.map(lambda x: (x, usual))))
    def check(case: tuple[Any, dict[str, Any]]) -> None:
        x, parameters = case
        model = DAEBM(**parameters)
        try:
            model.fit(x)
        except Exception as error:
            tally["refused"] += 1
            assert is_clear(error), repr(error)
        else:
            answers(model, x)


@often
def test_score_anything(times: int, fitted: DAEBM) -> None:
    right = st.integers(0, 6).flatmap(lambda n: arrays.arrays(np.float64, (n, 3), elements=numbers))

    @fuzz(70, times, st.one_of(right, odd_arrays))
    def check(x: Any) -> None:
        try:
            answers(fitted, x)
        except AssertionError:
            raise
        except Exception as error:
            tally["refused"] += 1
            assert is_clear(error), repr(error)


@often
def test_sample_anything(times: int, fitted: DAEBM) -> None:
    @fuzz(30, times, st.one_of(st.integers(-1, 20), anything), st.one_of(st.none(), st.integers(0, 9), anything))
    def check(count: Any, state: Any) -> None:
        try:
            x = fitted.sample(count, state)
        except Exception as error:
            tally["refused"] += 1
            assert is_clear(error), repr(error)
        else:
            tally["answered"] += 1
            assert x.shape == (count, 3) and np.isfinite(x).all() and (x[:, 2] == 7).all()


# The command line, on files.

bad_cells = st.one_of(
    numbers.map(repr),
    st.sampled_from(["", " ", "x", '"', '"1"', "1,5", "NA", "nan", "-inf", "1e999", "0x1", "\0", "é", "1_0", "1\n2"]),
)
breaks = st.sampled_from([b"", b"", b"", b"\n", b"\n\n", b"1", b"\xff", b'"', b"\n1,2,3,4,5,6\n", b"\xef\xbb\xbf"])


@st.composite
def csv_files(draw: Any) -> bytes:
    """A table of good numbers, with or without a header and a faulty cell, and perhaps broken at some place."""
    x = draw(tables(tame, 4))
    rows = [[repr(v) for v in row] for row in x.tolist()]
    if draw(st.booleans()):
        row = draw(st.sampled_from(rows))
        row[draw(st.integers(0, len(row) - 1))] = draw(bad_cells)
    names = [[f"c{i}" for i in range(x.shape[1])]] if draw(st.booleans()) else []
    separator, ending = draw(st.sampled_from([",", ";", "\t"])), draw(st.sampled_from(["\n", "\r\n"]))
    text = ending.join(separator.join(row) for row in names + rows).encode()
    place = draw(st.integers(0, len(text)))
    return text[:place] + draw(breaks) + text[place:]


@st.composite
def array_files(draw: Any, zipped: bool) -> bytes:
    x = draw(st.one_of(tables(tame, 4), tables(numbers), odd_arrays.filter(lambda x: isinstance(x, np.ndarray))))
    buffer = io.BytesIO()
    np.savez(buffer, x) if zipped else np.save(buffer, x)
    content = bytearray(buffer.getvalue())
    if draw(st.integers(0, 3)) == 0:
        content[draw(st.integers(0, len(content) - 1))] ^= draw(st.integers(1, 255))
    return bytes(content[: -draw(st.sampled_from([0, 0, 0, 0, 1, 50])) or None])


files = st.one_of(
    st.tuples(st.sampled_from(["d.csv", "d.tsv", "D.CSV"]), csv_files()),
    st.tuples(st.just("d.npy"), array_files(False)),
    st.tuples(st.just("d.npz"), array_files(True)),
    st.tuples(st.sampled_from(["d.csv", "d.npy", "d.npz", "d.txt", "d"]), st.binary(max_size=60)),
)


def ended(capsys: pytest.CaptureFixture[str], *words: object) -> int:
    """The status; if it is not 0, one sentence was printed, beside notes."""
    capsys.readouterr()
    status = call(*words)
    err = [line for line in capsys.readouterr().err.splitlines() if "daebm: note:" not in line]
    if status:
        assert len(err) == 1 and err[0].startswith("daebm: ") and len(err[0]) > 30, err
    else:
        assert not err
    return status


def check_scores(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "score,p_value,flag" and len(lines) > 1
    for line in lines[1:]:
        score, p, flag = line.split(",")
        assert not math.isnan(float(score)) and 0 < float(p) <= 1 and flag in "01"


@often
@pytest.mark.usefixtures("tiny_recipe")
def test_fit_and_score_on_any_file(times: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @fuzz(50, times, files, st.sampled_from(["0.5", "0.5", "0.4", "0.1", "nan"]))
    def check(file: tuple[str, bytes], fpr: str) -> None:
        data, out, scores = folder / file[0], folder / "deep" / "model", folder / "s.csv"
        data.write_bytes(file[1])
        if ended(capsys, "fit", data, "--out", out, f"--fpr={fpr}"):
            tally["refused"] += 1
            assert not (folder / "deep").exists()
        else:
            tally["answered"] += 1
            DAEBM.load(out)
            if not ended(capsys, "score", out, data, "-o", scores):
                check_scores(scores)
                scores.unlink()
            shutil.rmtree(folder / "deep")
        assert list(folder.iterdir()) == [data]
        data.unlink()


@often
def test_score_any_file(times: int, saved: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = st.sampled_from([(), (), (), ("--fpr", "0.001"), ("--score-by", "x"), ("--columns", "1", "2", "1")])
    rows = st.lists(st.tuples(tame, numbers, st.sampled_from([7, 7, 7, 8])), min_size=1)
    mine = rows.map(lambda x: ("d.csv", "\n".join(",".join(map(repr, row)) for row in x).encode()))

    @fuzz(50, times, st.one_of(files, mine), options)
    def check(file: tuple[str, bytes], options: tuple[str, ...]) -> None:
        data, scores = folder / file[0], folder / "s.csv"
        data.write_bytes(file[1])
        refused = ended(capsys, "score", saved, data, "-o", scores, *options)
        tally["refused" if refused else "answered"] += 1
        if not refused:
            check_scores(scores)
            scores.unlink()
        assert list(folder.iterdir()) == [data]
        data.unlink()


@often
def test_sample_any_number_to_any_file(
    times: int, saved: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = st.sampled_from(["x.csv", "x.npy", "x.CSV", "x.png", "x", "no/x.csv"])

    counts = st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(max_value=0), st.integers(min_value=10**9))

    @fuzz(20, times, counts, names, st.sampled_from(["0", "5", "7", "-1", str(2**70)]))
    def check(count: int, name: str, seed: str) -> None:
        out = folder / name
        refused = ended(capsys, "sample", saved, f"--number={count}", "-o", out, f"--seed={seed}")
        tally["refused" if refused else "answered"] += 1
        if not refused:
            x = np.load(out) if out.suffix == ".npy" else np.loadtxt(out, delimiter=",", ndmin=2)
            assert x.shape == (count, 3) and np.isfinite(x).all()
            out.unlink()
        assert not list(folder.iterdir())
