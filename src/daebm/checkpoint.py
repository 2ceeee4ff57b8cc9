"""States and models on disk: one safetensors file that is complete in itself, and the same facts as JSON beside it.

A write is atomic: the new file is finished under another name and then renamed over the old one, so a reader (or a
run killed at any moment) finds the old state or the new one. Never pickle: loading a file runs no code of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from daebm.errors import CheckpointError

FORMAT = 1


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` in one step: a kill before that leaves what there was."""
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:  # a full disk, say, or Ctrl-C: give the space back
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # that of a write names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``path``, new or empty, in one step; nothing is left if that fails."""
    path = path.absolute()  # "." has no name
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")  # of nobody else
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_atomically(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): restore it or start over") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: restore it or start over")
    return value


def write(folder: Path, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write ``folder/name.safetensors`` (the truth) and ``folder/name.json`` (the same facts, for people)."""
    facts = {"format": FORMAT, **facts}
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    metadata = {"daebm": text, "sha256": _digest(text, tensors)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.safetensors", save(tensors, metadata))
    write_json(folder / f"{name}.json", {"sha256": metadata["sha256"], **facts})


def exists(folder: Path, name: str) -> bool:
    return (folder / f"{name}.safetensors").exists()


def read(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write` wrote, refusing files that are missing, truncated, edited or from a newer format."""
    path = folder / f"{name}.safetensors"
    if not path.exists():
        raise CheckpointError(f"there is no {path}: name a folder that holds a daebm run or model")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned, as safetensors maps the file: a state must not change with it.
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}): restore a copy or start over") from error
    if "daebm" not in metadata:
        raise CheckpointError(f"{path} was not written by daebm: name a folder that holds a daebm run or model")
    facts: dict[str, Any]
    try:
        facts = json.loads(metadata["daebm"])
        newer = facts["format"] > FORMAT
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged (its facts cannot be read): restore a copy or start over") from error
    if newer:
        raise CheckpointError(
            f"{path} has format {facts['format']}, and this daebm reads up to {FORMAT}: install a newer daebm"
        )
    if _digest(metadata["daebm"], tensors) != metadata.get("sha256"):
        raise CheckpointError(f"{path} was edited or damaged (its checksum differs): restore a copy or start over")
    beside = folder / f"{name}.json"
    if beside.exists():
        copy = read_json(beside)
        # A run killed between the two renames leaves the JSON of the state before; that one says so by its checksum.
        if copy.pop("sha256", None) == metadata["sha256"] and copy != facts:
            raise CheckpointError(f"{beside} was edited by hand: delete it, {path.name} holds the same facts")
    return tensors, facts


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {tuple(tensors[key].shape)}".encode())
        digest.update(tensors[key].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
