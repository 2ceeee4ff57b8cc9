"""Where and how the work is done: device, precision, compilation, and the captured inner loop of training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from daebm.denoising import denoising_loss
from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.methods import Transition
from daebm.samplers import mgms
from daebm.samplers.capture import Captured
from daebm.samplers.langevin import Kernel

if TYPE_CHECKING:
    from daebm.config import Config


def check(config: Config) -> torch.device:
    """The config's device, refusing what this machine cannot do."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device=cuda, but there is no usable GPU here: add --set device=cpu --set precision=fp32 (slow)"
        )
    if config.device == "cpu" and config.precision != "fp32":
        raise InputError(f"precision={config.precision} needs device=cuda: a CPU works in fp32")
    if config.compile and config.device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InputError("compile=true needs a C++ compiler and none was found: install g++ or leave compile out")
    return torch.device(config.device)


def set_precision(network: nn.Module, precision: str) -> None:
    """Let the convolutions of ``network`` work in ``precision``; everything else stays float32.

    TF32 is PyTorch's switch for the whole process. Algorithms are fixed and deterministic, so that a resumed run
    continues bit for bit.
    """
    torch.backends.cudnn.allow_tf32 = precision in ("tf32", "tf32x2")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    convolutional = [part for part in network.modules() if hasattr(part, "arithmetic")]
    if precision not in ("fp32", "tf32") and not convolutional:
        raise InputError(f"precision={precision} is for convolutional networks: use fp32 or tf32 here")
    for part in convolutional:
        part.arithmetic = precision  # type: ignore[assignment]


@contextmanager
def exactly() -> Iterator[None]:
    """Float32 convolutions on a GPU for a while, where PyTorch's own default is TF32; then as before."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Engine:
    """The compiled pieces of a training run. Holds no state of the run: it can be rebuilt at any time."""

    def __init__(self, config: Config, network: nn.Module, ladder: Ladder, generator: torch.Generator) -> None:
        self.config, self.network, self.generator = config, network, generator
        self.move = mgms.label_move(config.label_move, ladder.top, config.block)
        self.on_gpu = config.device == "cuda"
        self.transitions: dict[Kernel, Transition] = {}
        self.compiled = config.compile and self.on_gpu
        # The losses need gradients with respect to weights, graphs of their own.
        self.energy: Callable[[Tensor, Tensor], Tensor] = network
        self.denoising_loss: Callable[..., Tensor] = partial(denoising_loss, network)
        if self.compiled:
            self.energy = torch.compile(self.energy, dynamic=False)
            self.denoising_loss = torch.compile(self.denoising_loss, dynamic=False)

    def use(self, precision: str) -> None:
        """Go on in ``precision``: graphs recorded in another one are of no more use."""
        set_precision(self.network, precision)
        self.transitions.clear()

    def transition(self, kernel: Kernel) -> Transition:
        """Algorithm 2 on the network, compiled and captured on a GPU."""
        if kernel not in self.transitions:
            self.transitions[kernel] = self._build(kernel)
        return self.transitions[kernel]

    def _build(self, kernel: Kernel) -> Transition:
        config = self.config
        labels = _CompiledLabels(self.network) if self.compiled else self.network

        def move(energy: Any, x: Tensor, t: Tensor, generator: torch.Generator | None) -> Any:
            return self.move(labels, x, t, generator)

        def transition(x: Tensor, t: Tensor, sigma: Tensor) -> Any:
            return mgms.transition(
                kernel, self.network, x, t, sigma, config.steps, move, self.generator, config.compile, check=False
            )

        return Captured(transition, self.generator) if self.compiled else transition


class _CompiledLabels:
    """A network whose energies of many labels are compiled; called as a whole it is the network."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        if hasattr(network, "of_labels"):
            self.of_labels = torch.compile(cast(Callable[..., Tensor], network.of_labels), dynamic=False)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        u: Tensor = self.network(x, t)
        return u
