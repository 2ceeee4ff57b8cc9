"""The noise ladder: levels t = 0..T with x_t = sqrt(abar_t) z + sqrt(v_t) eps, eps ~ N(0, I) (eq. 8 of the paper).

Level 0 is the data, or the data plus a stated noise floor; level T is close to N(0, I). Ladders are built in
float64: in float32 the first levels of the paper's T = 50 schedule come out as exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from daebm.errors import InputError

# Neighbouring levels overlap like two chi-squares with d degrees of freedom, whose relative width is
# sqrt(2 / d). A step of twice that in log variance lets about a third of neighbour moves through.
LOG_VARIANCE_STEP = 2.0


@dataclass(frozen=True, eq=False)
class Ladder:
    """Signal share ``abar`` and noise variance ``variance`` of every level, both float64 of shape (T + 1,)."""

    abar: Tensor
    variance: Tensor

    def __post_init__(self) -> None:
        if self.abar.dtype != torch.float64 or self.variance.dtype != torch.float64:
            raise InputError("a ladder holds float64 tensors: build it with .double()")
        if self.abar.ndim != 1 or self.abar.shape != self.variance.shape or len(self.abar) == 0:
            raise InputError(
                f"a ladder needs two equally long vectors, got {tuple(self.abar.shape)} and "
                f"{tuple(self.variance.shape)}"
            )
        rising = bool((self.variance.diff() > 0).all() and (self.abar.diff() < 0).all())
        inside = bool((self.variance >= 0).all() and (self.abar > 0).all() and (self.abar <= 1).all())
        if not (rising and inside):
            raise InputError("a ladder's noise variances must rise and its signal shares fall within (0, 1]")

    @property
    def top(self) -> int:
        """T, the noisiest level."""
        return len(self.abar) - 1

    @property
    def levels(self) -> int:
        """T + 1, the number of levels."""
        return len(self.abar)

    @property
    def floor(self) -> float:
        """Standard deviation of the noise that is part of level 0."""
        return math.sqrt(float(self.variance[0]))

    @property
    def alpha(self) -> Tensor:
        """alpha_t = abar_t / abar_(t-1) for t = 1..T at index t; alpha_0 = 1."""
        ratio = torch.ones_like(self.abar)
        ratio[1:] = self.abar[1:] / self.abar[:-1]
        return ratio

    @property
    def step_variance(self) -> Tensor:
        """Noise variance added from level t - 1 to t, at index t (1 - alpha_t without a floor); index 0 is v_0."""
        added = self.variance.clone()
        added[1:] -= self.alpha[1:] * self.variance[:-1]
        return added

    @cached_property
    def _copies(self) -> dict[torch.device, Ladder]:
        return {self.abar.device: self}

    def on(self, device: torch.device) -> Ladder:
        """This ladder on a device, copied there once: at every copy the host would wait for the device."""
        if device not in self._copies:
            self._copies[device] = Ladder(self.abar.to(device), self.variance.to(device))
        return self._copies[device]

    def diffuse(self, z: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw x_t given clean z of shape (n, ...) at levels t of shape (n,)."""
        return self.noised(z, t, torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device))

    def noised(self, z: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """x_t of clean z for given noise."""
        here = self.on(z.device)
        return per_chain(here.abar.sqrt(), t, z) * z + per_chain(here.variance.sqrt(), t, z) * eps

    def diffuse_up(self, x: Tensor, t: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw x_(t+1) given x_t, one step of the diffusion."""
        eps = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        here = self.on(x.device)
        return per_chain(here.alpha.sqrt(), t + 1, x) * x + per_chain(here.step_variance.sqrt(), t + 1, x) * eps

    @classmethod
    def single(cls, floor: float = 0.0) -> Ladder:
        """One level: a plain EBM is the joint model with T = 0."""
        _check_floor(floor)
        return cls(torch.ones(1, dtype=torch.float64), torch.tensor([floor**2], dtype=torch.float64))

    @classmethod
    def paper(cls, top: int, delta_first: float, delta_last: float) -> Ladder:
        """The paper's cumulative sum: sqrt(1 - alpha_t) = delta_1 + ... + delta_t, delta equally spaced."""
        check_positive(top=top, delta_first=delta_first, delta_last=delta_last)
        noise_sd = torch.linspace(delta_first, delta_last, top, dtype=torch.float64).cumsum(0)
        if float(noise_sd[-1]) >= 1:
            raise InputError(
                f"delta_first={delta_first} and delta_last={delta_last} over {top} levels add up to a noise sd "
                f"of {float(noise_sd[-1]):.3g}, which must stay below 1"
            )
        # log1p keeps 1 - abar exact for tiny noise, where cumprod of (1 - beta) would round it away.
        log_abar = torch.log1p(-(noise_sd**2)).cumsum(0)
        zero = torch.zeros(1, dtype=torch.float64)
        return cls(torch.cat([zero, log_abar]).exp(), torch.cat([zero, -torch.expm1(log_abar)]))

    @classmethod
    def geometric(
        cls,
        dimension: int,
        floor: float = 0.0,
        first_sd: float = 0.01,
        last_variance: float = 0.95,
        top: int | None = None,
    ) -> Ladder:
        """Equal steps in log noise variance: v_t = v_0 e^(kt), abar_t = (1 - v_t) / (1 - v_0), v_T < 1.

        For standardised data. ``floor`` is the sd of the noise in level 0. With a zero floor level 0 is the data
        and the geometric part starts at level 1 with sd ``first_sd``. ``top`` (T) follows from the dimension
        when it is not given.
        """
        _check_floor(floor)
        check_positive(dimension=dimension, first_sd=first_sd, last_variance=last_variance)
        start = floor**2 if floor > 0 else first_sd**2
        if not start < last_variance < 1:
            raise InputError(
                f"a geometric ladder needs floor (or first_sd) squared < last_variance < 1, got "
                f"floor={floor}, first_sd={first_sd}, last_variance={last_variance}"
            )
        first = 0 if floor > 0 else 1
        if top is None:
            step = LOG_VARIANCE_STEP * math.sqrt(2 / dimension)
            top = first + max(1, round(math.log(last_variance / start) / step))
        if top < first + 1:
            raise InputError(f"a geometric ladder needs at least {first + 1} levels above 0, got top={top}")
        log_v = torch.linspace(math.log(start), math.log(last_variance), top + 1 - first, dtype=torch.float64)
        v = torch.cat([torch.zeros(first, dtype=torch.float64), log_v.exp()])
        return cls((1 - v) / (1 - v[0]), v)


def per_chain(values: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """values[t] in the dtype of ``like``, shaped to broadcast over its event dimensions."""
    chosen = values[t].to(like.dtype)
    return chosen.reshape(-1, *[1] * (like.ndim - 1))


def _check_floor(floor: float) -> None:
    if not (math.isfinite(floor) and floor >= 0):
        raise InputError(f"floor must be 0 or more, got {floor!r}")


def check_positive(**values: float) -> None:
    """Refuse the first of the named values that is not a positive finite number."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be a positive number, got {value!r}")
