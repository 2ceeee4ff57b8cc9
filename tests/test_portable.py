"""A run packed into a portable checkpoint: small files, what is kept exactly, and going on from it."""

from pathlib import Path

import pytest
import torch

from daebm import CheckpointError, Config, Dataset, InputError, checkpoint, load, portable, runs
from daebm.state import CHECKPOINT, read_state
from daebm.training import train

DATA = Dataset.standardised(
    "points", torch.randn(300, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(10, 4) + 0.5
)
CONFIG = Config(
    width=16,
    hidden=1,
    iterations=30,
    batch=20,
    store=100,
    steps=2,
    first_sd=0.2,
    average=0.9,
    checkpoint_every=10,
    log_every=5,
)


class Interrupt:
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def __call__(self, metrics: dict[str, object]) -> None:
        if metrics["iteration"] == self.iteration:
            raise KeyboardInterrupt


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was interrupted half-way."""
    stop = Interrupt(15)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, DATA, tmp_path / "run", report=stop)
    return tmp_path / "run"


def test_what_is_kept_is_kept(run: Path, tmp_path: Path) -> None:
    said = runs.pack(run, tmp_path / "small")
    whole, _facts = read_state(run)
    small, facts = read_state(tmp_path / "small")
    assert set(small) == set(whole) and "100 of 100 chains" in said and facts["portable"] == said
    for key, value in whole.items():
        if key.endswith(".exp_avg_sq"):
            # 254 steps over the range of the logarithms: off by at most half a step.
            positive = value[value > 0].log()
            half_step = float(positive.max() - positive.min()) / 254 / 2
            assert torch.equal(small[key] > 0, value > 0)
            assert float((small[key][value > 0].log() - positive).abs().max()) <= half_step + 1e-5
        elif key.endswith(".exp_avg"):
            assert not small[key].any()  # beta1 is 0: it is overwritten before it is read
        elif (key.startswith("average.") and value.ndim > 1) or key == "chains.x":
            torch.testing.assert_close(small[key], value, rtol=2**-11, atol=1e-6)  # half precision
        else:
            assert torch.equal(small[key], value), key


def test_constants_of_levels_are_kept_to_the_last_bit(run: Path, tmp_path: Path) -> None:
    """Some are of thousands of nats, where half precision knows every second one."""
    tensors, facts = read_state(run)
    tensors["average.constant"] = torch.linspace(2000.1, 2142.7, 520)
    tensors["average.large"] = torch.linspace(2000.1, 2142.7, 520).reshape(20, 26)
    portable.write(tmp_path, tensors, facts)
    small, _facts = portable.read(tmp_path)
    assert torch.equal(small["average.constant"], tensors["average.constant"])
    assert not torch.equal(small["average.large"], tensors["average.large"])


def test_training_goes_on_from_it(run: Path, tmp_path: Path) -> None:
    runs.pack(run, tmp_path / "small")
    torch.testing.assert_close(
        load(run).energy(DATA.held_out), load(tmp_path / "small").energy(DATA.held_out), rtol=0.01, atol=0.01
    )  # half-precision averages
    assert int(read_state(run)[1]["iteration"]) == 10
    state, _ladder = train(CONFIG, DATA, tmp_path / "small", resume=True)
    assert state.iteration == 30 and len(state.chains) == 100


def test_it_fits(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room chains are dropped and files are split; with less still it is refused."""
    tensors, facts = read_state(run)
    fixed = sum(portable._bytes(v) for k, v in tensors.items() if not k.startswith("chains."))
    monkeypatch.setattr(portable, "MARGIN", 0)
    monkeypatch.setattr(portable, "FILE", fixed // 2)
    monkeypatch.setattr(portable, "TOTAL", fixed)
    said = portable.write(tmp_path / "small" / CHECKPOINT, tensors, facts)
    files = sorted((tmp_path / "small" / CHECKPOINT).glob("*.safetensors"))
    assert len(files) > 1 and "chains kept" in said
    again, _facts = portable.read(tmp_path / "small" / CHECKPOINT)
    assert 20 <= len(again["chains.t"]) <= 100
    monkeypatch.setattr(portable, "TOTAL", fixed // 4)
    with pytest.raises(InputError, match="no room for a batch of chains"):
        portable.write(tmp_path / "smaller", tensors, facts)


def test_the_paper_s_network_fits() -> None:
    """4.76 M weights: 4 bytes of weights, 2 of averages and 1 of moments each leave room for thousands of chains."""
    room = portable.TOTAL - 3 * portable.MARGIN - 7 * 4_756_864 - 4 * 60_000
    assert room // (2 * 784 + 28) > 2000


@pytest.mark.parametrize("other", ["replaced", "chains.ease", "chains.more"])
def test_a_run_of_another_version(run: Path, tmp_path: Path, other: str) -> None:
    """Older or newer: neither packed nor gone on with, and left as it is; the model that it has come to can be had."""
    tensors, facts = read_state(run)
    if other == "chains.more":
        tensors[other] = tensors["chains.t"].clone()
    else:
        (tensors if other in tensors else facts).pop(other)
    facts.pop("format")
    checkpoint.write(run / CHECKPOINT, "state", tensors, facts)
    with pytest.raises(CheckpointError, match="another version of daebm"):
        runs.pack(run, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    with pytest.raises(CheckpointError, match="another version of daebm"):
        train(CONFIG, DATA, run, resume=True)
    assert load(run).energy(DATA.held_out).shape == (10,)


@pytest.mark.parametrize("problem", ["no run", "full folder"])
def test_bad_input(problem: str, run: Path, tmp_path: Path) -> None:
    if problem == "no run":
        with pytest.raises(InputError, match="holds no daebm run"):
            runs.pack(tmp_path / "nowhere", tmp_path / "small")
    else:
        with pytest.raises(InputError, match="not an empty folder"):
            runs.pack(run, run)
