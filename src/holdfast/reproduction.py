"""From a recipe to a results folder: resume, run, and leave a report behind."""

import bisect
import contextlib
import dataclasses
import errno
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from holdfast import checkpoint, memory, results
from holdfast.approximation import Approximation, Diagonal, Setting
from holdfast.display import Display
from holdfast.experiment import Experiment
from holdfast.hashing import Draw
from holdfast.jobs import Job, RunExperiment
from holdfast.parameters import ParameterSpace
from holdfast.recipes import RECIPES, Recipe, Request, Score
from holdfast.results import BrokenResult, Result
from holdfast.sharing import Elsewhere
from holdfast.structure import layer_shapes
from holdfast.sweep import Estimator, Summary, sweep

__all__ = ["check_writable", "explain", "memory_note", "reproduce"]

WORTH_SAYING = 2 * 10**8  # bytes


def reproduce(
    recipe: Recipe,
    request: Request,
    folder: Path,
    display: Display,
    *,
    jobs: int = 1,
    budget: float | None = None,
) -> Summary:
    """Run what a recipe asks for and the folder does not have yet.

    Raises:
        ForeignResult: The folder holds results of another format version.
        MemoryError: The largest matrix does not fit into memory.
        OSError: The folder cannot be written.
    """
    check_writable(folder)
    estimator = Estimator()

    def report(error: BrokenResult) -> None:
        display.message(
            f"{error}; it does not count, and is run again if it is asked for", bad=True
        )

    def remember(result: Result) -> None:
        estimator.record(RunExperiment(result.experiment), result.seconds["total"])

    for result in results.load_all(folder, report).values():
        remember(result)
    score = _validation_score(folder)
    elsewhere = Elsewhere(folder, [folder.absolute().parent / name for name in RECIPES])

    def plan() -> Sequence[Job]:
        planned = _wanted(recipe, request, score)
        while taken := elsewhere.take_over(planned):  # a search may have ended with that
            for result in taken:
                remember(result)
            runs, verb = ("run", "is") if len(taken) == 1 else ("runs", "are")
            display.message(
                f"{len(taken)} {runs} of other studies or presets {verb} the same work and {verb} taken over"
            )
            planned = _wanted(recipe, request, score)
        return planned

    open_runs = [
        j.experiment for j in plan() if isinstance(j, RunExperiment) and not j.done(folder)
    ]

    note = memory_note(open_runs, jobs)
    with display:
        if note is not None:
            display.message(note)
        summary = sweep(
            plan,
            folder,
            display,
            jobs=jobs,
            budget=budget,
            estimator=estimator,
        )
    if not summary.left and not summary.failed:
        _tidy(recipe, request, score, folder)
    return summary


def _wanted(recipe: Recipe, request: Request, score: Score) -> list[Job]:
    return [job for job in recipe.jobs(request, score) if request.wants(job)]


def _tidy(recipe: Recipe, request: Request, score: Score, folder: Path) -> None:
    """Remove the first tasks that runs shared, but for those that other presets will begin with."""
    known: list[Job] = []
    for preset in recipe.presets:
        with contextlib.suppress(ValueError):  # a preset that cannot be run with these settings
            every = dataclasses.replace(request, presets=(preset,), extras=True, only=())
            known += [job for job in recipe.jobs(every, score) if job.beginning is not None]
    needed = {job.beginning for job in known if not job.done(folder)}
    names = {job.beginning for job in recipe.jobs(request, score)} - needed
    checkpoint.remove_beginnings(folder, [name for name in names if name is not None])


def memory_note(experiments: Iterable[Experiment], processes: int) -> str | None:
    """How much memory the largest matrix among the runs will take; None if that is nothing to speak of.

    Raises:
        MemoryError: It is more than there is; the message says what would fit.
    """
    largest: tuple[int, Approximation, Setting] | None = None
    seen = set()
    for experiment in experiments:
        recipe = experiment.regularizer
        key = (experiment.model, recipe and (recipe.approximation, recipe.include, recipe.exclude))
        if recipe is None or key in seen:
            continue
        seen.add(key)
        model = experiment.model.build(0)
        space = ParameterSpace.of(model, recipe.include, recipe.exclude)
        setting = Setting(space, Draw(0), layers=layer_shapes(model, space))
        needed = recipe.approximation.nbytes(setting)
        if largest is None or needed > largest[0]:
            largest = needed, recipe.approximation, setting
    if largest is None:
        return None
    needed, approximation, setting = largest
    free = memory.available(torch.device("cpu"))
    what = (
        f"{approximation!r} of {setting.dim:,} parameters takes {memory.readable(needed)} while a task "
        f"is consolidated, beside the penalty of the tasks before; {processes} at a time, "
        f"{memory.readable(free)} are free"
    )
    if needed * processes > free:
        raise MemoryError(f"{what}: {_what_fits(approximation, setting, free, processes)}")
    return what if needed >= WORTH_SAYING else None


def _what_fits(approximation: Approximation, setting: Setting, free: int, processes: int) -> str:
    """Settings with which the matrices of all processes fit into memory, as advice."""
    fits = []
    fewer = free // approximation.nbytes(setting)
    if fewer:
        fits.append(f"--jobs {fewer}")
    each = free // processes
    for name in ("size", "rank"):
        value = getattr(approximation, name, None)
        if isinstance(value, int):
            smaller = range(0, value, getattr(approximation, "nonzeros", 1))[1:]

            def needed(value: int, name: str = name) -> int:
                changed: Approximation = dataclasses.replace(
                    cast(Any, approximation), **{name: value}
                )
                return changed.nbytes(setting)

            count = bisect.bisect_right(smaller, each, key=needed)
            fits += [f"regularizer.approximation.{name}={smaller[count - 1]}"] if count else []
    if not isinstance(approximation, Diagonal) and Diagonal().nbytes(setting) <= each:
        fits.append("regularizer.approximation=diagonal")
    if not fits:
        return "not even a diagonal fits; take a smaller model, or hold on to some parameters only"
    return f"what fits is {', or '.join(fits)}"


def _validation_score(folder: Path) -> Score:
    """Looks results up in the folder; what was found once is remembered, files are not read twice."""
    known: dict[str, float] = {}

    def score(experiment: Experiment) -> float | None:
        path = results.path_of(folder, experiment)
        if path.stem not in known:
            if not path.exists():
                return None
            try:
                final = results.load(path).validation[-1]
            except BrokenResult:
                return None
            known[path.stem] = sum(final) / len(final)
        return known[path.stem]

    return score


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written before hours of work are done for it."""
    probe = Path(folder) / ".writable"
    with results.atomic(probe) as file:
        file.write(b"Holdfast looks whether it may write here.\n")
    probe.unlink()


def explain(error: OSError, folder: Path) -> str:
    """What a failed write means and what to do."""
    text = str(error)
    if error.errno == errno.ENOSPC or "No space left" in text:
        advice = "the disk is full; free some space and run the same command again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) or "Permission" in text:
        advice = "no permission to write there; choose another folder with --out"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        advice = "a file stands where a folder is needed; choose another folder with --out"
    else:
        advice = "finished runs are kept; run the same command again"
    return f"cannot write results to {folder}: {text}: {advice}"
