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

from daebm.denoising import chainless_loss, denoising_loss, relating_loss
from daebm.errors import InputError
from daebm.ladder import Ladder
from daebm.methods import Transition
from daebm.resnet import Draft
from daebm.samplers import langevin, mgms
from daebm.samplers.capture import Captured, compiled
from daebm.samplers.langevin import Kernel
from daebm.updates import likelihood_loss, trainable

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
    torch.backends.cudnn.allow_tf32 = precision in ("tf32", "tf32x2", "drafted")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    convolutional = [part for part in network.modules() if hasattr(part, "arithmetic")]
    if precision not in ("fp32", "tf32") and not convolutional:
        raise InputError(f"precision={precision} is for convolutional networks: use fp32 or tf32 here")
    for part in convolutional:
        part.arithmetic = precision  # type: ignore[assignment]


def drafts(network: nn.Module) -> bool:
    """Whether the steps of ``network`` are drafted in 16 bits."""
    return any(getattr(part, "arithmetic", "") == "drafted" for part in network.modules())


@contextmanager
def exactly(network: nn.Module) -> Iterator[None]:
    """Float32 convolutions for a while, whatever arithmetic was set, PyTorch's own or ours; then as before."""
    parts: list[Any] = [part for part in network.modules() if hasattr(part, "arithmetic")]
    before, switch = [part.arithmetic for part in parts], torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    for part in parts:
        part.arithmetic = "fp32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = switch
        for part, arithmetic in zip(parts, before, strict=True):
            part.arithmetic = arithmetic


Gradient = Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]]
"""Of given tensors: a loss and other values, and the gradient of the loss with respect to the trainable weights."""


class Engine:
    """The compiled pieces of a training run. Holds no state of the run: it can be rebuilt at any time."""

    def __init__(self, config: Config, network: nn.Module, ladder: Ladder, generator: torch.Generator) -> None:
        self.config, self.network, self.generator = config, network, generator
        self.move = mgms.label_move(config.label_move, ladder.top, config.block)
        self.compiled = config.compile and config.device == "cuda"
        self.reset()

    def reset(self) -> None:
        """Forget what was recorded: graphs read weights where they lay and in the precision of then."""
        self.transitions: dict[Kernel, Transition] = {}
        # Scores are learned by the energy without gains, which are there to undo what its errors do to chains.
        plain = getattr(self.network, "ungained", self.network)
        energy, score = self._compile(self.network), self._compile(partial(denoising_loss, plain))
        self.likelihood = self._gradient(partial(likelihood_loss, self.network, energy, self.config))
        self.chainless = self._gradient(lambda *noisy: (chainless_loss(score, energy, *noisy),))
        self.relating = self._gradient(lambda *given: (relating_loss(score, energy, *given),))

    def use(self, precision: str) -> None:
        """Go on in ``precision``."""
        set_precision(self.network, precision)
        self.reset()

    def _compile(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return compiled(function) if self.compiled else function

    def _gradient(self, loss: Callable[..., tuple[Tensor, ...]]) -> Gradient:
        """``loss`` returns what is to be lowered and other values; this, all of them and the weights' gradient."""
        weights = trainable(self.network)

        def gradient(*inputs: Tensor) -> Any:
            values = loss(*inputs)
            slopes = torch.autograd.grad(values[0], weights, allow_unused=True)
            # Laid out as the weights are: only then does the optimiser take all weights at once.
            slopes = tuple(
                slope if slope is None or slope.stride() == weight.stride() else torch.empty_like(weight).copy_(slope)
                for slope, weight in zip(slopes, weights, strict=True)
            )
            return tuple(value.detach() for value in values), slopes

        return Captured(gradient, copy=False) if self.compiled else gradient

    def transition(self, kernel: Kernel) -> Transition:
        """Algorithm 2 on the network, compiled and captured on a GPU."""
        if kernel not in self.transitions:
            self.transitions[kernel] = self._build(kernel)
        return self.transitions[kernel]

    def _build(self, kernel: Kernel) -> Transition:
        labels = _CompiledLabels(self.network) if self.compiled else self.network
        # Only what Metropolis corrects step by step can be corrected as a whole.
        draft = Draft(self.network) if drafts(self.network) and kernel is langevin.mala else None
        energy = self.network if draft is None else labels

        def move(energy: Any, x: Tensor, t: Tensor, generator: torch.Generator | None) -> Any:
            return self.move(labels, x, t, generator)

        def transition(x: Tensor, t: Tensor, sigma: Tensor) -> Any:
            return mgms.transition(
                kernel,
                energy,
                x,
                t,
                sigma,
                self.config.steps,
                move,
                self.generator,
                self.config.compile,
                check=False,
                draft=draft,
            )

        return Captured(transition, self.generator) if self.compiled else transition


class _CompiledLabels:
    """A network whose energies of many labels are compiled."""

    def __init__(self, network: nn.Module) -> None:
        self.energy = compiled(network)
        if hasattr(network, "of_labels"):
            self.of_labels = compiled(cast(Callable[..., Tensor], network.of_labels))
        if hasattr(network, "carried"):
            self.carried = network.carried

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        u: Tensor = self.energy(x, t)
        return u
