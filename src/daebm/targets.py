"""Closed-form energies with exact samplers: to test a sampler against, or to try one on.

Every target is normalised, U(x) = -log p(x), is callable on x of shape (n, d), and has ``sample(n, generator)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from daebm.errors import InputError

LOG_2PI = math.log(2 * math.pi)


class Target(Protocol):
    """A normalised energy with an exact sampler."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, diag(sd^2)); mean and sd of shape (d,)."""

    mean: Tensor
    sd: Tensor

    def __post_init__(self) -> None:
        if not (isinstance(self.mean, Tensor) and isinstance(self.sd, Tensor) and self.mean.shape == self.sd.shape):
            raise InputError("mean and sd must be torch tensors of one shape (d,): wrap them in torch.as_tensor")
        if not bool((self.sd > 0).all()):
            raise InputError(f"every sd must be positive, got {self.sd.tolist()}")

    def __call__(self, x: Tensor) -> Tensor:
        z = (x - self.mean) / self.sd
        return (z.square() / 2 + self.sd.log() + LOG_2PI / 2).sum(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        eps = torch.randn(n, len(self.mean), generator=generator, dtype=self.mean.dtype)
        return self.mean + self.sd * eps


@dataclass(frozen=True, eq=False)
class Mixture:
    """sum_k weight_k component_k, for any targets of one dimension."""

    weights: Tensor
    components: Sequence[Target]

    def __post_init__(self) -> None:
        total = float(self.weights.double().sum())
        if bool((self.weights < 0).any()) or abs(total - 1) > 1e-4 or len(self.weights) != len(self.components):
            raise InputError(
                f"weights must be one of 0 or more for each of {len(self.components)} components and add up to 1, got "
                f"{self.weights.tolist()}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        log_p = torch.stack([-component(x) for component in self.components], dim=1)
        return -torch.logsumexp(log_p + self.weights.to(x.dtype).log(), dim=1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        which = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        draws = torch.stack([component.sample(n, generator) for component in self.components])
        return draws[which, torch.arange(n)]


@dataclass(frozen=True, eq=False)
class Skewed:
    """Independent Gumbel coordinates, U(x) = sum_i z_i + exp(-z_i) + log scale, z = x / scale.

    Mean 0.5772 scale, variance pi^2 scale^2 / 6, skewness 1.14: a sampler that is right only for symmetric targets
    fails on it.
    """

    dimension: int
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        z = x / self.scale
        return (z + torch.exp(-z) + math.log(self.scale)).sum(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        u = torch.rand(n, self.dimension, generator=generator, dtype=torch.float64)
        return -self.scale * torch.log(-torch.log(u.clamp(min=1e-300)))


@dataclass(frozen=True, eq=False)
class LabelledLadder:
    """p(x, t) = weight_t p_t(x): the joint target of MGMS, U(x, t) = -log weight_t - log p_t(x)."""

    weights: Tensor
    levels: Sequence[Target]

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.levels):
            raise InputError(f"{len(self.levels)} levels need as many weights, got {len(self.weights)}")

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        u = torch.stack([level(x) for level in self.levels], dim=1)
        return (u - self.weights.to(x.dtype).log()).gather(1, t.unsqueeze(1)).squeeze(1)

    def sample(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        t = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        draws = torch.stack([level.sample(n, generator) for level in self.levels])
        return draws[t, torch.arange(n)], t
