"""Speed of the paper's image network on one GPU: a MALA step and a training iteration, everything in one run.

Run with `make bench-gpu`. `--model RUN` times and checks a trained model of that architecture; without it the network
is untrained, and the precision check says little.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import daebm
from daebm import checkpoint, sampling
from daebm.config import Config, resolve
from daebm.engine import drafts, set_precision
from daebm.experiments.images import presets
from daebm.precision import check_precision
from daebm.resnet import Draft, ResNet
from daebm.samplers.capture import Captured, compiled
from daebm.samplers.langevin import energy_and_gradient, init, mala
from daebm.samplers.mgms import stay, transition
from daebm.state import CHECKPOINT, STATE
from daebm.training import begin, step

BATCH, STEPS, TOP = 200, 40, 50
GFLOP = 2.8 * BATCH  # energy and input gradient of the paper's network, per image 2.8


def milliseconds(call: Callable[[], object], rounds: int = 7, inner: int = 1) -> float:
    """Median over rounds of the device's time for one of ``inner`` calls."""
    call()
    times = []
    for _ in range(rounds):
        begin_, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin_.record()
        for _ in range(inner):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin_.elapsed_time(end) / inner)
    return statistics.median(times)


def peak(dtype: torch.dtype, tf32: bool = False) -> float:
    """TFLOP/s of a large matrix product, the card's practical limit."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    rate = 2 * 8192**3 / milliseconds(lambda: a @ a, inner=5) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = False
    return rate


class Plain(nn.Module):
    """The network as one would first write it: NCHW, library convolutions, the embedding per image."""

    def __init__(self, network: ResNet) -> None:
        super().__init__()
        self.inner = copy.deepcopy(network).to(memory_format=torch.contiguous_format)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        net = self.inner
        angle = t.unsqueeze(1) * net.frequencies
        time = F.silu(net.embed[1](F.silu(net.embed[0](torch.cat([angle.sin(), angle.cos()], 1)))))
        h = F.conv2d(F.pad(x, net.padding), net.stem.weight, net.stem.bias, padding=1)
        for i, block in enumerate(net.blocks):
            h = F.avg_pool2d(h, 2) if i else h
            c = block.first(F.silu(h)) + block.shift(time)[:, :, None, None]
            h = block.second(F.silu(c)) + (h if block.skip is None else block.skip(h))
        return -(F.silu(h).sum((2, 3)) * net.head(time)).sum(1)


def plain_iteration(network: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, t: Tensor) -> None:
    """A training iteration without care: a host read every step, one label forward after the other."""
    sigma = torch.full((len(x),), 0.01, device="cuda")
    with torch.no_grad():
        state = init(lambda y: network(y, t), x)
        for _ in range(STEPS):
            log_u = torch.rand(len(x), device="cuda").log()
            state, info = mala(lambda y: network(y, t), state, sigma, torch.randn_like(x), log_u)
            info.accept_prob.mean().item()
        u = torch.stack([network(state.x, torch.full_like(t, k)) for k in range(TOP + 1)], 1)
        t_new = torch.distributions.Categorical(logits=-u).sample()
    loss = network(x, t).mean() - network(state.x, t_new).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    loss.item()


def captured_burst(
    network: nn.Module, t: Tensor, precision: str, steps: int, levels: int | None = None
) -> Callable[[Tensor], Tensor]:
    """``steps`` MALA steps from x, all of it captured; a draft's last decision is in it."""
    set_precision(network, precision)
    generator = torch.Generator("cuda").manual_seed(0)
    sigma = torch.full((TOP + 1 if levels is None else levels,), 0.01, device="cuda")
    draft = Draft(network) if drafts(network) else None
    exact = compiled(network)

    def burst(y: Tensor) -> Tensor:
        with torch.no_grad():
            energy = network if draft is None else exact
            y, _t, _info = transition(mala, energy, y, t, sigma, steps, stay, generator, True, check=False, draft=draft)
        return y

    return Captured(burst, generator)


def captured_steps(
    network: nn.Module, x: Tensor, t: Tensor, precision: str, steps: int, levels: int | None = None
) -> float:
    """Milliseconds per MALA step; the gradient at the start is in it."""
    go = captured_burst(network, t, precision, steps, levels)
    return milliseconds(lambda: go(x)) / steps


def kernels(go: Callable[[], object], steps: int) -> None:
    """What the time of a burst of ``steps`` is spent on, a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        go()
        torch.cuda.synchronize()
    for it in sorted(seen.key_averages(), key=lambda it: -it.device_time_total)[:30]:
        print(f"  {it.device_time_total / steps:8.1f} us  {it.count / steps:5.1f} x  {it.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="folder of a trained run with the paper's network")
    parser.add_argument("--skip-iteration", action="store_true")
    parser.add_argument(
        "--kernels", default=None, metavar="PRECISION", help="show the kernels of a step, and nothing else"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs a GPU, and this machine has none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    peaks = {"fp16": peak(torch.float16), "bf16": peak(torch.bfloat16), "tf32": peak(torch.float32, True)}
    peaks["fp32"] = peak(torch.float32)
    print("matrix peak, TFLOP/s: " + ", ".join(f"{k} {v:.0f}" for k, v in peaks.items()))

    torch.manual_seed(0)
    network = ResNet((1, 28, 28), TOP + 1).cuda().requires_grad_(False)
    x = torch.randn(BATCH, 1, 28, 28, device="cuda")
    t = torch.randint(TOP + 1, (BATCH,), device="cuda")
    if arguments.kernels:
        go = captured_burst(network, t, arguments.kernels, STEPS)
        print(f"{milliseconds(lambda: go(x)) / STEPS:.3f} ms a step, of which:")
        kernels(lambda: go(x), STEPS)
        return
    plain = Plain(network)
    print(f"\nenergy and gradient (eager) or a whole MALA step (ours), batch {BATCH}: ms, TFLOP/s, share of peak")

    def line(name: str, ms: float, precision: str) -> None:
        rate = GFLOP / ms
        print(f"  {name:<34}{ms:8.3f}{rate:8.0f}{rate / peaks[precision]:8.2f}", flush=True)

    for precision in ("fp32", "tf32"):
        set_precision(plain, precision)
        torch.backends.cudnn.deterministic = False
        ms = milliseconds(lambda: energy_and_gradient(lambda y: plain(y, t), x), inner=5)
        line(f"eager {precision}, NCHW", ms, precision)
    for precision in ("tf32x2", "drafted", "tf32", "fp16", "bf16"):
        ms = captured_steps(network, x, t, precision, STEPS)
        line(f"ours {precision}, captured MALA", ms, {"tf32x2": "tf32", "drafted": "fp16"}.get(precision, precision))
    del network

    if arguments.model:
        trained(Path(arguments.model))
    if not arguments.skip_iteration:
        iterations(plain)


def trained(folder: Path) -> None:
    """The precision check on a trained run's own chains, moved on to have enough of them at every level."""
    model = daebm.load(folder).to("cuda")
    tensors, _facts = checkpoint.read(folder / CHECKPOINT, STATE)
    x, t = tensors["chains.x"].cuda(), tensors["chains.t"].cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    sampler = model.sampler()
    set_precision(model.network, "tf32")
    snapshots = []
    for _ in range(8):
        x, t, *_costs = sampling.transitions(sampler, sampling.Drawn(x, t, 0), 10, generator)
        snapshots.append((x, t))
    x, t = (torch.cat(part) for part in zip(*snapshots, strict=True))
    print(f"\nprecision on the trained model, {len(x)} chains: mean |change| of acceptance, label TV, worst level each")
    for precision, steps in (("tf32x2", 1), ("drafted", 3), ("drafted", STEPS), ("tf32", 1), ("fp16", 1), ("bf16", 1)):
        report = check_precision(model.network, precision, x, t, model.sigma, generator, steps=steps)
        verdict = "admitted" if report.passes else "refused"
        if report.kept is not None:
            verdict += (
                f"; of bursts of {steps} steps {float(report.kept.min()):.3f} to {float(report.kept.max()):.3f} kept"
            )
        print(f"  {precision:<8}{float(report.acceptance.max()):8.4f}{float(report.labels.max()):8.4f}  {verdict}")
    set_precision(model.network, "fp32")
    images = np.random.default_rng(0).integers(256, size=(10_000, *model.event), dtype=np.uint8)
    print("scores of 10,000 images, from bytes in the host's memory, s:")
    for name, score in {"energy": model.energy, "features": partial(model.said, "features")}.items():
        print(f"  {name:<8}{milliseconds(lambda score=score: score(images), rounds=3) / 1000:8.3f}", flush=True)
    print("a MALA step of this model, ms:")
    for precision in ("tf32x2", "drafted", "tf32", "fp16"):
        ms = captured_steps(model.network, x[:BATCH], t[:BATCH], precision, STEPS, model.ladder.levels)
        print(f"  {precision:<8}{ms:8.3f}", flush=True)


def iterations(plain: Plain) -> None:
    """The paper's iteration: 200 chains, 40 steps, a draw over 51 labels, an update."""
    x = torch.randn(BATCH, 1, 28, 28, device="cuda")
    t = torch.randint(TOP + 1, (BATCH,), device="cuda")
    plain.requires_grad_(True)
    set_precision(plain, "tf32")
    torch.backends.cudnn.deterministic = False
    optimiser = torch.optim.Adam(plain.parameters(), lr=1e-8, betas=(0.0, 0.999))
    slow = milliseconds(lambda: plain_iteration(plain, optimiser, x, t), rounds=3)
    print(f"\na training iteration, {BATCH} chains, {STEPS} steps, {TOP + 1} labels: ms, times faster, peak GiB")
    print(f"  {'plain eager tf32':<34}{slow:8.1f}{1:8.2f}")
    images = torch.randint(256, (60_000, 1, 28, 28), dtype=torch.uint8)
    for precision, move in itertools.product(("tf32x2", "drafted", "tf32", "fp16"), ("full", "block")):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        config = Config(
            network="resnet", width=128, hidden=1, ladder="paper", top=TOP, delta_first=0.0002, delta_last=0.02,
            batch=BATCH, store=50_000, steps=STEPS, bursts=1, label_move=move, block=8, learning_rate=1e-8,
            step_size=0.1, start="noise", adapt_every=100, device="cuda", precision=precision, compile=True,
            dequantise=True,
        )  # fmt: skip
        setup = begin(config, daebm.Dataset("bench", images, images[:100]))
        ours = milliseconds(lambda setup=setup: step(setup), rounds=5)
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(f"  {f'ours {precision}, {move} label draw':<34}{ours:8.1f}{slow / ours:8.2f}{gib:8.2f}", flush=True)
        del setup
    config = resolve("fashion-mnist", presets({}), "da", "default", 0, {})
    print(
        f"\nan iteration with chains of the preset of fashion-mnist, {config.bursts} x {config.steps} steps: ", end=""
    )
    setup = begin(config, daebm.Dataset.standardised("bench", images, images[:100]))
    setup.state.iteration = config.warm
    inner = 2 * config.adapt_every  # what is done once in as many iterations is in it
    print(f"{milliseconds(lambda: step(setup), rounds=3, inner=inner):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
