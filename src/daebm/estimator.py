"""A scikit-learn estimator: a normalised density, samples, and decisions with a stated false-alarm rate.

detector = daebm.DAEBM(random_state=0).fit(X)
detector.log_density(X_new)  # nats, in the units of X
detector.predict(X_new)  # -1 for outliers; one in a hundred normal rows is flagged too
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from daebm import checkpoint, conformal, profile, recipe
from daebm.data import Dataset
from daebm.errors import CheckpointError, InputError
from daebm.fitting import LARGEST_VALIDATION, Normalised, Watch, energies, normalise
from daebm.model import SHIPPED, Model, assembled, model_folder
from daebm.profile import LAW_ROWS, SAID, Law, kinds, law, law_tensors, laws_in
from daebm.training import train
from daebm.units import Floats, Units, wild

PER_SCORE = ("calibration", "validation", "examples")  # attributes that hold an array for each of them
CALIBRATION, LARGEST_CALIBRATION = 5, 1000  # one row in five is kept for calibration, up to so many
VALIDATION = 10  # one row in ten is kept to watch training by, up to LARGEST_VALIDATION
# Streams of their own, beside the training's, which starts at the seed itself.
SAMPLE_SEED, NOISE_SEED = 70_000_027, 80_000_023
DECIMALS = 9  # of a score, in nats
CHUNK = 1 << 17  # numbers per evaluation; bounds memory
EXAMPLES = 8  # calibration rows that are kept at either end, to be looked at
# Beyond these a fit says so. A gap is per dimension, as a Gaussian with d numbers a row has one that grows with d.
LARGEST_GAP, GAP_PER_DIMENSION = 0.2, 0.05  # nats
LEAST_ACCEPTANCE, LEAST_TRIPS, LARGEST_ERROR = 0.4, 1.0, 0.1


class NoEstimatorError(CheckpointError):
    """A folder without an estimator; it may hold a bare model."""


class DAEBM(OutlierMixin, BaseEstimator):  # type: ignore[misc]
    """Density and outliers of a numeric table (n, d) or of images (n, h, w) or (n, c, h, w).

    Larger scores are more normal. Numpy arrays, torch tensors and pandas frames go in, numpy arrays come out, in the
    units of X. Columns are standardised inside; columns with a single value in all n training rows are left out of the
    model, and another value there has probability 1 / (n + 2) (Laplace's rule of succession).

    Parameters
    ----------
    score_by : "energy", "profile" or "features"
        What `score_samples` returns: the log density at the data's level, or how normal it is by training rows what the
        network says of a row. ``profile``: the energies and the logarithms of their slopes at many noise levels, by
        minus the squared Mahalanobis distance (Ledoit-Wolf); of images the slopes are taken place by place, by a
        mixture of Gaussians. ``features``: the last map that the energy is a sum of, by such a mixture (residual
        networks only, whose ``profile`` has the score of the features added). Scores of a mixture are twice log
        densities, up to a constant. Constant columns with another value take off twice the nats then. (Not called
        ``score``: an attribute of that name would hide the method `score`, which `GridSearchCV` needs, and scikit-learn
        demands that attribute and parameter share their name.)
    fpr : float
        False-alarm rate of `predict`: the share of normal rows that are flagged. It needs 1 / fpr - 1 rows for
        calibration, which `fit` keeps apart; with fewer, `fit` warns and `predict` refuses. Both this and ``score_by``
        can be changed after fitting.
    budget : "small", "medium" or "large"
        Iterations of training; tables of fewer than 1,000 rows take a share of them.
    floor : "auto" or float
        Noise that is added to the data at the lowest level, in sds of the data. The density is that of the noisy data
        then. "auto" takes none in up to four dimensions if values do not repeat, and a little otherwise (`floor_`).
    settings : dict or None
        Any settings of `daebm.Config`, to overrule the ones chosen from the shape and size of X (`config_`).
    random_state : int, RandomState or None
        Two fits with the same number, data and number of threads agree bit for bit.
    verbose : int
        1 prints a line for every look at the held-out rows.

    Attributes
    ----------
    model_ : the trained `daebm.Model`, in standardised units
    log_normaliser_, log_normaliser_se_ : log of the integral of exp(-U) at level 0, and its standard error in nats
    offset_ : the score under which `predict` flags
    calibration_ : sorted scores of the rows kept for calibration, of every kind of score that the network has
    validation_ : the same of the rows that training was watched by
    noisy_ : log densities of the calibration rows with the floor's noise added, as the model's own draws have it
    drawn_ : log densities of draws of the model's own, by which its normalising constant was found
    examples_ : the eight least and the eight most normal calibration rows, sorted like their scores, of every kind
    laws_ : what the network says of training rows, as a law (`daebm.profile`) for each kind of what it says
    wild_ : columns of which few values set the scale: number, farthest value, quartiles
    history_ : a dictionary for every look during training: held-out log density, gap, acceptance, round trips
    """

    def __init__(
        self,
        *,
        score_by: str = "energy",
        fpr: float = 0.01,
        budget: str = "medium",
        floor: float | str = "auto",
        settings: dict[str, Any] | None = None,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.score_by = score_by
        self.fpr = fpr
        self.budget = budget
        self.floor = floor
        self.settings = settings
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> DAEBM:
        """Train on X, find the normalising constant, and calibrate on rows that were kept apart; y is ignored."""
        before = dict(self.__dict__)
        try:
            with torch.inference_mode(False), torch.enable_grad():  # whatever the caller has switched off
                return self._fit(X)
        except BaseException:  # a fit that fails leaves what there was before it, not half of a model
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _fit(self, X: Any) -> DAEBM:
        conformal.check_rate(self.fpr)
        _kind(self.score_by)
        x = self._validated(X, reset=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows = _split(len(x), self.fpr, seed)
        # The units too come from the training rows alone: calibration rows must be as strange to the model as new ones.
        units = Units.of(x[rows.train])
        _check_range(units, x)
        self.wild_ = wild(x) if units.table else []
        z, held = (torch.from_numpy(units.to_model(x[part])).float() for part in (rows.train, rows.validation))
        config = recipe.choose(z, self.budget, self.floor, seed, self.settings)
        if self.score_by == "features" and "resnet" not in config.network:
            how = "settings={'network': 'level-resnet'}" if not units.table else "take energy or profile for a table"
            raise InputError(f"score_by='features' needs a residual network, for images: {how}")
        dataset = Dataset("X", z, held)
        watch = Watch(config, dataset, self.verbose)
        state, ladder = train(config, dataset, report=watch.note, stop=watch)
        model, chains = watch.chosen(state, ladder)
        found = normalise(model, chains, dataset, seed)

        self.history_, self.n_iter_, self.seed_ = watch.history, state.iteration, seed
        self._use(model, units)
        some = x[rows.train[:LAW_ROWS]]
        laws = {kind: law(model.event).of(self._said(kind, some)) for kind in kinds(model.network)}
        self._calibrate(found, laws, x[rows.validation], x[rows.calibration])
        for concern in self.concerns():
            warnings.warn(concern, ConvergenceWarning, stacklevel=3)
        return self

    @classmethod
    def from_model(
        cls,
        model: Model,
        units: Units,
        found: Normalised,
        laws: dict[str, Law],
        validation: Floats,
        calibration: Floats,
        history: list[dict[str, Any]],
        **parameters: Any,
    ) -> DAEBM:
        """An estimator of a model that was trained elsewhere, calibrated on rows that it has not seen.

        ``units`` say how rows of the user's are to be standardised, ``laws`` (`daebm.profile`) what the network
        says of training rows, ``found`` is what `daebm.fitting.normalise_trained` tells. ``history`` is one dictionary
        at least, as in `history_`: iteration, gap, gap_error, acceptance, round_trips, chosen. ``parameters`` are those
        of the constructor.
        """
        self = cls(**parameters)
        self.history_, self.n_iter_, self.seed_ = history, history[-1]["iteration"], model.config.seed
        self.wild_ = []
        self._use(model, units)
        self._calibrate(found, laws, validation, calibration)
        return self

    def _calibrate(self, found: Normalised, laws: dict[str, Law], validation: Floats, calibration: Floats) -> None:
        """Scores of rows that were not trained on; what decisions are made by."""
        self.log_normaliser_, self.log_normaliser_se_ = found.value, found.error
        self.drawn_ = -found.drawn[::-1] - found.value - self.units_.log_stretch
        self.laws_ = laws
        scores = {kind: self._scores(calibration, kind) for kind in profile.scores(laws)}
        self.examples_ = {kind: calibration[_ends(values)] for kind, values in scores.items()}
        self.validation_ = {kind: np.sort(self._scores(validation, kind)) for kind in scores}
        self.noisy_ = self._noisy_log_density(calibration)
        self.calibration_ = {kind: np.sort(values) for kind, values in scores.items()}

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "calibration_")

    def log_density(self, X: Any) -> Floats:
        """log p(x) in nats at the data's level, in the units of X; `log_normaliser_se_` is the error they share.

        It is the density of the varying columns times the probability of the constant ones: each that has another
        value than in the n training rows costs log(n + 2) nats. With a floor (`floor_`) it is the density of the data
        with that noise added. -inf only where x is so far away that its energy is beyond the range of floats.
        """
        check_is_fitted(self)
        return self._log_density(self._validated(X))

    def score_samples(self, X: Any) -> Floats:
        """Larger is more normal: the log density, or by what the network says besides, as ``score_by`` says."""
        check_is_fitted(self)
        return self._scores(self._validated(X), self.kind)

    def score(self, X: Any, y: Any = None) -> float:
        """The mean log density of X, whatever ``score_by``; `GaussianMixture.score` is a mean too."""
        return float(self.log_density(X).mean())

    def p_values(self, X: Any) -> Floats:
        """Conformal p-values: of a normal row at most alpha with probability at most alpha, for any alpha.

        With n calibration rows no p-value is below 1 / (n + 1).
        """
        scores = self.score_samples(X)
        return conformal.p_values(self.calibration_[self.score_by], scores)

    @property
    def kind(self) -> str:
        """``score_by``, if this model has it."""
        if _kind(self.score_by) not in self.calibration_:
            known = ", ".join(self.calibration_)
            raise InputError(
                f"this model has the scores {known}, and no {self.score_by}: take one of them, or fit it again"
            )
        return self.score_by

    @property
    def offset_(self) -> float:
        """The score under which a row is flagged."""
        check_is_fitted(self)
        return conformal.threshold(self.calibration_[self.kind], self.fpr)

    def decision_function(self, X: Any) -> Floats:
        """`score_samples` minus `offset_`; negative is flagged."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """-1 for rows with a p-value of at most ``fpr``, +1 for others."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def fit_predict(self, X: Any, y: Any = None, **kwargs: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """`fit` and then `predict` on the same rows, for which the false-alarm rate does not hold; it says so."""
        warnings.warn(
            "fit_predict judges rows that the model was trained on: they look more normal than fresh ones, so the "
            "false-alarm rate does not hold for them; fit on rows that are known to be normal and predict others",
            UserWarning,
            stacklevel=2,
        )
        return self.fit(X, y, **kwargs).predict(X)

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Floats:
        """Rows or images from the model, started from noise, in the units of X; without the floor's noise.

        The same ones in every call, unless ``random_state`` says otherwise.
        """
        check_is_fitted(self)
        if isinstance(n_samples, bool) or not isinstance(n_samples, int | np.integer) or n_samples < 1:
            raise InputError(f"n_samples must be a whole number of at least 1, got {n_samples!r}")
        seed = (
            self.seed_ + SAMPLE_SEED
            if random_state is None
            else int(check_random_state(random_state).randint(2**31 - 1))
        )
        x = torch.from_numpy(self.model_.sample(int(n_samples), seed).astype(np.float64))
        return self.units_.to_user(self.model_.standardise(x).numpy())

    @property
    def floor_(self) -> float:
        """sd of the noise in the data's level, in sds of the data."""
        check_is_fitted(self)
        return float(self.model_.ladder.floor)

    def save(self, folder: str | Path, more: dict[str, Tensor] | None = None) -> None:
        """Write model.safetensors and model.json, which `DAEBM.load` and, for the bare model, `daebm.load` read.

        Of the data they hold no more than `examples_`. ``more`` tensors of your own go into the same file.
        """
        check_is_fitted(self)
        arrays = {name: getattr(self.units_, name) for name in ("varies", "shift", "scale")}
        for name in PER_SCORE:
            arrays |= {f"{name}.{kind}": values for kind, values in getattr(self, name + "_").items()}
        arrays |= {"noisy": self.noisy_, "drawn": self.drawn_}
        tensors = {f"estimator.{name}": torch.from_numpy(np.ascontiguousarray(v)) for name, v in arrays.items()}
        tensors |= law_tensors(self.laws_)
        parameters = {k: v.item() if isinstance(v, np.generic) else v for k, v in self.get_params().items()}
        if not isinstance(parameters["random_state"], int | None):
            parameters["random_state"] = None  # a generator: what it gave is in seed_
        facts = {
            "parameters": parameters,
            "event": list(self.units_.event),
            "rows": self.units_.rows,
            "log_normaliser": self.log_normaliser_,
            # JSON has neither infinity nor NaN.
            "log_normaliser_se": self.log_normaliser_se_ if math.isfinite(self.log_normaliser_se_) else None,
            "seed": self.seed_,
            "iterations": self.n_iter_,
            "history": [{k: v if math.isfinite(v) else None for k, v in look.items()} for look in self.history_],
            "n_features_in": getattr(self, "n_features_in_", None),  # scikit-learn counts those of tables only
            "feature_names": [str(name) for name in getattr(self, "feature_names_in_", [])],
            "wild": self.wild_,
        }
        self.model_.save(folder, tensors | (more or {}), {"estimator": facts})

    def export_onnx(self, path: str | Path) -> None:
        """Write `log_density` as an ONNX file for other runtimes: float64 rows in the units of X, any number of them.

        The input is ``x``, the output ``log_density``, whatever ``score_by``. Needs the extra ``onnx``.
        """
        from daebm.export import LogDensity, write_onnx

        check_is_fitted(self)
        write_onnx(path, LogDensity(self._energy, self.units_, self.log_normaliser_), self.units_.event)

    @classmethod
    def load(cls, folder: str | Path) -> DAEBM:
        """The estimator that `save` wrote, without its training state, or one that comes with this package, by name."""
        folder = model_folder(folder)
        if not checkpoint.exists(folder, "model"):
            what = f"{folder} holds no estimator" if folder.exists() else f"there is no folder {folder}"
            names = " or ".join(("a folder that `daebm fit` or DAEBM.save wrote", *SHIPPED))
            raise NoEstimatorError(f"{what}: name {names}")
        tensors, everything = checkpoint.read(folder, "model")
        if "estimator" not in everything:
            raise NoEstimatorError(f"{folder} holds a model but no estimator: read it with daebm.load")
        try:
            return cls._assembled(folder, tensors, everything)
        except (KeyError, TypeError, InputError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{folder} was written by another version of daebm ({reason}): fit again") from error

    @classmethod
    def _assembled(cls, folder: Path, tensors: dict[str, Tensor], everything: dict[str, Any]) -> DAEBM:
        facts = everything["estimator"]
        if settings := facts["parameters"]["settings"]:  # JSON has no tuples, and settings no lists
            facts["parameters"]["settings"] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        own = {k.removeprefix("estimator."): v for k, v in tensors.items() if k.startswith("estimator.")}
        array = {k: (v.double() if v.is_floating_point() else v).numpy() for k, v in own.items()}
        self = cls(**facts["parameters"])
        units = Units(tuple(facts["event"]), array["varies"], array["shift"], array["scale"], facts["rows"])
        self.laws_ = laws_in(tensors, everything["data"]["event"])
        had = profile.scores(self.laws_)
        for name in PER_SCORE:
            setattr(self, name + "_", {kind: array[f"{name}.{kind}"] for kind in had})
        self.noisy_, self.drawn_ = array["noisy"], array["drawn"]
        self.log_normaliser_, error = facts["log_normaliser"], facts["log_normaliser_se"]
        self.log_normaliser_se_ = math.inf if error is None else error
        self.seed_, self.n_iter_ = facts["seed"], facts["iterations"]
        self.history_ = [{k: math.nan if v is None else v for k, v in look.items()} for look in facts["history"]]
        if facts["n_features_in"] is not None:
            self.n_features_in_ = facts["n_features_in"]
        self.wild_ = [tuple(column) for column in facts.get("wild", [])]
        if facts["feature_names"]:
            self.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
        self._use(assembled(folder, tensors, everything), units)
        return self

    def _use(self, model: Model, units: Units) -> None:
        """Scores are computed in float64 and rounded after: they must not depend on the rows beside a row, not even in
        the last digit, for the calibration row at the threshold is compared with itself."""
        self.model_, self.units_, self.config_ = model, units, model.config
        self._energy = copy.deepcopy(model.network).double()

    def _validated(self, X: Any, reset: bool = False) -> Floats:
        """Rows or images as float64, of the shape that was fitted."""
        if isinstance(X, Tensor):
            X = X.detach().cpu()
            X = (X.double() if X.is_floating_point() else X).numpy()  # numpy has no bfloat16
        image = getattr(X, "ndim", 2) in (3, 4)
        # Two training rows, one for calibration and one to watch by are the least there can be.
        x: Floats = validate_data(
            self,
            X,
            reset=reset,
            dtype=np.float64,
            allow_nd=image,
            ensure_2d=not image,
            ensure_min_samples=4 if reset else 1,
        )
        if x[0].size == 0:
            raise InputError(f"X must hold numbers, got shape {x.shape}")
        x = x if reset else self.units_.shaped(x)
        if not reset and x.shape[1:] != self.units_.event:
            shape = ", ".join(map(str, self.units_.event))
            raise InputError(f"X must have shape (n, {shape}), as in fit, got {x.shape}")
        return x

    def _log_density(self, x: Floats) -> Floats:
        energy = np.concatenate([energies(self._energy, part) for part in self._parts(x)])
        log_p = -energy - self.log_normaliser_ - self.units_.log_stretch
        return _rounded(log_p - self.units_.surprise(x))

    def _noisy_log_density(self, x: Floats) -> Floats:
        generator = torch.Generator(self.model_.device).manual_seed(self.seed_ + NOISE_SEED)

        def energy(z: Tensor) -> Floats:
            level = torch.zeros(len(z), dtype=torch.long, device=z.device)
            return energies(self._energy, self.model_.ladder.diffuse(z.float(), level, generator).double())

        u = np.concatenate([energy(part) for part in self._parts(x)])
        return np.sort(-u - self.log_normaliser_ - self.units_.log_stretch - self.units_.surprise(x))

    def _scores(self, x: Floats, kind: str) -> Floats:
        if kind == "energy":
            return self._log_density(x)
        score = profile.score(kind, self.laws_, lambda kind: self._said(kind, x))
        return _rounded(score - 2 * self.units_.surprise(x))  # a squared distance is twice a number of nats

    def _parts(self, x: Floats) -> list[Tensor]:
        with np.errstate(over="ignore", invalid="ignore"):
            z = torch.from_numpy(self.units_.to_model(x))
        rows = max(1, CHUNK // math.prod(self.units_.model_event))
        return [z[i : i + rows].to(self.model_.device) for i in range(0, len(z), rows)]

    def _said(self, kind: str, x: Floats) -> Floats:
        """What the network says of every row besides its energy, (n, p)."""
        say, levels = SAID[kind], self.model_.ladder.levels
        return np.concatenate([say(self._energy, levels, part) for part in self._parts(x)])

    def concerns(self) -> list[str]:
        """What you should know before trusting this fit, each with what to do: what `fit` warned of."""
        check_is_fitted(self)
        last, chosen = self.history_[-1], next(look for look in reversed(self.history_) if look["chosen"])
        dimension = math.prod(self.units_.model_event)
        found = [self._said_of_wild()] if self.wild_ else []
        if self.n_iter_ < self.config_.iterations:  # a larger budget would end there too
            more = (
                f"give more rows or a larger floor (training ended at iteration {self.n_iter_} of "
                f"{self.config_.iterations}, as held-out rows became less likely)"
            )
        elif "iterations" in (self.settings or {}) or self.budget == "large":
            more = f"raise iterations in settings (now {self.config_.iterations})"
        else:
            more = "take a larger budget"
        if chosen["gap"] - 2 * chosen["gap_error"] > LARGEST_GAP + GAP_PER_DIMENSION * dimension:
            found.append(
                f"the training rows are {chosen['gap']:.2g} nats likelier than held-out ones, so the model knows them "
                f"by heart: give more rows, a smaller budget, or a larger floor (now {self.floor_:g})"
            )
            more = "give more rows"  # a larger budget would make that worse
        if last["acceptance"] < LEAST_ACCEPTANCE:
            found.append(
                f"only {last['acceptance']:.0%} of the sampler's steps are accepted, so training followed poor "
                f"samples: take the logarithm of columns that span many orders of magnitude, or {more}"
            )
        if last["round_trips"] < LEAST_TRIPS:
            found.append(
                f"the chains made {last['round_trips']:.2g} trips over the noise levels, too few to weigh distant "
                f"parts of the data against each other: {more}"
            )
        if self.log_normaliser_se_ > LARGEST_ERROR + 0.01 * dimension:
            found.append(
                f"log densities share an unknown constant of about {self.log_normaliser_se_:.2g} nats: compare them "
                f"with each other but not with other models, or {more}"
            )
        return found

    def _said_of_wild(self) -> str:
        names = getattr(self, "feature_names_in_", None)
        column, value, low, high = self.wild_[0]
        where = f"column {column} (from 0)" if names is None else f"column {str(names[column])!r}"
        more = f" (and {len(self.wild_) - 1} more such columns)" if len(self.wild_) > 1 else ""
        return (
            f"{where} holds {value:g}, and half of its values lie in {low:g}..{high:g}{more}: few such values set the "
            "scale, by which all others look alike; take them out if they stand for missing ones or are slips, or take "
            "the logarithm of the column"
        )


def _kind(score_by: Any) -> str:
    if not isinstance(score_by, str) or score_by not in profile.NAMES:
        raise InputError(f"score_by must be one of {', '.join(profile.NAMES)}, got {score_by!r}")
    return score_by


def _rounded(score: Floats) -> Floats:
    """-inf where x, or what the network makes of it, is beyond the range of floats."""
    with np.errstate(over="ignore"):
        return np.where(np.isnan(score), -np.inf, score.round(DECIMALS))


def _ends(scores: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which rows score least and most, in the order of their scores; all of them if there are no more."""
    order = np.argsort(scores, kind="stable")
    return order if len(order) <= 2 * EXAMPLES else np.concatenate([order[:EXAMPLES], order[-EXAMPLES:]])


@dataclass(frozen=True, eq=False)
class _Rows:
    train: np.ndarray[Any, np.dtype[np.int64]]
    validation: np.ndarray[Any, np.dtype[np.int64]]
    calibration: np.ndarray[Any, np.dtype[np.int64]]


def _split(count: int, fpr: float, seed: int) -> _Rows:
    """Rows to train on, to watch training by, and to calibrate on; the last as many as ``fpr`` needs, up to half."""
    calibration = max(1, min(count // CALIBRATION, LARGEST_CALIBRATION))
    needed = conformal.needed(fpr)
    if needed <= min(count // 2, count - 3):  # two to train on and one to watch by are left
        calibration = max(calibration, needed)
    elif calibration < needed:  # said where fit was called: _split, _fit, fit
        warnings.warn(
            f"{count} rows leave {calibration} for calibration and fpr={fpr:g} needs {needed}: predict will refuse; "
            f"give {max(2 * needed, needed + 3)} rows or more, or set fpr to {conformal.least_rate(calibration):g} or "
            "more",
            UserWarning,
            stacklevel=4,
        )
    validation = max(1, min(count // VALIDATION, LARGEST_VALIDATION))
    order = np.random.default_rng(seed).permutation(count)
    first, second = calibration, calibration + validation
    return _Rows(order[second:], order[first:second], order[:first])


def _check_range(units: Units, x: Floats) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        beyond = np.argwhere(~np.isfinite(units.to_model(x).astype(np.float32)))
    if len(beyond):
        row, place = beyond[0][:2]
        column = f", column {np.flatnonzero(units.varies)[place]}" if units.table else ""
        raise InputError(f"row {row}{column} (from 0) is too many sds away from the others for float32: remove it")
