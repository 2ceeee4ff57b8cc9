"""A model in data units: the same energies in every array type, saved and loaded equal, sampled reproducibly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daebm import sampling
from daebm.config import Config
from daebm.data import Dataset
from daebm.errors import CheckpointError, DaebmError, InputError
from daebm.ladder import Ladder
from daebm.methods import METHODS
from daebm.model import CHUNK, Model, load
from daebm.state import TrainingState
from daebm.training import train

SHIFT, SCALE = 3.0, 2.0


def small(method: str, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "network": "gated-mlp" if METHODS[method].ladder else "relu-mlp",
        "width": 8,
        "hidden": 2,
        "top": 3,
        "first_sd": 0.2,
        "iterations": 10,
        "batch": 16,
        "store": 40,
        "steps": 2,
        "kernel": METHODS[method].kernel,
        "adapt_every": 0,
        "average": 0.9,
        "checkpoint_every": 5,
    }
    return Config("test", method, "test", **(values | changes))


def dataset() -> Dataset:
    points = SHIFT + SCALE * torch.randn(50, 2, generator=torch.Generator().manual_seed(4))
    return Dataset("test", points, points[:10], shift=SHIFT, scale=SCALE)


def trained(folder: Path, method: str = "da", **changes: Any) -> tuple[TrainingState, Model]:
    state, _ladder = train(small(method, **changes), dataset(), folder)
    return state, load(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return trained(tmp_path_factory.mktemp("run"))[1]


class Known(nn.Module):
    """U(x, t) = |x|^2 / 2 + t in standardised units."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x.square().sum(1) / 2 + t


def known(floor: float = 0.0, network: nn.Module | None = None) -> Model:
    """A model whose energy is written down above, on a ladder of 4 levels."""
    ladder = Ladder.geometric(2, floor, 0.2, 0.95, 3)
    return Model(
        small("da", floor=floor), network or Known(), ladder, torch.full((4,), 0.5).double(), (2,), SHIFT, SCALE
    )


# Energies.


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_numpy_in_numpy_out(model: Model, dtype: type):
    x = np.linspace(0, 6, 10).reshape(5, 2).astype(dtype)
    u = model.energy(x)
    assert isinstance(u, np.ndarray)
    assert u.shape == (5,)
    assert u.dtype == (np.float64 if dtype == np.float64 else np.float32)  # in half precision nats would be rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_torch_in_torch_out(model: Model, dtype: torch.dtype):
    x = torch.linspace(0, 6, 10).reshape(5, 2).to(dtype)
    u = model.energy(x)
    assert isinstance(u, Tensor)
    assert u.shape == (5,)
    assert u.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not u.requires_grad


def test_whole_numbers_in_floats_out(model: Model):
    """The energy of pixel counts is not a whole number."""
    x = np.arange(10).reshape(5, 2)
    assert model.energy(x).dtype == np.float32
    assert model.energy(torch.from_numpy(x)).dtype == torch.float32
    assert np.array_equal(model.energy(x), model.energy(x.astype(np.float32)))


def test_both_kinds_of_array_give_the_same_numbers(model: Model):
    x = np.random.default_rng(0).normal(3, 2, (5, 2)).astype(np.float32)
    assert np.array_equal(model.energy(x, 2), model.energy(torch.from_numpy(x), 2).numpy())


@pytest.mark.parametrize("view", [lambda x: x[::-1], lambda x: x[:, ::-1], np.asfortranarray])
def test_any_view_of_an_array_will_do(model: Model, view: Any):
    x = np.random.default_rng(0).normal(3, 2, (5, 2)).astype(np.float32)
    # Other memory orders may sum in another order: a few units in the last place of energies of order 1.
    assert model.energy(view(x)) == pytest.approx(model.energy(view(x).copy()), abs=1e-5)


def test_a_read_only_array_will_do(model: Model, recwarn: pytest.WarningsRecorder):
    """Memory-mapped files and pandas give such arrays; the model does not write into them, nor warn."""
    x = np.zeros((5, 2), dtype=np.float32)
    x.flags.writeable = False
    assert model.energy(x).shape == (5,)
    assert not recwarn.list


def test_a_nested_list_will_do(model: Model):
    x = [[3.0, 2.0], [1.0, 0.0]]
    assert model.energy(x) == pytest.approx(model.energy(np.array(x)))


def test_units_are_those_of_the_data():
    """U is taken at (x - shift) / scale."""
    x = np.array([[SHIFT, SHIFT], [SHIFT + SCALE, SHIFT], [SHIFT, SHIFT - 2 * SCALE]])
    assert known().energy(x).tolist() == [0, 0.5, 2]
    assert known().energy(x, 3).tolist() == [3, 3.5, 5]


@pytest.mark.parametrize(
    "t",
    [2, np.int64(2), np.array(2), np.array([2]), torch.tensor(2), [2] * 5, np.full(5, 2), torch.full((5,), 2)],
    ids=lambda t: type(t).__name__,
)
@pytest.mark.parametrize("kind", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_one_level_or_one_each_in_any_type(t: Any, kind: Any):
    assert known().energy(kind((5, 2)) + SHIFT, t).tolist() == [2] * 5


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32])
def test_levels_of_any_whole_type(kind: type):
    assert known().energy(np.full((3, 2), SHIFT), np.array([0, 1, 3], dtype=kind)).tolist() == [0, 1, 3]


def test_each_point_gets_its_own_level():
    u = known().energy(np.full((4, 2), SHIFT), np.array([3, 0, 2, 1]))
    assert u.tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("t", [0, 3, np.zeros(0, dtype=int)], ids=["0", "3", "none"])
@pytest.mark.parametrize("kind", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_no_points_no_energies(model: Model, kind: Any, t: Any):
    u = model.energy(kind((0, 2)), t)
    assert tuple(u.shape) == (0,)


def test_many_points_go_in_parts():
    """More rows than one evaluation takes, with a level each."""
    count = 2 * CHUNK + 3
    t = torch.arange(count) % 4
    u = known().energy(torch.full((count, 2), SHIFT), t)
    assert torch.equal(u, t.float())


@pytest.mark.parametrize(
    "x, word",
    [
        (np.zeros((5, 3)), "(5, 3)"),
        (np.zeros(2), "(2,)"),
        (np.zeros((2, 2, 2)), "(2, 2, 2)"),
        (np.float64(1.0), "()"),
        (np.array([[0.0, np.nan]]), "NaN"),
        (np.array([[np.inf, 0.0]]), "NaN"),
        (np.array([[1e300, 0.0]]), "infinite"),
        (np.array([["a", "b"]]), "x must"),
        (np.array([[1j, 0]]), "x must"),
    ],
    ids=str,
)
def test_points_that_are_none_are_refused(model: Model, x: Any, word: str):
    with pytest.raises(InputError) as caught:
        model.energy(x)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "t", [-1, 4, 1.0, np.array([0.5] * 5), np.zeros(4, dtype=int), np.array([0, 1, 2, 3, 4]), "1", None], ids=repr
)
def test_levels_that_are_none_are_refused(model: Model, t: Any):
    with pytest.raises(InputError, match="t must") as caught:
        model.energy(np.zeros((5, 2)), t)
    assert "\n" not in str(caught.value)


def test_a_message_about_many_levels_stays_one_line(model: Model):
    """numpy prints long arrays over several lines."""
    with pytest.raises(InputError) as caught:
        model.energy(np.zeros((500, 2)), np.full(500, 9))
    assert "\n" not in str(caught.value)
    assert "9" in str(caught.value)


# Saving and loading.


@pytest.mark.parametrize("method", list(METHODS))
def test_saved_and_loaded_models_are_equal(tmp_path: Path, method: str):
    _state, model = trained(tmp_path / "run", method)
    model.save(tmp_path / "model")
    copy = load(tmp_path / "model")
    x = np.random.default_rng(0).normal(SHIFT, SCALE, (20, 2)).astype(np.float32)
    for t in range(model.ladder.levels):
        assert np.array_equal(model.energy(x, t), copy.energy(x, t))
    assert np.array_equal(model.long_run(x, 5, seed=1), copy.long_run(x, 5, seed=1))
    assert (copy.config, copy.event, copy.shift, copy.scale) == (model.config, model.event, SHIFT, SCALE)
    assert torch.equal(copy.sigma, model.sigma)


@pytest.mark.parametrize("method", ["persistent", "drl", "da"])
@pytest.mark.parametrize("network", ["relu-mlp", "gated-mlp", "level-mlp"])
def test_every_network_comes_back(tmp_path: Path, network: str, method: str):
    """Also what a network took from the data when it was built: on loading there are no data."""
    _state, model = trained(tmp_path / "run", method, network=network, squares=2, octaves=1)
    model.save(tmp_path / "model")
    x = np.random.default_rng(0).normal(SHIFT, SCALE, (20, 2)).astype(np.float32)
    for t in range(model.ladder.levels):
        u = model.energy(x, t)
        assert np.isfinite(u).all()
        assert np.array_equal(u, load(tmp_path / "model").energy(x, t))


def test_a_model_folder_holds_no_training_state(tmp_path: Path, model: Model):
    model.save(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.json", "model.safetensors"]


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_run_is_loaded_with_its_averaged_weights(tmp_path: Path, average: float):
    """The average is the model; the raw weights are those of the last, noisy, iteration."""
    state, model = trained(tmp_path, average=average)
    weights = dict(model.network.named_parameters())
    for name, raw in state.network.named_parameters():
        assert torch.equal(weights[name], state.average[name] if average else raw)
    same = [torch.equal(weights[name], raw) for name, raw in state.network.named_parameters()]
    assert not all(same) if average else all(same)


def test_loading_takes_the_steps_of_training(tmp_path: Path):
    state, model = trained(tmp_path, adapt_every=1)
    assert torch.equal(model.sigma, state.steps.sigma)


def test_loading_leaves_the_global_generator_alone(tmp_path: Path):
    """A script that seeds torch and then loads a model goes on as if it had not."""
    train(small("da"), dataset(), tmp_path)
    before = torch.random.get_rng_state()
    load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loaded_model_does_not_learn(model: Model):
    assert not model.network.training
    assert not any(weight.requires_grad for weight in model.network.parameters())


@pytest.mark.parametrize("what", ["nothing", "a file", "another folder"])
def test_loading_what_is_no_model_is_refused(tmp_path: Path, what: str):
    if what == "a file":
        (tmp_path / "x").write_text("mine")
    elif what == "another folder":
        (tmp_path / "x").mkdir()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "x")
    assert str(tmp_path / "x") in str(caught.value)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_a_narrow_network_works_or_is_refused(width: int):
    """The time embedding of the gated network has width / 2 frequencies; with one their spacing is 0 / 0."""
    config = small("da", width=width, iterations=1)
    try:
        state, _ladder = train(config, dataset())
    except InputError as error:
        assert "width" in str(error)
    else:
        assert all(torch.isfinite(weight).all() for weight in state.network.parameters())


# Samples.


@pytest.mark.parametrize("method", list(METHODS))
def test_samples_follow_from_the_seed(tmp_path: Path, method: str):
    _state, model = trained(tmp_path, method)
    # A plain EBM takes up to 250 times as many steps as in training.
    model = replace(model, config=replace(model.config, steps=1))
    first, again, other = (model.sample(7, seed=seed) for seed in (5, 5, 6))
    assert isinstance(first, np.ndarray)
    assert first.shape == (7, 2)
    assert first.dtype == np.float32
    assert np.isfinite(first).all()
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("method", list(METHODS))
def test_sampling_leaves_the_run_alone(tmp_path: Path, method: str):
    """Looking at a model moves neither the training chains nor the global generator."""
    state, model = trained(tmp_path, method)
    model = replace(model, config=replace(model.config, steps=1))
    chains = [getattr(state.chains, name).clone() for name in ("x", "t", "stage", "trips")]
    weights = [weight.clone() for weight in model.network.parameters()]
    generator, rng = state.generator.get_state(), torch.random.get_rng_state()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model.sample(5)
    model.long_run(dataset().train, 3)
    model.energy(dataset().train)
    for name, before in zip(("x", "t", "stage", "trips"), chains, strict=True):
        assert torch.equal(getattr(state.chains, name), before)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.network.parameters(), strict=True))
    assert torch.equal(state.generator.get_state(), generator)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("visits", [2, None])
def test_samples_are_in_data_units(visits: int | None):
    """exp(-|z|^2 / 2) at every level is N(shift, scale^2) in data units, and the start from noise is exact.

    Chains that start in equilibrium stay there: 5 standard errors of the mean and of the variance.
    """

    class Flat(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x.square().sum(1) / 2 + 0 * t

    count = 4000
    x = known(network=Flat()).sample(count, visits=visits)
    z = (x - SHIFT) / SCALE
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs((z**2).mean() - 1) < 5 * np.sqrt(2 / z.size)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_a_long_run_keeps_units_type_and_law(kind: Any):
    count = 4000
    z = torch.randn(count, 2, generator=torch.Generator().manual_seed(0)).numpy()
    end = known().long_run(kind(SHIFT + SCALE * z), 20, seed=1)
    assert isinstance(end, type(kind(z)))
    moved = (np.asarray(end) - SHIFT) / SCALE
    assert abs(moved.mean()) < 5 / np.sqrt(z.size)
    assert abs((moved**2).mean() - 1) < 5 * np.sqrt(2 / z.size)
    assert not np.allclose(moved, z)


@pytest.mark.parametrize("clean", [False, True])
def test_a_long_run_from_clean_points_begins_with_the_floors_noise(clean: bool):
    """All data are 0, so that level 0 is N(0, floor^2) and the start exact: 5 standard errors of the mean square.

    From 0 itself, the mode, nearly every step is refused in 500 dimensions, and a chain keeps its place for nothing.
    """
    floor, dimension, count = 0.1, 500, 200

    class Noise(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x.square().sum(1) / (2 * floor**2) + 0 * t

    ladder = Ladder.geometric(dimension, floor, top=3)
    sigma = torch.full((4,), 0.5 * floor).double()
    model = Model(small("da", floor=floor), Noise(), ladder, sigma, (dimension,), SHIFT, SCALE)
    end = (model.long_run(np.full((count, dimension), SHIFT), 20, clean=clean) - SHIFT) / SCALE
    if clean:  # Tweedie's formula knows that all points are 0; float32 rounds what is left
        assert np.abs(end).max() < 1e-6
    else:
        assert abs((end**2).mean() / floor**2 - 1) < 5 * np.sqrt(2 / end.size)
        _end, info = model.run_at_zero(torch.zeros(count, dimension), 20, torch.Generator().manual_seed(0), "mala")
        assert float(info.accept_prob.mean()) < 0.05


def test_a_large_shift_costs_no_energy():
    """x of a million with an sd of 1: float32 would leave a sixteenth of it."""
    z = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = replace(known(), shift=1e6, scale=1.0)
    assert model.energy((1e6 + z).numpy()) == pytest.approx((z.square().sum(1) / 2).numpy(), rel=1e-5)


def test_what_was_compiled_for_a_gpu_is_not_compiled_here(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(sampling, "long_run", lambda *given: (seen.append(given[-1]), (torch.zeros(3, 2), None))[1])
    for device in ("cpu", "cuda"):
        model = replace(known(), config=replace(known().config, compile=True, device=device))
        model.long_run(np.zeros((3, 2)), 4)
    assert seen == [True, False]


@pytest.mark.parametrize("clean", [True, False])
def test_cleaning_removes_the_floor(clean: bool):
    """With U = |z|^2 / 2 Tweedie's formula is z (1 - floor^2)."""
    floor = 0.5
    model = known(floor)
    noisy = model.sample(6, seed=2, clean=False)
    expected = SHIFT + (noisy - SHIFT) * (1 - floor**2 if clean else 1)
    assert model.sample(6, seed=2, clean=clean) == pytest.approx(expected, rel=1e-5)


def test_the_units_are_a_pair():
    model = known()
    x = torch.randn(5, 2)
    assert torch.allclose(model.standardise(model.to_data(x)), x, atol=1e-6)
    assert torch.equal(model.standardise(torch.tensor(SHIFT + SCALE)), torch.tensor(1.0))


@pytest.mark.parametrize("arguments", [{"count": 0}, {"count": -1}, {"count": 5, "visits": 0}], ids=str)
def test_bad_requests_for_samples_are_refused(model: Model, arguments: dict[str, int]):
    with pytest.raises(InputError, match="at least 1"):
        model.sample(**arguments)


@pytest.mark.parametrize("arguments, word", [({"steps": 0}, "0"), ({"steps": 3, "kernel": "nuts"}, "nuts")], ids=str)
def test_bad_requests_for_long_runs_are_refused(model: Model, arguments: dict[str, Any], word: str):
    with pytest.raises(InputError, match=word):
        model.long_run(np.zeros((2, 2)), **arguments)


def test_labels_that_do_not_mix_are_said(monkeypatch: pytest.MonkeyPatch):
    """A model whose level 0 is never visited cannot be sampled; that is a sentence and not an endless loop."""

    class Walled(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x.square().sum(1) / 2 + torch.where(t == 0, 1e4, 0.0)

    model = known(network=Walled())
    calls = count_transitions(monkeypatch)
    monkeypatch.setattr("daebm.model.LEAST_TRIP", 5)
    for trip in (None, 2.0, 30.0):
        model.trip = trip
        calls.clear()
        with pytest.raises(DaebmError, match="3 of 3 chains"):
            model.sample(3, visits=1)
        # Nothing known: the levels squared. Less than the least: the least.
        assert len(calls) == sampling.patience(3, {None: model.ladder.levels**2, 2.0: 5, 30.0: 30.0}[trip])
        with pytest.raises(DaebmError, match="0 of 3 samples were found in 10 looks at 64 chains"):
            model.sample(3)


def count_transitions(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    real = sampling.transition

    def counted(*args: Any) -> Any:
        calls.append(None)
        return real(*args)

    monkeypatch.setattr(sampling, "transition", counted)
    return calls


def test_a_round_trip_is_remembered(tmp_path: Path):
    """Transitions of a chain over its trips: the same from the state, from the run folder and from a saved model."""
    config = Config(width=8, hidden=1, iterations=40, batch=50, store=100, top=3, bursts=2)
    data = Dataset("normal", torch.randn(200, 2), torch.randn(50, 2))
    state, ladder = train(config, data, tmp_path / "run")
    model = Model.from_training(config, data, state, ladder)
    trips = float(state.chains.trips.double().mean())
    assert trips > 1 and model.trip == 40 * 2 * 50 / 100 / trips
    model.save(tmp_path / "model")
    assert load(tmp_path / "run").trip == load(tmp_path / "model").trip == model.trip


def test_many_samples_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch):
    """In bounded memory; a number that no one can wait for is refused at once."""
    model = known()
    monkeypatch.setattr("daebm.model.SAMPLE_CHUNK", 20)
    x = model.sample(25)
    assert x.shape == (25, 2) and len(np.unique(x, axis=0)) == 25
    with pytest.raises(InputError, match="too many for one call"):
        model.sample(10**12)
