"""The store of persistent chains (x, t)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daebm.errors import InputError
from daebm.ladder import Ladder

EASE = 0.05  # weight of the last move in a chain's mean acceptance
# Of the mean acceptance of all chains. Those that move as others do are never there; one whose steps are all refused is
# after some sixty moves.
STUCK = 0.05


@dataclass(eq=False)
class Chains:
    """Positions x (n, ...), levels t (n,), and per chain its label round trips 0 -> T -> 0.

    ``stage`` says how far the current round trip has come: 0 before the first visit to level 0, 1 after it, 2 after
    level T was reached from there. ``ease`` is the mean acceptance of a chain's steps over its last twenty moves or so;
    it begins at 1.
    """

    x: Tensor
    t: Tensor
    stage: Tensor
    trips: Tensor
    ease: Tensor

    @classmethod
    def start(cls, x: Tensor, t: Tensor) -> Chains:
        return cls(x, t, (t == 0).long(), torch.zeros_like(t), torch.ones(len(t), device=t.device))

    @classmethod
    def from_data(cls, size: int, data: Tensor, ladder: Ladder, generator: torch.Generator) -> Chains:
        """Diffused data with uniform labels: near equilibrium, but contrastive divergence until it has travelled."""
        z = data[torch.randint(len(data), (size,), generator=generator, device=data.device)]
        t = torch.randint(ladder.levels, (size,), generator=generator, device=data.device)
        return cls.start(ladder.diffuse(z, t, generator), t)

    @classmethod
    def from_noise(cls, size: int, event: tuple[int, ...], ladder: Ladder, generator: torch.Generator) -> Chains:
        """N(0, I) at every level, labels in equal sorted blocks, as the paper's code starts."""
        x = torch.randn(size, *event, generator=generator, device=generator.device)
        return cls.start(x, torch.arange(size, device=x.device) * ladder.levels // size)

    def __len__(self) -> int:
        return len(self.t)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Slots of ``count`` different chains. Write their new values back with `put` to the same slots."""
        if count > len(self):
            raise InputError(f"cannot draw {count} different chains from a store of {len(self)}")
        return torch.randperm(len(self), generator=generator, device=self.t.device)[:count]

    def put(self, slots: Tensor, x: Tensor, t: Tensor, accepted: Tensor) -> None:
        """New values, and the mean acceptance (n,) of the steps that led there."""
        self.x[slots] = x
        self.t[slots] = t
        self.ease[slots] += EASE * (accepted.to(self.ease) - self.ease[slots])

    def stuck(self) -> Tensor:
        """Those whose steps are hardly ever accepted where those of the others are, (n,)."""
        return self.ease < STUCK * self.ease.mean()

    def replace(self, slots: Tensor, x: Tensor) -> None:
        """Chains that begin anew at their levels, and with them the round trips that they were on."""
        self.x[slots] = x
        self.stage[slots] = (self.t[slots] == 0).long()
        self.ease[slots] = 1

    def count_trips(self, slots: Tensor, t: Tensor, top: int) -> None:
        """Follow the labels ``t`` that the chains in ``slots`` have just moved to."""
        if top == 0:
            return
        stage = self.stage[slots]
        back = (stage == 2) & (t == 0)
        self.trips[slots] += back
        stage = torch.where((t == 0) & ((stage == 0) | back), 1, stage)
        self.stage[slots] = torch.where((t == top) & (stage == 1), 2, stage)
