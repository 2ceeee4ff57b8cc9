"""The command line for data of one's own: daebm fit, score, sample, inspect."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from daebm import checkpoint, conformal, tables
from daebm.errors import InputError
from daebm.images import contact_sheet
from daebm.model import load, model_folder
from daebm.state import holds_state
from daebm.units import Floats

if TYPE_CHECKING:
    from daebm.estimator import DAEBM

REPORT = "report.html"
FITTED = ("energy", "profile")  # scores of what `daebm fit` trains
OTHER_UNITS = 20  # times narrower than the data of the model are data in other units
MANY_ROWS, NEARLY_ALL = 20, 0.9  # flagged: rather a slip than so many outliers
COLUMNS_SHOWN = 10
LEAST_ROWS = 4  # two to train on, one to watch by and one to calibrate on
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
ModelName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
DataPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
Out = Annotated[Path, tyro.conf.arg(metavar="FILE", aliases=["-o"])]
Columns = Annotated[list[str], tyro.conf.arg(metavar="NAME")]
Size = Annotated[int | None, tyro.conf.arg(metavar="PIXELS")]


@dataclass
class Fit:
    """Learn what is normal from a csv, npy or npz file or a folder of pictures, and calibrate a detector on it."""

    data: DataPath
    """A table with a row for each observation, images (n, h, w) or (n, c, h, w) in an npy file, or a folder."""
    out: Annotated[Path, tyro.conf.arg(metavar="MODEL", aliases=["-o"])]
    """Folder for the model."""
    fpr: float = 0.01
    """False-alarm rate: the share of normal rows that will be flagged."""
    budget: str = "medium"
    """small, medium or large: how long to train."""
    score_by: str = "energy"
    """energy (the log density) or profile (energies and slopes at many noise levels)."""
    floor: float | None = None
    """Noise that is added to the data at the lowest level, in sds; chosen from the data when not given."""
    columns: Columns = field(default_factory=list)
    """Columns of the csv file to take, by name or, without a header, by number from 1; all when not given."""
    size: Size = None
    """Crop pictures to their central square and resize it to so many pixels a side."""
    seed: int = 0
    """Everything random follows from it."""
    overwrite: Flag = False
    """Replace the model in that folder."""

    def __call__(self) -> None:
        from daebm.estimator import DAEBM

        _check_seed(self.seed)
        if self.score_by not in FITTED:
            raise InputError(f"--score-by of fit is {' or '.join(FITTED)}, got {self.score_by}")
        with _model_folder(self.out, self.overwrite):
            data = tables.open_data(self.data, self.columns, self.size)
            x = tables.whole(self.data, data)
            if len(x) < LEAST_ROWS:
                raise InputError(f"{self.data} has {len(x)} rows, too few to learn from: give at least {LEAST_ROWS}")
            print(f"{self.data}: {_what(x)}{_columns_said(self.data, data.columns)}")
            detector = DAEBM(
                score_by=self.score_by,
                fpr=self.fpr,
                budget=self.budget,
                floor="auto" if self.floor is None else self.floor,
                random_state=self.seed,
                verbose=1,
            )
            with _warnings_as_notes():
                detector.fit(x)
            if data.columns:
                detector.feature_names_in_ = np.array(data.columns, dtype=object)
            _note(*detector.concerns())
            detector.save(self.out)
            (self.out / REPORT).unlink(missing_ok=True)  # on the model that was there before
        print(_facts(detector))
        print(f"model: {self.out}")


@dataclass
class Score:
    """Write score, p-value and flag of every row or picture to a csv file; larger scores are more normal.

    A flag of 1 says that the p-value is at most the false-alarm rate.
    """

    model: ModelName
    """Folder that `daebm fit` has written, or fashion-mnist or mnist, which come with this package."""
    data: DataPath
    """Like the data of `daebm fit`: columns of a csv file are found by their names; for those two (n, 28, 28) or
    pictures of that size, in grey levels from 0 to 255."""
    out: Out
    """The csv file to write."""
    fpr: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None
    """Another false-alarm rate than in fit."""
    score_by: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Another score than the model's own (`daebm inspect` names it): energy, profile, or features if it has them."""
    columns: Columns = field(default_factory=list)
    """Columns of a csv file without a header to take, by number from 1, as in fit."""
    size: Size = None
    """Crop and resize pictures, as in fit."""
    overwrite: Flag = False
    """Replace the file if it is there."""

    def __call__(self) -> None:
        if self.out.exists() and self.data.exists() and self.out.samefile(self.data):
            raise InputError(f"{self.out} is the data: choose another --out")
        _check_file(self.out, (".csv",), self.overwrite)
        detector = _detector(self.model)
        changed = {name: v for name in ("fpr", "score_by") if (v := getattr(self, name)) is not None}
        detector.set_params(**changed)
        _offset = detector.offset_  # a rate that cannot be had is said before anything is read
        data = self._open(detector)
        rows = flagged = 0
        what = "rows"
        with checkpoint.replacing(self.out) as file:
            file.write(b"file,score,p_value,flag\n" if self.data.is_dir() else b"score,p_value,flag\n")
            for batch in data.batches:
                flags, lines = _judged(detector, self.data, batch)
                if not rows:
                    _note_other_units(detector, self.data, batch.x)
                    what = "images" if batch.x.ndim > 2 else "rows"
                file.write(lines)
                rows, flagged = rows + len(flags), flagged + int(flags.sum())
        if rows >= MANY_ROWS and flagged >= NEARLY_ALL * rows:
            _note("nearly everything is flagged: check that units and the order of columns are those of fit")
        rate = f"a false-alarm rate of {detector.fpr:g}"
        print(f"{rows} {what}, {flagged} flagged at {rate} by {detector.score_by}: {self.out}")

    def _open(self, detector: DAEBM) -> tables.Data:
        fitted = [str(name) for name in getattr(detector, "feature_names_in_", [])]
        if not fitted or not self.data.is_file():
            return tables.open_data(self.data, self.columns, self.size)
        data = tables.open_data(self.data, (), self.size)
        if not data.columns:  # without a header there is nothing but the order to go by
            return tables.open_data(self.data, self.columns, self.size)
        if self.columns:
            raise InputError(f"{self.data} has a header, and its columns are found by name: leave --columns out")
        return tables.open_data(self.data, fitted, self.size, fitted=True)


@dataclass
class Sample:
    """Draw new rows or pictures from a model, started from noise; values may lie a little beyond those of the data."""

    model: ModelName
    """Folder that `daebm fit` or `daebm run` has written, or fashion-mnist or mnist, which come with this package."""
    out: Out
    """The file to write: .npy, .csv for tables, or .png for images."""
    count: Annotated[int, tyro.conf.arg(name="number", metavar="N", aliases=["-n"])] = 64
    """How many."""
    seed: int | None = None
    """Another number, other samples; the same ones in every call without it."""
    overwrite: Flag = False
    """Replace the file if it is there."""

    def __call__(self) -> None:
        from daebm.estimator import DAEBM, NoEstimatorError

        _check_file(self.out, (".npy", ".csv", ".png"), self.overwrite)
        if self.count < 1:
            raise InputError(f"-n must be at least 1, got {self.count}")
        _check_seed(self.seed or 0)
        names: list[str] = []
        print(f"drawing {self.count} from noise ..", flush=True)  # images take minutes on a CPU
        try:
            detector = DAEBM.load(self.model)
        except NoEstimatorError:  # a bare model, if any: of images in [-1, 1]
            model = load(self.model)
            _check_format(self.out, model.event)
            x, seen = model.sample(self.count, self.seed or 0), np.array([-1.0, 1.0])
        else:
            _check_format(self.out, detector.units_.event)
            x, seen = detector.sample(self.count, self.seed), detector.examples_["energy"]
            names = [str(name) for name in getattr(detector, "feature_names_in_", [])]
        checkpoint.write_atomically(self.out, _encoded(self.out, x, names, seen))
        print(f"{len(x)} samples of shape {tuple(x.shape[1:])}: {self.out}")


@dataclass
class Inspect:
    """Report on a fitted model: training, label mixing, energies, calibration, most and least normal examples."""

    model: ModelName
    """Folder that `daebm fit` has written, or fashion-mnist or mnist, which come with this package."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", aliases=["-o"])] = None
    """The html file to write; MODEL/report.html when not given, MODEL-report.html for a name."""
    overwrite: Flag = False
    """Replace the file if it is there."""

    def __call__(self) -> None:
        from daebm import inspection

        detector = _detector(self.model)
        own = model_folder(self.model) == Path(self.model)  # what comes with the package stays as it is
        out = self.out or (Path(self.model) / REPORT if own else Path(f"{self.model}-{REPORT}"))
        _check_file(out, (".html",), self.overwrite)
        with _names_known():
            inspection.write(out, detector, self.model)
        print(_facts(detector))
        _note(*detector.concerns())
        print(f"report: {out}")


def _detector(name: str) -> DAEBM:
    from daebm.estimator import DAEBM

    if holds_state(model_folder(name)):
        raise InputError(f"{name} holds a run of `daebm run`, which has no calibration: name a folder of `daebm fit`")
    return DAEBM.load(name)


def _facts(detector: DAEBM) -> str:
    from daebm import inspection

    rows = inspection.facts(detector)
    width = max(len(title) for title, _value in rows)
    return "\n".join(f"  {title:<{width}}  {value}" for title, value in rows)


@contextlib.contextmanager
def _model_folder(folder: Path, overwrite: bool) -> Iterator[None]:
    """A folder that a model may be written to, made before an hour of training and gone again if that fails."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another --out")
    there = folder.exists()
    if checkpoint.exists(folder, "model"):
        if not overwrite:
            raise InputError(f"{folder} already holds a model: add --overwrite or choose another --out")
    elif there and any(path.suffix != ".partial" for path in folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no daebm model: choose another --out")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: someone else's
            for path in made:
                path.rmdir()
        raise


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:  # what numpy takes
        raise InputError(f"--seed must lie in 0..{2**32 - 1}, got {seed}")


def _check_file(path: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Whether a file may be written, said before the work is done."""
    if path.suffix.lower() not in suffixes:
        raise InputError(f"{path} must end in {' or '.join(suffixes)}: choose another --out")
    if path.is_dir():
        raise InputError(f"{path} is a folder: choose another --out")
    if path.exists() and not overwrite:
        raise InputError(f"{path} is there already: add --overwrite or choose another --out")
    check_parent(path)


def check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}: make it or choose another --out")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write to the folder {path.parent}: choose another --out")


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """What Python would print with a file and a line of code, as a sentence; an error comes alone.

    What a fit leaves you to know is said later, when columns have their names.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    ours = (each for each in caught if issubclass(each.category, UserWarning))
    _note(*dict.fromkeys(str(each.message) for each in ours if not issubclass(each.category, ConvergenceWarning)))


def _note(*sentences: str) -> None:
    for sentence in sentences:
        print(f"daebm: note: {sentence}", file=sys.stderr)


@contextlib.contextmanager
def _names_known() -> Iterator[None]:
    """scikit-learn warns of arrays without names of columns; here they were matched when the file was opened."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names", UserWarning)
        yield


def _judged(detector: DAEBM, path: Path, batch: tables.Batch) -> tuple[np.ndarray[Any, Any], bytes]:
    """Flags of a batch, and its lines of the csv file."""
    event, x = detector.units_.event, detector.units_.shaped(batch.x)
    if x.shape[1:] != event:
        names = ", ".join(map(str, getattr(detector, "feature_names_in_", [])[:COLUMNS_SHOWN]))
        what = f"{path} has rows of shape {batch.x.shape[1:]}, and the model {event}"
        hint = " (--size)" if batch.files else f" ({names})" if names else ""
        raise InputError(f"{what}: give what fit had{hint}")
    with _names_known():
        scores = detector.score_samples(x)
    flags = scores < detector.offset_
    p = conformal.p_values(detector.calibration_[detector.score_by], scores)
    columns: list[Any] = [batch.files] if batch.files else []
    columns += [scores.tolist(), p.tolist(), flags.astype(int).tolist()]
    return flags, _csv(zip(*columns, strict=True))


def _note_other_units(detector: DAEBM, path: Path, x: Floats) -> None:
    """Images in [0, 1] are all outliers to a model of grey levels, and nothing but this would say why."""
    seen = detector.examples_["energy"]
    if not detector.units_.table and x.size and np.ptp(x) * OTHER_UNITS < np.ptp(seen):
        _note(
            f"values of {path} lie in {x.min():g}..{x.max():g}, and those that the model was fitted on in "
            f"{seen.min():g}..{seen.max():g}: give both in the same units"
        )


def _what(x: Floats) -> str:
    if x.ndim > 2:
        return f"{len(x)} images of shape {tuple(x.shape[1:])}"
    return f"{len(x)} rows of {x.shape[1]} column{'s' * (x.shape[1] != 1)}"


def _columns_said(path: Path, names: Sequence[str]) -> str:
    if path.suffix.lower() not in (".csv", ".tsv"):
        return ""
    more = ", .." if len(names) > COLUMNS_SHOWN else ""
    return f" ({', '.join(names[:COLUMNS_SHOWN])}{more})" if names else ", no header"


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _encoded(path: Path, x: Floats, names: list[str], seen: Floats) -> bytes:
    """Samples in the format that the name of a file asks for."""
    kind = path.suffix.lower()
    if kind == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, x)
        return buffer.getvalue()
    return contact_sheet(x, seen) if kind == ".png" else _csv([*([names] if names else []), *x.tolist()])


def _check_format(path: Path, event: tuple[int, ...]) -> None:
    """Said before minutes of sampling."""
    fitting = ".csv" if len(event) == 1 else ".png"
    if path.suffix.lower() not in (fitting, ".npy"):
        raise InputError(f"{path}: samples of shape {event} go to {fitting} or .npy: choose another --out")
