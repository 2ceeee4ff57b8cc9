"""The samplers through the compiled and captured path on a GPU, in every precision: exact starts, planted faults."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from daebm import Config, Dataset
from daebm.denoising import draw_labelled, draw_noisy
from daebm.engine import drafts, set_precision
from daebm.precision import check_precision
from daebm.resnet import HALF, Draft, coarsen, convolve
from daebm.samplers import langevin, mgms
from daebm.samplers.capture import Captured
from daebm.training import begin, denoise, relate, step, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
N, CHANNELS, SIDE, LEVELS = 4096, 16, 3, 5  # 16 channels: fewer are not worth tensor cores to the library
DIMENSION = CHANNELS * SIDE * SIDE
VARIANCE = torch.logspace(-1, 0, LEVELS, dtype=torch.float64) ** (1 / 2)


class Rotated(nn.Module):
    """U(x, t) = |R x|^2 / (2 v_t) + d/2 log v_t for a rotation R of the channels, done as a convolution.

    In exact arithmetic p(x | t) = N(0, v_t I) and p(t) is uniform, whatever R is; the convolution works in the
    precision under test.
    """

    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.arithmetic = "fp32"
        turned, _ = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(3)))
        self.rotation = nn.Conv2d(CHANNELS, CHANNELS, 1).requires_grad_(False)
        self.rotation.weight.copy_(turned[:, :, None, None])
        nn.init.zeros_(self.rotation.bias)
        self.register_buffer("variance", VARIANCE.float())

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = convolve(self.rotation, x, self.arithmetic).float()
        v = self.variance[t]
        return y.square().flatten(1).sum(1) / (2 * v) + DIMENSION / 2 * v.log()

    def coarsen(self) -> None:
        coarsen(self.rotation)

    def carried(self, x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Half of the change of scale, so that the label still depends on x."""
        factor = (self.variance[labels] / self.variance[t].unsqueeze(1)) ** 0.25
        return factor[:, :, None, None, None] * x.unsqueeze(1), DIMENSION * factor.log()


def exact_start(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator("cuda").manual_seed(seed)
    t = torch.randint(LEVELS, (N,), generator=generator, device="cuda")
    sd = VARIANCE.float().sqrt().cuda()[t].reshape(-1, 1, 1, 1)
    return sd * torch.randn(N, CHANNELS, SIDE, SIDE, generator=generator, device="cuda"), t, generator


def worst_z(x: Tensor, t: Tensor) -> float:
    """The largest |z| over level counts and the mean square of x at each level: binomial and chi-square sds."""
    worst = 0.0
    for k in range(LEVELS):
        count = int((t == k).sum())
        worst = max(worst, abs(count - N / LEVELS) / math.sqrt(N / LEVELS * (1 - 1 / LEVELS)))
        square = x[t == k].double().square().mean() / float(VARIANCE[k])
        worst = max(worst, abs(float(square) - 1) / math.sqrt(2 / (count * DIMENSION)))
    return worst


SIGMA = 0.55 * VARIANCE.sqrt()  # about .7 accepted in 144 dimensions


def captured(network: nn.Module, move: mgms.LabelMove, generator: torch.Generator, steps: int = 3) -> Captured:
    sigma, draft = SIGMA.cuda(), Draft(network) if drafts(network) else None

    def transition(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, mgms.TransitionInfo]:
        return mgms.transition(
            langevin.mala, network, x, t, sigma, steps, move, generator, compile=True, check=False, draft=draft
        )

    return Captured(transition, generator)


MOVES = {
    "full": mgms.full(LEVELS - 1),
    "block": mgms.block(LEVELS - 1, 2),
    "local": mgms.local(LEVELS - 1),
    "carry": mgms.carry(LEVELS - 1, 3),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("precision", ["fp32", "tf32x2", "drafted", "tf32", "fp16"])
def test_exact_start_stays_exact(precision: str, move: str) -> None:
    network = Rotated().cuda()
    set_precision(network, precision)
    x, t, generator = exact_start(1)
    assert worst_z(x, t) < 5
    go = captured(network, MOVES[move], generator)
    accepted = []
    for _ in range(60):
        x, t, info = go(x, t)
        accepted.append(info.steps.accept_prob.mean())
    assert 0.3 < float(torch.stack(accepted).mean()) < 0.95
    assert worst_z(x, t) < 5


def test_captured_transitions_are_the_eager_ones() -> None:
    """The graph draws the numbers that the function would, and leaves the generator where it would."""
    network = Rotated().cuda().double()
    set_precision(network, "fp32")
    results = []
    for capture in (False, True):
        x, t, generator = exact_start(2)
        x = x.double()
        go = captured(network, MOVES["block"], generator)
        for _ in range(4):
            x, t, _info = (go if capture else go.function)(x, t)
        results.append((x, t, generator.get_state()))
    (x_a, t_a, state_a), (x_b, t_b, state_b) = results
    torch.testing.assert_close(x_a, x_b)
    assert torch.equal(t_a, t_b) and torch.equal(state_a, state_b)


def test_captured_gradients_are_the_eager_ones() -> None:
    """Of all losses, three times over, with weights that change in between: a graph must read them anew."""
    data = Dataset.standardised("noise", torch.randint(256, (200, 1, 16, 16)).byte(), torch.zeros(1, 1, 16, 16).byte())
    values = {
        "network": "level-resnet",
        "heads": 4,
        "width": 16,
        "hidden": 1,
        "floor": 0.2,
        "top": 5,
        "denoise": 1,
        "iterations": 9,
    }
    values |= {"device": "cuda", "batch": 32, "store": 64}
    setups = [begin(Config(compile=compiled, **values), data) for compiled in (False, True)]
    for setup in setups:
        setup.engine.use("fp32")
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(3):
        z = torch.randn(32, 1, 16, 16, device="cuda", generator=generator)
        noisy = draw_noisy(setups[0].ladder, z, generator)
        labelled = draw_labelled(setups[0].ladder, z, generator)
        for name, inputs in (
            ("chainless", noisy),
            ("relating", (*noisy[:4], *labelled)),
            ("likelihood", (noisy.x, noisy.t, z, noisy.t)),
        ):
            (values_a, eager), (values_b, graph) = (getattr(setup.engine, name)(*inputs) for setup in setups)
            torch.testing.assert_close(values_a, values_b, rtol=1e-3, atol=1e-3)
            for a, b in zip(eager, graph, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:  # sums in another order: right to a thousandth of the whole
                    assert float((a - b).norm()) <= 1e-3 * float(a.norm()) + 1e-5
        with torch.no_grad():
            for weights in zip(*(setup.state.network.parameters() for setup in setups), strict=True):
                change = 0.01 * torch.randn(weights[0].shape, device="cuda", generator=generator)
                for weight in weights:
                    weight.add_(change)


def test_nothing_waits_for_the_device_within_an_iteration() -> None:
    """Of any part; where levels are balanced, once in ``adapt_every`` iterations, it may."""
    data = Dataset.standardised("noise", torch.randint(256, (200, 1, 16, 16)).byte(), torch.zeros(1, 1, 16, 16).byte())
    config = Config(
        **{"network": "level-resnet", "width": 16, "heads": 2, "hidden": 1, "floor": 0.2, "top": 11, "device": "cuda"},
        **{"compile": True, "denoise": 4, "relate": 4, "iterations": 40, "batch": 32, "store": 64, "average": 0.9},
        **{"label_move": "carry", "block": 4, "level_rate": 0.3, "gain_rate": 1e-3, "adapt_every": 10, "trust": 0.1},
        optimiser="muon",
    )
    setup = begin(config, data)
    for part, iteration in ((denoise, 0), (relate, 4), (step, 11)):
        setup.state.iteration = iteration
        part(setup)  # records its graphs
        torch.cuda.set_sync_debug_mode("error")
        try:
            part(setup)
            with pytest.raises(RuntimeError, match="synchroniz"):
                setup.state.chains.t.cpu()  # planted
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["tf32x2", "drafted"])
def test_a_resumed_run_continues_bit_for_bit(precision: str, tmp_path: Path) -> None:
    """Through all parts of the recipe, compiled and captured: the same weights and chains, cut or not."""
    images = torch.randint(256, (200, 1, 16, 16), generator=torch.Generator().manual_seed(1)).byte()
    data = Dataset.standardised("noise", images, images[:8])
    config = Config(
        **{"network": "level-resnet", "width": 16, "heads": 2, "hidden": 1, "floor": 0.2, "top": 11, "device": "cuda"},
        **{
            "compile": True,
            "precision": precision,
            "denoise": 6,
            "relate": 6,
            "iterations": 32,
            "finish": 8,
            "batch": 32,
            "store": 64,
            "trust": 0.1,
            "optimiser": "muon",
        },
        **{"steps": 3, "bursts": 2, "label_move": "carry", "block": 4, "level_rate": 0.3, "gain_rate": 1e-3},
        **{"learning_rate": 1e-4, "adapt_every": 2, "average": 0.9, "checkpoint_every": 4, "log_every": 2},
    )
    whole, _ladder = train(config, data)
    assert whole.precision == precision
    for cut in (4, 8, 16, 24, 28):  # in each part, and where weights begin to stay
        folder = tmp_path / str(cut)
        train(config, data, folder, stop=lambda state, _ladder, cut=cut: state.iteration == cut)
        resumed, _ladder = train(config, data, folder, resume=True)
        assert torch.equal(resumed.chains.x, whole.chains.x) and torch.equal(resumed.chains.t, whole.chains.t)
        for key, value in whole.network.state_dict().items():
            assert torch.equal(resumed.network.state_dict()[key], value), key


class SameNoise(Captured):
    """Planted fault: every replay starts from the generator's first state."""

    def __call__(self, *inputs: Tensor) -> object:
        state = self.generator.get_state()
        result = super().__call__(*inputs)
        self.generator.set_state(state)
        return result


def test_a_graph_that_replays_the_same_noise_is_caught() -> None:
    """Chains pushed by one frozen noise drift away from the target."""
    network = Rotated().cuda()
    set_precision(network, "fp32")
    x, t, generator = exact_start(3)
    go = captured(network, MOVES["full"], generator)
    go.__class__ = SameNoise
    for _ in range(60):
        x, t, _info = go(x, t)
    assert worst_z(x, t) > 10


def test_the_guard_admits_tf32_and_refuses_bf16() -> None:
    """At this size bf16 is off by tenths of a nat, TF32 by hundredths."""
    network = Rotated().cuda()
    x, t, generator = exact_start(4)
    reports = {
        p: check_precision(network, p, x, t, SIGMA.cuda(), generator)
        for p in ("fp32", "tf32x2", "drafted", "tf32", *HALF)
    }
    assert reports["fp32"].worst < 1e-3 and not reports["bf16"].passes
    assert reports["tf32x2"].passes and reports["drafted"].passes and float(reports["drafted"].kept.min()) < 1
    assert reports["tf32"].worst < reports["bf16"].worst
