"""A function of tensors recorded as a CUDA graph and replayed: no launches from Python, no reads by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Captured:
    """``function`` of tensors of fixed shapes, recorded at the first call.

    What else the function reads (weights, step sizes) is read from where it lay then, so it must be changed in place.
    Its noise comes from ``generator``, whose state every replay moves on as the function itself would: a graph that
    replays the same noise would be a wrong sampler. The recording itself leaves no trace in the generator.
    """

    def __init__(self, function: Callable[..., Any], generator: torch.Generator) -> None:
        self.function, self.generator = function, generator
        self.graph: torch.cuda.CUDAGraph | None = None

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        before = self.generator.get_state()
        self.inputs = tuple(x.detach().clone() for x in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, chooses algorithms, allocates workspaces
            for _ in range(2):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self.outputs = self.function(*self.inputs)
        self.generator.set_state(before)
        self.graph = graph

    def __call__(self, *inputs: Tensor) -> Any:
        if self.graph is None:
            self._record(inputs)
        assert self.graph is not None
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs)
