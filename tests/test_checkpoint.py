"""A checkpoint is read back exactly, or refused in one sentence; a failed write never costs the state before it."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from daebm import checkpoint
from daebm.checkpoint import FORMAT, read, write
from daebm.config import Config
from daebm.data import Dataset
from daebm.errors import CheckpointError, DaebmError
from daebm.model import load
from daebm.state import CHECKPOINT, STATE
from daebm.training import train

NAME = "state"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
FACTS = {"iteration": 12, "seconds": 0.1 + 0.2, "config": {"name": "Ö", "list": [1, 2]}, "nothing": None}


def small_tensors() -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(6.0).reshape(2, 3) / 7, "t": torch.tensor([3, 0, 1])}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small checkpoint in it."""
    write(tmp_path, NAME, small_tensors(), FACTS)
    return tmp_path


def truth_file(folder: Path) -> Path:
    return folder / f"{NAME}.safetensors"


def refused(folder: Path, *words: str) -> str:
    """Reading raises CheckpointError whose message is one sentence that holds the words."""
    with pytest.raises(CheckpointError) as caught:
        read(folder, NAME)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def tiny_run(folder: Path | None, resume: bool = False, **changes: object) -> None:
    values: dict[str, object] = {
        "network": "relu-mlp",
        "width": 4,
        "hidden": 1,
        "iterations": 4,
        "batch": 4,
        "store": 8,
        "steps": 1,
        "checkpoint_every": 2,
    }
    data = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    config = Config("test", "persistent", "test", **(values | changes))
    train(config, Dataset("test", data, data), folder, resume)


# What is written comes back.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    write(tmp_path, NAME, {"value": value}, {})
    tensors, facts = read(tmp_path, NAME)
    assert tensors["value"].dtype == dtype
    assert tensors["value"].shape == value.shape
    assert torch.equal(tensors["value"], value)
    assert facts == {"format": FORMAT}


def test_odd_floats_come_back(tmp_path: Path):
    """A state may hold infinities or NaN; they are the state's business, not the file's."""
    value = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    write(tmp_path, NAME, {"value": value}, {})
    back = read(tmp_path, NAME)[0]["value"]
    assert torch.equal(back.view(torch.int32), value.view(torch.int32))


def test_views_are_stored_as_what_they_show(tmp_path: Path):
    """A transposed tensor must not come back in memory order, nor drag its whole storage along."""
    base = torch.arange(12.0).reshape(3, 4)
    views = {"transposed": base.T, "part": base[1:, ::2], "again": base}
    write(tmp_path, NAME, views, {})
    back, _facts = read(tmp_path, NAME)
    assert all(torch.equal(back[key], value) for key, value in views.items())


def test_facts_come_back(folder: Path):
    assert read(folder, NAME)[1] == {"format": FORMAT, **FACTS}


def test_the_json_beside_it_says_the_same(folder: Path):
    beside = json.loads((folder / f"{NAME}.json").read_text())
    beside.pop("sha256")
    assert beside == {"format": FORMAT, **FACTS}


def test_a_second_write_replaces_the_first_and_leaves_no_other_file(folder: Path):
    write(folder, NAME, {"x": torch.ones(1)}, {"iteration": 13})
    tensors, facts = read(folder, NAME)
    assert set(tensors) == {"x"}
    assert facts["iteration"] == 13
    assert sorted(p.name for p in folder.iterdir()) == [f"{NAME}.json", f"{NAME}.safetensors"]


def test_what_was_read_does_not_hang_on_the_file(folder: Path):
    """A file may be mapped into memory instead of read; whoever then writes into it would change a running state."""
    tensors, _facts = read(folder, NAME)
    with open(truth_file(folder), "r+b") as file:
        file.write(bytes(truth_file(folder).stat().st_size))
    assert all(torch.equal(tensors[key], value) for key, value in small_tensors().items())


def test_no_pickle(tmp_path: Path):
    """Loading a file must not run code from it: nothing in the package may unpickle, and no file may be a pickle."""
    source = "".join(path.read_text() for path in Path(checkpoint.__file__).parent.rglob("*.py"))
    for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True", "joblib"):
        assert word not in source
    tiny_run(tmp_path)
    files = {path.suffix: path for path in (tmp_path / CHECKPOINT).iterdir()}
    assert files.keys() == {".safetensors", ".json"}
    json.loads(files[".json"].read_text())
    header = int.from_bytes(files[".safetensors"].read_bytes()[:8], "little")  # of JSON, whatever its first byte is
    json.loads(files[".safetensors"].read_bytes()[8 : 8 + header])


# What is damaged is refused.


def test_a_missing_folder_is_refused(tmp_path: Path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int):
    path = truth_file(folder)
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, str(path), "damaged")


def test_an_appended_byte_is_refused(folder: Path):
    path = truth_file(folder)
    path.write_bytes(path.read_bytes() + b"\0")
    refused(folder, str(path))


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80])
def test_a_flipped_bit_is_refused_wherever_it_is(folder: Path, mask: int):
    """In the header, in the facts, in a tensor, in the checksum: each byte of the file in turn."""
    path = truth_file(folder)
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= mask
        path.write_bytes(bytes(bad))
        try:
            tensors, facts = read(folder, NAME)
        except CheckpointError as error:
            assert "\n" not in str(error), position
        else:
            # Only the spelling may have changed (the padding of the header, say), never a value.
            assert facts == {"format": FORMAT, **FACTS}, position
            assert all(torch.equal(tensors[k], v) for k, v in small_tensors().items()), position


def test_facts_edited_in_the_tensor_file_are_refused(folder: Path):
    path = truth_file(folder)
    content = path.read_bytes()
    assert content.count(b'\\"iteration\\": 12') == 1
    path.write_bytes(content.replace(b'\\"iteration\\": 12', b'\\"iteration\\": 99'))
    refused(folder, str(path), "checksum")


def test_edited_json_is_refused(folder: Path):
    """Whoever edits the readable copy would otherwise believe that it counts."""
    beside = folder / f"{NAME}.json"
    beside.write_text(beside.read_text().replace('"iteration": 12', '"iteration": 99'))
    refused(folder, str(beside), "edited")


@pytest.mark.parametrize("text", ["", "{", "[]", "12", '"x"', "null"])
def test_json_that_is_not_ours_is_refused(folder: Path, text: str):
    beside = folder / f"{NAME}.json"
    beside.write_text(text)
    refused(folder, str(beside))


def test_json_from_the_state_before_is_no_error(folder: Path):
    """A run killed between the two renames leaves a newer tensor file beside an older JSON."""
    old = (folder / f"{NAME}.json").read_bytes()
    write(folder, NAME, small_tensors(), {"iteration": 13})
    (folder / f"{NAME}.json").write_bytes(old)
    assert read(folder, NAME)[1]["iteration"] == 13


def test_json_may_be_missing(folder: Path):
    (folder / f"{NAME}.json").unlink()
    assert read(folder, NAME)[1]["iteration"] == 12


def test_a_newer_format_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "FORMAT", FORMAT + 1)
    write(folder, NAME, small_tensors(), FACTS)
    monkeypatch.undo()
    refused(folder, f"format {FORMAT + 1}", "newer")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"daebm": "{}"}, {"daebm": "not JSON"}, {"daebm": "[]"}])
def test_a_foreign_safetensors_file_is_refused(tmp_path: Path, metadata: dict[str, str] | None):
    save_file({"weights": torch.ones(3)}, truth_file(tmp_path), metadata)
    refused(tmp_path, str(truth_file(tmp_path)))


def test_a_folder_in_its_place_is_refused(tmp_path: Path):
    truth_file(tmp_path).mkdir()
    refused(tmp_path, str(truth_file(tmp_path)))


# A run's checkpoint in particular.


@pytest.mark.parametrize("key, value", [("learning_rate", 0.5), ("iterations", 6), ("milestones", (0.5,)), ("seed", 1)])
def test_resume_under_other_settings_names_the_setting(tmp_path: Path, key: str, value: object):
    tiny_run(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        tiny_run(tmp_path, resume=True, **{key: value})
    assert key in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("shape", [(30, 2), (10, 2), (20, 3)])
def test_resume_on_other_data_is_refused(tmp_path: Path, shape: tuple[int, int]):
    """The order of the data is part of the state; on other data it means nothing, so 'bit for bit' would be a lie."""
    tiny_run(tmp_path, iterations=4)
    config = Config.from_json(read(tmp_path / CHECKPOINT, STATE)[1]["config"])
    with pytest.raises(DaebmError):
        train(config, Dataset("test", torch.ones(shape), torch.ones(shape)), tmp_path, resume=True)


def test_a_setting_this_version_does_not_know_is_named(tmp_path: Path):
    tiny_run(tmp_path)
    tensors, facts = read(tmp_path / CHECKPOINT, STATE)
    write(tmp_path / CHECKPOINT, STATE, tensors, facts | {"config": facts["config"] | {"warp": 9}})
    with pytest.raises(DaebmError, match="warp"):
        load(tmp_path)


# A write that fails.


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_full_disk_leaves_the_old_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, failing: int):
    """Whether the first file (tensors) or the second (JSON) fails, what is there can be read and is one whole state."""
    count, real = 0, getattr(os, call)

    def full(*args: object) -> object:
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write(folder, NAME, {"weights": torch.zeros(2, 3)}, {"iteration": 13})
    monkeypatch.undo()
    tensors, facts = read(folder, NAME)
    if failing == 1:
        assert facts["iteration"] == 12
        assert torch.equal(tensors["weights"], small_tensors()["weights"])
    else:
        assert facts["iteration"] == 13
        assert torch.equal(tensors["weights"], torch.zeros(2, 3))


def test_a_write_cut_short_is_invisible(folder: Path):
    """The half-written file of a killed run lies under another name, and the next write takes it over."""
    partial = folder / f"{NAME}.safetensors.partial"
    partial.write_bytes(truth_file(folder).read_bytes()[:50])
    assert read(folder, NAME)[1]["iteration"] == 12
    write(folder, NAME, small_tensors(), {"iteration": 13})
    assert read(folder, NAME)[1]["iteration"] == 13
    assert not partial.exists()


def test_the_file_is_plain_safetensors(folder: Path):
    """Other tools can read the tensors without daebm."""
    assert torch.equal(load_file(truth_file(folder))["t"], torch.tensor([3, 0, 1]))
