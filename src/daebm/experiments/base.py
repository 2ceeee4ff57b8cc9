"""What an experiment is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor
from tqdm import tqdm

from daebm.chains import Chains
from daebm.config import Config, PresetTable
from daebm.data import Dataset
from daebm.model import Model
from daebm.samplers.adapt import StepSizes
from daebm.samplers.langevin import KERNELS, State, init, log_uniform

Arrays = dict[str, np.ndarray[Any, Any]]
Summary = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """What an evaluation looks at. The chains are a copy: looking does not advance the training chains."""

    model: Model
    dataset: Dataset
    chains: Chains
    config: Config
    generator: torch.Generator  # the evaluation's own
    precision: str = "fp32"  # the one the run ended in


@dataclass(frozen=True)
class Column:
    """A column of a result table: the summary key, its heading, the truth or target shown beside it."""

    key: str
    title: str
    truth: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment of the paper, or ours."""

    name: str
    title: str
    presets: PresetTable
    dataset: Callable[[Config], Dataset]
    evaluate: Callable[[Trained], tuple[Summary, Arrays]]
    figures: Callable[[Summary, Arrays], dict[str, Figure]]
    compare: Callable[[Mapping[str, tuple[Summary, Arrays]]], dict[str, Figure]]
    columns: tuple[Column, ...]


@contextmanager
def progress(title: str, total: int) -> Iterator[tqdm[Any]]:
    """A progress bar on a terminal, nothing in a log."""
    with tqdm(total=total, desc=title, leave=False, disable=None, mininterval=0.5) as bar:
        yield bar


def long_run(trained: Trained, x: Tensor, kernel: str, title: str, every: int = 100) -> tuple[Tensor, Tensor, Any]:
    """The config's long run at t = 0 from standardised x: final x, energies every ``every`` steps, and info.

    With MALA where the method itself was trained unadjusted, a short pilot first finds a step size that is accepted.
    """
    config = trained.config
    energies: list[Tensor] = []
    with progress(title, config.long_run_steps) as bar:

        def observe(k: int, state: State) -> None:
            energies.append(state.energy.clone())
            bar.update(k - bar.n)

        model = trained.model
        if kernel == "mala" and config.kernel != "mala":
            model = with_pilot_step(model, x, trained.generator)
        end, info = model.run_at_zero(x, config.long_run_steps, trained.generator, kernel, observe, every)
    return end, torch.stack(energies) if energies else torch.empty(0, len(x)), info


def with_pilot_step(model: Model, x: Tensor, generator: torch.Generator) -> Model:
    """The model with the step of level 0 adapted to acceptance .6-.8 from x, which itself stays where it is."""
    steps = StepSizes.start(model.sigma[:1], (1e-6, 3.0), 1)
    level = torch.zeros(len(x), dtype=torch.long, device=x.device)

    def energy(y: Tensor) -> Tensor:
        u: Tensor = model.network(y, level)
        return u

    with torch.no_grad():
        state = init(energy, x)
        for k in range(1, 1001):
            eps = torch.randn(x.shape, generator=generator, device=x.device)
            log_u = log_uniform(len(x), x, generator)
            state, info = KERNELS["mala"](energy, state, steps.sigma.float().expand(len(x)), eps, log_u)
            steps.record(level, info.accept_prob)
            if k % 20 == 0:
                steps.adapt()
    sigma = model.sigma.clone()
    sigma[0] = steps.sigma[0]
    return replace(model, sigma=sigma)


def log_steps(axis: Any, sigma: Sequence[float]) -> None:
    """Step sizes by level, on a log axis with ticks at 0.1, 0.2, 0.5, .. and wide enough for one of them."""
    axis.plot(sigma, marker=".", linewidth=0.8)
    axis.set(yscale="log", ylim=(min(sigma) / 1.6, max(sigma) * 1.6))
    axis.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_locator=NullLocator())
