"""Is a coarser arithmetic still an exact sampler? A check against float32 on the same proposals, per level.

Metropolis is exact for any drift, as long as the energy differences are right. So the drift is left as it is, and only
the two energies of each proposal, and those of the labels, are replaced by float32 ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from daebm.chains import Chains
from daebm.engine import set_precision
from daebm.samplers.langevin import energy_and_gradient, init
from daebm.samplers.mgms import carried_energies, label_energies

LIMIT = 0.01  # of either change; a 0.3-nat error moves the *mean* acceptance by .006 only, but a proposal's by .08
FALLBACK = {"fp16": "tf32", "bf16": "tf32", "tf32": "tf32x2", "tf32x2": "fp32"}
CHECK_CHAINS = 4096  # at most so many chains take part in a check
CHECK_SEED = 40_000_003  # a stream of its own: looking must not change a run
LABELS = 8  # labels whose probabilities are compared, around the chain's own


class PrecisionReport(NamedTuple):
    """Mean absolute change of the acceptance probability and total variation of the label draw, both (T + 1,)."""

    precision: str
    acceptance: Tensor
    labels: Tensor

    @property
    def worst(self) -> float:
        """The larger of the two at the worst level; NaN counts as infinite."""
        return float(torch.cat([self.acceptance, self.labels]).nan_to_num(nan=torch.inf).max())

    @property
    def passes(self) -> bool:
        return self.worst <= LIMIT


def check_precision(
    network: nn.Module,
    precision: str,
    x: Tensor,
    t: Tensor,
    sigma: Tensor,
    generator: torch.Generator,
    chunk: int = 512,
) -> PrecisionReport:
    """Compare ``precision`` with float32 on one proposal and one label draw of every chain (x, t).

    Levels without chains report zero. Leaves the network in ``precision``.
    """
    levels = len(sigma)
    sums = torch.zeros(3, levels, dtype=torch.float64, device=x.device)
    for start in range(0, len(x), chunk):
        x_now, t_now = x[start : start + chunk], t[start : start + chunk]
        eps = torch.randn(x_now.shape, generator=generator, device=x.device)
        window = (t_now - LABELS // 2).clamp(0, max(levels - LABELS, 0)).unsqueeze(1)
        labels = (window + torch.arange(min(LABELS, levels), device=x.device)).clamp(max=levels - 1)
        step = sigma[t_now].to(x.dtype)
        shape = (-1, *[1] * (x.ndim - 1))

        def energy(y: Tensor, t_now: Tensor = t_now) -> Tensor:
            u: Tensor = network(y, t_now)
            return u

        set_precision(network, precision)
        with torch.no_grad():
            before = init(energy, x_now)
            proposal = x_now - step.reshape(shape) ** 2 / 2 * before.grad + step.reshape(shape) * eps
            after_energy, after_grad = energy_and_gradient(energy, proposal)
            coarse = _of_labels(network, x_now, t_now, labels)
            set_precision(network, "fp32")
            exact_before, exact_after = energy(x_now), energy(proposal)
            fine = _of_labels(network, x_now, t_now, labels)
        # log r with float32 energies: the drift's part is what the coarse log r leaves besides its energies.
        both = before.grad + after_grad
        drift = (step.reshape(shape) / 2 * both * (eps - step.reshape(shape) / 4 * both)).flatten(1).sum(1)

        def accepted(log_r: Tensor) -> Tensor:
            return torch.where(torch.isfinite(log_r), log_r.clamp(max=0).exp(), 0.0)

        exact = accepted(exact_before - exact_after + drift)
        changes = torch.stack(
            [
                (accepted(before.energy - after_energy + drift) - exact).abs(),
                (torch.softmax(-coarse, 2) - torch.softmax(-fine, 2)).abs().sum(2).amax(0) / 2,
                torch.ones_like(exact),
            ]
        )
        sums.index_add_(1, t_now, changes.double())
    set_precision(network, precision)
    seen = sums[2].clamp(min=1)
    return PrecisionReport(precision, (sums[0] / seen).cpu(), (sums[1] / seen).cpu())


def _of_labels(network: nn.Module, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Energies of labels for every way in which a label can be drawn: x fixed, and carried where the network can."""
    kinds = [label_energies(network, x, labels)]
    if hasattr(network, "carried"):
        kinds.append(carried_energies(network, x, t, labels)[1])
    return torch.stack(kinds)


def settle_precision(
    network: nn.Module, precision: str, chains: Chains, sigma: Tensor, seed: int
) -> tuple[str, list[str]]:
    """Set and return the first precision, from ``precision`` on, that passes on these chains, and why others do not."""
    refused = []
    while precision in FALLBACK:
        generator = torch.Generator(chains.x.device).manual_seed(seed + CHECK_SEED)
        some = torch.randperm(len(chains), generator=generator, device=chains.x.device)[:CHECK_CHAINS]
        report = check_precision(network, precision, chains.x[some], chains.t[some], sigma, generator)
        if report.passes:
            break
        refused.append(
            f"precision {precision} changes acceptance or label probabilities by up to {report.worst:.3g} at a level "
            f"(limit {LIMIT:g}): going on in {FALLBACK[precision]}"
        )
        precision = FALLBACK[precision]
    set_precision(network, precision)
    return precision, refused
