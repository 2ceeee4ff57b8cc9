"""The log density as an ONNX file, for other runtimes and languages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from daebm.checkpoint import write_atomically
from daebm.errors import InputError
from daebm.resnet import LevelResNet, ResNet, eleven_bits
from daebm.units import Units


class LogDensity(nn.Module):
    """x (n, ...) in the user's units to log p(x) in nats, (n,): `DAEBM.log_density` without its rounding.

    In float64, as in the estimator: in float32 a column like 1e6 ± 1 has hardly a digit left to standardise.
    """

    shift: Tensor
    scale: Tensor
    near: Tensor
    varying: Tensor
    constant: Tensor
    change_cost: Tensor
    offset: Tensor

    def __init__(self, energy: nn.Module, units: Units, log_normaliser: float) -> None:
        super().__init__()
        self.energy, self.table, self.event = copy.deepcopy(energy), units.table, units.model_event
        if isinstance(self.energy, LevelResNet):
            self.energy.inner = cast(Any, _InSingle(self.energy.inner))
        for name in ("shift", "scale", "near"):
            self.register_buffer(name, torch.from_numpy(getattr(units, name)))
        self.register_buffer("varying", torch.from_numpy(units.varies).nonzero().flatten())
        self.register_buffer("constant", torch.from_numpy(~units.varies).nonzero().flatten())
        # Tensors, as the exporter would round plain numbers to float32.
        self.register_buffer("change_cost", torch.tensor(units.change_cost, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(log_normaliser + units.log_stretch, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = (x - self.shift) / self.scale
        z = z.index_select(1, self.varying) if self.table else z.reshape(-1, *self.event)
        level_0 = torch.zeros_like(z.flatten(1)[:, 0], dtype=torch.int64)
        log_p: Tensor = -self.energy(z, level_0) - self.offset
        if len(self.constant):
            other = ((x - self.shift).abs() > self.near).index_select(1, self.constant)
            log_p = log_p - self.change_cost * other.double().sum(1)
        return torch.where(log_p.isnan(), -torch.inf, log_p)


class _InSingle(nn.Module):
    """A residual network in float32 between float64: ONNX Runtime has no other convolutions on a CPU."""

    def __init__(self, inner: ResNet) -> None:
        super().__init__()
        self.inner = inner.float()
        with torch.no_grad():
            for part in self.inner.modules():
                if isinstance(part, nn.Conv2d):
                    part.weight.copy_(eleven_bits(part.weight))

    def at(self, t: Tensor) -> Callable[[Tensor], Tensor]:
        energy = self.inner.at(t)
        return lambda x: energy(x.float()).double()


def write_onnx(path: str | Path, log_density: LogDensity, event: tuple[int, ...]) -> None:
    """One file with input ``x`` (rows, *event) and output ``log_density`` (rows,), for any number of rows."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError("export_onnx needs onnx and onnxscript: pip install 'daebm[onnx]'") from error
    program = torch.onnx.export(
        log_density.eval(),
        (torch.zeros(2, *event, dtype=torch.float64),),
        input_names=["x"],
        output_names=["log_density"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # only a call with a path returns nothing
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, program.model_proto.SerializeToString())
