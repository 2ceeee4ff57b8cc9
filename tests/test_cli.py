"""The command line: what it writes, that it never destroys anything unasked, and that bad input is one sentence."""

import contextlib
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import daebm
from daebm import checkpoint, report, runs
from daebm.cli import main
from daebm.config import Config, explained, resolve
from daebm.data import Dataset
from daebm.errors import DaebmError, InputError
from daebm.experiments import EXPERIMENTS, gaussian_1d
from daebm.methods import METHODS
from daebm.state import CHECKPOINT, STATE

TINY = {
    "iterations": 6,
    "steps": 2,
    "checkpoint_every": 3,
    "log_every": 2,
    "long_run_chains": 10,
    "long_run_steps": 5,
    "post_chains": 20,
    "post_transitions": 5,
}
MADE = {"config.json", "metrics.jsonl", "summary.json", "samples.safetensors", "report.html", CHECKPOINT, "figures"}


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    out: str
    err: str


Cli = Callable[..., Ended]


def call(*args: object) -> int:
    """The command line in this process, far faster than a new one; the exit status as a shell would see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["daebm", *map(str, args)])
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
                return 1
            return end.code or 0
    return 0


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("run", ...)` in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> Ended:
        capsys.readouterr()
        status = call(*args)
        return Ended(status, *capsys.readouterr())

    return run


def sets(**changes: object) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def quick(out: Path, *more: object, **changes: object) -> list[object]:
    """Arguments of the smallest run."""
    return ["run", "gaussian-1d", "--preset", "quick", "--out", out, *sets(**(TINY | changes)), *more]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with the content of files."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to look at and not to touch."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert call(*quick(out)) == 0
    return out


@pytest.fixture
def finished(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(finished_run, tmp_path / "done"))


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after its checkpoint 3."""
    out = tmp_path_factory.mktemp("cut") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, 4)
        assert call(*quick(out)) != 0
    return out


@pytest.fixture
def cut(cut_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cut_run, tmp_path / "cut"))


def interrupt_at(patch: pytest.MonkeyPatch, iteration: int) -> None:
    """Ctrl-C right after an iteration's metrics are written."""
    real = runs._Log.__call__

    def log(self: Any, metrics: dict[str, Any]) -> None:
        real(self, metrics)
        if metrics["iteration"] >= iteration:
            raise KeyboardInterrupt

    patch.setattr(runs._Log, "__call__", log)


def iteration_of(folder: Path) -> int:
    path = folder / CHECKPOINT / f"{STATE}.json"
    return int(json.loads(path.read_text())["iteration"]) if path.exists() else -1


def assert_one_sentence(ended: Ended, *words: str) -> None:
    """A non-zero status, and on stderr one line that names what was wrong."""
    assert ended.status != 0
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in lines[0]


# Looking around.


@pytest.mark.parametrize("command", [[], ["run"], ["list"], ["show"], ["report"]])
def test_help(cli: Cli, command: list[str]):
    ended = cli(*command, "--help")
    assert ended.status == 0
    assert "usage: daebm" in ended.out
    for option in {"run": ["--method", "--resume", "--overwrite", "--set"], "report": ["--out"]}.get(
        command[0] if command else "", []
    ):
        assert option in ended.out


def test_list_names_everything(cli: Cli):
    out = cli("list").out
    for name in (*EXPERIMENTS, *METHODS, "quick", "default", "paper"):
        assert re.search(rf"\b{name}\b", out)


@pytest.mark.parametrize("method", list(METHODS))
def test_show_lists_the_settings_that_a_run_would_use(cli: Cli, method: str, tmp_path: Path):
    ended = cli("show", "gaussian-1d", "--preset", "quick", "--method", method, *sets(iterations=7))
    assert ended.status == 0
    assert shown(ended.out)["iterations"] == "7"
    assert shown(ended.out)["method"] == method
    assert "Cost" in ended.out
    assert tree(tmp_path) == {}


def shown(out: str) -> dict[str, str]:
    """Settings and values; what they mean comes after a #."""
    lines = [line[2:].split("  # ")[0].split(maxsplit=1) for line in out.splitlines() if line[:2] in ("  ", "* ")]
    return {words[0]: words[1].strip() for words in lines if len(words) == 2 and words[0] != "other"}


def test_what_show_prints_is_what_set_takes(cli: Cli):
    """A newcomer copies a value from `daebm show` into --set."""
    out = cli("show", "gaussian-1d", "--preset", "paper", "--method", "cd").out
    config = resolve("gaussian-1d", gaussian_1d.PRESETS, "cd", "paper")
    fixed = ("experiment", "method", "preset", "seed")
    given = {name: value for name, value in shown(out).items() if name not in fixed}
    assert set(given) == set(config.to_json()) - set(fixed)
    assert resolve("gaussian-1d", gaussian_1d.PRESETS, "cd", "paper", overrides=given) == config


def test_settings_of_another_run_are_taken_as_they_were(cli: Cli, finished_run: Path, tmp_path: Path):
    """Whatever the presets say today, with a seed and a change of one's own; what does not fit is refused."""
    words = ("--like", finished_run, "--seed", 3, "--set", "iterations=4", "--out", tmp_path / "r")
    assert cli("run", "gaussian-1d", *words).status == 0
    then, now = (json.loads((folder / "config.json").read_text()) for folder in (finished_run, tmp_path / "r"))
    assert now == then | {"seed": 3, "iterations": 4}
    shown = cli("show", "fashion-mnist", "--like", "fashion-mnist").out
    assert "iterations         18000" in shown and "trust              0.0" in shown
    for other in (("four-rings",), ("gaussian-1d", "--method", "cd"), ("gaussian-1d", "--preset", "paper")):
        ended = cli("run", *other, "--like", finished_run)
        assert ended.status == 2 and ended.err.count("\n") == 1 and "is da on gaussian-1d" in ended.err


# Running.


def test_a_run_leaves_a_complete_folder(finished_run: Path):
    assert {path.name for path in finished_run.iterdir()} == MADE
    figures = [path.name for path in (finished_run / "figures").iterdir()]
    assert sorted(figures) == ["figure-1.png", "training.png"]
    for name in figures:
        assert (finished_run / "figures" / name).read_bytes().startswith(b"\x89PNG")
    config = Config.from_json(json.loads((finished_run / "config.json").read_text()))
    assert (config.experiment, config.method, config.preset, config.iterations) == ("gaussian-1d", "da", "quick", 6)
    summary = json.loads((finished_run / "summary.json").read_text())
    assert (summary["status"], summary["iterations"], summary["rollbacks"]) == ("finished", 6, 0)
    assert summary["training_gradients"] == 6 * config.gradients_per_iteration * config.batch
    log = (finished_run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in log] == [2, 4, 6]


def assert_self_contained(page: Path) -> None:
    """One file that can be mailed: whatever it refers to is inside it."""
    text = page.read_text()
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'> ]+)""", text)
    assert references
    assert all(reference.startswith("data:") for reference in references)
    assert not re.search(r"<link|<script|@import|url\(", text)


def test_the_report_needs_no_other_file(finished_run: Path):
    assert_self_contained(finished_run / "report.html")


def test_the_table_is_printed(cli: Cli, tmp_path: Path):
    ended = cli(*quick(tmp_path / "run"))
    assert ended.status == 0
    for column in gaussian_1d.EXPERIMENT.columns:
        assert column.title in ended.out
    assert str(tmp_path / "run" / "report.html") in ended.out
    assert ended.err == ""


def test_the_default_folder_says_what_the_run_is(cli: Cli, tmp_path: Path):
    arguments = ["run", "gaussian-1d", "--preset", "quick", "--method", "cd", "--seed", 3, *sets(**TINY)]
    assert cli(*arguments).status == 0
    assert (tmp_path / "runs" / "gaussian-1d-cd-quick-3" / "report.html").exists()


def test_two_runs_of_one_seed_are_equal(cli: Cli, finished_run: Path, tmp_path: Path):
    cli(*quick(tmp_path / "run"))
    for name in ("config.json", "samples.safetensors", "figures/figure-1.png"):
        assert (tmp_path / "run" / name).read_bytes() == (finished_run / name).read_bytes()


def test_the_recorded_command_can_be_pasted_back(cli: Cli, tmp_path: Path):
    """Quotes and all."""
    arguments = [str(word) for word in quick(tmp_path / "my run", milestones="[0.5, 0.8]")]
    assert cli(*arguments).status == 0
    command = json.loads((tmp_path / "my run" / "summary.json").read_text())["command"]
    assert shlex.split(command) == ["daebm", *arguments]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_evaluation_without_a_sample_at_level_zero_is_reported(cli: Cli, tmp_path: Path):
    """One chain, one transition: it may well not arrive; that is a result, not a crash."""
    for seed in range(3):
        ended = cli(*quick(tmp_path / str(seed), "--seed", seed, post_chains=1, post_transitions=1))
        assert ended.status == 0
        json.loads((tmp_path / str(seed) / "summary.json").read_text(), parse_constant=pytest.fail)


def test_tensorboard_logs_are_written(cli: Cli, tmp_path: Path):
    pytest.importorskip("tensorboard")
    assert cli(*quick(tmp_path / "run", "--tensorboard")).status == 0
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_missing_tensorboard_is_said_before_anything_is_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert_one_sentence(cli(*quick(tmp_path / "run", "--tensorboard")), "tensorboard")
    assert tree(tmp_path) == {}


# All methods, and reports over runs.


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison") / "all"
    assert call(*quick(out, "--method", "all", iterations=3)) == 0
    return out


def test_all_methods_are_compared(comparison: Path):
    table = json.loads((comparison / "comparison.json").read_text())
    assert {summary["method"] for summary in table.values()} == set(METHODS)
    assert all(summary["status"] == "finished" for summary in table.values())
    assert_self_contained(comparison / "report.html")
    for name in METHODS:
        assert {path.name for path in (comparison / name).iterdir()} == MADE


def test_all_methods_spend_the_same(comparison: Path):
    """Within half an iteration of the method's own."""
    spent = {}
    for name in METHODS:
        summary = json.loads((comparison / name / "summary.json").read_text())
        config = Config.from_json(json.loads((comparison / name / "config.json").read_text()))
        spent[name] = (summary["training_gradients"], config.gradients_per_iteration * config.batch)
    for total, one in spent.values():
        assert abs(total - spent["da"][0]) <= one / 2


def test_a_comparison_that_was_cut_short_is_continued(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of its parts some are finished, one is half done and some are unborn; the finished ones are not done again."""
    arguments = quick(tmp_path / "all", "--method", "all", iterations=3)
    with monkeypatch.context() as patch:
        real, seen = runs.train, []

        def train(config: Config, *rest: Any) -> Any:
            seen.append(config.method)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return real(config, *rest)

        patch.setattr(runs, "train", train)
        assert cli(*arguments).status != 0
    before = tree(tmp_path / "all" / seen[0])
    assert_one_sentence(cli(*arguments), "already holds")
    assert cli(*arguments, "--resume").status == 0
    assert tree(tmp_path / "all" / seen[0]) == before
    assert len(json.loads((tmp_path / "all" / "comparison.json").read_text())) == len(METHODS)


def test_report_over_two_runs(cli: Cli, comparison: Path, tmp_path: Path):
    folders = [comparison / "cd", comparison / "da"]
    ended = cli("report", *folders, "--out", tmp_path / "both")
    assert ended.status == 0
    for text in (*map(str, folders), *(column.title for column in gaussian_1d.EXPERIMENT.columns)):
        assert text in ended.out
    assert_self_contained(tmp_path / "both" / "report.html")
    assert len(json.loads((tmp_path / "both" / "comparison.json").read_text())) == 2


def test_report_without_a_folder_writes_nothing(cli: Cli, comparison: Path, tmp_path: Path):
    assert cli("report", comparison / "cd").status == 0
    assert tree(tmp_path) == {}


def test_report_over_unfinished_or_damaged_runs(cli: Cli, finished: Path, cut: Path, tmp_path: Path):
    assert_one_sentence(cli("report", finished, cut), str(cut))
    assert_one_sentence(cli("report", tmp_path / "nowhere"), "nowhere")
    samples = finished / "samples.safetensors"
    samples.write_bytes(samples.read_bytes()[:100])
    assert_one_sentence(cli("report", finished), str(samples))


def test_report_does_not_write_over_a_run(cli: Cli, finished: Path):
    before = tree(finished)
    assert_one_sentence(cli("report", finished, "--out", finished), str(finished))
    assert tree(finished) == before


def test_report_into_a_place_that_cannot_be(cli: Cli, finished: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    assert_one_sentence(cli("report", finished, "--out", tmp_path / "file"), str(tmp_path / "file"))
    assert_one_sentence(cli("report", finished, "--out", tmp_path / "file" / "x"), str(tmp_path / "file"))


# Not overwriting.


def test_an_existing_run_is_kept(cli: Cli, finished: Path):
    before = tree(finished)
    assert_one_sentence(cli(*quick(finished)), str(finished), "--resume", "--overwrite")
    assert tree(finished) == before


def test_overwrite_starts_again(cli: Cli, finished: Path):
    assert cli(*quick(finished, "--overwrite", "--seed", 1)).status == 0
    assert json.loads((finished / "config.json").read_text())["seed"] == 1
    assert {path.name for path in finished.iterdir()} == MADE


@pytest.mark.parametrize("content", ['{"name": "my web page"}', "[]", "not JSON", ""])
@pytest.mark.parametrize("flag", ["--overwrite", "--resume", "--threads=1"])
def test_a_config_json_of_something_else_is_no_run(cli: Cli, tmp_path: Path, content: str, flag: str):
    """Half of the world's programs have a config.json: --overwrite must not delete their folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    (folder / "thesis.tex").write_text("years of work")
    before = tree(tmp_path)
    assert_one_sentence(cli(*quick(folder, flag)), str(folder))
    assert tree(tmp_path) == before


def test_a_comparison_is_not_written_into_a_run(cli: Cli, finished: Path):
    """Its report.html would replace the run's."""
    before = tree(finished)
    assert_one_sentence(cli(*quick(finished, "--method", "all")), str(finished))
    assert tree(finished) == before


def test_a_comparison_is_not_written_into_a_foreign_folder(cli: Cli, tmp_path: Path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "report.html").write_text("mine")
    before = tree(tmp_path)
    assert_one_sentence(cli(*quick(tmp_path / "site", "--method", "all")), "site")
    assert tree(tmp_path) == before


# Resuming.


def test_an_interrupted_run_says_how_to_go_on_and_does(
    cli: Cli, tmp_path: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        ended = cli(*quick(tmp_path / "run"))
    assert_one_sentence(ended, "--resume")
    assert cli(*quick(tmp_path / "run", "--resume")).status == 0
    for name in ("samples.safetensors", "figures/figure-1.png"):
        assert (tmp_path / "run" / name).read_bytes() == (finished_run / name).read_bytes()


@pytest.mark.parametrize("left", ["config.json alone", "an unfinished first checkpoint"])
def test_before_the_first_checkpoint_resume_starts_over(cli: Cli, cut: Path, finished_run: Path, left: str):
    for path in sorted(cut.rglob("*"), reverse=True):
        if path.name not in ("config.json", CHECKPOINT):
            path.unlink()
    if left == "config.json alone":
        (cut / CHECKPOINT).rmdir()
    else:
        (cut / CHECKPOINT / f"{STATE}.safetensors.partial").write_bytes(b"half")
    assert cli(*quick(cut, "--resume")).status == 0
    assert (cut / "samples.safetensors").read_bytes() == (finished_run / "samples.safetensors").read_bytes()


def test_a_finished_run_says_so(cli: Cli, finished: Path):
    before = tree(finished)
    ended = cli(*quick(finished, "--resume"))
    assert ended.status == 0
    assert "finished" in ended.out + ended.err
    assert tree(finished) == before


def test_resume_where_there_is_no_run(cli: Cli, tmp_path: Path):
    assert_one_sentence(cli(*quick(tmp_path / "nowhere", "--resume")), "nowhere")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("key, value", [("learning_rate", 0.5), ("iterations", 7), ("milestones", "[0.5]")])
def test_resume_with_another_setting_names_it(cli: Cli, cut: Path, key: str, value: object):
    before = tree(cut)
    assert_one_sentence(cli(*quick(cut, "--resume", **{key: value})), key)
    assert tree(cut) == before


def test_resume_and_overwrite_exclude_each_other(cli: Cli, finished: Path):
    before = tree(finished)
    assert_one_sentence(cli(*quick(finished, "--resume", "--overwrite")), "--resume", "--overwrite")
    assert tree(finished) == before


def damages() -> list[Any]:
    """Ways in which what lies in a run folder may have been hurt."""
    state, beside = f"{CHECKPOINT}/{STATE}.safetensors", f"{CHECKPOINT}/{STATE}.json"
    table: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("cut", state, lambda b: b[: len(b) // 2]),
        ("empty", state, lambda b: b""),
        ("flipped", state, lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]),
        ("not safetensors", state, lambda b: b"hello"),
        ("edited", beside, lambda b: b.replace(b'"iteration": 3', b'"iteration": 4')),
        ("not JSON", beside, lambda b: b[:-9]),
        ("not JSON", "config.json", lambda b: b[:-9]),
        ("a list", "config.json", lambda b: b"[]"),
        ("keys missing", "config.json", lambda b: b"{}"),
        ("a word for a number", "config.json", lambda b: b.replace(b'"iterations": 6', b'"iterations": "six"')),
        ("a number for a list", "config.json", lambda b: re.sub(rb'"milestones": \[\]', b'"milestones": 7', b)),
        ("an unknown key", "config.json", lambda b: b.replace(b'"batch"', b'"bunch"')),
        ("bad number", "config.json", lambda b: b.replace(b'"iterations": 6', b'"iterations": -6')),
    ]
    return [pytest.param(path, change, id=f"{path} {name}") for name, path, change in table]


@pytest.mark.parametrize("name, change", damages())
def test_a_damaged_run_is_not_resumed(cli: Cli, cut: Path, name: str, change: Callable[[bytes], bytes]):
    path = cut / name
    content = change(path.read_bytes())
    assert content != path.read_bytes()
    path.write_bytes(content)
    before = tree(cut)
    assert_one_sentence(cli(*quick(cut, "--resume")), path.name)
    assert tree(cut) == before


def test_death_between_summary_and_report_loses_no_report(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_run: Path
):
    """Whoever resumes a run that was killed while its report was written gets the report."""

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_run", die)
        assert cli(*quick(tmp_path / "run")).status != 0
    assert cli(*quick(tmp_path / "run", "--resume")).status == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == MADE


def test_death_before_the_first_file_blocks_nothing(cli: Cli, tmp_path: Path):
    """A kill while config.json is written leaves an unfinished file; the same command then simply works."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json.partial").write_text("{")
    assert cli(*quick(tmp_path / "run")).status == 0


def test_a_full_disk_is_one_sentence(cli: Cli, cut: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    before = checkpoint.read(cut / CHECKPOINT, STATE)[1]
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        ended = cli(*quick(cut, "--resume"))
    assert_one_sentence(ended, "No space left")
    assert checkpoint.read(cut / CHECKPOINT, STATE)[1] == before
    assert cli(*quick(cut, "--resume")).status == 0


# Bad input: one sentence, and nothing is left behind.

BAD_SETTINGS = [
    ("stepz=3", "stepz"),
    ("=3", "--set"),
    ("seed=3", "--seed"),
    ("method=cd", "--method"),
    ("steps", "steps"),
    ("iterations=ten", "'ten'"),
    ("iterations=1e3", "'1e3'"),
    ("iterations=", "iterations"),
    ("iterations=0", "iterations"),
    ("steps=-1", "-1"),
    ("batch=0", "batch"),
    ("batch=100000", "batch"),
    ("store=10", "store=10"),
    ("hidden=0", "hidden"),
    ("learning_rate=fast", "'fast'"),
    ("learning_rate=nan", "nan"),
    ("learning_rate=-0.1", "-0.1"),
    ("step_size=inf", "inf"),
    ("standardise=maybe", "'maybe'"),
    ("milestones=0.5", "'0.5'"),
    ("milestones=[0.5, 2]", "2.0"),
    ("restart=1.5", "1.5"),
    ("kernel=nuts", "'nuts'"),
    ("network=transformer", "'transformer'"),
    ("ladder=rope", "'rope'"),
    ("label_move=jump", "'jump'"),
    ("optimiser=lion", "'lion'"),
    ("last_variance=1.5", "last_variance"),
    ("last_variance=nan", "last_variance"),
    ("delta_first=nan", "delta_first"),
    ("top=1", "top"),
    ("block=1", "block"),
    ("post_chains=0", "post_chains"),
    ("train_size=1", "batch"),
]


@pytest.mark.parametrize("method", ["da", "persistent", "all"])
@pytest.mark.parametrize("setting, word", BAD_SETTINGS)
def test_bad_settings(cli: Cli, tmp_path: Path, setting: str, word: str, method: str):
    if method == "persistent" and setting in ("top=1", "last_variance=1.5"):
        pytest.skip("a plain EBM has no ladder to refuse it")
    without = {key: value for key, value in TINY.items() if key != setting.partition("=")[0]}
    arguments = ["run", "gaussian-1d", "--preset", "quick", "--method", method, *sets(**without), "--set", setting]
    assert_one_sentence(cli(*arguments, "--out", tmp_path / "new" / "run"), word)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["gaussian"], "'gaussian'"),
        (["gaussian-1d", "--method", "gan"], "'gan'"),
        (["gaussian-1d", "--preset", "slow"], "'slow'"),
        (["gaussian-1d", "--preset", "quick", "--seed", "-1"], "-1"),
        (["gaussian-1d", "--preset", "quick", "--seed", "100000000000000000000"], "100000000000000000000"),
        (["gaussian-1d", "--preset", "quick", "--threads", "-1"], "-1"),
        (["gaussian-1d", "--preset", "quick", "--threads", "100000"], "100000"),
        (["digits", "--preset", "quick", "--set", "train_size=5"], "train_size=5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("command", ["run", "show"])
def test_bad_names(cli: Cli, tmp_path: Path, command: str, arguments: list[str], word: str):
    if command == "show" and "--seed" in arguments:
        pytest.skip("show has no seed")
    assert_one_sentence(cli(command, *arguments), word)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("method", ["da", "all"])
@pytest.mark.parametrize("out", ["file", "file/run", "foreign"])
def test_bad_folders(cli: Cli, tmp_path: Path, out: str, method: str):
    """A path below a regular file is unwritable for everybody, root included."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "holiday.jpg").write_text("mine too")
    before = tree(tmp_path)
    for flag in ((), ("--overwrite",)):
        assert_one_sentence(cli(*quick(tmp_path / out, "--method", method, *flag)), str(tmp_path / out))
        assert tree(tmp_path) == before


@pytest.mark.parametrize("shape", [(0, 1), (5,), ()], ids=str)
def test_data_without_rows_or_columns_are_refused(shape: tuple[int, ...]):
    with pytest.raises(InputError) as caught:
        Dataset("mine", torch.zeros(shape), torch.zeros(5, 1))
    assert str(shape) in str(caught.value)


def test_held_out_data_of_another_shape_are_refused():
    with pytest.raises(InputError, match="differ in shape"):
        Dataset("mine", torch.zeros(5, 1), torch.zeros(5, 2))


def test_numpy_arrays_are_taken_or_refused_in_a_sentence():
    with contextlib.suppress(InputError):
        assert Dataset("mine", np.zeros((5, 1)), np.zeros((5, 1))).event == (1,)


@pytest.mark.parametrize(
    "key, value",
    [
        ("iterations", 5.5),
        ("iterations", "5"),
        ("iterations", True),
        ("learning_rate", "fast"),
        ("learning_rate", None),
        ("kernel", 3),
        ("standardise", "yes"),
        ("milestones", 0.5),
        ("milestones", ("a",)),
        ("last_variance", math.nan),
    ],
    ids=str,
)
def test_settings_of_another_type_are_refused(key: str, value: object):
    """In a script as on the command line, before they can do harm far from where they were written."""
    with pytest.raises(InputError, match=key):
        Config("mine", "persistent", "none", **{key: value})


def test_every_error_on_purpose_is_caught_by_the_command_line():
    for name in ("InputError", "CheckpointError", "DivergenceError"):
        assert issubclass(getattr(sys.modules["daebm.errors"], name), DaebmError)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "here/x"), ("here/x", "free some space")),
        (OSError(30, "Read-only file system", "here"), ("here", "name another place")),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), ("out of memory",)),
        (MemoryError(), ("out of memory",)),
    ],
    ids=["full", "read-only", "no memory", "no memory for numpy"],
)
def test_what_the_machine_refuses(cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, words: tuple[str, ...]):
    def refuse(self: object) -> None:
        raise error

    monkeypatch.setattr("daebm.cli.List.__call__", refuse)
    assert_one_sentence(cli("list"), *words)


def test_errors_of_our_own_making_are_not_taken_for_a_lack_of_memory(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    def broken(self: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("daebm.cli.List.__call__", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli("list")


def test_a_folder_comes_whole_or_not_at_all(tmp_path: Path):
    """A write that fails names its file."""
    out = tmp_path / "out"
    with pytest.raises(OSError) as caught, checkpoint.new_folder(out) as new:
        (new / "first").write_text("1")
        with checkpoint.replacing(new / "second"):
            raise OSError(28, "No space left on device")
    assert caught.value.filename.endswith("second") and tree(tmp_path) == {}
    out.mkdir()
    with checkpoint.new_folder(out) as new:
        (new / "first").write_text("1")
    assert set(tree(tmp_path)) == {"out", "out/first"}


def test_every_setting_is_explained(cli: Cli):
    ended = cli("show", "gaussian-1d", "--preset", "quick")
    assert set(explained()) >= set(Config().to_json()) - {"delta_last", "decay_factor", "step_maximum"}  # of a pair
    lines = ended.out.splitlines()
    assert [line for line in lines if line[2:].startswith("steps ") and "# L, Langevin steps per burst" in line]
    assert [line for line in lines if line.startswith("* iterations")]


# In a process of its own.


def in_process(*arguments: object) -> subprocess.Popen[str]:
    """Started with Ctrl-C in its usual state, which a test runner in the background may have switched off."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import daebm.cli as c; c.main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_bad_input_in_a_process(tmp_path: Path):
    process = in_process(*quick(tmp_path / "run", steps=-1))
    out, err = process.communicate()
    assert_one_sentence(Ended(process.returncode, out, err), "steps", "-1")
    assert out == ""
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_run_that_can_be_resumed(cli: Cli, tmp_path: Path, by: signal.Signals):
    """So does the end of a batch job. Meanwhile nobody else may run in that folder, or begin anew there."""
    changes = {"iterations": 3000, "batch": 20, "store": 50, "checkpoint_every": 10}
    run = tmp_path / "run"
    process = in_process(*quick(run, **changes))
    while process.poll() is None and iteration_of(run) < 20:
        time.sleep(0.01)
    for flag in ("--resume", "--overwrite"):
        assert_one_sentence(cli(*quick(run, flag, **changes)), "another process", str(run))
    process.send_signal(by)
    out, err = process.communicate()
    assert_one_sentence(Ended(process.returncode, out, err), "--resume")
    stopped = iteration_of(run)
    assert 20 <= stopped < 3000
    assert not (run / "summary.json").exists()
    # Going on to the end would take long: that it goes on is enough.
    process = in_process(*quick(run, "--resume", **changes))
    while process.poll() is None and iteration_of(run) < stopped + 10:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate()
    log = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert log == list(range(2, log[-1] + 1, 2))


def test_what_nohup_started_goes_on(tmp_path: Path):
    """A signal that is ignored from the start stays so."""
    run = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = in_process(*quick(run, iterations=3000, batch=20, store=50, checkpoint_every=10))
    finally:
        signal.signal(signal.SIGHUP, before)
    for _ in range(2):
        reached = iteration_of(run)
        while process.poll() is None and iteration_of(run) < reached + 20:
            time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_setting_is_given_once(cli: Cli, tmp_path: Path):
    ended = cli("show", "gaussian-1d", "--set", "steps=3", "--set", "steps=4")
    assert_one_sentence(ended, "--set gives steps twice, 3 and 4")


def test_the_version(cli: Cli):
    ended = cli("--version")
    assert ended.status == 0 and ended.out == f"daebm {daebm.__version__}\n"


# Packing a run, and where image files come from.


def test_a_packed_run_goes_on(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "gaussian-1d", "--preset", "quick", "--out", "a").status == 0
    packed = cli("pack", "a", "--out", "b")
    assert packed.status == 0 and "chains kept" in packed.out
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"config.json", CHECKPOINT}
    assert cli("run", "gaussian-1d", "--preset", "quick", "--out", "b", "--resume").status == 0
    assert (tmp_path / "b" / "report.html").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("pack", "nowhere", "--out", "b"), "nowhere holds no daebm run"),
        (("run", "fashion-mnist", "--preset", "quick", "--data-dir", "nowhere"), "nowhere, which is not a folder"),
        (("run", "digits", "--set", "device=cuda"), "no usable GPU"),
        (("run", "digits", "--set", "precision=tf32"), "precision=tf32 needs device=cuda"),
    ],
)
def test_bad_places_and_devices(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], sentence: str
) -> None:
    if "device=cuda" in args and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("DAEBM_DATA", "")
    ended = cli(*args)
    assert ended.status == 2 and ended.err.count("\n") == 1 and sentence in ended.err
    assert not any(tmp_path.iterdir())


def test_a_full_gpu_is_one_sentence(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runs, "run", run)
    ended = cli("run", "gaussian-1d", "--preset", "quick")
    assert ended.status == 2 and "lower batch" in ended.err and ended.err.count("\n") == 1
