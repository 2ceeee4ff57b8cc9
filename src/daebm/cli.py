"""The command line: daebm run, list, show, report, pack, ood, and for data of one's own fit, score, sample, inspect."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import tyro

from daebm import __version__, checkpoint, engine, profile, report, runs
from daebm.commands import Fit, Flag, Inspect, Sample, Score, check_parent
from daebm.config import Config, again, check_methods, explained, resolve
from daebm.errors import DaebmError, DivergenceError, InputError
from daebm.experiments import EXPERIMENTS, experiment
from daebm.experiments.base import Experiment
from daebm.images import load_images
from daebm.methods import METHODS
from daebm.model import load, model_folder
from daebm.training import begin, denoise, relate, step

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")]
Settings = Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="KEY=VALUE")]


@dataclass
class Run:
    """Train, evaluate and report an experiment into a folder."""

    experiment: Name
    """gaussian-1d, four-rings, digits, fashion-mnist or mnist (`daebm list` describes them)."""
    method: Annotated[str, tyro.conf.arg(metavar="METHOD")] = "da"
    """cd, persistent, noise, hybrid, drl or da; all runs every one with the same number of gradient evaluations."""
    preset: Annotated[str, tyro.conf.arg(metavar="PRESET")] = "default"
    """quick (seconds to two minutes, to try things), default (what we recommend) or paper (the paper's settings)."""
    like: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """In place of a preset: the settings of a run or a model; fashion-mnist and mnist come with this package."""
    seed: int = 0
    """Everything random follows from it."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the run; runs/EXPERIMENT-METHOD-PRESET-SEED when not given."""
    resume: Flag = False
    """Continue the run in that folder, bit for bit."""
    overwrite: Flag = False
    """Delete the run in that folder and start again."""
    settings: Settings = field(default_factory=list)
    """Change one setting; repeat for more (`daebm show` lists them)."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where image files are looked for first; the environment variable DAEBM_DATA does the same."""
    tensorboard: Flag = False
    """Also write TensorBoard logs."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.experiment}-{self.method}-{self.preset}-{self.seed}"

    def __call__(self) -> None:
        _set_threads(self.threads)
        if self.data_dir is not None:
            os.environ["DAEBM_DATA"] = str(self.data_dir)
        if self.resume and self.overwrite:
            raise InputError("--resume and --overwrite exclude each other: give one of them")
        out = self.folder
        it = experiment(self.experiment)
        configs = {
            name: _config(it, name, self.preset, self.like, self.seed, self.settings)
            for name in check_methods([self.method])
        }
        if self.method != "all":
            self._one(configs[self.method], out)
            return
        _check_comparison_folder(out)
        configs = {name: runs.matched_iterations(config, configs["da"]) for name, config in configs.items()}
        for config in configs.values():
            runs.check(config, self.tensorboard)
        finished = {}
        for name, config in configs.items():
            print(f"{name}: {METHODS[name].title}")
            try:
                self._one(config, out / name)
            except DivergenceError as error:  # a result too: the comparison goes on without this row
                print(f"{name}: {error}", file=sys.stderr)
                continue
            finished[METHODS[name].title] = runs.load_finished(out / name)
        if not finished:
            raise DivergenceError("every method diverged: nothing to compare")
        report.write_comparison(out, finished)
        print(f"comparison: {out / 'report.html'}")

    def _one(self, config: Config, out: Path) -> None:
        # One command continues a comparison that was cut short: its parts may be unborn, half done or finished.
        resume = self.resume and (self.method != "all" or (out / runs.CONFIG).exists())
        summary = runs.run(config, out, resume, self.overwrite, self.tensorboard)
        print(report.short_table(experiment(config.experiment), summary))
        if config.preset == "quick":
            print("The preset quick shows the way; its figures mean nothing.")
        print(f"report: {out / 'report.html'}")


@dataclass
class Pack:
    """Write a run's checkpoint in at most 36 MiB, to go on from it elsewhere with `daebm run ... --resume`."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """An empty or new folder."""

    def __call__(self) -> None:
        check_parent(self.out)
        print(f"{self.out}: {runs.pack(self.run, self.out)}")


@dataclass
class List:
    """List experiments, their presets, and the methods."""

    def __call__(self) -> None:
        print("Experiments (presets)")
        for it in EXPERIMENTS.values():
            print(f"  {it.name:<14} {it.title} ({', '.join(it.presets)})")
        print("Methods")
        for row in METHODS.values():
            print(f"  {row.name:<14} {row.title}")


@dataclass
class Show:
    """Show the settings of a run, what each of them means, and what the run will cost, without running it."""

    experiment: Name
    """gaussian-1d, four-rings, digits, fashion-mnist or mnist."""
    method: Annotated[str, tyro.conf.arg(metavar="METHOD")] = "da"
    """cd, persistent, noise, hybrid, drl or da."""
    preset: Annotated[str, tyro.conf.arg(metavar="PRESET")] = "default"
    """quick, default or paper."""
    like: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """In place of a preset: the settings of a run or a model."""
    settings: Settings = field(default_factory=list)
    """Change one setting; repeat for more."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""

    def __call__(self) -> None:
        _set_threads(self.threads)
        it = experiment(self.experiment)
        config = _config(it, self.method, self.preset, self.like, 0, self.settings)
        meaning = explained()
        for setting in dataclasses.fields(config):
            name, value = setting.name, getattr(config, setting.name)
            text = value if isinstance(value, str) else json.dumps(value)
            said = f"  # {meaning[name]}" if name in meaning else ""
            print(f"{'*' if value != setting.default else ' '} {name:<18} {text:<14}{said}".rstrip())
        print("* other than the default")
        gradients = config.gradients(config.iterations)
        try:
            engine.check(config)
        except InputError as error:  # the settings can be read all the same
            time_needed = f"not timed: {error}"
        else:
            time_needed = f"about {_seconds(config):,.0f} s here, threads: {torch.get_num_threads()}"
        long_run = config.long_run_chains * config.long_run_steps
        print(
            f"Cost: {config.iterations:,} iterations, {gradients:.3g} energy gradients in training "
            f"({time_needed}); evaluation comes on top, with {long_run:.3g} in a long run."
        )


@dataclass
class Ood:
    """How well a trained image model tells its own test images from others, beside detectors that need no model."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """fashion-mnist or mnist, which come with this package, or the folder of a run."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for report.html and ood.json; the table alone is printed when not given."""
    images: int = 0
    """At most so many test images of each set, spread evenly; 0 is all of them."""
    scores: Annotated[list[str], tyro.conf.arg(metavar="NAME")] = field(default_factory=lambda: ["energy", "features"])
    """energy, features, profile (eight gradients an image: a quarter of an hour for all images without a GPU)."""
    device: str = "cpu"
    """cpu or cuda."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where image files are looked for first; the environment variable DAEBM_DATA does the same."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""

    def __call__(self) -> None:
        from daebm import detection

        _set_threads(self.threads)
        if self.data_dir is not None:
            os.environ["DAEBM_DATA"] = str(self.data_dir)
        wrong = [name for name in self.scores if name not in profile.NAMES]
        if wrong or not self.scores:
            raise InputError(f"--scores takes {', '.join(profile.NAMES)}, got {', '.join(wrong) or 'none'}")
        if self.images < 0:
            raise InputError(f"--images must be 0 or more, got {self.images}")
        if self.out is not None:
            if self.out.exists():
                raise InputError(f"{self.out} is there already: choose another --out")
            check_parent(self.out)
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise InputError(f"--device {self.device} is not to be had here: leave it out")
        model = load(self.model).to(self.device)
        inside = model.config.experiment
        if inside not in detection.SETS:
            own = "data of your own" if inside in ("", "own-data") else inside
            raise InputError(f"{self.model} is a model of {own}: ood is for fashion-mnist and mnist")
        if missing := [name for name in self.scores if name not in profile.scores(profile.kinds(model.network))]:
            raise InputError(
                f"network {model.config.network!r} of {self.model} has no {missing[0]}: leave it out of --scores"
            )
        sets, (train, _labels) = detection.sets_of_images(inside, self.images), load_images(inside, "train")
        saved, wanted = detection.saved_laws(model_folder(self.model)), profile.needed(self.scores, model.network)
        laws = {kind: saved.get(kind) or detection.fit_law(kind, model, train) for kind in wanted}
        scores = {name: score for name, score in detection.model_scores(model, laws).items() if name in self.scores}
        found = detection.detect(scores | detection.baseline_scores(train), sets)
        lines, differences = detection.lines(found), detection.differences(found, scores)
        paired = [
            (row["score"], row["less"], row["set"], "{:+.3f} ({:+.3f} to {:+.3f})".format(*row["auroc"]))
            for row in differences
        ]
        for line in (*lines, (), ("AUROC of", "less that of", "set", "difference"), *paired):
            print("  ".join(f"{cell:<22}" for cell in line).rstrip())
        if self.out is not None:
            everything = {"model": self.model, "rows": detection.rows(found), "differences": differences}
            pictures = "".join(report.inline(k, report.png(v)) for k, v in detection.figures(found).items())
            body = f"<h1>{inside} against other images</h1>" + report.table(lines) + pictures
            body += report.table([("AUROC of", "less that of", "set", "difference"), *paired])
            with checkpoint.new_folder(self.out) as new:
                checkpoint.write_json(new / "ood.json", everything)
                report.write_page(new / "report.html", f"daebm: ood {self.model}", body)
            print(f"report: {self.out / 'report.html'}")


@dataclass
class Report:
    """Print a table over finished runs of one experiment and write a comparison report."""

    folders: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Run folders."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for report.html; the table alone is printed when not given."""

    def __call__(self) -> None:
        if not self.folders:
            raise InputError("name at least one run folder")
        if self.out is not None and runs.holds_run(self.out):
            raise InputError(f"{self.out} holds a run, whose report would be lost: choose another --out")
        finished = {str(folder): runs.load_finished(folder) for folder in self.folders}
        names = {config.experiment for config, _summary, _arrays in finished.values()}
        if len(names) > 1:
            raise InputError(f"a report compares runs of one experiment, got {', '.join(sorted(names))}")
        table = report.comparison_table(
            experiment(names.pop()), {title: summary for title, (_c, summary, _a) in finished.items()}
        )
        for column in zip(*table, strict=True):
            print("  ".join(f"{cell:<28}" for cell in column).rstrip())
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            report.write_comparison(self.out, finished)
            print(f"report: {self.out / 'report.html'}")


def _config(it: Experiment, method: str, preset: str, like: Path | None, seed: int, settings: list[str]) -> Config:
    if like is None:
        return resolve(it.name, it.presets, method, preset, seed, _pairs(settings))
    found = load(like).config
    if (found.experiment, found.method, preset) != (it.name, method, "default"):
        raise InputError(
            f"--like {like} is {found.method} on {found.experiment}: it goes with that experiment and method, and "
            "without --preset"
        )
    return again(found, seed, _pairs(settings))


def _pairs(settings: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in settings:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"--set takes KEY=VALUE, got {item!r}")
        if key in pairs:
            raise InputError(f"--set gives {key} twice, {pairs[key]} and {value}: give it once")
        pairs[key] = value
    return pairs


def _check_comparison_folder(out: Path) -> None:
    """A comparison may be continued, but not be written over anything else."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    ours = set(METHODS) | ({"comparison.json", "report.html", "figures"} if "comparison.json" in names else {"figures"})
    if names - ours:
        raise InputError(f"{out} is not empty and holds no daebm comparison: choose another --out")


def _set_threads(threads: int) -> None:
    most = os.cpu_count() or 1
    if not 0 <= threads <= most:
        raise InputError(f"--threads must lie in 0..{most}, the cores of this machine, got {threads}")
    if threads:
        torch.set_num_threads(threads)


def _seconds(config: Config, tries: int = 3) -> float:
    """Of training: a few iterations of every part are timed, after a first one."""
    setup, total = begin(config, experiment(config.experiment).dataset(config)), 0.0
    for part, count in ((denoise, config.denoise), (relate, config.relate), (step, config.iterations - config.warm)):
        if count:
            part(setup).tolist()  # a GPU is done when its result can be read
            clock = time.perf_counter()
            for _ in range(tries):
                part(setup).tolist()
            total += (time.perf_counter() - clock) / tries * count
    return total


COMMANDS: dict[str, Any] = {
    "fit": Fit,
    "score": Score,
    "sample": Sample,
    "inspect": Inspect,
    "run": Run,
    "list": List,
    "show": Show,
    "report": Report,
    "pack": Pack,
    "ood": Ood,
}


def main() -> None:
    """Entry point: user errors become one sentence and exit status 2."""
    command = None
    for name in ("SIGTERM", "SIGHUP"):  # of batch systems and closed terminals: ended as Ctrl-C ends it
        if hasattr(signal, name) and threading.current_thread() is threading.main_thread():
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup it is to go on
                signal.signal(number, _interrupt)
    if sys.argv[1:] == ["--version"]:
        print(f"daebm {__version__}")
        return
    try:
        _check_once(sys.argv[1:])
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="daebm",
            description="Energy-based models that can be trusted: for data of your own fit, score, sample and inspect; "
            "for the experiments of this package run, list, show, report, pack and ood.",
        )
        command()
    except BrokenPipeError:  # `daebm show ... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (DaebmError, OSError) as error:
        _fail(_sentence(error) if isinstance(error, OSError) else str(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            _fail("the GPU is out of memory: lower batch, block or width (--set batch=100), or free it of other work")
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        lower = "lower width, batch or store (--set)" if isinstance(command, Run | Show) else "give smaller data"
        _fail(f"out of memory: {lower}, or free some of it")
    except KeyboardInterrupt:
        there = isinstance(command, Run) and runs.holds_run(command.folder)
        print(f"daebm: interrupted{'; the same command with --resume continues' if there else ''}", file=sys.stderr)
        sys.exit(130)


def _check_once(arguments: list[str]) -> None:
    """An option that is given twice would take its last value without a word; only --set is there to be repeated."""
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    if twice := [name for i, name in enumerate(names) if name in names[:i] and name != "--set"]:
        raise InputError(f"{twice[0]} is given twice: give it once, with all that it takes")


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _fail(sentence: str) -> NoReturn:
    print(f"daebm: {sentence}", file=sys.stderr)
    sys.exit(2)


def _sentence(error: OSError) -> str:
    """What, where, what to do: the system says the first of them, and the second if it knows."""
    advice = "free some space" if error.errno in (errno.ENOSPC, errno.EFBIG) else "check the path"
    return f"{error.filename or 'a file'}: {error.strerror or error}: {advice} or name another place"


if __name__ == "__main__":
    main()
