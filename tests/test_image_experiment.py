"""Fashion-MNIST and MNIST: data, a quick run from start to report, and measures that are right on a known model."""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daebm import levels, report
from daebm.chains import Chains
from daebm.cli import main
from daebm.config import Config, resolve
from daebm.data import Dataset, to_unit_range
from daebm.errors import InputError
from daebm.experiments import EXPERIMENTS, image_measures, images
from daebm.experiments.base import Trained
from daebm.ladder import Ladder
from daebm.model import Model
from daebm.resnet import LevelResNet
from daebm.runs import load_finished, run
from daebm.training import begin

DATA = Path(os.environ.get("DAEBM_DATA") or Path(__file__).parents[2] / "shared" / "data")
KEYS = (
    "pictures samples_from_noise gradients_per_sample held_out_gap held_out_gap_se long_run_energy_shift "
    "long_run_energy_shift_se long_run_acceptance long_run_refused train_seconds"
)
KEYS_OF_LEVELS = (
    "label_share_by_level acceptance_by_level mean_difference_by_level variance_ratio_by_level energy_gap_by_level "
    "energy_gap_se_by_level label_share_range acceptance_range mean_difference_range variance_ratio_range "
    "energy_gap_range own_image_gap_by_level own_image_gap_range own_image_gap_se_by_level neighbour_acceptance "
    "neighbour_acceptance_minimum steps_at_bound step_sizes "
    "round_trips_per_chain round_trips_median round_trips_per_1000_transitions annealed_gradients_per_sample "
    "from_noise_mean_difference_range from_noise_variance_ratio_range from_noise_energy_gap_range"
)


def made_up(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Soft blobs at random places with a little noise."""
    assert split == "train"  # nothing may look at the test split
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:28, :28]
    centre = rng.uniform(8, 20, (800, 2, 1, 1))
    blob = 220 * np.exp(-((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2) / 40)
    return (blob + rng.uniform(0, 30, blob.shape)).astype(np.uint8), rng.integers(0, 10, 800)


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "load_images", made_up)
    monkeypatch.setattr(images, "HELD_OUT", 200)


def config(method: str = "da", preset: str = "quick", **overrides: Any) -> Config:
    changed = {key: str(value) for key, value in overrides.items()}
    return resolve("fashion-mnist", images.FASHION_MNIST.presets, method, preset, 0, changed)


@pytest.mark.usefixtures("synthetic")
def test_the_last_training_images_are_held_out() -> None:
    pixels, labels = made_up("", "train")
    data = images.dataset("fashion-mnist", config(train_size=500))
    assert data.train.dtype == torch.uint8 and data.event == (1, 28, 28)
    np.testing.assert_array_equal(data.train[:, 0], pixels[:500])
    np.testing.assert_array_equal(data.held_out[:, 0], pixels[600:])
    assert data.train_labels is not None and data.held_out_labels is not None
    np.testing.assert_array_equal(data.train_labels, labels[:500])
    np.testing.assert_array_equal(data.held_out_labels, labels[600:])
    unit = to_unit_range(data.train).double()
    assert (data.shift, data.scale) == pytest.approx((float(unit.mean()), float(unit.std(correction=0))))
    assert len(images.dataset("mnist", config(train_size=0)).train) == 600
    plain = images.dataset("mnist", config(standardise="false"))
    assert (plain.shift, plain.scale) == (0, 1)
    with pytest.raises(InputError, match="at most 600"):
        images.dataset("mnist", config(train_size=601))


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist"])
def test_real_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (DATA / name).is_dir():
        pytest.skip("the files are not here")
    monkeypatch.setenv("DAEBM_DATA", str(DATA))
    ours = config(preset="default", device="cpu", precision="fp32", compile="false", width=4)
    data = EXPERIMENTS[name].dataset(ours)
    begin(ours, data)  # refuses a ladder that ends too far from noise
    assert (len(data.train), len(data.held_out)) == (55_000, 5000)
    mean, sd = {"fashion-mnist": (0.286, 0.353), "mnist": (0.131, 0.308)}[name]  # on [0, 1], widely quoted
    assert (data.shift, data.scale) == pytest.approx((2 * mean - 1, 2 * sd), abs=0.002)


def test_paper_preset_has_the_paper_numbers() -> None:
    it = config(preset="paper")
    assert (it.network, it.width, it.hidden, it.batch, it.store, it.steps) == ("resnet", 128, 1, 200, 50_000, 40)
    assert (it.ladder, it.top, it.delta_first, it.delta_last, it.floor) == ("paper", 50, 0.0002, 0.02, 0)
    assert (it.learning_rate, it.beta1, it.iterations, it.warm_up, it.decay_start) == (1e-5, 0, 120_000, 6000, 0.6)
    assert (it.start, it.dequantise, it.standardise, it.label_move, it.bursts) == ("noise", True, False, "full", 1)
    assert (it.adapt_every, it.reject_from, it.step_size) == (100, 6000, 0.1)
    assert config("noise", "paper").steps == 80
    assert config("persistent", "paper").learning_rate == 2e-5


@pytest.mark.usefixtures("synthetic")
@pytest.mark.parametrize("name, method", [("fashion-mnist", "da"), ("mnist", "persistent"), ("mnist", "drl")])
def test_quick_run_gives_folder_report_and_summary(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (images, image_measures):
        monkeypatch.setattr(module, "STORE_CHAINS", 60)  # moved on from held-out images; both for the time it takes
    monkeypatch.setattr(image_measures, "FRESH", 1)
    monkeypatch.setattr(levels, "SETTLE_ROUNDS", 2)
    it = EXPERIMENTS[name]
    run(resolve(name, it.presets, method, "quick"), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert set(KEYS.split()) <= set(stored)
    assert (set(KEYS_OF_LEVELS.split()) <= set(stored)) == (method == "da")
    assert stored["status"] == "finished"
    figures = ("training", "pictures", "energies", *(["levels"] if method == "da" else []))
    for file in ("report.html", "samples.safetensors", *(f"figures/{figure}.png" for figure in figures)):
        assert (tmp_path / "run" / file).stat().st_size > 0
    assert report.short_table(it, stored)
    arrays = load_finished(tmp_path / "run")[2]
    assert arrays["long_run"].shape == (20, 28, 28)
    for key in ("real", "samples", "long_run"):  # data units, clipped for display
        assert arrays[key].min() >= -1 and arrays[key].max() <= 1
    finished = load_finished(tmp_path / "run")
    (tmp_path / "both").mkdir()
    report.write_comparison(tmp_path / "both", {"a": finished, "b": finished})
    assert (tmp_path / "both" / "figures" / "pictures.png").stat().st_size > 0


def gaussian(change: Callable[[LevelResNet], None] = lambda network: None, **overrides: Any) -> Trained:
    """A network at its start is the exact diffused Gaussian of its data; so are these data, and the chains."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(64, 64, generator=generator) / 8
    draws = (torch.randn(12_000, 64, generator=generator) @ mix + 0.3).reshape(-1, 1, 8, 8)
    data = Dataset("gaussian", draws[:10_000], draws[10_000:])
    it = config(**{"post_transitions": 60, "long_run_steps": 50, "store": 1000, "batch": 500} | overrides)
    ladder = Ladder.geometric(64, floor=0.2, last_variance=0.97)
    network = LevelResNet(data.train, ladder, width=4)
    change(network)
    model = Model(it, network, ladder, 0.6 * ladder.variance.sqrt(), (1, 8, 8), 0.0, 1.0)
    chains = Chains.from_data(it.store, data.train, ladder, generator)
    return Trained(model, data, chains, it, generator)


def test_measures_of_an_exact_model_are_the_truth() -> None:
    trained = gaussian()
    before = trained.chains.x.clone()
    summary, arrays = images.evaluate(trained)
    gap, se = (np.array(summary[f"energy_gap{kind}_by_level"]) for kind in ("", "_se"))
    assert (np.abs(gap) < 5 * se).all() and (se > 0).all() and se.max() < 2
    own, own_se = (np.array(summary[f"own_image_gap{kind}_by_level"]) for kind in ("", "_se"))
    assert (np.abs(own) < 5 * own_se).all() and (own_se > 0).all() and own_se.max() < 2
    np.testing.assert_allclose(summary["variance_ratio_by_level"], 1, atol=0.1)
    assert max(summary["mean_difference_by_level"]) < 0.1
    np.testing.assert_allclose(summary["label_share_by_level"], 1, atol=0.4)
    for kind, truth in (("energy_gap", 0), ("variance_ratio", 1), ("mean_difference", 0)):  # chains from noise
        fresh, error = (np.array(summary[f"from_noise_{kind}{of}_by_level"]) for of in ("", "_se"))
        assert (np.abs(fresh - truth) < 5 * error).all() and len(fresh) == trained.model.ladder.levels
    assert all(0.2 < a <= 1 for a in summary["acceptance_by_level"])
    assert len(summary["neighbour_acceptance"]) == trained.model.ladder.top
    assert summary["neighbour_acceptance_minimum"] == min(summary["neighbour_acceptance"]) > 0.1
    assert abs(summary["held_out_gap"]) < 5 * summary["held_out_gap_se"] + 0.5  # 10,000 points fix 64^2 / 2 numbers
    assert abs(summary["long_run_energy_shift"]) < 5 * summary["long_run_energy_shift_se"]
    assert summary["steps_at_bound"] == 0
    assert summary["samples_from_noise"] == len(arrays["samples"]) > 0
    assert torch.equal(trained.chains.x, before)  # looking moves nothing
    figures = images.figures(summary | {"step_sizes": trained.model.sigma.tolist()}, arrays)
    barred = {axis.get_title(): any(lines.has_yerr for lines in axis.containers) for axis in figures["levels"].axes[:7]}
    assert [title for title, has in barred.items() if has] == [
        t for t in barred if "held-out" in t
    ]  # whose error is known


def test_measures_see_a_wrong_model() -> None:
    """Precision doubled: half the variance, and by d / 2 = 32 nats too high an energy of the data."""

    def doubled(network: LevelResNet) -> None:
        network.base.precision *= math.sqrt(2)

    trained = gaussian(doubled)
    ladder, x, t = trained.model.ladder, trained.chains.x, trained.chains.t
    centre = ladder.abar.sqrt()[t].reshape(-1, 1, 1, 1).float() * trained.dataset.train.mean(0)
    exact = centre + (x - centre) / math.sqrt(2)  # draws of that model
    walked = image_measures.Walk(exact, t, torch.arange(len(t)), torch.zeros(ladder.levels), 0)
    measured = image_measures.level_measures(trained, walked)
    np.testing.assert_allclose(measured["variance_ratio_by_level"], 0.5, atol=0.08)
    np.testing.assert_allclose(measured["energy_gap_by_level"], 32, atol=5)  # the error of each is about 0.9
    fresh = image_measures.descent(trained)[1]  # chains that know nothing of the data see it as well
    assert max(fresh["from_noise_variance_ratio_by_level"]) < 0.7 and min(fresh["from_noise_energy_gap_by_level"]) > 16
    own = image_measures.own_image_gap(trained)  # from the images; steps relax most of it within 30 transitions
    known = ~np.isnan(own["own_image_gap_by_level"])
    assert known.sum() > ladder.levels / 2 and min(np.array(own["own_image_gap_by_level"])[known]) > 16


def test_chains_from_noise_are_measured_at_their_own_levels() -> None:
    """A model that is wrong at its lower half alone."""

    def narrow(network: LevelResNet) -> None:
        network.base.precision[: len(network.constant) // 2] *= math.sqrt(2)

    trained = gaussian(narrow)
    half = trained.model.ladder.levels // 2
    end, fresh = image_measures.descent(trained)
    ratio = fresh["from_noise_variance_ratio_by_level"]
    assert max(ratio[:half]) < 0.7 and min(ratio[half:]) > 0.85
    assert len(end.x) == len(end.t) == image_measures.FRESH * trained.config.post_chains
    assert end.gradients == len(end.x) * trained.model.ladder.levels * (image_measures.FRESH_STEPS + 1)


def test_nothing_is_drawn_that_was_not_measured(tmp_path: Path) -> None:
    """In the warm starts no chains move: their gap and acceptance of 0 are no measurements."""
    every = [{"iteration": i, "gap": 0.0, "acceptance": 0.0, "learning_rate": 1e-5} for i in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, every)))
    it = config(denoise=2, relate=2)
    axes = report._training_figure(tmp_path, it, {"step_sizes": [0.3, 0.4]}).axes
    assert [list(axis.lines[0].get_xdata()) for axis in axes[:2]] == [[5, 6, 7, 8]] * 2
    assert list(axes[2].lines[0].get_xdata()) == list(range(1, 9))
    steps = axes[3]
    assert any(steps.get_ylim()[0] < tick < steps.get_ylim()[1] for tick in steps.get_yticks())


def test_energies_far_off_are_counted_and_leave_room_for_the_others() -> None:
    random = np.random.default_rng(0)
    arrays = {f"energy_{key}": random.normal(size=1000) for key in ("train", "held_out", "samples")}
    arrays["energy_samples"][:250] = 1e6
    arrays |= {"real": np.zeros((1, 28, 28)), "along": random.normal(size=(3, 20)), "along_step": np.arange(3)}
    axis = images.figures({}, arrays)["energies"].axes[0]
    assert axis.get_xlim()[1] < 10
    assert axis.get_legend().get_texts()[2].get_text() == "from noise, chains at t = 0 (25.0% beyond)"


def test_no_sample_at_level_0_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "STORE_CHAINS", 200)

    def closed(network: LevelResNet) -> None:
        with torch.no_grad():
            network.constant[0] = 1e4

    trained = gaussian(closed, post_chains=5, post_transitions=10)
    summary, arrays = images.evaluate(trained)
    assert summary["samples_from_noise"] == 0 and math.isnan(summary["gradients_per_sample"])
    assert "none of 5 chains" in summary["samples_note"]
    assert math.isnan(summary["energy_gap_by_level"][0]) and math.isfinite(summary["energy_gap_by_level"][1])
    images.figures(summary | {"step_sizes": trained.model.sigma.tolist()}, arrays)
    images.compare({"a": (summary, arrays)})


def test_standard_error_counts_chains_not_draws() -> None:
    """The same draws ten times over tell no more than once."""
    trained = gaussian()
    x, t = trained.chains.x, trained.chains.t
    once = image_measures.Walk(x, t, torch.arange(len(t)), torch.zeros(trained.model.ladder.levels), 0)
    ten = once._replace(x=x.repeat(10, 1, 1, 1), t=t.repeat(10), chain=once.chain.repeat(10))
    errors = [np.array(image_measures.level_measures(trained, w)["energy_gap_se_by_level"]) for w in (once, ten)]
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.05)


def test_what_travels_fast_is_not_seen_more_often_at_level_0() -> None:
    """Two kinds of chains, equally often at t = 0: one comes and goes, the other stays there or away.

    Planted: a draw of each chain that has ever been there.
    """
    generator = torch.Generator().manual_seed(4)
    fast = torch.arange(4000) < 2000
    level = torch.rand(20, 4000, generator=generator)
    level[:, ~fast] = level[:1, ~fast]
    t, chain = (level > 0.1).long().flatten(), torch.arange(4000).repeat(20)
    x = fast.float().repeat(20).reshape(-1, 1, 1, 1)
    seen = image_measures.at_zero(image_measures.Walk(x, t, chain, torch.zeros(2), 0), generator)
    once = torch.unique(chain[t == 0])
    assert len(seen) == len(once)
    # 2,000 slow chains are at t = 0 in all snapshots or in none: some 200 of them.
    error = 0.25 / math.sqrt(200)
    assert abs(float(seen.mean()) - 0.5) < 5 * error < float(fast[once].double().mean()) - 0.5


def test_errors_hold_what_is_not_known_of_the_held_out_images() -> None:
    """Of means and variances: in 200 sets of chains and images the errors are what z scores need to have size 1."""
    trained, scores = gaussian(), []
    z = trained.dataset.train
    for k in range(200):
        images_of = replace(trained.dataset, held_out=z[50 * k : 50 * (k + 1)])
        rows = torch.randint(len(z), (100,), generator=trained.generator)
        x = trained.model.ladder.diffuse(z[rows], torch.zeros(100, dtype=torch.long), trained.generator)
        found = image_measures.HeldOut(replace(trained, dataset=images_of)).against(0, x, torch.arange(100))
        scores.append(
            [found.mean_difference / found.mean_difference_se, (found.variance_ratio - 1) / found.variance_ratio_se]
        )
    size = np.square(scores).mean(0) ** 0.5
    # sd of such a root over 200 sets is .05; without the images' part scores would be sqrt(3) times as large.
    np.testing.assert_allclose(size, 1, atol=0.25)


def test_draws_of_one_chain_say_nothing_of_the_variance() -> None:
    """Half the mean squared difference of all pairs of different chains; and the measure of a level is that."""
    generator = torch.Generator().manual_seed(2)
    x, chain = torch.randn(30, 1, 3, 3, generator=generator), torch.randint(6, (30,), generator=generator)
    apart = torch.cdist(x.flatten(1).double(), x.flatten(1).double(), compute_mode="donot_use_mm_for_euclid_dist")
    pairs = apart.square()[chain.unsqueeze(1) != chain] / 2 / 9
    assert image_measures._variance(x, 7 * chain) == pytest.approx(float(pairs.mean()), rel=1e-12)  # chains by any name
    trained = gaussian()
    held, few = image_measures.HeldOut(trained), trained.chains.x[:5]
    once, often = (held.against(0, few.repeat(k, 1, 1, 1), torch.arange(5).repeat(k)) for k in (1, 20))
    assert often.variance_ratio == pytest.approx(once.variance_ratio, rel=1e-6)


@pytest.mark.parametrize("counts", [(20, 20, 20, 20, 20), (1, 2, 7, 30, 60)], ids=str)
@pytest.mark.parametrize("alike", [1.0, 0.5], ids=["equal draws", "draws that share half of their variance"])
def test_the_variance_of_few_chains_is_the_truth_on_average(counts: tuple[int, ...], alike: float) -> None:
    """Exact draws N(m_i, v_i) of every pixel, in 600 repetitions. That of all draws is short by a fifth of what they
    share, and by more where counts are unequal."""
    generator = torch.Generator().manual_seed(3)
    mean, variance = torch.linspace(-2, 3, 16), torch.linspace(0.2, 2, 16)
    chain = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    found, plain = [], []
    for _ in range(600):
        shared, own = (torch.randn(n, 16, generator=generator) for n in (len(counts), len(chain)))
        draws = math.sqrt(alike) * shared[chain] + math.sqrt(1 - alike) * own
        x = (mean + variance.sqrt() * draws).reshape(-1, 1, 4, 4)
        found.append(image_measures._variance(x, chain))
        plain.append(float(x.var(0).mean()))
    truth = float(variance.mean())
    z, planted = ((np.mean(v) - truth) / (np.std(v) / math.sqrt(len(v))) for v in (found, plain))
    assert abs(z) < 5 and planted < -10


@pytest.mark.usefixtures("synthetic")
@pytest.mark.parametrize("preset", ["quick", "default", "paper"])
def test_show_prints_every_setting(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings in any case; the cost, which is measured, where this machine can run them."""
    monkeypatch.setattr(sys, "argv", ["daebm", "show", "fashion-mnist", "--preset", preset])
    try:
        main()
    except SystemExit as end:
        assert preset != "quick" and end.code == 2
    out, err = capsys.readouterr()
    assert "network" in out and "iterations" in out
    assert ("Cost:" in out) != err.startswith("daebm: ")
