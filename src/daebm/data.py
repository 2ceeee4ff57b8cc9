"""Data sets: tensors in their own units, with the affine map to the standardised units that training uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.targets import Gaussian, Mixture

GAUSSIAN_1D_TRUTH = Mixture(
    torch.tensor([0.75, 0.25]),
    [Gaussian(torch.tensor([m]), torch.tensor([0.1])) for m in (-2.0, 2.0)],
)
RING_RADII = (1.0, 2.0, 3.0, 4.0)
RING_SD = 0.01
# Data come from a stream of their own: the training generator starts at the seed itself, and two generators with one
# seed would make the chains' first noise a copy of the data's.
DATA_SEED = 20_000_003


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and held-out events (n, ...) in data units; standardised = (x - shift) / scale.

    Images may be kept as bytes; their data units are [-1, 1].
    """

    name: str
    train: Tensor
    held_out: Tensor
    shift: float = 0.0
    scale: float = 1.0
    train_labels: Tensor | None = None
    held_out_labels: Tensor | None = None

    def __post_init__(self) -> None:
        for part, x in (("training", self.train), ("held-out", self.held_out)):
            if not isinstance(x, Tensor):
                raise InputError(f"the {part} data of {self.name} must be a torch tensor: wrap them in torch.as_tensor")
            if x.ndim < 2 or len(x) == 0:
                raise InputError(
                    f"the {part} data of {self.name} must have shape (n, ...) with n >= 1, got {tuple(x.shape)}"
                )
            check_finite(f"the {part} data of {self.name}", x)
        if not (math.isfinite(self.shift) and math.isfinite(self.scale) and self.scale > 0):
            raise InputError(
                f"shift and scale of {self.name} must be finite and scale positive, got {self.shift} and {self.scale}"
            )
        if self.train.shape[1:] != self.held_out.shape[1:]:
            raise InputError(
                f"training and held-out events of {self.name} differ in shape: "
                f"{tuple(self.train.shape[1:])} and {tuple(self.held_out.shape[1:])}"
            )

    @classmethod
    def standardised(cls, name: str, train: Tensor, held_out: Tensor) -> Dataset:
        """Data with the shift and scale that give ``train`` mean 0 and sd 1 over all its numbers."""
        train, held_out = torch.as_tensor(train), torch.as_tensor(held_out)  # arrays will do
        numbers = to_unit_range(train).double()
        return cls(name, train, held_out, float(numbers.mean()), float(numbers.std()))

    @property
    def event(self) -> tuple[int, ...]:
        return tuple(self.train.shape[1:])

    def standardise(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Data units to training units; bytes are grey levels. A generator dequantises bytes by uniform noise."""
        return ((to_unit_range(x, generator) - self.shift) / self.scale).float()


def to_unit_range(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Bytes 0..255 to [-1, 1], with a generator spread evenly over a grey level each; floats as they are."""
    if x.dtype != torch.uint8:
        return x
    if generator is None:
        return x.float() / 127.5 - 1
    # Around, and not above: what is scored without noise lies in the middle of what was trained on.
    return (x + torch.rand(x.shape, generator=generator, device=x.device) - 0.5) / 127.5 - 1


def check_finite(what: str, x: Tensor) -> None:
    if not torch.isfinite(x).all():
        row = int((~torch.isfinite(x.flatten(1))).any(1).nonzero()[0])
        raise InputError(f"{what} hold a NaN or infinite value (first in row {row}): remove or impute such rows")


def gaussian_1d(generator: torch.Generator, count: int = 1000, standardise: bool = False) -> Dataset:
    """Section 3.1: three quarters of the points from N(-2, .1^2), one quarter from N(2, .1^2), in exact shares."""
    left = count * 3 // 4
    centres = torch.cat([torch.full((left,), -2.0), torch.full((count - left,), 2.0)])
    train = (centres + 0.1 * torch.randn(count, generator=generator)).unsqueeze(1)
    shift, scale = (-1.0, math.sqrt(3.01)) if standardise else (0.0, 1.0)  # the mixture's own mean and sd
    return Dataset("gaussian-1d", train, GAUSSIAN_1D_TRUTH.sample(1000, generator), shift, scale)


def draw_rings(count: int, generator: torch.Generator) -> Tensor:
    """Points on four rings: radius N(k, .01^2), k = 1..4 equally likely, uniform angle (truncation at 100 sd)."""
    centre = torch.tensor(RING_RADII)[torch.randint(len(RING_RADII), (count,), generator=generator)]
    radius = centre + RING_SD * torch.randn(count, generator=generator)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def four_rings(generator: torch.Generator, count: int = 50_000, standardise: bool = True) -> Dataset:
    """Section 5. The scale is the exact sd of a coordinate, sqrt(E r^2 / 2), so that it is a constant."""
    scale = math.sqrt(sum(r**2 + RING_SD**2 for r in RING_RADII) / len(RING_RADII) / 2)
    train = draw_rings(count, generator)
    return Dataset("four-rings", train, draw_rings(10_000, generator), scale=scale if standardise else 1.0)


def digits(standardise: bool = True) -> Dataset:
    """scikit-learn's 8x8 digits as rows of 64 pixels in [0, 1]: 1,297 to train, 500 held out, always the same."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x, x_held, y, y_held = train_test_split(
        (images / 16).astype(np.float32), labels, test_size=500, stratify=labels, random_state=0
    )
    train = torch.from_numpy(x)
    return Dataset(
        "digits",
        train,
        torch.from_numpy(x_held),
        shift=float(train.mean()) if standardise else 0.0,
        scale=float(train.std()) if standardise else 1.0,
        train_labels=torch.from_numpy(y),
        held_out_labels=torch.from_numpy(y_held),
    )
