"""Step sizes per level, adapted during training by the paper's asymmetric rule (appendix E.3) and frozen after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH = 0.6, 0.8  # the band the mean acceptance probability is steered into
TAU = 0.1  # grow by 1 + tau, shrink by 1 + 2 tau: unequal, so that steps are not stuck on a fixed grid


@dataclass(eq=False)
class StepSizes:
    """sigma_t per level (T + 1,), with running sums of acceptance probabilities since the last adaptation.

    The mean is over acceptance *probabilities*, not outcomes, and a level seen fewer than ``minimum_count`` times
    keeps its step: an unvisited level must not drift.
    """

    sigma: Tensor
    bounds: tuple[float, float]
    minimum_count: int
    total: Tensor
    count: Tensor

    @classmethod
    def start(cls, sigma: Tensor, bounds: tuple[float, float], minimum_count: int) -> StepSizes:
        sigma = sigma.double().clamp(*bounds)
        return cls(sigma, bounds, minimum_count, torch.zeros_like(sigma), torch.zeros_like(sigma))

    def record(self, level: Tensor, accept_prob: Tensor) -> None:
        """Add mean acceptance probabilities (n,) of chains that stepped at ``level`` (n,)."""
        # A product, for a sum by index has no fixed order on a GPU, and a resumed run must end in the same bits.
        own = torch.arange(len(self.total), device=level.device).unsqueeze(1) == level
        self.total += own.to(self.total.dtype) @ accept_prob.to(self.total.dtype)
        self.count += own.sum(1, dtype=self.count.dtype)

    def acceptance(self) -> Tensor:
        """Mean acceptance probability per level since the last adaptation; NaN where nothing was seen."""
        return self.total / self.count

    def adapt(self) -> None:
        """Move every level with enough evidence towards the band and forget that evidence."""
        seen = self.count >= self.minimum_count
        mean = torch.where(seen, self.acceptance(), (LOW + HIGH) / 2)
        sigma = torch.where(mean > HIGH, self.sigma * (1 + TAU), self.sigma)
        sigma = torch.where(mean < LOW, self.sigma / (1 + 2 * TAU), sigma)
        self.sigma = sigma.clamp(*self.bounds)
        self.total = torch.where(seen, 0.0, self.total)
        self.count = torch.where(seen, 0.0, self.count)
