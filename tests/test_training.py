"""One training loop for six methods: its contract, its schedule, and resuming it bit for bit after any death."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from daebm import checkpoint, training
from daebm.cli import main
from daebm.config import Config, resolve
from daebm.data import Dataset
from daebm.engine import Engine
from daebm.errors import InputError
from daebm.experiments import gaussian_1d
from daebm.ladder import Ladder
from daebm.methods import METHODS, Negatives, draw_negatives
from daebm.networks import GaussianTop, LevelMLP
from daebm.runs import matched_iterations
from daebm.state import CHECKPOINT, STATE, TrainingState, build_ladder, start
from daebm.training import Setup, advance, begin, learning_rate, step, train
from daebm.updates import likelihood_loss, trainable

ALL = list(METHODS)


class Death(BaseException):
    """Ends a run from within, as a kill would: no handler of ordinary errors sees it."""


def points(n: int = 50, dimension: int = 2) -> Tensor:
    return 3 + 2 * torch.randn(n, dimension, generator=torch.Generator().manual_seed(8))


DATA = Dataset("test", points(), points(10), shift=3.0, scale=2.0)


def small(method: str, **changes: Any) -> Config:
    """Few small iterations in which everything happens: new epochs, adaptation, averaging, momentum, warm-up."""
    values: dict[str, Any] = {
        "network": "gated-mlp" if METHODS[method].ladder else "relu-mlp",
        "width": 8,
        "hidden": 2,
        "top": 3,
        "first_sd": 0.2,
        "iterations": 20,
        "batch": 16,
        "store": 40,
        "steps": 3,
        "kernel": METHODS[method].kernel,
        "step_size": 0.3,
        "adapt_every": 4,
        "average": 0.9,
        "beta1": 0.5,
        "warm_up": 3,
        "checkpoint_every": 5,
        "log_every": 1,
    }
    return Config("test", method, "test", **(values | changes))


def tensors_of(state: TrainingState) -> dict[str, Tensor]:
    """All that the future of a run depends on."""
    parts: dict[str, Any] = {f"network.{k}": v for k, v in state.network.state_dict().items()}
    parts |= {f"average.{k}": v for k, v in state.average.items()}
    for index, entries in state.optimiser.state_dict()["state"].items():
        parts |= {f"optimiser.{index}.{k}": torch.as_tensor(v) for k, v in entries.items()}
    parts |= {f"chains.{k}": getattr(state.chains, k) for k in ("x", "t", "stage", "trips")}
    parts |= {f"steps.{k}": getattr(state.steps, k) for k in ("sigma", "total", "count")}
    numbers = torch.tensor([state.iteration, state.cursor, state.rate_scale, state.rollbacks, state.nonfinite])
    return parts | {"generator": state.generator.get_state(), "order": state.order, "numbers": numbers}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


def logged(folder: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl; a cut line would not parse."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_log_complete(folder: Path, config: Config) -> None:
    iterations = [entry["iteration"] for entry in logged(folder) if "event" not in entry]
    every = range(config.log_every, config.iterations + 1, config.log_every)
    assert iterations == sorted({*every, config.iterations})


# The contract that every method keeps.


@pytest.fixture(params=ALL)
def config(request: pytest.FixtureRequest) -> Config:
    return small(request.param)


def one_step(config: Config, state: TrainingState) -> Tensor:
    data = DATA.standardise(DATA.train)
    ladder = build_ladder(config, data)
    return step(Setup(config, DATA, data, ladder, state, Engine(config, state.network, ladder, state.generator)))


def begun(config: Config) -> TrainingState:
    data = DATA.standardise(DATA.train)
    return start(config, data, build_ladder(config, data))


def test_trained_weights_are_finite_and_moved(config: Config):
    state, _ladder = train(config, DATA)
    before = begun(config).network.state_dict()
    assert all(torch.isfinite(value).all() for value in tensors_of(state).values())
    assert any(not torch.equal(before[name], value) for name, value in state.network.state_dict().items())
    assert state.iteration == config.iterations


def test_same_seed_same_run(config: Config):
    """Also whatever the global generator holds: everything random follows from the seed alone."""
    torch.manual_seed(1)
    first = tensors_of(train(config, DATA)[0])
    torch.manual_seed(2)
    assert_equal(first, tensors_of(train(config, DATA)[0]))


def test_other_seed_other_run(config: Config):
    a, b = (train(replace(config, seed=seed), DATA)[0] for seed in (0, 1))
    assert any(not torch.equal(p, q) for p, q in zip(a.network.parameters(), b.network.parameters(), strict=True))
    assert not torch.equal(a.chains.x, b.chains.x)


def test_training_leaves_the_global_generator_alone(config: Config):
    before = torch.random.get_rng_state()
    train(replace(config, iterations=2), DATA)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_folder_changes_nothing(config: Config, tmp_path: Path):
    assert_equal(tensors_of(train(config, DATA)[0]), tensors_of(train(config, DATA, tmp_path)[0]))


def test_the_report_changes_nothing(config: Config):
    seen: list[dict[str, Any]] = []
    assert_equal(tensors_of(train(config, DATA)[0]), tensors_of(train(config, DATA, report=seen.append)[0]))
    assert [metrics["iteration"] for metrics in seen] == list(range(1, config.iterations + 1))


@pytest.mark.parametrize("bursts", [1, 3])
def test_gradients_are_counted_right(config: Config, bursts: int):
    """Comparisons at equal cost stand on this number: points whose energy gradient the chains ask for."""
    config = replace(config, bursts=bursts)
    state, rows = begun(config), 0

    def count(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        nonlocal rows
        rows += len(inputs[0]) if inputs[0].requires_grad else 0

    state.network.register_forward_hook(count)
    for _ in range(3):
        one_step(config, state)
    assert rows == 3 * config.gradients_per_iteration * config.batch == config.gradients(3)


def test_a_run_says_that_levels_are_deserted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At checkpoints while chains persist; those that start as noise have half of the run to come down."""
    monkeypatch.setattr(training, "deserted", lambda t, levels: [f"no chain is near some of {levels}"])
    events: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any]) -> None:
        events.extend([metrics] if "event" in metrics else [])

    settings = {"iterations": 8, "checkpoint_every": 2, "denoise": 3, "floor": 0.1}
    train(small("da", **settings), DATA, tmp_path, report=report)
    assert [(event["iteration"], event["event"]) for event in events] == [(4, "labels"), (6, "labels"), (8, "labels")]
    assert (tmp_path / "metrics.jsonl").read_text().count("no chain is near some of") == 3
    events.clear()
    train(small("da", start="noise", **settings), DATA, report=report)
    assert [event["iteration"] for event in events] == [6, 8]


def test_moved_chains_go_back_to_their_slots(config: Config, monkeypatch: pytest.MonkeyPatch):
    """A store whose chains are moved but not put back is contrastive divergence under another name."""
    state, seen = begun(config), []

    def watch(*args: Any) -> Negatives:
        seen.append(draw_negatives(*args))
        return seen[-1]

    monkeypatch.setattr(training, "draw_negatives", watch)
    for _ in range(3):
        x, t = state.chains.x.clone(), state.chains.t.clone()
        one_step(config, state)
        changed = ((state.chains.x != x).any(1) | (state.chains.t != t)).nonzero().squeeze(1)
        if METHODS[config.method].start != "store":
            assert len(changed) == 0
            continue
        moved = {(*row.tolist(), int(level)) for row, level in zip(seen[-1].x, seen[-1].t, strict=True)}
        stored = {(*state.chains.x[i].tolist(), int(state.chains.t[i])) for i in changed}
        assert stored <= moved
        # An unadjusted step always moves; MALA may refuse all three steps of a chain.
        assert len(changed) == config.batch if config.kernel == "langevin" else 0 < len(changed) <= config.batch


def test_the_network_stays_as_it_was_set_up(config: Config):
    state, _ladder = train(config, DATA)
    assert state.network.training == begun(config).network.training
    assert all(weight.requires_grad for weight in state.network.parameters())


def test_float64_data_train(config: Config):
    """numpy's default is float64: such data must train, not fail on a dtype."""
    double = Dataset("test", DATA.train.double(), DATA.held_out.double(), DATA.shift, DATA.scale)
    state, _ladder = train(replace(config, iterations=2), double)
    assert state.chains.x.dtype == torch.float32


@pytest.mark.parametrize("method", [m for m in ALL if METHODS[m].kernel == "langevin"])
def test_unadjusted_steps_do_not_adapt(method: str):
    """Without rejections every acceptance is 1; adapting to it would let the step grow without end."""
    config = small(method, adapt_every=1)
    state, _ladder = train(config, DATA)
    assert torch.equal(state.steps.sigma, begun(config).steps.sigma)


def test_a_warm_up_without_rejections_does_not_adapt():
    config = small("da", adapt_every=1, reject_from=20)
    state, _ladder = train(config, DATA)
    assert torch.equal(state.steps.sigma, begun(config).steps.sigma)


def test_training_ends_where_it_is_told_to():
    """Asked at every checkpoint; until then it is the same run."""
    asked: list[int] = []

    def stop(state: TrainingState, ladder: Ladder) -> bool:
        asked.append(state.iteration)
        return state.iteration == 10

    state, ladder = train(small("da"), DATA, stop=stop)
    assert asked == [5, 10] and state.iteration == 10 and ladder.top == 3
    alike, _ladder = train(small("da"), DATA, stop=lambda state, ladder: state.iteration >= 10)
    for name, value in tensors_of(state).items():
        assert torch.equal(value, tensors_of(alike)[name])


def test_a_batch_larger_than_the_data_is_refused():
    """Fewer points and chains than ``batch`` says would make every count of gradients wrong."""
    with pytest.raises(InputError, match="batch"):
        train(small("da", batch=60, store=100), DATA)


# The schedule.


def test_the_rate_warms_up_linearly():
    config = small("cd", iterations=100, warm_up=9, learning_rate=2.0, decay_start=1.0)
    rates = [learning_rate(config, k) for k in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert rates[9:] == [2.0] * 91


def test_the_rate_falls_at_the_milestones():
    config = small(
        "cd", iterations=1200, warm_up=0, learning_rate=0.2, milestones=(0.5, 2 / 3, 5 / 6), decay_factor=0.2
    )
    rates = [learning_rate(config, k) for k in range(1200)]
    changes = [k for k in range(1, 1200) if rates[k] != rates[k - 1]]
    assert changes == [600, 800, 1000]
    assert [rates[k] for k in (0, 600, 800, 1000)] == pytest.approx([0.2, 0.04, 0.008, 0.0016])


def test_the_rate_decays_linearly_to_almost_nothing():
    config = small("cd", iterations=1000, warm_up=0, learning_rate=1.0, decay_start=0.5)
    rates = np.array([learning_rate(config, k) for k in range(1000)])
    assert (rates[:501] == 1).all()
    assert np.diff(rates[500:]) == pytest.approx(-1 / 500)
    assert rates[-1] == pytest.approx(1 / 500)


@pytest.mark.parametrize("decay_start", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("iterations", [1, 7])
def test_the_rate_is_never_zero_or_negative(decay_start: float, iterations: int):
    config = small("cd", iterations=iterations, decay_start=decay_start)
    rates = [learning_rate(config, k) for k in range(iterations)]
    assert all(0 < rate <= config.learning_rate and math.isfinite(rate) for rate in rates)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("preset", ["quick", "default", "paper"])
def test_matched_runs_spend_the_same_gradients(method: str, preset: str):
    """Within half an iteration: a finer match would need another batch."""
    reference = resolve("gaussian-1d", gaussian_1d.PRESETS, "da", preset)
    other = matched_iterations(resolve("gaussian-1d", gaussian_1d.PRESETS, method, preset), reference)
    cost = other.gradients_per_iteration * other.batch
    total = reference.iterations * reference.gradients_per_iteration * reference.batch
    assert abs(other.iterations * cost - total) <= cost / 2


def test_gradients_of_the_warm_starts_are_counted() -> None:
    config = Config(network="level-mlp", denoise=10, relate=4, iterations=20, steps=3, bursts=2, batch=50)
    each = [0, 7, 10, 12, 14, 14 + 6 * 8]
    assert [config.gradients(k) for k in (0, 7, 10, 12, 14, 20)] == [50 * count for count in each]


def test_the_reference_of_a_match_is_left_as_it_is():
    """DA-EBM in a comparison is then the same run, number for number, as DA-EBM by itself."""
    reference = resolve("gaussian-1d", gaussian_1d.PRESETS, "da", "quick")
    assert matched_iterations(reference, reference) == reference


# Resuming.


def run_until(config: Config, folder: Path, iteration: int, resume: bool = False) -> None:
    """Train and die right after ``iteration``, before its checkpoint could be written."""

    def report(metrics: dict[str, Any]) -> None:
        if metrics["iteration"] >= iteration:
            raise Death

    with pytest.raises(Death):
        train(config, DATA, folder, resume, report)


@pytest.mark.parametrize("last", [11, 14], ids=["at a checkpoint", "between checkpoints"])
def test_ten_and_ten_are_twenty(config: Config, tmp_path: Path, last: int):
    """Interrupted after checkpoint 10: with nothing lost, and with iterations that have to be done again."""
    whole, _ladder = train(config, DATA, tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    run_until(config, tmp_path / "parts", last)
    assert checkpoint.read(tmp_path / "parts" / CHECKPOINT, STATE)[1]["iteration"] == 10
    parts, _ladder = train(config, DATA, tmp_path / "parts", resume=True)
    assert_equal(tensors_of(whole), tensors_of(parts))
    assert_log_complete(tmp_path / "parts", config)
    without_clock = [[{**e, "seconds": 0} for e in logged(tmp_path / part)] for part in ("whole", "parts")]
    assert without_clock[0] == without_clock[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimiser": "sgd"},
        {"beta1": 0.0},
        {"average": 0.0},
        {"label_move": "local"},
        {"label_move": "block", "block": 2},
        {"bursts": 2},
        {"start": "noise", "restart": 0.3},
        {"reject_from": 12},
        {"clip": 0.5, "energy_penalty": 0.1},
        {"trust": 0.01},
        {"floor": 0.1},
        {"network": "level-mlp", "squares": 2, "octaves": 1},
        {"ladder": "paper", "delta_first": 0.01, "delta_last": 0.4},
    ],
    ids=str,
)
def test_resuming_is_exact_under_other_settings(tmp_path: Path, changes: dict[str, Any]):
    config = small("da", iterations=14, **changes)
    whole = tensors_of(train(config, DATA)[0])
    run_until(config, tmp_path, 8)
    run_until(config, tmp_path, 13, resume=True)
    assert_equal(whole, tensors_of(train(config, DATA, tmp_path, resume=True)[0]))


def test_resuming_a_finished_training_changes_nothing(tmp_path: Path):
    config = small("da", iterations=7)
    whole = tensors_of(train(config, DATA, tmp_path)[0])
    assert_equal(whole, tensors_of(train(config, DATA, tmp_path, resume=True)[0]))
    assert_log_complete(tmp_path, config)


def test_resume_without_a_checkpoint_starts_over(tmp_path: Path):
    config = small("da", iterations=4)
    assert_equal(tensors_of(train(config, DATA)[0]), tensors_of(train(config, DATA, tmp_path, resume=True)[0]))


def test_lines_cut_by_a_kill_and_lines_of_lost_iterations_are_dropped(tmp_path: Path):
    config = small("da")
    run_until(config, tmp_path, 13)
    log = tmp_path / "metrics.jsonl"
    log.write_text(log.read_text() + '{"iteration": 14, "lo')
    train(config, DATA, tmp_path, resume=True)
    assert_log_complete(tmp_path, config)


# Death at a chosen moment of a write: the moments that random kills rarely meet.


def die_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int, cut: bool = False) -> None:
    """Let the ``number``-th os.fsync or os.replace be the last thing that the run does not get done."""
    count, real = 0, getattr(os, call)

    def deadly(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count < number:
            return real(*args)
        if cut:
            os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
        raise Death

    monkeypatch.setattr(os, call, deadly)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", range(1, 9))
def test_death_in_a_checkpoint_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int):
    """With half of a file written, with the new tensors not yet in place, and between the renames of the two files.

    Numbers 1, 3, 5, ... are the tensors, 2, 4, 6, ... the JSON beside them; 1 is before anything can be resumed.
    """
    config = small("da", iterations=8, checkpoint_every=2)
    whole = tensors_of(train(config, DATA)[0])
    with monkeypatch.context() as patch:
        die_at(patch, call, number, cut=call == "fsync")
        with pytest.raises(Death):
            train(config, DATA, tmp_path)
    assert_equal(whole, tensors_of(train(config, DATA, tmp_path, resume=True)[0]))
    assert_log_complete(tmp_path, config)
    assert not list(tmp_path.rglob("*.partial"))


def test_death_while_the_log_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On resume the log loses its lines beyond the checkpoint; a kill in that moment must not cost the others."""
    config = small("da")
    run_until(config, tmp_path, 13)

    def half(self: Path, text: str, *args: Any, **kwargs: Any) -> int:
        self.write_bytes(text.encode()[: len(text) // 2])
        raise Death

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with contextlib.suppress(Death):
            train(config, DATA, tmp_path, resume=True)
    train(config, DATA, tmp_path, resume=True)
    assert_log_complete(tmp_path, config)


# Kills from outside, at moments nobody chose.

SETTINGS = {
    "iterations": 120,
    "batch": 20,
    "store": 50,
    "steps": 2,
    "log_every": 7,
    "checkpoint_every": 1,
    "long_run_chains": 10,
    "long_run_steps": 5,
    "post_chains": 20,
    "post_transitions": 5,
}


def arguments(out: Path, *more: str) -> list[str]:
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    return ["run", "gaussian-1d", "--preset", "quick", "--method", "da", "--out", str(out), *sets, *more]


def saved_iteration(folder: Path) -> int:
    path = folder / CHECKPOINT / f"{STATE}.json"
    return int(json.loads(path.read_text())["iteration"]) if path.exists() else -1


def kill_at_random(folder: Path, rng: np.random.Generator, kills: int) -> None:
    """Start or resume the run and kill it ``kills`` times, each time a random moment after some progress."""
    most = SETTINGS["iterations"] // (kills + 1)
    for _ in range(kills):
        resume = ["--resume"] if (folder / "config.json").exists() else []
        goal = saved_iteration(folder) + int(rng.integers(1, most))
        process = subprocess.Popen(
            [sys.executable, "-m", "daebm.cli", *arguments(folder, *resume, "--threads", "1")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and saved_iteration(folder) < goal:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        _out, error = process.communicate()
        assert process.returncode == -signal.SIGKILL, error.decode()


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_at_random_ends_as_if_it_never_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int):
    """A checkpoint after every iteration, so that most of the time a write is under way when the kill comes."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def finish(folder: Path, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", ["daebm", *arguments(folder, *more)])
        main()

    finish(whole)
    kill_at_random(parts, np.random.default_rng(kills), kills)
    assert saved_iteration(parts) < SETTINGS["iterations"]
    finish(parts, "--resume")

    ends = [checkpoint.read(folder / CHECKPOINT, STATE) for folder in (whole, parts)]
    assert_equal(ends[0][0], ends[1][0])
    assert {**ends[0][1], "seconds": 0} == {**ends[1][1], "seconds": 0}
    samples = [load_file(folder / "samples.safetensors") for folder in (whole, parts)]
    assert all(np.array_equal(samples[0][key], samples[1][key]) for key in samples[0])
    iterations = [entry["iteration"] for entry in logged(parts)]
    assert iterations == [*range(7, 120, 7), 120]


def test_beyond_the_margin_a_point_and_its_chain_are_drawn_together() -> None:
    """Within it they are driven apart as ever; the energies that are watched stay what they are."""
    u = torch.tensor([3.0, -9.0, -12.0, -500.0], requires_grad=True)  # a margin of 10 ends below the second
    v = torch.zeros(4, requires_grad=True)

    def energy(x: Tensor, t: Tensor) -> Tensor:
        return x.squeeze(1)

    points, levels = (u.unsqueeze(1), v.unsqueeze(1)), torch.zeros(4, dtype=torch.long)
    given = points[0], levels, points[1], levels
    loss, u_data, u_chains = likelihood_loss(nn.Identity(), energy, Config(margin=10.0, level_rate=0.1), *given)
    slopes = torch.autograd.grad(loss, (u, v))
    assert (4 * slopes[0]).tolist() == [1, 1, -1, -1] and (4 * slopes[1]).tolist() == [-1, -1, 1, 1]
    assert loss.item() == pytest.approx((3 - 9 - 8 + 480) / 4)
    assert torch.equal(u_data, u) and torch.equal(u_chains, v)
    plain, _u, _v = likelihood_loss(nn.Identity(), energy, Config(), *given)
    assert plain.item() == pytest.approx((3 - 9 - 12 - 500) / 4)


def test_the_penalty_prefers_no_level() -> None:
    """The energies of exact draws are as far from their own mean at every level: nothing pulls at the constants.

    Planted: a size that is measured from 0 pulls levels of many dimensions by tens of standard errors.
    """
    dimension, rows, weight = 200, 400, 0.1
    z = torch.randn(rows, dimension, generator=torch.Generator().manual_seed(2))
    ladder = Ladder.geometric(dimension, floor=0.05, top=6)
    network = LevelMLP(z, ladder, width=8, hidden=1)
    t = torch.arange(7).repeat_interleave(rows)
    base = network.base
    white = torch.randn(len(t), dimension, generator=torch.Generator().manual_seed(3))
    x = (white / base.precision[t] + base.centre[t]) @ base.axes.T
    for measured_from, caught in ((network, False), (GaussianTop(network, top=6), False), (nn.Identity(), True)):
        loss, _u, _v = likelihood_loss(measured_from, network, Config(energy_penalty=weight), x, t, x, t)
        (pull,) = torch.autograd.grad(loss, network.constant)  # 2 weight / 7 times twice a mean over the level's rows
        errors = pull / (4 * weight / 7) / math.sqrt(dimension / 2 / rows)
        assert bool((errors.abs() > 5).any()) == caught, errors


@pytest.mark.parametrize("margin", [0.0, 50.0])
def test_a_margin_holds_energies_that_no_chain_holds(margin: float) -> None:
    """Chains that hardly move, and none of them of a rare kind of images: without a margin nothing bounds the loss."""
    generator = torch.Generator().manual_seed(0)
    images = 0.3 * torch.randn(400, 1, 8, 8, generator=generator)
    images[::50] += 2 * torch.tensor([1.0, -1.0]).repeat(4).unsqueeze(1)  # stripes
    config = Config(
        **{"network": "level-resnet", "width": 8, "hidden": 1, "floor": 0.2, "top": 5, "label_move": "carry"},
        **{"iterations": 60, "batch": 20, "store": 20, "steps": 1, "step_size": 1e-4, "adapt_every": 10},
        **{"level_rate": 1e-6, "learning_rate": 1e-3, "block": 2, "margin": margin, "maximum_gap": 1e9},
    )
    setup = begin(config, Dataset("rare", images, images[:8], 0.0, 1.0))
    setup.state.chains.x = setup.ladder.diffuse(images[1:21], setup.state.chains.t, generator)
    while setup.state.iteration < config.iterations:
        advance(setup)
    level = torch.zeros(8, dtype=torch.long)
    with torch.no_grad():
        striped, other = (setup.state.network(images[i::50], level) for i in (0, 1))
    # An update of some nats beyond the margin is made up for by the next ones.
    assert (abs(float((striped - other).mean())) < 20 * 50) == (margin > 0)


def test_a_margin_needs_pairs() -> None:
    with pytest.raises(InputError, match="margin compares points and chains at the same levels"):
        Config(margin=10.0)


def one_update(trust: float, iteration: int = 0, **changes: Any) -> tuple[float, list[Tensor], float]:
    """By how much an update lowers the loss of its batch, to first order; its way, weight by weight; and its rate."""
    config = small("da", trust=trust, warm_up=0, learning_rate=0.01, **changes)
    setup = begin(config, DATA)
    while setup.state.iteration < iteration:
        advance(setup)
    weights = trainable(setup.state.network)
    before = [weight.detach().clone() for weight in weights]
    rate = learning_rate(config, setup.state.iteration)
    advance(setup)
    moved = [weight.detach() - old for weight, old in zip(weights, before, strict=True)]
    slopes = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    return -sum(float((way * slope).sum()) for way, slope in zip(moved, slopes, strict=True)), moved, rate


def test_an_update_lowers_its_batch_by_what_it_is_trusted_with() -> None:
    free, way, _rate = one_update(0.0)
    assert free > 0.02  # planted: what an update does that nothing holds
    held, shorter, _rate = one_update(0.01)
    # Float32 sums of some hundred products.
    assert held == pytest.approx(0.01, rel=1e-3)
    for a, b in zip(way, shorter, strict=True):  # in the same direction
        torch.testing.assert_close(a * (held / free), b, rtol=1e-2, atol=1e-7)
    same = one_update(10 * free)  # as if there were no limit
    assert all(torch.equal(a, b) for a, b in zip(way, same[1], strict=True))


def test_trust_falls_as_the_rate_does_and_is_for_chains_alone() -> None:
    late, _way, rate = one_update(0.01, iteration=17)
    assert rate < 0.004
    assert late == pytest.approx(0.01 * rate / 0.01, rel=1e-2)
    level = {"network": "level-mlp", "squares": 2, "octaves": 1, "denoise": 2}
    assert all(
        torch.equal(a, b) for a, b in zip(one_update(1e-9, **level)[1], one_update(0.0, **level)[1], strict=True)
    )
