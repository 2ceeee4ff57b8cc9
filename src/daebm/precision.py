"""Is a coarser arithmetic still an exact sampler? A check against float32 on the same proposals, per level.

Metropolis is exact for any drift, as long as the energy differences are right. So the drift is left as it is, and only
the two energies of each proposal, and those of the labels, are replaced by float32 ones.

Where steps are drafted in 16 bits the proposal is the end of a burst, whatever its steps got wrong: then a coarse draft
costs bursts that are undone, and no exactness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from daebm.chains import Chains
from daebm.engine import drafts, set_precision
from daebm.resnet import Draft
from daebm.samplers.langevin import init, mala, propose, take_steps
from daebm.samplers.mgms import carried_energies, draft_log_ratio, label_energies

LIMIT = 0.01  # of either change; a 0.3-nat error moves the *mean* acceptance by .006 only, but a proposal's by .08
# Of drafts: a step in 16 bits takes half of one in tf32x2, so that with half of them undone nothing is won; and at a
# single level chains must still move.
LEAST_KEPT, LEAST_KEPT_THERE = 0.6, 0.2
KNOWN = 20  # draws by which a level knows its own share of drafts kept; with fewer it has that of all
FALLBACK = {"fp16": "tf32", "bf16": "tf32", "tf32": "tf32x2", "drafted": "tf32x2", "tf32x2": "fp32"}
CHECK_CHAINS = 4096  # so many draws take part in a check: fewer chains are moved more than once
CHECK_SEED = 40_000_003  # a stream of its own: looking must not change a run
LABELS = 8  # labels whose probabilities are compared, around the chain's own


class PrecisionReport(NamedTuple):
    """Mean absolute change of the acceptance probability and total variation of the label draw, both (T + 1,).

    ``kept`` is the probability of keeping a draft, by level (of all draws, where few are); None without drafts. Its
    mean is over levels, as chains are spread over them.
    """

    precision: str
    acceptance: Tensor
    labels: Tensor
    kept: Tensor | None = None

    @property
    def worst(self) -> float:
        """The larger of the two at the worst level; NaN counts as infinite."""
        return float(torch.cat([self.acceptance, self.labels]).nan_to_num(nan=torch.inf).max())

    @property
    def passes(self) -> bool:
        return self.worst <= LIMIT and (
            self.kept is None or (float(self.kept.mean()) >= LEAST_KEPT and float(self.kept.min()) >= LEAST_KEPT_THERE)
        )

    @property
    def reason(self) -> str:
        if self.worst <= LIMIT and self.kept is not None:
            return (
                f"keeps {float(self.kept.mean()):.2f} of the bursts, {float(self.kept.min()):.2f} at its worst level "
                f"(at least {LEAST_KEPT:g} and {LEAST_KEPT_THERE:g})"
            )
        return f"changes acceptance or label probabilities by up to {self.worst:.3g} at a level (limit {LIMIT:g})"


def check_precision(
    network: nn.Module,
    precision: str,
    x: Tensor,
    t: Tensor,
    sigma: Tensor,
    generator: torch.Generator,
    chunk: int = 512,
    steps: int = 3,
) -> PrecisionReport:
    """Compare ``precision`` with float32 on one proposal and one label draw of every chain (x, t).

    Where steps are drafted the proposal is a burst of ``steps`` of them. Levels without chains report zero. Leaves the
    network in ``precision``.
    """
    levels = len(sigma)
    sums = torch.zeros(4, levels, dtype=torch.float64, device=x.device)
    for start in range(0, len(x), chunk):
        x_now, t_now = x[start : start + chunk], t[start : start + chunk]
        window = (t_now - LABELS // 2).clamp(0, max(levels - LABELS, 0)).unsqueeze(1)
        labels = (window + torch.arange(min(LABELS, levels), device=x.device)).clamp(max=levels - 1)
        step = sigma[t_now].to(x.dtype)
        set_precision(network, precision)
        with torch.no_grad():
            propose = _burst if drafts(network) else _proposal
            log_r = propose(network, x_now, t_now, step, steps, generator)
            given, coarse = log_r(), _of_labels(network, x_now, t_now, labels)
            set_precision(network, "fp32")
            exact, fine = log_r(), _of_labels(network, x_now, t_now, labels)
        changes = torch.stack(
            [
                (_accepted(given) - _accepted(exact)).abs(),
                (torch.softmax(-coarse, 2) - torch.softmax(-fine, 2)).abs().sum(2).amax(0) / 2,
                1 - _accepted(given),
                torch.ones_like(exact),
            ]
        )
        sums.index_add_(1, t_now, changes.double())
    set_precision(network, precision)
    acceptance, label, undone = sums[:3] / sums[3].clamp(min=1)
    undone = torch.where(sums[3] >= KNOWN, undone, sums[2].sum() / sums[3].sum())
    return PrecisionReport(precision, acceptance.cpu(), label.cpu(), 1 - undone.cpu() if drafts(network) else None)


def _accepted(log_r: Tensor) -> Tensor:
    return torch.where(torch.isfinite(log_r), log_r.clamp(max=0).exp(), 0.0)


def _proposal(
    network: nn.Module, x: Tensor, t: Tensor, sigma: Tensor, _steps: int, generator: torch.Generator
) -> Callable[[], Tensor]:
    """log r of a MALA proposal from x, by energies in the network's precision of the moment; the drift is today's."""
    eps = torch.randn(x.shape, generator=generator, device=x.device)

    def energy(y: Tensor) -> Tensor:
        u: Tensor = network(y, t)
        return u

    proposal, correction = propose(energy, init(energy, x), sigma, eps)
    return lambda: energy(x) - energy(proposal.x) + correction


def _burst(
    network: nn.Module, x: Tensor, t: Tensor, sigma: Tensor, steps: int, generator: torch.Generator
) -> Callable[[], Tensor]:
    """The same of a burst that is drafted from x."""
    here = Draft(network).at(t)
    start = init(here, x)
    end, _info = take_steps(mala, here, start, sigma, steps, generator, compile=False)
    return lambda: draft_log_ratio(network, t, start, end)


def _of_labels(network: nn.Module, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Energies of labels for every way in which a label can be drawn: x fixed, and carried where the network can."""
    kinds = [label_energies(network, x, labels)]
    if hasattr(network, "carried"):
        kinds.append(carried_energies(network, x, t, labels)[1])
    return torch.stack(kinds)


def settle_precision(
    network: nn.Module, precision: str, chains: Chains, sigma: Tensor, seed: int, steps: int = 3
) -> tuple[str, list[str]]:
    """Set and return the first precision, from ``precision`` on, that passes on these chains, and why others do not."""
    refused = []
    while precision in FALLBACK:
        generator = torch.Generator(chains.x.device).manual_seed(seed + CHECK_SEED)
        some = torch.randperm(len(chains), generator=generator, device=chains.x.device)
        some = some.repeat(-(-CHECK_CHAINS // len(some)))[:CHECK_CHAINS]
        report = check_precision(network, precision, chains.x[some], chains.t[some], sigma, generator, steps=steps)
        if report.passes:
            break
        refused.append(f"precision {precision} {report.reason}: going on in {FALLBACK[precision]}")
        precision = FALLBACK[precision]
    set_precision(network, precision)
    return precision, refused
