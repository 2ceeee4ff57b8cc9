"""The experiments by name. Each is data, presets, an evaluation and figures; training is the same for all."""

from daebm.errors import InputError
from daebm.experiments import digits, four_rings, gaussian_1d, images
from daebm.experiments.base import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        gaussian_1d.EXPERIMENT,
        four_rings.EXPERIMENT,
        digits.EXPERIMENT,
        images.FASHION_MNIST,
        images.MNIST,
    )
}


def experiment(name: str) -> Experiment:
    """The experiment called ``name``."""
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
