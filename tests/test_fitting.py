"""Looks during a fit: they change nothing, they measure what is there, and the best one is kept with its own chains."""

from typing import Any

import pytest
import torch
from torch import Tensor

from daebm import Config, Dataset, Ladder, train
from daebm.fitting import Watch
from daebm.state import Saved, TrainingState
from daebm.targets import LOG_2PI
from daebm.training import Setup, begin, step

SIGMAS = 5.0


def rows(count: int, seed: int) -> Tensor:
    """Two columns that go together, with mean 0 and sds of about 1."""
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)) @ torch.tensor([[1.0, 0.6], [0.0, 0.8]])


DATA = Dataset("rows", rows(1500, 0), rows(500, 1))


def config(**changes: Any) -> Config:
    values: dict[str, Any] = {
        "network": "level-mlp",
        "width": 8,
        "hidden": 1,
        "floor": 0.3,
        "top": 3,
        "iterations": 8,
        "batch": 50,
        "store": 800,
        "steps": 2,
        "step_size": 0.7,
        "adapt_every": 4,
        "checkpoint_every": 2,
        "log_every": 2,
        "average": 0.9,
    }
    return Config(**(values | changes))


def everything(setup: Setup | None, state: TrainingState, ladder: Ladder, it: Config) -> dict[str, Any]:
    """All that a run's future depends on and, of a setup, what is beside it; but not the clock."""
    saved = Saved(it, DATA, ladder, None)
    saved.save(state)
    assert saved.memory is not None
    tensors, facts = saved.memory
    if setup is not None:
        tensors |= {f"data.{name}": getattr(DATA, name).clone() for name in ("train", "held_out")}
        tensors["everyone's generator"] = torch.get_rng_state()
        facts["asks for gradients"] = [weight.requires_grad for weight in state.network.parameters()]
        facts["gradients"] = [weight.grad is None for weight in state.network.parameters()]
        facts["mode"] = [part.training for part in state.network.modules()]
    return tensors | {key: value for key, value in facts.items() if key != "seconds"}


def differing(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    assert a.keys() == b.keys()

    def same(x: Any, y: Any) -> bool:
        return x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, Tensor) else x == y

    return {key for key in a if not same(a[key], b[key])}


class Careless(Watch):
    """A planted fault: one that draws from the training's generator."""

    def __call__(self, state: TrainingState, ladder: Ladder) -> bool:
        torch.rand(1, generator=state.generator)
        return super().__call__(state, ladder)


@pytest.mark.parametrize(("watch", "changed"), [(Watch, set()), (Careless, {"generator"})])
def test_a_look_leaves_the_state_as_it_is(watch: type[Watch], changed: set[str]) -> None:
    """Weights and their averages, chains, steps, optimiser and generators; the next look sees the same."""
    it = config()
    setup = begin(it, DATA)
    for _ in range(3):
        step(setup)
    looking = watch(it, DATA, verbose=0)
    before = everything(setup, setup.state, setup.ladder, it)
    assert looking(setup.state, setup.ladder) is False
    assert differing(before, everything(setup, setup.state, setup.ladder, it)) == changed
    looking(setup.state, setup.ladder)
    first, second = ({k: v for k, v in look.items() if k != "acceptance"} for look in looking.history)
    assert first == second and "log_density" in first


def test_a_watched_run_is_the_run() -> None:
    it = config()
    ends = []
    for stop in (None, Watch(it, DATA, verbose=0), Careless(it, DATA, verbose=0)):
        state, ladder = train(it, DATA) if stop is None else train(it, DATA, stop=stop)
        ends.append(everything(None, state, ladder, it))
    plain, watched, careless = ends
    assert differing(plain, watched) == set()
    assert {"generator", "chains.x", "network.head"} <= differing(plain, careless)


def gaussian(setup: Setup, narrower: float) -> float:
    """Make the model the data's diffused Gaussian, ``narrower`` times as narrow, and its chains exact draws of it.

    In place, as training moves weights and chains. Returns the mean log density of the held-out rows.
    """
    state, ladder = setup.state, setup.ladder
    base = state.network.base
    generator = torch.Generator().manual_seed(round(100 * narrower))
    with torch.no_grad():
        base.precision.copy_(narrower * type(base)(DATA.train, ladder).precision)
        t = torch.arange(len(state.chains)) % ladder.levels
        white = torch.randn(state.chains.x.shape, generator=generator)
        state.chains.t.copy_(t)
        state.chains.x.copy_((white / base.precision[t] + base.centre[t]) @ base.axes.T)
        square = base.half_square(DATA.held_out, torch.zeros(len(DATA.held_out), dtype=torch.long)).double()
        return float(base.precision[0].double().log().sum() - LOG_2PI - square.mean())


def test_a_look_measures_the_held_out_log_density() -> None:
    """Of a model whose density is known, right and wrong ones."""
    setup = begin(config(average=0.0), DATA)
    watch = Watch(setup.config, DATA, verbose=0)
    for narrower in (1.0, 2.0, 0.5):
        truth = gaussian(setup, narrower)
        watch(setup.state, setup.ladder)
        look = watch.history[-1]
        assert 0 < look["log_density_error"] < 0.2
        assert abs(look["log_density"] - truth) < SIGMAS * look["log_density_error"]


@pytest.mark.parametrize(
    ("narrower", "kept"), [((1.0, 2.0), 0), ((1.0, 2.0, 1.5), 0), ((2.0, 1.0), 1), ((2.0, 0.5, 1.0), 2)], ids=str
)
def test_the_best_model_is_kept_with_the_chains_of_then(narrower: tuple[float, ...], kept: int) -> None:
    """By the model as it was at that look, and by the chains that it had; others are draws of another model."""
    setup = begin(config(average=0.0), DATA)
    state, watch = setup.state, Watch(setup.config, DATA, verbose=0)
    zero = torch.zeros(len(DATA.held_out), dtype=torch.long)
    then = []
    for narrow in narrower:
        gaussian(setup, narrow)
        watch(state, setup.ladder)
        with torch.no_grad():
            then.append((state.chains.x.clone(), state.chains.t.clone(), state.network(DATA.held_out, zero).clone()))
    model, chains = watch.chosen(state, setup.ladder)
    assert [look["chosen"] for look in watch.history] == [k == kept for k in range(len(narrower))]
    for k, (x, t, u) in enumerate(then):
        assert torch.equal(chains.x, x) == torch.equal(model.network(DATA.held_out, zero), u) == (k == kept)
        assert torch.equal(chains.t, t)
