"""Training on images of bytes: device, precision and compilation, the update's limits, levels of equal mass."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from daebm import Config, Dataset, Ladder, Model, checkpoint, levels, resnet, train, training
from daebm import precision as guarding
from daebm.chains import Chains
from daebm.config import PRECISIONS
from daebm.data import to_unit_range
from daebm.engine import Engine, set_precision
from daebm.errors import InputError
from daebm.networks import LevelMLP, ReluMLP
from daebm.precision import LIMIT, check_precision, settle_precision
from daebm.resnet import HALF, Draft
from daebm.samplers import langevin, mgms
from daebm.samplers.langevin import mala
from daebm.samplers.mgms import full, transition
from daebm.spacing import level_balance
from daebm.state import CHECKPOINT, STATE
from daebm.training import begin, step

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="compilation needs a C++ compiler")
DIGITS = torch.from_numpy(load_digits().images * 15).byte().unsqueeze(1)  # (1797, 1, 8, 8), 0..240
DATA = Dataset.standardised("digits", DIGITS[:1297], DIGITS[1297:])


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """PyTorch's switches are for the whole process: leave them as they were."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
    yield
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "network": "level-resnet",
        "width": 4,
        "hidden": 1,
        "top": 5,
        "floor": 0.2,
        "iterations": 6,
        "batch": 16,
        "store": 40,
        "steps": 2,
        "step_size": 0.3,
        "adapt_every": 4,
        "log_every": 1,
    }
    return Config(**(values | {"experiment": "test"} | changes))


def one_sentence(error: pytest.ExceptionInfo[InputError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message and ". " not in message and all(word in message for word in words), message


# Bytes.


def test_bytes_stay_bytes() -> None:
    """60,000 pictures as float32 are four times the memory, for nothing."""
    setup = begin(config(), DATA)
    assert setup.data.dtype == torch.uint8 and torch.equal(setup.data, DATA.train)
    rows = torch.tensor([5, 0, 1296])
    state = setup.state.generator.get_state()
    points = setup.points(rows)
    assert points.dtype == torch.float32
    assert torch.equal(points, DATA.standardise(DATA.train[rows]))
    assert torch.equal(state, setup.state.generator.get_state())  # without dequantise nothing is drawn


def test_dequantised_points_stay_within_their_grey_level() -> None:
    """A grey level k is an interval around k/127.5 - 1, which is its middle and what is scored."""
    setup = begin(config(dequantise=True), DATA)
    rows = torch.arange(500)
    first, second = setup.points(rows), setup.points(rows)
    assert not torch.equal(first, second)  # drawn anew every time
    grey = DATA.train[rows].double()
    for points in (first, second, DATA.standardise(DATA.train[rows])):
        level = (points.double() * DATA.scale + DATA.shift + 1) * 127.5 - grey
        assert float(level.abs().max()) < 0.5 + 1e-4  # float32 at 255 is right to 2e-5
    noise = (first.double() * DATA.scale + DATA.shift + 1) * 127.5 - grey
    # 32,000 uniform numbers: the mean has sd .289 / sqrt(32000), the mean square 1/12 with sd .0745 / sqrt(32000).
    assert abs(float(noise.mean())) < 5 * 0.289 / math.sqrt(32_000)
    assert abs(float(noise.square().mean()) - 1 / 12) < 5 * 0.0745 / math.sqrt(32_000)


def test_standardised_bytes_have_mean_0_and_sd_1() -> None:
    assert DATA.train.dtype == torch.uint8
    grey = DATA.train.double() / 127.5 - 1
    assert pytest.approx(float(grey.mean()), abs=1e-6) == DATA.shift  # bytes become float32 numbers first
    assert pytest.approx(float(grey.std()), abs=1e-6) == DATA.scale
    z = DATA.standardise(DATA.train).double()
    assert float(z.mean()) == pytest.approx(0, abs=1e-6) and float(z.std()) == pytest.approx(1, abs=1e-6)


def test_black_and_white_are_the_ends_of_the_range() -> None:
    assert to_unit_range(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]
    assert to_unit_range(torch.tensor([0.0, 255.0])).tolist() == [0, 255]  # floats are in data units already


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_energies_of_bytes_are_those_of_grey_levels(kind: str) -> None:
    it = config()
    setup = begin(it, DATA)
    nn.init.normal_(setup.state.network.inner.head.weight)
    model = Model.from_training(it, DATA, setup.state, setup.ladder)
    grey = DATA.held_out[:20]
    unit = grey.float() / 127.5 - 1
    given = (grey.numpy(), unit.numpy()) if kind == "numpy" else (grey, unit)
    a, b = (torch.as_tensor(model.energy(x, 1)) for x in given)
    assert a.dtype == b.dtype == torch.float32 and len(a.unique()) == 20
    torch.testing.assert_close(a, b)  # numpy goes by way of float64


def test_energies_of_rows_of_bytes_are_those_of_the_training_units() -> None:
    """What training standardised as grey levels, the model must too."""
    rows = Dataset.standardised("rows", DIGITS[:1297].flatten(1), DIGITS[1297:].flatten(1))
    it = config(network="level-mlp")
    setup = begin(it, rows)
    model = Model.from_training(it, rows, setup.state, setup.ladder)
    expected = setup.state.network(rows.standardise(rows.held_out), torch.zeros(500, dtype=torch.long)).detach()
    torch.testing.assert_close(model.energy(rows.held_out), expected)  # the same operations


# What this machine cannot do.


@pytest.mark.parametrize("start", [begin, train])
def test_a_missing_gpu_is_said(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError) as error:
        start(config(device="cuda"), DATA)
    one_sentence(error, "device=cuda", "device=cpu")


@pytest.mark.parametrize("precision", ["tf32x2", "drafted", "tf32", "fp16", "bf16"])
def test_coarse_arithmetic_on_a_cpu_is_refused(precision: str) -> None:
    with pytest.raises(InputError) as error:
        train(config(precision=precision), DATA)
    one_sentence(error, f"precision={precision}", "device=cuda")


@pytest.mark.parametrize("precision", ["tf32x2", "drafted", *HALF])
def test_half_precision_without_convolutions_is_refused(precision: str) -> None:
    """TF32 is a switch of the library and harms nothing."""
    network = ReluMLP(2, 8, 1)
    with pytest.raises(InputError) as error:
        set_precision(network, precision)
    one_sentence(error, f"precision={precision}", "fp32")
    set_precision(network, "tf32")


def test_the_precision_reaches_the_network_inside() -> None:
    """The larger product of tf32x2 is TF32's own, so the library's switch is on for it too."""
    network = begin(config(), DATA).state.network
    assert network.inner.arithmetic == "fp32"
    for precision in PRECISIONS:
        set_precision(network, precision)
        assert network.inner.arithmetic == precision
        assert torch.backends.cudnn.allow_tf32 == (precision in ("tf32", "tf32x2", "drafted"))
        assert not torch.backends.cuda.matmul.allow_tf32


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError) as error:
        train(config(compile=True), DATA)
    one_sentence(error, "compile=true", "g++")


# A run on images.


def test_training_on_images_of_bytes() -> None:
    """Few iterations of 16 channels on scikit-learn's digits, with the levels of data and chains paired."""
    it = config(
        width=16,
        top=0,
        floor=0.1,
        step_size=0.7,
        iterations=10,
        batch=64,
        store=128,
        level_rate=0.1,
        dequantise=True,
    )
    seen: list[dict[str, Any]] = []
    state, _ladder = train(it, DATA, report=seen.append)
    assert len(seen) == 10 and not any("event" in metrics for metrics in seen)
    assert all(math.isfinite(value) for metrics in seen for value in metrics.values())
    assert all(0 < metrics["acceptance"] < 1 for metrics in seen)
    assert all(torch.isfinite(weight).all() for weight in state.network.parameters())
    # The model starts with the data's first two moments, so that the mean energies agree. At a level the energies of
    # data have an sd of at most 10 nats: the means of 64 of them and of 64 chains differ by 5 * 10 * sqrt(2 / 64).
    assert max(abs(metrics["gap"]) for metrics in seen) < 5 * 10 * math.sqrt(2 / 64)
    assert int(state.nonfinite) == 0


# Compiled and eager.


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet.ResNet((1, 4, 4), levels=3, width=4).double()


@needs_compiler
@pytest.mark.parametrize(
    "multipliers", [(2,), pytest.param((1, 2, 2, 2), marks=pytest.mark.long)], ids=["one block", "whole"]
)
def test_a_compiled_transition_is_the_eager_one(monkeypatch: pytest.MonkeyPatch, multipliers: tuple[int, ...]) -> None:
    """The same noise, the same moves. Float64: the order of a sum changes 1e-15, which flips no decision in practice.

    One block, with a convolution for its skip, compiles in a fraction of the time of four.
    """
    monkeypatch.setattr(resnet, "MULTIPLIERS", multipliers)
    network = small_resnet()
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t, sigma = torch.arange(6) % 3, torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    torch.compiler.reset()  # what other tests compiled counts against the limit, beyond which steps go uncompiled
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    ends = []
    for compiled in (False, True):
        generator = torch.Generator().manual_seed(2)
        ends.append(transition(mala, network, x, t, sigma, 1, full(2), generator, compiled))
        ends[-1] = (*ends[-1], generator.get_state())
    assert counters["stats"]["unique_graphs"] == graphs + 1
    (x_a, t_a, info_a, state_a), (x_b, t_b, info_b, state_b) = ends
    torch.testing.assert_close(x_a, x_b)
    torch.testing.assert_close(info_a.steps.accept_prob, info_b.steps.accept_prob)
    assert torch.equal(t_a, t_b) and torch.equal(state_a, state_b)
    assert not torch.equal(x_a, x)


@needs_compiler
@pytest.mark.long
def test_compiled_training_is_eager_training() -> None:
    """Three iterations in float32. Energies of some 100 nats are right to 1e-5, and so is an acceptance probability:
    of 3 * 16 * 2 decisions none is as close as that (the chains would differ by a step), and weights of order 1, that
    Adam moves by .001 a time whatever the gradient, agree to .0001 unless a gradient is zero but for rounding."""
    runs = [train(config(compile=compiled, iterations=3), DATA)[0] for compiled in (False, True)]
    a, b = runs
    assert torch.equal(a.chains.t, b.chains.t) and torch.equal(a.generator.get_state(), b.generator.get_state())
    torch.testing.assert_close(a.chains.x, b.chains.x, rtol=0, atol=1e-4)
    for name, weight in a.network.named_parameters():
        torch.testing.assert_close(weight, b.network.get_parameter(name), rtol=0, atol=1e-4, msg=name)


# Resuming a run with a warm start.


class Death(BaseException):
    """Ends a run from within, as a kill would."""


def ended(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = checkpoint.read(folder / CHECKPOINT, STATE)
    return tensors, {**facts, "seconds": 0}


@pytest.fixture(scope="module", params=["adam", "muon"])
def warm_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Everything happens: 4 iterations of denoising, 5 with labels, 6 of likelihood, 5 to finish."""
    it = config(
        optimiser=request.param,
        iterations=20,
        finish=5,
        denoise=4,
        relate=5,
        checkpoint_every=3,
        average=0.9,
        beta1=0.5,
        level_rate=0.1,
        dequantise=True,
        label_move="carry",
        block=3,
        gain_rate=0.01,
    )
    folder = tmp_path_factory.mktemp("whole")
    train(it, DATA, folder)
    return it, folder


@pytest.mark.parametrize(
    ("last", "saved"),
    [(5, 3), (7, 6), (9, 6), (10, 9), (16, 15), (19, 18)],
    ids=[
        "inside the first",
        "inside the second",
        "in its last iteration",
        "at its end",
        "at the end of learning",
        "with weights that stay",
    ],
)
def test_a_warm_start_resumes_bit_for_bit(warm_run: tuple[Config, Path], tmp_path: Path, last: int, saved: int) -> None:
    it, whole = warm_run

    def report(metrics: dict[str, Any]) -> None:
        if metrics["iteration"] >= last:
            raise Death

    with pytest.raises(Death):
        train(it, DATA, tmp_path, report=report)
    assert ended(tmp_path)[1]["iteration"] == saved
    resumed, _ladder = train(it, DATA, tmp_path, resume=True)
    for name, weight in resumed.network.named_parameters():  # else each is updated by itself on a GPU
        laid_out = [resumed.average[name], *resumed.optimiser.state.get(weight, {}).values()]
        assert {value.stride() for value in laid_out if value.shape == weight.shape} == {weight.stride()}, name
    (tensors, facts), (expected, expected_facts) = ended(tmp_path), ended(whole)
    assert facts == expected_facts and tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), key


@pytest.mark.parametrize("wanted", [{"relate": 1}, {"label_move": "carry"}], ids=str)
@pytest.mark.parametrize("changes", [{"network": "resnet"}, {"method": "drl"}], ids=str)
def test_what_carries_x_needs_a_network_that_can(wanted: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="they need method=da and network=level-mlp or level-resnet"):
        config(**(wanted | changes))


@pytest.mark.long
def test_the_recipe_of_the_images_in_miniature() -> None:
    """Denoising, labels of carried images, then persistent chains, on digits: nothing diverges, the levels keep their
    chains, and data and chains stay together.

    When this was written the gap was -.15 nats over the last 100 iterations, with a standard error of .2 (images differ
    by 10 nats, 1,000 chains), fifths of the ladder held .6 to 1.2 of their share, and 147 round trips were made."""
    it = config(
        **{"width": 16, "ladder": "overlap", "overlap": 0.4, "last_variance": 0.99, "batch": 100, "store": 1000},
        **{"steps": 3, "bursts": 3, "label_move": "carry", "block": 8, "level_rate": 0.3, "gain_rate": 5e-4},
        **{"denoise": 600, "denoise_rate": 4e-3, "relate": 200, "relate_rate": 1e-3},
        **{"iterations": 1200, "learning_rate": 1e-5, "average": 0.99, "adapt_every": 10, "step_size": 0.5},
    )
    setup = begin(it, DATA)
    measures = torch.stack([training.advance(setup) for _ in range(it.iterations)])
    chains, levels = setup.state.chains, setup.ladder.levels
    assert torch.isfinite(measures).all() and int(setup.state.nonfinite) == 0
    assert abs(float(measures[-100:, 1].mean())) < 1.5
    shares = (
        torch.bincount(chains.t * 5 // levels, minlength=5)
        / len(chains)
        / (torch.bincount(torch.arange(levels) * 5 // levels) / levels)
    )
    assert float(shares.min()) > 0.4 and float(shares.max()) < 2.5
    assert int(chains.trips.sum()) > 0


# Levels of equal mass.


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_constants_follow_the_masses_and_nothing_else(optimiser: str) -> None:
    """At an adaptation they take back their share of what all stored chains see; the optimiser never moves them."""
    it = config(level_rate=0.5, optimiser=optimiser, bursts=2, adapt_every=2, learning_rate=0.01, energy_penalty=0.1)
    setup = begin(it, DATA)
    network, chains = setup.state.network, setup.state.chains
    constant = network.constant
    for k in range(4):
        before, others = constant.detach().clone(), network.inner.head.weight.detach().clone()
        step(setup)
        after = constant.detach().clone()
        assert not torch.equal(others, network.inner.head.weight)  # the optimiser did move the rest
        if k % 2 == 0:
            assert torch.equal(after, before)
            continue
        constant.copy_(before)
        ratio, _acceptance = level_balance(network, chains.x, chains.t, setup.ladder.top)
        constant.copy_(after)
        assert after[0] == before[0] and ratio.abs().max() > 0.1
        # The same numbers, added up in float64 and rounded once.
        shares = torch.bincount(chains.t, minlength=setup.ladder.levels) * setup.ladder.levels / len(chains)
        crowded = 0.5 * sum(nats for _part, nats in levels.HISTOGRAM) * (shares - shares[0])  # windows of one level
        torch.testing.assert_close(
            after[1:] - before[1:], 0.5 * ratio.cumsum(0).float() + crowded[1:], rtol=1e-5, atol=1e-6
        )
    assert not constant.requires_grad and constant.grad is None
    index = [name for name, _ in network.named_parameters()].index("constant")
    assert index not in setup.state.optimiser.state_dict()["state"]


def test_at_the_end_weights_stay_and_levels_find_their_masses() -> None:
    """The averaged ones, to the last bit; the constants go on, and end as their mean, the later the more."""
    it = config(level_rate=0.3, bursts=2, adapt_every=2, learning_rate=0.01, iterations=30, finish=20, average=0.9)
    setup = begin(it, DATA)
    state = setup.state
    for _ in range(it.learned):
        training.advance(setup)
    weights = {name: weight.detach().clone() for name, weight in state.network.named_parameters()}
    assert all(torch.equal(state.average[name], weight) for name, weight in weights.items())
    constants = []
    for _ in range(it.finish):
        constants.append(state.network.constant.detach().clone())
        training.advance(setup)
    for name, weight in state.network.named_parameters():
        assert torch.equal(weight, weights[name]) == (name != "constant"), name
        if name != "constant":
            torch.testing.assert_close(state.average[name], weights[name], rtol=1e-6, atol=0)
    age = torch.arange(1.0, it.finish + 1)
    mean = (torch.stack(constants) * (age / age.sum()).unsqueeze(1)).sum(0)
    torch.testing.assert_close(state.average["constant"], mean, rtol=1e-4, atol=1e-4)


def test_corrections_at_the_end_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    monkeypatch.setattr(training, "balance_levels", lambda setup, x, t, share: shares.append(share))
    setup = begin(
        config(level_rate=0.3, adapt_every=10, iterations=140, finish=110, average=0.9, batch=2, store=2), DATA
    )
    for _ in range(140):
        training.advance(setup)
    assert shares[:3] == [0.3] * 3 and shares[-1] == pytest.approx(0.3 / (1 + 110 / training.FINISHING))
    assert shares[2:] == sorted(shares[2:], reverse=True)


def test_the_rate_is_spent_when_weights_stay() -> None:
    """Linear decay ends there, and milestones are shares of what comes before."""
    it = config(learning_rate=1.0, iterations=1200, finish=200, decay_start=0.5, level_rate=0.1, average=0.9)
    rates = [training.learning_rate(it, k) for k in range(1200)]
    assert rates[:500] == [1.0] * 500 and rates[750] == pytest.approx(0.5) and rates[999] == pytest.approx(0.002)
    assert rates[1000:] == [0.0] * 200
    it = config(
        learning_rate=1.0, iterations=1200, finish=200, milestones=(0.5,), decay_factor=0.1, level_rate=0.1, average=0.9
    )
    rates = [training.learning_rate(it, k) for k in range(1200)]
    assert rates[499] == 1 and rates[500] == rates[999] == pytest.approx(0.1) and rates[1000:] == [0.0] * 200


def test_a_gradient_that_is_not_finite_does_no_harm_at_the_end() -> None:
    """A rate of 0 times infinity would be a NaN weight."""
    it = config(level_rate=0.3, adapt_every=2, iterations=14, finish=4, average=0.9)
    setup = begin(it, DATA)
    for _ in range(it.learned):
        training.advance(setup)
    weights = [weight.detach().clone() for weight in setup.state.network.parameters() if weight.requires_grad]
    training.update(it, setup.state, [torch.full_like(weight, torch.inf) for weight in weights])
    left = [weight for weight in setup.state.network.parameters() if weight.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(weights, left, strict=True))


def test_a_finish_without_an_adaptation_is_refused() -> None:
    with pytest.raises(InputError, match="finish=9 ends before levels adapt: give 10 or more"):
        config(level_rate=0.1, average=0.9, finish=9, adapt_every=10, iterations=50)


@pytest.mark.parametrize("changes", [{"level_rate": 0.0}, {"average": 0.0}], ids=str)
def test_finish_without_what_it_finishes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="level_rate and average must not be 0"):
        config(**({"level_rate": 0.1, "average": 0.9, "finish": 2} | changes))


def test_without_level_rate_the_optimiser_moves_the_constants() -> None:
    setup = begin(config(), DATA)
    step(setup)
    assert setup.state.network.constant.requires_grad and (setup.state.network.constant != 0).any()


def test_data_take_the_levels_of_the_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a constant per level drops out of the gap."""
    gaps = []
    for shift in (0.0, 100.0):
        setup = begin(config(level_rate=1e-6, iterations=2, label_move="local"), DATA)
        with torch.no_grad():
            setup.state.network.constant += shift * torch.tensor([0.0, 1, 0, 1, 0, 1])
        # Steps only, no label moves: the constants must not change where the chains go.
        monkeypatch.setattr(setup.engine, "move", lambda energy, x, t, g: full(0)(energy, x, t, g)._replace(t=t))
        gaps.append(float(step(setup)[1]))
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-3)  # energies of some 100 nats in float32


@pytest.mark.parametrize(
    "changes",
    [
        {"network": "resnet"},
        {"network": "gated-mlp"},
        {"network": "level-mlp", "method": "persistent"},
        {"method": "drl"},
    ],
    ids=str,
)
def test_level_rate_without_constants_is_refused(changes: dict[str, Any]) -> None:
    data = DATA if changes.get("network") != "gated-mlp" else Dataset("rows", torch.randn(50, 3), torch.randn(5, 3))
    with pytest.raises(InputError) as error:
        begin(config(**({"level_rate": 0.1} | changes)), data)
    one_sentence(error, "level_rate", "constant", "level-mlp")


def test_balancing_makes_wrong_constants_right() -> None:
    """An exact Gaussian at every level, but for constants that are off by up to 6 nats; the network stands still.

    Chains then sit on few levels. The balance must make the labels uniform, as they are for an exact model: 1,000
    labels on 5 levels are off by .025 in total variation, and constants that 1,000 chains agree on by .1 or so.
    """
    data = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[1.0, 0.5], [0.0, 0.8]])
    wrong = torch.tensor([0.0, 3.0, -3.0, 2.0, -1.0])
    shares, constants = {}, {}
    for rate in (0.0, 0.3):
        ladder = Ladder.geometric(2, floor=0.3, top=4)
        torch.manual_seed(1)
        network = LevelMLP(data, ladder, width=4, hidden=1)
        with torch.no_grad():
            network.constant += wrong
        it = config(
            network="level-mlp",
            level_rate=rate,
            learning_rate=1e-9,
            top=4,
            floor=0.3,
            iterations=150,
            batch=1000,
            store=1000,
            steps=1,
            step_size=0.8,
            decay_start=0.3,
        )
        state, _ladder = train(it, Dataset("gaussian", data, data[:10]), network=network)
        shares[rate] = torch.bincount(state.chains.t, minlength=5) / 1000
        constants[rate] = state.network.constant.detach()
    assert float((shares[0.0] - 0.2).abs().sum()) / 2 > 0.4
    assert float((shares[0.3] - 0.2).abs().sum()) / 2 < 0.1
    assert float(constants[0.3].max() - constants[0.3].min()) < 0.5
    torch.testing.assert_close(constants[0.0], wrong, rtol=0, atol=1e-5)  # 150 steps of 1e-9


# Is a coarse arithmetic still exact enough?

VARIANCE = torch.tensor([0.5, 1.0, 2.0])
SIGMA = 0.9 * VARIANCE.double().sqrt()
EVENT = (1, 3, 3)


class Coarse(nn.Module):
    """N(0, v_t I) at every level. In ``coarse`` precisions the energy is ``fault`` of itself; the slope stays exact."""

    def __init__(self, fault: Any = torch.round, coarse: tuple[str, ...] = tuple(HALF)) -> None:
        super().__init__()
        self.arithmetic, self.fault, self.coarse = "fp32", fault, coarse

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        v = VARIANCE[t]
        u = x.square().flatten(1).sum(1) / (2 * v) + x[0].numel() / 2 * v.log()
        return u + (self.fault(u) - u).detach() if self.arithmetic in self.coarse else u


def at_equilibrium(n: int = 3000, levels: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(n) % levels
    return VARIANCE[t].sqrt().reshape(-1, 1, 1, 1) * torch.randn(n, *EVENT, generator=generator), t


@pytest.mark.parametrize("kind", ["closed form", "level-resnet"])
def test_the_same_precision_changes_nothing(kind: str) -> None:
    if kind == "closed form":
        network, (x, t), sigma = Coarse(), at_equilibrium(), SIGMA
    else:
        setup = begin(config(), DATA)
        nn.init.normal_(setup.state.network.inner.head.weight, std=0.1)
        network, sigma = setup.state.network, setup.state.steps.sigma
        x, t = setup.state.chains.x, setup.state.chains.t
    report = check_precision(network, "fp32", x, t, sigma, torch.Generator().manual_seed(1))
    assert report.passes and report.worst == 0
    assert not report.acceptance.any() and not report.labels.any()


@pytest.mark.parametrize("precision", list(HALF))
def test_energies_in_whole_nats_are_refused_and_rightly_measured(precision: str) -> None:
    """Against acceptance probabilities written down from the densities, with the noise that the check draws."""
    network, (x, t) = Coarse(), at_equilibrium()
    report = check_precision(network, precision, x, t, SIGMA, torch.Generator().manual_seed(1), chunk=3000)
    assert report.precision == precision and not report.passes and report.worst > 10 * LIMIT
    assert network.arithmetic == precision

    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).flatten(1).double()
    x, v, s = x.flatten(1).double(), VARIANCE[t].double(), SIGMA[t]
    y = x * (1 - s**2 / (2 * v))[:, None] + s[:, None] * eps

    def energy(z: Tensor, v: Tensor) -> Tensor:
        return z.square().sum(-1) / (2 * v) + 9 / 2 * v.log()

    def log_move(a: Tensor, b: Tensor) -> Tensor:
        return -(b - a * (1 - s**2 / (2 * v))[:, None]).square().sum(1) / (2 * s**2)

    def acceptance(u_x: Tensor, u_y: Tensor) -> Tensor:
        return (u_x - u_y + log_move(y, x) - log_move(x, y)).clamp(max=0).exp()

    u_x, u_y = energy(x, v), energy(y, v)
    moved = (acceptance(u_x.round(), u_y.round()) - acceptance(u_x, u_y)).abs()
    u = energy(x[:, None], VARIANCE.double())
    drawn = (torch.softmax(-u.round(), 1) - torch.softmax(-u, 1)).abs().sum(1) / 2
    for k in range(3):
        # Float32: an energy within 1e-6 of a half may round the other way, one chain in a thousand's share of a change.
        assert float(report.acceptance[k]) == pytest.approx(float(moved[t == k].mean()), abs=1e-3)
        assert float(report.labels[k]) == pytest.approx(float(drawn[t == k].mean()), abs=1e-3)


def test_a_fine_fault_passes() -> None:
    """Rounded to a thousandth of a nat: changes of .0005 at most, far below the limit but not zero."""
    report = check_precision(
        Coarse(lambda u: (1000 * u).round() / 1000), "fp16", *at_equilibrium(), SIGMA, torch.Generator().manual_seed(1)
    )
    assert 0 < report.worst < 0.001 and report.passes


def nan_beyond(limit: float) -> Any:
    return lambda u: torch.where(u > limit, torch.nan, u)


@pytest.mark.parametrize("fault", [nan_beyond(-torch.inf), nan_beyond(8.0)], ids=["everywhere", "in places"])
def test_energies_that_are_no_numbers_fail(fault: Any) -> None:
    report = check_precision(Coarse(fault), "fp16", *at_equilibrium(), SIGMA, torch.Generator().manual_seed(1))
    assert not report.passes and report.worst == math.inf


def test_proposals_whose_energy_is_no_number_fail() -> None:
    """Half precision overflows at every proposal and at no chain: it refuses what float32 accepts 7 times in 10."""
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(200, 1, 12, 12, generator=generator), torch.ones(200, dtype=torch.long)
    sigma = torch.full((3,), 0.55, dtype=torch.float64)
    here = Coarse()(x, t)
    network = Coarse(lambda u: u if len(u) != len(x) or torch.equal(u, here) else u * torch.nan)
    report = check_precision(network, "fp16", x, t, sigma, generator)
    assert not report.passes


def test_levels_without_chains_report_zero() -> None:
    x, t = at_equilibrium(200, levels=2)
    report = check_precision(Coarse(), "fp16", x, t, SIGMA, torch.Generator().manual_seed(1))
    assert report.acceptance.shape == report.labels.shape == (3,)
    assert (report.acceptance[:2] > 0).all() and report.acceptance[2] == report.labels[2] == 0


def test_a_refused_precision_gives_way_to_the_next() -> None:
    """Here TF32 is float32, which passes, unless it is said to be coarse too."""
    chains = Chains.start(*at_equilibrium(300))
    network = Coarse()
    settled, (sentence,) = settle_precision(network, "fp16", chains, SIGMA, seed=0)
    assert settled == "tf32"
    assert "fp16" in sentence and "tf32" in sentence and "\n" not in sentence
    assert network.arithmetic == "tf32" and torch.backends.cudnn.allow_tf32
    assert settle_precision(network, "fp32", chains, SIGMA, seed=0) == ("fp32", [])
    assert not torch.backends.cudnn.allow_tf32
    fine = Coarse(lambda u: u)
    assert settle_precision(fine, "bf16", chains, SIGMA, seed=0) == ("bf16", []) and fine.arithmetic == "bf16"


@pytest.mark.parametrize("last", ["tf32x2", "fp32"])
def test_precisions_are_tried_from_coarse_to_fine(last: str) -> None:
    """fp16, TF32, TF32 of x in two parts, float32: one sentence for every one that is refused on the way."""
    way = ["fp16", "tf32", "tf32x2", "fp32"]
    refused = way[: way.index(last)]
    network = Coarse(coarse=tuple(refused))
    settled, said = settle_precision(network, "fp16", Chains.start(*at_equilibrium(300)), SIGMA, seed=0)
    assert settled == network.arithmetic == last
    assert torch.backends.cudnn.allow_tf32 == (last == "tf32x2")
    for sentence, before, after in zip(said, refused, way[1:], strict=False):
        assert f"precision {before} " in sentence and sentence.endswith(f"going on in {after}")
    assert len(said) == len(refused)


def drafted_network() -> tuple[Any, Tensor, Tensor, Tensor]:
    """A network that has learned something, so that 11 bits are felt, and where its chains begin."""
    setup = begin(config(), DATA)
    nn.init.normal_(setup.state.network.inner.head.weight, std=0.1)
    return setup.state.network, setup.state.chains.x, setup.state.chains.t, setup.state.steps.sigma


def test_a_draft_is_the_network_in_16_bits_and_shares_its_weights() -> None:
    network, x, t, _sigma = drafted_network()
    draft = Draft(network)
    coarse = {layer.weight.dtype for layer in draft.network.modules() if isinstance(layer, nn.Conv2d)}
    assert coarse == {torch.float16, torch.float32}  # pixels are never rounded: the stem is as it was
    assert draft.network.constant is network.constant and len(draft.own) == 2 * (2 * 4 + 1)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    for _ in range(2):
        u, v = network(x, t), draft.at(t)(x)
        off = (u - v).detach().std()
        assert v.dtype == torch.float32 and 0 < float(off) < 1e-3 * float(u.detach().std())
        with torch.no_grad():  # as the optimiser would
            for weight in network.parameters():
                weight.add_(0.05 * weight.std(unbiased=False) * torch.randn_like(weight))
            stale = draft.network(x, t)
        assert float((network(x, t).detach() - stale).std()) > 10 * float(off)


def test_drafted_steps_are_exact_by_the_check_and_counted() -> None:
    """The check sees the decision on the burst: by float32 energies on a CPU, so nothing changes."""
    network, x, t, sigma = drafted_network()
    report = check_precision(network, "drafted", x, t, sigma, torch.Generator().manual_seed(1), steps=4)
    assert report.acceptance.shape == report.labels.shape == report.kept.shape == sigma.shape
    assert report.passes and report.worst < 1e-4 and 0.9 < float(report.kept.min()) < 1
    some = torch.ones_like(report.kept)
    some[1] = 0.21  # at one level: steps there are worth less, all others are worth more
    assert report._replace(kept=some).passes
    some[1] = 0.19  # chains are stuck there
    stuck, slow = report._replace(kept=some), report._replace(kept=torch.full_like(some, 0.59))
    assert not stuck.passes and "0.19 at its worst level" in stuck.reason
    assert not slow.passes and "keeps 0.59 of the bursts" in slow.reason
    few = check_precision(network, "drafted", x[:9], t[:9], sigma, torch.Generator().manual_seed(1))
    assert len(few.kept.unique()) == 1  # of all: nine chains say nothing of a level
    assert check_precision(network, "fp32", x, t, sigma, torch.Generator().manual_seed(1)).kept is None


def test_few_chains_at_a_level_are_enough_to_refuse_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them drafts several bursts. Planted: a level of four chains where no draft is kept."""
    network, x, t, sigma = drafted_network()
    few = torch.cat([(t == level).nonzero().flatten()[:4] for level in range(len(sigma))])

    def burst(network: Any, x: Tensor, t: Tensor, *_: Any) -> Any:
        return lambda: torch.where(t == 2, -100.0, 0.0)

    monkeypatch.setattr(guarding, "_burst", burst)
    settled, (sentence,) = settle_precision(network, "drafted", Chains.start(x[few], t[few]), sigma, seed=0)
    assert settled == "tf32x2" and "0.00 at its worst level" in sentence


def test_drafts_give_way_to_what_decides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, t, sigma = drafted_network()
    asked = []

    def check(network: Any, name: str, *rest: Any, steps: int, **_: Any) -> guarding.PrecisionReport:
        asked.append((name, steps))
        kept = torch.tensor([0.9, 0.1]) if name == "drafted" else None
        return guarding.PrecisionReport(name, torch.zeros(2), torch.zeros(2), kept)

    monkeypatch.setattr(guarding, "check_precision", check)
    settled, (sentence,) = settle_precision(network, "drafted", Chains.start(x, t), sigma, 0, 7)
    assert settled == "tf32x2" and asked == [("drafted", 7), ("tf32x2", 7)]
    assert sentence.endswith("going on in tf32x2") and "0.10 at its worst level" in sentence


@pytest.mark.parametrize("changes", [{"method": "cd"}, {"kernel": "langevin"}])
def test_only_bursts_of_mala_are_drafted(changes: dict[str, str]) -> None:
    with pytest.raises(InputError) as error:
        Config(precision="drafted", device="cuda", **changes)
    one_sentence(error, "precision=drafted", "kernel=mala")


def test_an_engine_drafts_what_metropolis_corrects() -> None:
    """Its transition is that of `mgms` with a draft; an unadjusted kernel is never drafted."""
    network, x, t, sigma = drafted_network()
    results = []
    for own in (False, True):
        generator = torch.Generator().manual_seed(3)
        move = mgms.label_move("block", len(sigma) - 1, 3)
        settings = config(label_move="block", block=3, steps=4)
        set_precision(network, "drafted")
        if own:
            run = Engine(settings, network, begin(config(), DATA).ladder, generator).transition(langevin.mala)
            results.append(run(x, t, sigma))
        else:
            draft = Draft(network)
            results.append(
                mgms.transition(langevin.mala, network, x, t, sigma, 4, move, generator, draft=draft, check=False)
            )
    (x_a, t_a, info_a), (x_b, t_b, info_b) = results
    assert torch.equal(x_a, x_b) and torch.equal(t_a, t_b) and torch.equal(info_a.kept, info_b.kept)
    assert float(info_a.kept.min()) < 1
    unadjusted = Engine(settings, network, begin(config(), DATA).ladder, generator).transition(langevin.langevin)
    assert (unadjusted(x, t, sigma)[2].kept == 1).all()
    set_precision(network, "fp32")


def test_undone_drafts_do_not_shrink_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are sized by what is accepted of them; that a whole burst was undone says nothing of their size.

    The reported acceptance and the ease of the chains, which tell how chains move, do count it."""

    def trained(kept: float, planted: bool = False) -> tuple[training.Setup, list[float]]:
        setup = begin(config(batch=80, store=80, bursts=2, adapt_every=2), DATA)
        real = setup.engine.transition(mala)

        def judged(x: Tensor, t: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, mgms.TransitionInfo]:
            x, t, info = real(x, t, sigma)
            steps = info.steps._replace(accept_prob=info.steps.accept_prob * kept) if planted else info.steps
            return x, t, info._replace(steps=steps, kept=torch.full_like(info.kept, kept))

        monkeypatch.setattr(setup.engine, "transition", lambda kernel: judged)
        return setup, [float(step(setup)[3]) for _ in range(3)]  # an adaptation after the second

    (whole, accepted), (undone, nothing), (planted, _none) = trained(1.0), trained(0.0), trained(0.0, planted=True)
    assert not torch.equal(whole.state.steps.sigma, begin(config(), DATA).state.steps.sigma)  # steps did adapt
    for name in ("sigma", "total", "count"):
        assert torch.equal(getattr(undone.state.steps, name), getattr(whole.state.steps, name)), name
    assert bool((planted.state.steps.sigma < whole.state.steps.sigma).all())
    assert min(accepted) > 0.2 and nothing == [0, 0, 0]
    assert bool((undone.state.chains.ease < whole.state.chains.ease).all())


def test_a_resumed_run_keeps_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again with every checkpoint, from the precision it had on: a finer one is never given up again."""
    asked = []

    def settle(network: Any, precision: str, *rest: Any) -> tuple[str, list[str]]:
        asked.append(precision)
        return "tf32", [] if precision == "tf32" else ["fp16 is too coarse"]

    monkeypatch.setattr(training, "settle_precision", settle)
    stop = 3

    def interrupt(metrics: dict[str, Any]) -> None:
        if metrics["iteration"] == stop:
            raise KeyboardInterrupt

    it = config(checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(it, DATA, tmp_path, report=interrupt)
    state, _ladder = train(it, DATA, tmp_path, resume=True)
    assert asked[0] == it.precision and set(asked[1:]) == {"tf32"}
    assert state.precision == "tf32" and torch.backends.cudnn.allow_tf32
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [e["reason"] for e in events if "event" in e] == ["fp16 is too coarse"]
