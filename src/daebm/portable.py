"""A checkpoint small enough to carry: at most 36 MiB in files of at most 15 MiB, from which a run goes on elsewhere.

Weights, labels, step sizes, data order and generator are kept as they are. Coarser: large averages and chains in half
precision, Adam's second moments in 8 bits on a log scale. Dropped: first moments where beta1 is 0, for they
have no memory then (those of the warm starts build up again), and chains that do not fit. So a run goes on from here,
but not bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daebm import checkpoint
from daebm.errors import InputError

PART = "portable"  # files portable-0.safetensors, portable-1.safetensors, ...
TOTAL, FILE = 36 << 20, 15 << 20  # bytes
MARGIN = 1 << 16  # per file, for names and facts


def exists(folder: Path) -> bool:
    return checkpoint.exists(folder, f"{PART}-0")


def write(folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """Write a full state in portable form; returns what was made coarser or dropped, in words."""
    small: dict[str, Tensor] = {}
    without_memory = facts["config"]["beta1"] == 0
    for key, value in tensors.items():
        if key.startswith("chains."):
            continue
        if key.endswith(".exp_avg_sq"):
            small[f"{key}:codes"], small[f"{key}:range"] = _to_codes(value)
        elif key.startswith("average.") and value.ndim > 1:  # constants of levels: of thousands of nats a tenth counts
            small[key] = value.half()
        elif not (key.endswith(".exp_avg") and without_memory):
            small[key] = value.int() if key == "order" else value
    files = -(-TOTAL // FILE)
    room = TOTAL - files * MARGIN - sum(_bytes(value) for value in small.values())
    chains = {key: value for key, value in tensors.items() if key.startswith("chains.")}
    chains["chains.x"] = chains["chains.x"].half()
    stored = len(chains["chains.t"])
    kept = min(stored, room // sum(_bytes(value[:1]) for value in chains.values()))
    if kept < facts["config"]["batch"]:
        raise InputError(
            f"a portable checkpoint holds {TOTAL >> 20} MiB, which leaves no room for a batch of chains beside this "
            "network's weights: copy the run folder instead"
        )
    small |= {key: value[:kept].clone() for key, value in chains.items()}
    said = f"large averages and chains in half precision, second moments in 8 bits, {kept} of {stored} chains kept"
    parts: list[dict[str, Tensor]] = [{}]
    for key, value in small.items():
        if sum(map(_bytes, parts[-1].values())) + _bytes(value) > FILE - MARGIN:
            parts.append({})
        parts[-1][key] = value
    for index, part in enumerate(parts):
        checkpoint.write(folder, f"{PART}-{index}", part, facts | {"portable": said, "parts": len(parts)})
    return said


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The full state again, up to what `write` made coarser."""
    small, facts = checkpoint.read(folder, f"{PART}-0")
    for index in range(1, facts["parts"]):
        more, other = checkpoint.read(folder, f"{PART}-{index}")
        if other["iteration"] != facts["iteration"]:
            raise InputError(f"the parts of the portable checkpoint in {folder} are of different states: copy it again")
        small |= more
    tensors: dict[str, Tensor] = {}
    for key, value in small.items():
        if key.endswith(":codes"):
            name = key.removesuffix(":codes")
            tensors[name] = _from_codes(value, small[f"{name}:range"])
            first = name.removesuffix("_sq")
            if first not in small:
                tensors[first] = torch.zeros_like(tensors[name])
        elif not key.endswith(":range"):
            tensors[key] = value.float() if value.dtype == torch.float16 else value
    tensors["order"] = tensors["order"].long()
    return tensors, facts


def _to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes on a log scale, 0 for 0, and the least and largest logarithm."""
    logs = values.double().log()
    positive = logs[values > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.0, 0.0)
    codes = 1 + (254 * (logs - low) / max(high - low, 1e-12)).round()
    limits = torch.tensor([low, high], dtype=torch.float64)
    return torch.where(values > 0, codes, 0.0).to(torch.uint8), limits


def _from_codes(codes: Tensor, limits: Tensor) -> Tensor:
    logs = limits[0] + (codes.double() - 1) / 254 * (limits[1] - limits[0])
    return torch.where(codes > 0, logs.exp(), 0.0).float()


def _bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
