"""A run: train, evaluate and report into one folder, which is never overwritten without being asked."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from tqdm import tqdm

from daebm import checkpoint, engine, model, portable, report
from daebm.config import Config
from daebm.data import Dataset
from daebm.errors import CheckpointError, DivergenceError, InputError
from daebm.experiments import experiment
from daebm.experiments.base import Arrays, Summary, Trained
from daebm.state import CHECKPOINT, holds_state, read_resumable
from daebm.training import begin, train

try:
    import fcntl
except ImportError:  # Windows, where two runs in one folder are not told apart
    fcntl = None  # type: ignore[assignment]

CONFIG, SUMMARY, SAMPLES = "config.json", "summary.json", "samples.safetensors"
# The evaluation draws from its own stream, so that looking at a model never changes a training run.
EVALUATION_SEED = 10_000_019
LINES = 10  # of a log, over a training


def run(
    config: Config, folder: Path, resume: bool = False, overwrite: bool = False, tensorboard: bool = False
) -> Summary:
    """Do, or continue, the run described by ``config`` in ``folder``; returns its summary."""
    dataset = check(config, tensorboard)  # before anything is written
    with _alone(folder):
        return _run(config, dataset, folder, resume, overwrite, tensorboard)


def _run(config: Config, dataset: Dataset, folder: Path, resume: bool, overwrite: bool, tensorboard: bool) -> Summary:
    finished = _prepare(config, folder, resume, overwrite)
    if finished is not None:
        print(f"the run in {folder} is finished; --overwrite in place of --resume starts it again")
        return finished
    if resume and not holds_state(folder):
        print(f"{folder} has no checkpoint yet: the run begins at its beginning", file=sys.stderr)
    log = _Log(config, folder if tensorboard else None)
    try:
        state, _ladder = train(config, dataset, folder, resume, log)
    except DivergenceError as error:
        checkpoint.write_json(folder / SUMMARY, {"status": "diverged", "reason": str(error), **_facts(config)})
        raise
    finally:
        log.close()
    generator = torch.Generator(config.device).manual_seed(config.seed + EVALUATION_SEED)
    final = model.load(folder).to(config.device)
    engine.set_precision(final.network, state.precision)
    trained = Trained(final, dataset, copy.deepcopy(state.chains), config, generator, state.precision)
    clock = time.perf_counter()
    measured, arrays = experiment(config.experiment).evaluate(trained)
    summary: Summary = {
        "status": "finished",
        **_facts(config),
        **measured,
        **_training_facts(config, state),
        "evaluation_seconds": round(time.perf_counter() - clock, 1),
    }
    checkpoint.write_atomically(folder / SAMPLES, save(arrays))
    report.write_run(folder, config, summary, arrays)
    summary = _json(summary)
    checkpoint.write_json(folder / SUMMARY, summary)  # last: it says that everything is there
    return summary


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process in the folder, which is made if need be; the lock goes with the process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another --out")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(
                    f"another process is running in {folder}: wait for it, or choose another --out"
                ) from error
        yield
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):  # not empty: a run is there
            for path in made:
                path.rmdir()


def check(config: Config, tensorboard: bool = False) -> Dataset:
    """The data of a run, after all that could refuse it has been asked."""
    if tensorboard:
        _summary_writer()
    engine.check(config)  # before data are downloaded for a GPU that is not there
    dataset = experiment(config.experiment).dataset(config)
    begin(config, dataset)
    return dataset


def _read_config(folder: Path) -> Config:
    try:
        return Config.from_json(checkpoint.read_json(folder / CONFIG))
    except InputError as error:
        raise CheckpointError(
            f"{folder / CONFIG} is not the config of a run ({error}): restore it or choose another --out"
        ) from error


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run. A config.json alone is no proof: many programs have one."""
    if holds_state(folder):
        return True
    try:
        _read_config(folder)
    except CheckpointError:
        return False
    return True


def _prepare(config: Config, folder: Path, resume: bool, overwrite: bool) -> Summary | None:
    """Make the folder ready for a new or continued run; the summary if it is finished already."""
    if resume:
        if not (folder / CONFIG).exists():
            raise InputError(f"there is no run to resume in {folder}: leave --resume out to start one there")
        before = _read_config(folder)
        difference = config.difference(before)
        if difference is not None:
            raise CheckpointError(
                f"the run in {folder} was begun with other settings ({difference}): "
                "resume with the same ones or choose another --out"
            )
        summary = folder / SUMMARY
        if summary.exists() and checkpoint.read_json(summary).get("status") == "finished":
            done: Summary = checkpoint.read_json(summary)
            return done
        return None
    there = holds_run(folder)
    if there and not overwrite:
        raise InputError(f"{folder} already holds a run: add --resume, --overwrite or choose another --out")
    if not there and any(path.suffix != ".partial" for path in folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no daebm run: choose another --out")
    try:
        if there:
            _delete(folder)
        checkpoint.write_json(folder / CONFIG, config.to_json())
    except OSError as error:
        raise InputError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    return None


def _delete(folder: Path) -> None:
    """Delete a run, config.json last, and nothing that daebm has not put there."""
    for name in (SUMMARY, "report.html", SAMPLES, "metrics.jsonl", "figures", "tensorboard", CHECKPOINT, CONFIG):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def pack(folder: Path, out: Path) -> str:
    """Write the state of the run in ``folder`` to ``out``, small enough to carry; returns what it lacks, in words."""
    if not holds_state(folder):
        raise InputError(f"{folder} holds no daebm run with a checkpoint: name the folder of `daebm run --out`")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not an empty folder: choose another --out")
    tensors, facts = read_resumable(folder)
    with checkpoint.new_folder(out) as new:
        said = portable.write(new / CHECKPOINT, tensors, facts)
        checkpoint.write_json(new / CONFIG, facts["config"])
    return said


def matched_iterations(config: Config, reference: Config) -> Config:
    """``config`` with as many iterations as spend the gradient evaluations of ``reference``, chains counted."""
    if config == reference:
        return config
    left = reference.gradients(reference.iterations) - config.gradients(config.warm)
    iterations = config.warm + max(1, round(left / (config.gradients_per_iteration * config.batch)))
    every = max(1, iterations // 20)
    return dataclasses.replace(
        config,
        iterations=iterations,
        checkpoint_every=min(config.checkpoint_every, every),
        log_every=min(config.log_every, max(1, iterations // 50)),
        warm_up=min(config.warm_up, iterations // 20),
        adapt_every=min(config.adapt_every, every),
    )


def load_finished(folder: Path) -> tuple[Config, Summary, Arrays]:
    """Config, summary and stored arrays of a finished run."""
    if not (folder / SUMMARY).exists() or not (folder / SAMPLES).exists():
        raise InputError(f"{folder} holds no finished run: name a folder that `daebm run` has completed")
    try:
        arrays = load((folder / SAMPLES).read_bytes())
    except SafetensorError as error:
        raise CheckpointError(f"{folder / SAMPLES} is damaged ({error}): restore it or run again") from error
    return _read_config(folder), checkpoint.read_json(folder / SUMMARY), arrays


def _facts(config: Config) -> Summary:
    gpu = f", {torch.cuda.get_device_name()}" if config.device == "cuda" else ""
    return {
        "experiment": config.experiment,
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "command": shlex.join(["daebm", *sys.argv[1:]]) if Path(sys.argv[0]).name == "daebm" else "",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores{gpu}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _training_facts(config: Config, state: Any) -> Summary:
    store = state.chains
    levels = len(state.steps.sigma)
    facts: Summary = {
        "iterations": state.iteration,
        "training_gradients": config.gradients(state.iteration),
        "train_seconds": round(state.seconds, 1),
        "rollbacks": state.rollbacks,
        "learning_rate_scale": state.rate_scale,
        "nonfinite_proposals": int(state.nonfinite),
        "stranded_chains_replaced": state.replaced,
        "precision": state.precision,
        "step_sizes": state.steps.sigma.tolist(),
    }
    if levels > 1 and config.method == "da":
        facts["label_share_of_uniform"] = (torch.bincount(store.t, minlength=levels) * levels / len(store)).tolist()
        facts["round_trips_per_chain"] = float(store.trips.float().mean())
    return facts


def _json(value: Any) -> Any:
    """Numbers that JSON can hold: a measure that came out as NaN or infinite is null, never a made-up figure."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard is not installed: pip install 'daebm[tensorboard]'") from error
    return SummaryWriter


class _Log:
    """The progress bar and, on request, TensorBoard."""

    def __init__(self, config: Config, tensorboard_folder: Path | None) -> None:
        self.bar = tqdm(
            total=config.iterations,
            desc=f"{config.experiment} {config.method}",
            disable=None,
            mininterval=0.5,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )
        self.total, self.next_line = config.iterations, 0
        self.writer: Any = None
        if tensorboard_folder is not None:
            self.writer = _summary_writer()(str(tensorboard_folder / "tensorboard"))

    def __call__(self, metrics: dict[str, Any]) -> None:
        if metrics.get("event") in ("precision", "labels", "chains"):
            self.bar.write(metrics["reason"], file=sys.stderr)
        elif "event" in metrics:
            self.bar.write(
                f"rolled back from iteration {metrics['iteration']} to {metrics['to']}: {metrics['reason']}; "
                f"learning rate now x{metrics['rate_scale']:g}",
                file=sys.stderr,
            )
        else:
            now = f"gap {metrics['gap']:+.3f}, acceptance {metrics['acceptance']:.2f}"
            self.bar.set_postfix_str(now, refresh=False)
            if self.bar.disable and metrics["iteration"] >= self.next_line:  # a log, where a bar would be noise
                print(f"iteration {metrics['iteration']} of {self.total}: {now}", flush=True)
                self.next_line = metrics["iteration"] + self.total // LINES
            if self.writer is not None:
                for key, value in metrics.items():
                    self.writer.add_scalar(key, value, metrics["iteration"])
        self.bar.update(metrics.get("to", metrics["iteration"]) - self.bar.n)

    def close(self) -> None:
        self.bar.close()
        if self.writer is not None:
            self.writer.close()
