"""Energy-based models that can be trusted. U low = likely, everywhere.

A `Ladder` of noise levels, an energy U(x, t) on it, exact samplers that move (x, t), and one training loop.
"""

from typing import TYPE_CHECKING, Any

from daebm.config import Config
from daebm.data import Dataset
from daebm.errors import CheckpointError, DaebmError, DivergenceError, InputError
from daebm.images import image_array, image_folder, load_images
from daebm.ladder import Ladder
from daebm.methods import METHODS, Method
from daebm.model import Model, load
from daebm.precision import check_precision
from daebm.samplers.langevin import langevin, mala, run
from daebm.samplers.mgms import block, full, local, transition
from daebm.spacing import neighbour_acceptance, overlapping, respaced
from daebm.targets import Gaussian, LabelledLadder, Mixture, Skewed
from daebm.training import train

if TYPE_CHECKING:
    from daebm.estimator import DAEBM

__version__ = "0.1.0"

# In the order of the data flow.
__all__ = [
    "Dataset",
    "load_images",
    "image_array",
    "image_folder",
    "Ladder",
    "overlapping",
    "neighbour_acceptance",
    "respaced",
    "Gaussian",
    "Mixture",
    "Skewed",
    "LabelledLadder",
    "langevin",
    "mala",
    "run",
    "full",
    "block",
    "local",
    "transition",
    "check_precision",
    "METHODS",
    "Method",
    "Config",
    "train",
    "Model",
    "load",
    "DAEBM",
    "DaebmError",
    "InputError",
    "CheckpointError",
    "DivergenceError",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """The estimator brings scikit-learn with it, whose import takes as long as all the rest: only when asked for."""
    if name == "DAEBM":
        from daebm.estimator import DAEBM

        return DAEBM
    raise AttributeError(f"module 'daebm' has no attribute {name!r}")
