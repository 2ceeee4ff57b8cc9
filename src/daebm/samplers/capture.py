"""Functions of tensors of fixed shapes: compiled, and recorded as a CUDA graph to be replayed.

Neither launches from Python nor reads by the host are left then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Function = TypeVar("Function", bound=Callable[..., Any])
COMPILATIONS = 64  # of one function


def compiled(function: Function) -> Function:
    """``function`` compiled. A stop watch must not choose kernels that round differently: runs continue bit for bit.

    The same steps serve energies of other shapes and precisions, each a compilation of its own. After eight of them
    PyTorch would go on uncompiled, and say so in a log alone.
    """
    from torch._dynamo import config as dynamo  # here, because they take a second
    from torch._inductor import config

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILATIONS)
    options: dict[str, Any] = {"deterministic": True} if hasattr(config, "deterministic") else {}
    return cast(Function, torch.compile(function, dynamic=False, options=options))


class Captured:
    """``function`` of tensors of fixed shapes, recorded at the first call.

    What else the function reads (weights, step sizes) is read from where it lay then, so it must be changed in place.
    Its noise comes from ``generator``, whose state every replay moves on as the function itself would: a graph that
    replays the same noise would be a wrong sampler. The recording itself leaves no trace in the generator.

    Results are copies or, without ``copy``, the graph's own memory, which the next call overwrites.
    """

    def __init__(
        self, function: Callable[..., Any], generator: torch.Generator | None = None, copy: bool = True
    ) -> None:
        self.function, self.generator, self.copy = function, generator, copy
        self.graph: torch.cuda.CUDAGraph | None = None

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        before = None if self.generator is None else self.generator.get_state()
        self.inputs = tuple(x.detach().clone() for x in inputs)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, chooses algorithms, allocates workspaces
            for _ in range(2):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self.outputs = self.function(*self.inputs)
        if self.generator is not None and before is not None:
            self.generator.set_state(before)
        self.graph = graph

    def __call__(self, *inputs: Tensor) -> Any:
        if self.graph is None:
            self._record(inputs)
        assert self.graph is not None
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return tree_map(torch.clone, self.outputs) if self.copy else self.outputs
