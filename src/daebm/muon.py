"""Adam, with Muon's steps (Jordan et al., 2024) for the weights that are matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of the odd polynomial that takes singular values from (0, 1] to near 1, as its author gives it: quick, not exact.
POLYNOMIAL = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon(torch.optim.Adam):
    """Adam but for groups with ``matrices``, where all that a step keeps of the momentum are its directions.

    Of its singular value decomposition P S Q' a step takes P Q': the many directions in which gradients are small are
    learned as fast as the few in which they are large. A convolution is the matrix that takes the neighbourhood of a
    pixel to its channels (PyTorch's own Muon has none). The rate is the norm of a step, as an operator: one that
    suits a narrow network suits a wide one.
    """

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        matrices = [group for group in self.param_groups if group.get("matrices")]
        slopes = [[weight.grad for weight in group["params"]] for group in matrices]
        for group, given in zip(matrices, slopes, strict=True):
            self._move(group, given)
            for weight in group["params"]:
                weight.grad = None  # so that Adam leaves it alone
        super().step()
        for group, given in zip(matrices, slopes, strict=True):
            for weight, slope in zip(group["params"], given, strict=True):
                weight.grad = slope

    @torch.no_grad()
    def _move(self, group: dict[str, Any], slopes: list[Tensor | None]) -> None:
        alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for weight, slope in zip(group["params"], slopes, strict=True):
            if slope is not None:
                own = self.state[weight]  # with Adam's names, as Adam reads what was saved
                own["step"] = own.get("step", torch.zeros(())) + 1
                momentum = own.setdefault("exp_avg", torch.zeros_like(slope))
                momentum.lerp_(slope, 1 - group["betas"][0])
                ahead = slope.lerp(momentum, group["betas"][0])  # Nesterov's
                alike.setdefault(weight.flatten(1).shape, []).append((weight, ahead))
        for (rows, columns), given in alike.items():
            size = group["lr"] * max(1.0, rows / columns) ** 0.5
            moves = orthogonal(torch.stack([ahead.flatten(1) for _weight, ahead in given]))
            for (weight, _ahead), move in zip(given, moves, strict=True):
                weight.sub_(move.reshape(weight.shape), alpha=size)


def orthogonal(matrices: Tensor) -> Tensor:
    """About P Q' of each P S Q', (n, rows, columns), by Newton and Schulz; singular values end between .7 and 1.2."""
    wide = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
    least = torch.finfo(wide.dtype).tiny
    wide = wide / wide.abs().amax((1, 2), keepdim=True).clamp(min=least)  # squares of tiny numbers are 0
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=least)
    first, third, fifth = POLYNOMIAL
    for _ in range(ROUNDS):
        square = wide @ wide.mT
        wide = first * wide + (third * square + fifth * (square @ square)) @ wide
    result: Tensor = wide if matrices.shape[1] <= matrices.shape[2] else wide.mT
    return result
