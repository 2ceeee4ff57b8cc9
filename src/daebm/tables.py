"""Data files of one's own: tables in csv, npy and npz, and folders of pictures, a batch at a time.

A csv file is read line by line, an npy file is mapped into memory and pictures are opened when their turn comes, so
data of any size take the memory of one batch. Only an npz file is read as a whole.
"""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from daebm.errors import InputError
from daebm.images import picture, picture_files
from daebm.recipe import check_dimension
from daebm.units import Floats

BATCH = 1 << 17  # numbers that are held at once
SUFFIXES = (".csv", ".tsv", ".npy", ".npz")
SEPARATORS = ",;\t"


class Batch(NamedTuple):
    """Rows (n, d) or images (n, h, w) or (n, c, h, w), and for pictures their n paths below the folder."""

    x: Floats
    files: list[str]


class Data(NamedTuple):
    """Batches of a file, and the names of its columns if it has a header."""

    columns: list[str]
    batches: Iterator[Batch]


def open_data(path: Path, columns: Sequence[str] = (), size: int | None = None, fitted: bool = False) -> Data:
    """The data in a csv, tsv, npy or npz file or in a folder of pictures; every number of them finite.

    ``columns`` of a csv file are taken and others left alone, by their names or, without a header, by their numbers
    from 1. A first line is a header if a cell of it is a word, or if it counts 0, 1, 2, .. as pandas does for columns
    without names. ``size`` is for pictures: see `daebm.image_folder`. ``fitted`` columns are those of a model, which
    needs them all.
    """
    kind = "folder" if path.is_dir() else path.suffix.lower()
    if kind != "folder" and not path.is_file():
        raise InputError(f"there is no {path}: name a csv, npy or npz file or a folder of pictures")
    if kind != "folder" and kind not in SUFFIXES:
        raise InputError(f"{path} is none of {', '.join(SUFFIXES)} or a folder of pictures: convert it to one of them")
    if columns and kind not in (".csv", ".tsv"):
        raise InputError(f"--columns chooses from a csv file, and {path} is none: leave it out")
    if size is not None and kind != "folder":
        raise InputError(f"--size is for folders of pictures, and {path} is none: leave it out")
    if kind == "folder":
        return Data([], _pictures(path, size))
    if kind in (".csv", ".tsv"):
        return _csv(path, columns, fitted)
    return Data([], _array(path, kind))


def whole(path: Path, data: Data) -> Floats:
    """All rows at once, to be learned from: said before they fill the memory if they are too large for that."""
    parts = []
    for batch in data.batches:
        check_dimension(f"a row of {path}", math.prod(batch.x.shape[1:]))
        parts.append(batch.x)
    return np.concatenate(parts)


# Tables of text.


def _csv(path: Path, columns: Sequence[str], fitted: bool) -> Data:
    first = next(_lines(path), None)
    if first is None:
        raise InputError(f"{path} is empty: give a table with a row for each observation")
    named = _is_header(first[1])
    names = [name.strip() for name in first[1]] if named else [str(i + 1) for i in range(len(first[1]))]
    if "" in names:
        raise InputError(
            f"{path}, line {first[0]}: column {names.index('') + 1} has no name; an index of rows is no data, so leave "
            "it out (in pandas: to_csv(..., index=False)), or name the column"
        )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise InputError(f"{path}, line {first[0]}: two columns are called {twice[0]!r}: rename one of them")
    if missing := [name for name in columns if name not in names]:
        there = ", ".join(names[:20]) + (", .." if len(names) > 20 else "")
        todo = "add it, the model was fitted on it" if fitted else "add it or choose others (--columns)"
        raise InputError(f"{path} has no column {missing[0]!r}, only {there}: {todo}")
    if again := [name for i, name in enumerate(columns) if name in columns[:i]]:
        raise InputError(f"--columns names {again[0]!r} twice: name every column once")
    taken = [names.index(name) for name in columns] or list(range(len(names)))
    without = "" if fitted else ", or leave the column out (--columns)"
    return Data([names[i] for i in taken] if named else [], _csv_batches(path, names, taken, named, without))


def _is_header(cells: list[str]) -> bool:
    words = any(cell.strip() and _number(cell) is None for cell in cells)
    counted = cells[1:] if not cells[0].strip() else cells  # behind the name that pandas does not give an index
    return words or (len(cells) > 1 and counted == [str(i) for i in range(len(counted))])


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of every line; empty ones are allowed at the end only, where they can be no missing value."""
    empty = 0
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            start = file.read(1 << 16).splitlines()[:1]
            separator = max(SEPARATORS, key=start[0].count) if start else ","
            file.seek(0)
            reader = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    empty = empty or reader.line_num
                    continue
                if empty:
                    raise InputError(f"{path}, line {empty} is empty: fill it in or take it out")
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8 ({error.reason}): save it as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{path} cannot be read as csv ({error}): save it again, one row a line") from error


def _csv_batches(path: Path, names: list[str], taken: list[int], skip: bool, without: str) -> Iterator[Batch]:
    lines: list[tuple[int, list[str]]] = []
    most = max(1, BATCH // len(names))
    none = True
    for i, (line, cells) in enumerate(_lines(path)):
        if i == 0 and skip:
            continue
        if len(cells) != len(names):
            raise InputError(
                f"{path}, line {line} has {len(cells)} cells, and the first one has {len(names)}: make them equal"
            )
        lines.append((line, cells))
        if len(lines) == most:
            yield Batch(_numbers(path, names, taken, lines, without), [])
            lines, none = [], False
    if lines:
        yield Batch(_numbers(path, names, taken, lines, without), [])
    elif none:
        raise InputError(f"{path} has a header and no rows: give a row for each observation")


def _numbers(
    path: Path, names: list[str], taken: list[int], lines: list[tuple[int, list[str]]], without: str
) -> Floats:
    """The cells that are taken; ``without`` says that the column could be left out, if it could."""
    try:
        x = np.array([[float(cells[i]) for i in taken] for _line, cells in lines])
        if np.isfinite(x).all():
            return x
    except ValueError:
        pass
    for line, cells in lines:
        for i in taken:
            value = _number(cells[i])
            where = f"{path}, line {line}, column {names[i]!r}"
            if not cells[i].strip():
                raise InputError(f"{where} is empty: fill it in, take the line out{without}")
            if value is None:
                raise InputError(
                    f"{where} holds {_short(cells[i])}, which is no number: write it as one (0.5, not 0,5; a category "
                    f"as 0 and 1){without}"
                )
            if not math.isfinite(value):
                raise InputError(f"{where} holds {_short(cells[i])}: fill in a finite number or take the line out")
    raise AssertionError("some cell was no finite number")


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= 30 else cell[:27] + "...")


# Arrays.


def _array(path: Path, kind: str) -> Iterator[Batch]:
    array = _mapped(path) if kind == ".npy" else _unzipped(path)
    if array.ndim not in (2, 3, 4) or array.size == 0:
        raise InputError(
            f"{path} holds an array of shape {array.shape}: give rows (n, d) or images (n, h, w) or (n, c, h, w), "
            "n at least 1"
        )
    if array.dtype.kind not in "fiub":
        raise InputError(f"{path} holds {array.dtype}: give an array of real numbers")
    rows = max(1, BATCH // math.prod(array.shape[1:]))
    for i in range(0, len(array), rows):
        with np.errstate(over="ignore"):
            x = np.array(array[i : i + rows], dtype=np.float64)
        if not np.isfinite(x).all():
            place = np.argwhere(~np.isfinite(x))[0]
            column = ", ".join(map(str, place[1:]))
            raise InputError(
                f"{path}, row {i + place[0]}, column {column} (from 0) holds {x[tuple(place)]}: fill in a finite "
                "number or leave the row out"
            )
        yield Batch(x, [])


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises whatever it led to
        raise InputError(f"{path} is no npy file of numbers ({_line(error)}): write it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} is an npz file by its content: give it that suffix")
    return array


def _unzipped(path: Path) -> np.ndarray[Any, Any]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is no npz file: write it with numpy.savez")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            chosen = "X" if "X" in names else names[0] if len(names) == 1 else None
            array = arrays[chosen] if chosen else None
    except Exception as error:  # as above
        raise InputError(f"{path} is no npz file of numbers ({_line(error)}): write it with numpy.savez") from error
    if not isinstance(array, np.ndarray):
        held = ", ".join(names) or "nothing"
        raise InputError(f"{path} holds {held}: give a file with one array, or with one called X")
    return array


def _line(error: Exception) -> str:
    """numpy's first sentence: the second one may advise to load what we refuse."""
    return str(error).split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__


# Pictures.


def _pictures(path: Path, size: int | None) -> Iterator[Batch]:
    files = picture_files(path)
    first = picture(files[0], size).shape
    most = max(1, BATCH // math.prod(first))
    for i in range(0, len(files), most):
        images = []
        for file in files[i : i + most]:
            image = picture(file, size)
            if image.shape != first:
                todo = (
                    "convert it to grey or RGB like that" if image.shape[0] != first[0] else "resize it or give --size"
                )
                raise InputError(
                    f"{file} has channels, height and width {image.shape}, and {files[0].name} {first}: {todo}"
                )
            images.append(image)
        yield Batch(np.stack(images).astype(np.float64), [str(f.relative_to(path)) for f in files[i : i + most]])
