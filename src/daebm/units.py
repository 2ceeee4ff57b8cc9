"""The user's units and the model's: tables column by column, images by one shift and scale for all pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from daebm.errors import InputError

Floats = np.ndarray[Any, np.dtype[np.float64]]
# Spread below this share of a column's size is rounding, not variation: float64 carries 16 digits, tables fewer.
CONSTANT = 1e-9
WILD = 10  # times the sd that the middle half of a column would have if it were normal
QUARTILES = 1.349  # sds of a normal column between its quartiles
SMALLEST = 1e-150  # a spread whose square underflows cannot be divided by


@dataclass(frozen=True, eq=False)
class Units:
    """x = shift + scale * z on the columns that vary; the others keep their one value.

    ``varies`` (d,) says which columns are modelled; ``shift`` and ``scale`` have an entry for each of the d columns.
    For images all three hold one entry, and ``event`` is the shape of an image. ``rows`` is how many they came from.
    """

    event: tuple[int, ...]
    varies: np.ndarray[Any, np.dtype[np.bool_]]
    shift: Floats
    scale: Floats
    rows: int

    @classmethod
    def of(cls, x: Floats) -> Units:
        """Of rows (n, d) or images (n, h, w) and (n, c, h, w)."""
        table = x.ndim == 2
        columns = x if table else x.reshape(-1, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            shift, scale, spread = columns.mean(0), columns.std(0), np.ptp(columns, axis=0)
        if not (np.isfinite(shift).all() and np.isfinite(scale).all() and np.isfinite(spread).all()):
            column = int(np.flatnonzero(~(np.isfinite(shift) & np.isfinite(scale) & np.isfinite(spread)))[0])
            where = f"column {column} (from 0)" if table else "X"
            raise InputError(f"{where} holds values too large to square in float64: rescale it")
        varies = (spread > CONSTANT * np.abs(columns).max(0)) & (scale > SMALLEST)
        if not varies.any():
            what = "every column is constant" if table else "all pixels are equal"
            raise InputError(f"{what}: there is nothing to learn, give rows that differ")
        # The mean of equal values is off in the last digit.
        shift, scale = np.where(varies, shift, columns[0]), np.where(varies, scale, 1.0)
        return cls(tuple(x.shape[1:]), varies, shift, scale, len(x))

    @property
    def table(self) -> bool:
        return len(self.event) == 1

    @property
    def model_event(self) -> tuple[int, ...]:
        """What the model sees: the varying columns, or channels x height x width."""
        if self.table:
            return (int(self.varies.sum()),)
        return self.event if len(self.event) == 3 else (1, *self.event)

    @property
    def log_stretch(self) -> float:
        """log |dx / dz|: a density over z has this to be subtracted to be one over x."""
        if self.table:
            return float(np.log(self.scale[self.varies]).sum())
        return math.prod(self.event) * float(np.log(self.scale[0]))

    @property
    def near(self) -> Floats:
        """How close to its one value a constant column must be: ten times what passes for constant in `of`; a spread
        is at most sqrt(2 n) times an sd."""
        return np.maximum(10 * CONSTANT * np.abs(self.shift), 1e10 * SMALLEST)

    @property
    def change_cost(self) -> float:
        """Nats that another value in a constant column costs, in each by itself. By Laplace's rule of succession it has
        probability 1 / (n + 2) after n rows without one. The same value counts as certain and costs nothing, so that
        columns which say nothing change nothing; the rule's (n + 1) / (n + 2) would cost less than 1 / (n + 1) nats.
        """
        return math.log(self.rows + 2)

    def shaped(self, x: Floats) -> Floats:
        """Grey images (n, h, w) for (n, 1, h, w) and the other way round; anything else as it is."""
        same = not self.table and x.ndim > 2 and tuple(x.shape[-2:]) == self.event[-2:]
        return x.reshape(len(x), *self.event) if same and x[0].size == math.prod(self.event) else x

    def to_model(self, x: Floats) -> Floats:
        z = (x - self.shift) / self.scale
        return z[:, self.varies] if self.table else z.reshape(len(z), *self.model_event)

    def to_user(self, z: Floats) -> Floats:
        if not self.table:
            images: Floats = self.shift + self.scale * z.reshape(len(z), *self.event)
            return images
        x = np.tile(self.shift, (len(z), 1))
        x[:, self.varies] += self.scale[self.varies] * z
        return x

    def surprise(self, x: Floats) -> Floats:
        """Minus the log probability of the constant columns, (n,): `change_cost` for each that has another value."""
        if not self.table:
            return np.zeros(len(x))
        with np.errstate(over="ignore"):
            away = np.abs(x - self.shift)[:, ~self.varies]
        nats: Floats = self.change_cost * (away > self.near[~self.varies]).sum(1)
        return nats


def wild(x: Floats) -> list[tuple[int, float, float, float]]:
    """Columns of rows (n, d) whose sd is that of few values: their number, the farthest value, and the quartiles.

    A code for missing values, or a slip of the comma, in one cell of hundreds: in sds of such a column all other values
    are alike, whatever they are. Columns of which half has one value are none of these.
    """
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75], axis=0)
    with np.errstate(over="ignore"):
        wide = (high > low) & (x.std(0) > WILD * (high - low) / QUARTILES)
    farthest = np.abs(x - middle).argmax(0)
    return [(int(j), float(x[farthest[j], j]), float(low[j]), float(high[j])) for j in np.flatnonzero(wide)]
