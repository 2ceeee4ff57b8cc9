"""Faults are injected into training; the guard goes back to the last good state, or gives up and keeps it."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from daebm import checkpoint, model, runs, training
from daebm.cli import main
from daebm.config import Config
from daebm.data import Dataset
from daebm.denoising import nothing_known
from daebm.errors import DivergenceError, InputError
from daebm.experiments import gaussian_1d
from daebm.guard import WARM_LIMIT
from daebm.state import CHECKPOINT, STATE, TrainingState
from daebm.training import train

METHODS_TRIED = ["persistent", "cd", "drl", "da"]
REAL = {name: getattr(training, name) for name in ("denoise", "relate", "step")}


class Death(BaseException):
    """Ends a run from within, as a kill would."""


def small(method: str = "da", **changes: Any) -> Config:
    levels = method in ("da", "drl")
    values: dict[str, Any] = {
        "network": "gated-mlp" if levels else "relu-mlp",
        "width": 8,
        "hidden": 2,
        "top": 3,
        "first_sd": 0.2,
        "iterations": 25,
        "batch": 16,
        "store": 40,
        "steps": 3,
        "average": 0.9,
        "checkpoint_every": 10,
        "log_every": 1,
    }
    return Config("test", method, "test", **(values | changes))


def dataset() -> Dataset:
    points = torch.randn(50, 2, generator=torch.Generator().manual_seed(3))
    return Dataset("test", points, points[:10])


# Faults: each is given the state and the step to take, and does its harm before, while or after taking it.

Take = Callable[[], Tensor]


def nan_weights(state: TrainingState, take: Take) -> Tensor:
    with torch.no_grad():
        next(state.network.parameters()).view(-1)[0] = math.nan
    return take()


def infinite_weights_after(state: TrainingState, take: Take) -> Tensor:
    """What a last update that overflows does: the metrics of its own iteration still look well."""
    metrics = take()
    with torch.no_grad():
        next(state.network.parameters()).view(-1)[0] = math.inf
    return metrics


def nan_gradient(state: TrainingState, take: Take) -> Tensor:
    weight = list(state.network.parameters())[-1]
    hook = weight.register_hook(lambda grad: grad * math.nan)
    try:
        return take()
    finally:
        hook.remove()


def scaled_weights(state: TrainingState, take: Take) -> Tensor:
    """An energy that explodes but stays finite; seen by the gap between data and chains alone."""
    with torch.no_grad():
        for name, weight in state.network.named_parameters():
            if "head" in name:
                weight.mul_(1e8)
    return take()


def nan_chains(state: TrainingState, take: Take) -> Tensor:
    state.chains.x.fill_(math.nan)
    return take()


Fault = Callable[[TrainingState, Take], Tensor]
FAULTS: list[Fault] = [nan_weights, infinite_weights_after, nan_gradient, scaled_weights]


def inject(monkeypatch: pytest.MonkeyPatch, fault: Fault, when: int, times: int = 1) -> None:
    """Let ``fault`` happen in iteration ``when`` (counted from 1), the first ``times`` times it is reached."""
    left = times

    def faulty(real: Callable[[training.Setup], Tensor]) -> Callable[[training.Setup], Tensor]:
        def part(setup: training.Setup) -> Tensor:
            nonlocal left
            if setup.state.iteration + 1 != when or left == 0:
                return real(setup)
            left -= 1
            return fault(setup.state, lambda: real(setup))

        return part

    for name, real in REAL.items():
        monkeypatch.setattr(training, name, faulty(real))


def assert_finite(state: TrainingState) -> None:
    assert all(torch.isfinite(weight).all() for weight in state.network.parameters())
    assert all(torch.isfinite(weight).all() for weight in state.average.values())
    assert torch.isfinite(state.chains.x).all()
    assert torch.isfinite(state.steps.sigma).all()


def log(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl and, apart, its events."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [e for e in entries if "event" not in e], [e for e in entries if "event" in e]


# Faults that pass.


@pytest.mark.parametrize("method", METHODS_TRIED)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("on_disk", [True, False], ids=["folder", "memory"])
def test_a_passing_fault_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Fault, on_disk: bool
):
    config = small(method)
    inject(monkeypatch, fault, when=14)
    reported: list[dict[str, Any]] = []
    state, _ladder = train(config, dataset(), tmp_path if on_disk else None, report=reported.append)

    assert_finite(state)
    assert (state.iteration, state.rollbacks, state.rate_scale) == (25, 1, 0.5)
    events = [entry for entry in reported if "event" in entry]
    assert len(events) == 1
    event = events[0]
    # Weights that break after an update show in the iteration after.
    assert event["iteration"] == (15 if fault is infinite_weights_after else 14)
    assert (event["event"], event["to"], event["rate_scale"]) == ("roll-back", 10, 0.5)
    assert ("gap" if fault is scaled_weights else "nan") in event["reason"]
    assert [at for at, _gap in event["gaps"]] == list(range(1, event["iteration"] + 1))
    assert None not in [gap for _at, gap in event["gaps"]][:-1]
    if on_disk:
        lines, events = log(tmp_path)
        assert [line["iteration"] for line in lines] == list(range(1, 26))
        assert events == [json.loads(json.dumps(event))]
        # The rate of every iteration after the roll-back is half of what the schedule says.
        for line in lines:
            due = training.learning_rate(config, line["iteration"] - 1)
            assert line["learning_rate"] == pytest.approx(due * (0.5 if line["iteration"] > 10 else 1))


@pytest.mark.parametrize("on_disk", [True, False], ids=["folder", "memory"])
def test_a_roll_back_restores_the_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool):
    """With the rate left alone, a run that was rolled back ends exactly where it would have ended without the fault."""
    monkeypatch.setattr(training, "ROLLBACK_RATE_FACTOR", 1.0)
    clean, _ladder = train(small(), dataset())
    inject(monkeypatch, nan_weights, when=14)
    state, _ladder = train(small(), dataset(), tmp_path if on_disk else None)
    assert state.rollbacks == 1
    for a, b in zip(clean.network.parameters(), state.network.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(clean.chains.x, state.chains.x)
    assert torch.equal(clean.chains.t, state.chains.t)
    assert torch.equal(clean.generator.get_state(), state.generator.get_state())


def test_once_weights_stay_a_roll_back_goes_on_with_other_noise(monkeypatch: pytest.MonkeyPatch):
    """There is no rate left to lower: with the same noise the same batch would explode again, and again."""
    config = small(network="level-mlp", finish=16, level_rate=0.1, adapt_every=5)
    seen: list[Tensor] = []

    def unlucky(setup: training.Setup) -> Tensor:
        """The noise of iteration 24 explodes, the first time that it comes and whenever it is the same."""
        state = setup.state
        if state.iteration + 1 != 24:
            return REAL["step"](setup)
        seen.append(state.generator.get_state())
        return REAL["step"](setup) * (math.nan if torch.equal(seen[-1], seen[0]) else 1)

    monkeypatch.setattr(training, "step", unlucky)
    state, _ladder = train(config, dataset())
    assert (state.iteration, state.rollbacks, len(seen)) == (25, 1, 2)
    assert_finite(state)


def test_refusals_before_a_roll_back_stay_counted(monkeypatch: pytest.MonkeyPatch):
    def refusing(state: TrainingState, take: Take) -> Tensor:
        state.nonfinite += 777
        state.replaced += 3
        return nan_weights(state, take)

    inject(monkeypatch, refusing, when=14)
    state, _ladder = train(small(), dataset())
    assert state.rollbacks == 1 and int(state.nonfinite) >= 777 and state.replaced == 3


def test_corrupt_chains_are_rolled_back(monkeypatch: pytest.MonkeyPatch):
    inject(monkeypatch, nan_chains, when=14)
    state, _ladder = train(small(), dataset())
    assert_finite(state)
    assert state.rollbacks == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("when", [1, 10, 11, 25], ids=["first", "at a checkpoint", "after a checkpoint", "last"])
def test_a_fault_is_caught_whenever_it_comes(monkeypatch: pytest.MonkeyPatch, fault: Fault, when: int):
    """The last iteration matters most: nothing comes after it that could notice, and its weights are the result."""
    inject(monkeypatch, fault, when)
    state, _ladder = train(small(), dataset())
    assert_finite(state)
    assert state.rollbacks == 1


def test_three_faults_are_forgiven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    inject(monkeypatch, nan_gradient, when=14, times=3)
    state, _ladder = train(small(), dataset(), tmp_path)
    assert_finite(state)
    assert (state.rollbacks, state.rate_scale) == (3, 0.125)
    assert [event["rate_scale"] for event in log(tmp_path)[1]] == [0.5, 0.25, 0.125]


def test_a_bad_gradient_never_reaches_the_weights(monkeypatch: pytest.MonkeyPatch):
    """Not even for the moment until the roll-back: the update is skipped."""
    before: list[Tensor] = []

    def fault(state: TrainingState, take: Take) -> Tensor:
        before.extend(weight.detach().clone() for weight in state.network.parameters())
        metrics = nan_gradient(state, take)
        assert all(torch.equal(a, b) for a, b in zip(before, state.network.parameters(), strict=True))
        return metrics

    inject(monkeypatch, fault, when=14)
    train(small(), dataset())
    assert before


def test_resume_after_a_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lowered rate and the count survive a kill; the fault that passed does not come again."""
    config = small()
    (tmp_path / "whole").mkdir()
    inject(monkeypatch, nan_weights, when=14)
    whole, _ladder = train(config, dataset(), tmp_path / "whole")

    def die(metrics: dict[str, Any]) -> None:
        if metrics["iteration"] >= 17:
            raise Death

    inject(monkeypatch, nan_weights, when=14)
    with pytest.raises(Death):
        train(config, dataset(), tmp_path / "parts", report=die)
    parts, _ladder = train(config, dataset(), tmp_path / "parts", resume=True)
    assert (parts.rollbacks, parts.rate_scale) == (1, 0.5)
    for a, b in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.chains.x, parts.chains.x)
    lines, events = log(tmp_path / "parts")
    assert [line["iteration"] for line in lines] == list(range(1, 26))
    assert [event["iteration"] for event in events] == [14]


# Faults that stay.


def assert_last_good(folder: Path, iteration: int) -> None:
    """The checkpoint of the last good iteration is whole, finite, and a usable model."""
    tensors, facts = checkpoint.read(folder / CHECKPOINT, STATE)
    assert facts["iteration"] == iteration
    floating = [value for value in tensors.values() if value.is_floating_point()]
    assert all(torch.isfinite(value).all() for value in floating)
    kept = model.load(folder)
    assert torch.isfinite(kept.energy(torch.zeros(3, *kept.event))).all()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("maximum", [0, 2])
def test_a_fault_that_stays_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, maximum: int):
    inject(monkeypatch, fault, when=14, times=-1)
    with pytest.raises(DivergenceError) as caught:
        train(small(maximum_rollbacks=maximum), dataset(), tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{maximum} roll-back" in message
    assert "iteration 15" in message if fault is infinite_weights_after else "iteration 14" in message
    assert_last_good(tmp_path, 10)
    assert [event["event"] for event in log(tmp_path)[1]] == ["roll-back"] * maximum + ["divergence"]


@pytest.mark.parametrize(("trust", "advice"), [(0.0, "lower learning_rate"), (0.5, r"lower trust \(now 0.5\)")])
def test_a_divergence_names_what_holds_updates(monkeypatch: pytest.MonkeyPatch, trust: float, advice: str):
    inject(monkeypatch, FAULTS[0], when=14, times=-1)
    with pytest.raises(DivergenceError, match=advice):
        train(small(maximum_rollbacks=0, trust=trust), dataset())


@pytest.mark.parametrize(("denoise", "limit"), [(20, "denoise_rate"), (0, "relate_rate")])
def test_a_warm_start_that_explodes_is_a_divergence(
    monkeypatch: pytest.MonkeyPatch, denoise: int, limit: str, tmp_path: Path
) -> None:
    """Its loss is no energy gap, for which hundreds are little. What is learned next begins at its own rate again."""
    worst = WARM_LIMIT * nothing_known(dataset().train[0].numel())

    def exploded(state: TrainingState, take: Take) -> Tensor:
        measures = take()
        measures[0] = 1.01 * worst
        return measures

    changes = {"network": "level-mlp", "denoise": denoise, "relate": 20 - denoise}
    inject(monkeypatch, exploded, when=14)
    state, _ladder = train(small(**changes), dataset(), tmp_path)
    (event,) = log(tmp_path)[1]
    assert state.rollbacks == 1 and "warm start" in event["reason"] and event["rate_scale"] == 0.5
    assert state.rate_scale == 1
    inject(monkeypatch, exploded, when=14, times=-1)
    with pytest.raises(DivergenceError, match=rf"lower {limit} \(now \S+\); the last"):
        train(small(maximum_rollbacks=0, **changes), dataset())
    inject(monkeypatch, exploded, when=22)  # with chains such a loss is nothing unusual
    assert not train(small(**changes), dataset())[0].rollbacks


def test_who_knows_nothing_has_not_diverged() -> None:
    """One dimension and many levels: to guess a label costs more than all noise."""
    points = torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    config = small(network="level-mlp", relate=20, top=60, relate_rate=1e-9)
    state, _ladder = train(config, Dataset("line", points, points[:50]))
    assert not state.rollbacks


def test_a_rate_that_is_far_too_high_ends_the_run(tmp_path: Path):
    """Nothing injected: the energies run away by themselves, halving the rate three times is not enough."""
    config = small("persistent", optimiser="sgd", learning_rate=1e6, maximum_gap=1e3)
    with pytest.raises(DivergenceError, match="learning_rate"):
        train(config, dataset(), tmp_path)
    assert_last_good(tmp_path, 0)


SETTINGS = {
    "iterations": 25,
    "batch": 20,
    "store": 50,
    "steps": 2,
    "log_every": 5,
    "checkpoint_every": 10,
    "long_run_chains": 10,
    "long_run_steps": 5,
    "post_chains": 20,
    "post_transitions": 5,
}


def daebm(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    """Run the command line in this process; its exit status."""
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    arguments = ["run", "gaussian-1d", "--preset", "quick", *sets, "--out", str(out), *more]
    monkeypatch.setattr(sys, "argv", ["daebm", *arguments])
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def test_the_command_line_reports_a_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    inject(monkeypatch, nan_weights, when=14)
    assert daebm(monkeypatch, tmp_path / "run") == 0
    assert "rolled back from iteration 14 to 10" in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rollbacks"], summary["learning_rate_scale"]) == ("finished", 1, 0.5)
    assert (tmp_path / "run" / "report.html").exists()


def test_the_command_line_gives_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    inject(monkeypatch, nan_weights, when=14, times=-1)
    assert daebm(monkeypatch, run) != 0
    said = capsys.readouterr().err
    assert "diverged at iteration 14" in said
    assert "Traceback" not in said
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert "iteration 14" in summary["reason"]
    assert not (run / "report.html").exists()
    assert_last_good(run, 10)


def test_a_diverged_run_can_be_tried_again_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Should the cause have been outside (a bad machine, say), nothing is lost."""
    run = tmp_path / "run"
    inject(monkeypatch, nan_weights, when=14, times=-1)
    assert daebm(monkeypatch, run) != 0
    monkeypatch.setattr(training, "step", REAL["step"])
    assert daebm(monkeypatch, run, "--resume") == 0
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"


# Faults in the data.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["training", "held-out"])
def test_bad_data_are_refused_by_row(value: float, part: str):
    good, bad = torch.zeros(9, 2), torch.zeros(9, 2)
    bad[7, 1] = value
    bad[8, 0] = value
    with pytest.raises(InputError, match="row 7") as caught:
        Dataset("mine", *((bad, good) if part == "training" else (good, bad)))
    assert part in str(caught.value)
    assert "mine" in str(caught.value)


def test_bad_data_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def bad(config: Config) -> Dataset:
        points = gaussian_1d.dataset(config)
        points.train[5] = math.nan
        return Dataset("mine", points.train, points.held_out)

    broken = dataclasses.replace(gaussian_1d.EXPERIMENT, dataset=bad)
    monkeypatch.setattr(runs, "experiment", lambda name: broken)
    assert daebm(monkeypatch, tmp_path / "run") != 0
    assert "row 5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_data_that_go_bad_later_are_refused_too(tmp_path: Path):
    """A tensor can be changed after the check; training must not take the blame ('lower learning_rate')."""
    changed = dataset()
    changed.train[4, 0] = math.nan
    with pytest.raises(InputError, match="row 4"):
        train(small(), changed, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_cannot_be_divided_by_is_refused(scale: float):
    """Constant data have standard deviation 0, and dividing by it would make NaN of clean data."""
    with pytest.raises(InputError, match="scale"):
        Dataset("mine", torch.ones(5, 2), torch.ones(5, 2), scale=scale)
