"""A results folder made of invented numbers, in the real format: what the tests of the report read."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from holdfast import boundaries, results
from holdfast.approximation import (
    Approximation,
    BlockDiagonal,
    CountSketch,
    Diagonal,
    Full,
    LowRank,
)
from holdfast.configuration import to_json
from holdfast.experiment import Experiment
from holdfast.history import Mean, MovingAverage, Sum
from holdfast.importance import EWC, MAS, Importance
from holdfast.models import MLP
from holdfast.original_diagonal import OriginalDiagonal
from holdfast.recipes import RECIPES, Request
from holdfast.regularizer import Regularizer
from holdfast.results import Result
from holdfast.streams import CIFAR100Shift
from holdfast.streams.toy import BLOBS, WINDOW, Toy
from holdfast.training import Training

TASKS = 5
METHODS: dict[str, Approximation] = {
    "diagonal": Diagonal(),
    "block_diagonal": BlockDiagonal(size=50),
    "count_sketch": CountSketch(size=50, merge="stack"),
    "rank_1": LowRank(rank=1, merge="stack"),
    "rank_50": LowRank(rank=50, merge="stack"),
    "full": Full(),
}
IMPORTANCES: dict[str, Importance] = {"ewc": EWC(), "mas": MAS()}
LEVEL = {
    "diagonal": 0.84,
    "block_diagonal": 0.78,
    "count_sketch": 0.86,
    "rank_1": 0.83,
    "rank_50": 0.88,
    "full": 0.90,
}
SECONDS = {
    "diagonal": 0.3,
    "block_diagonal": 1.1,
    "count_sketch": 0.4,
    "rank_1": 0.5,
    "rank_50": 0.9,
    "full": 6.0,
}


def experiment(preset: str = "paper", epochs: int = 4, **fields: object) -> Experiment:
    """An experiment of the synthetic study; without a regularizer unless one is given."""
    return Experiment(
        recipe="toy",
        preset=preset,
        stream=Toy(),
        model=MLP((2, 128, 64, 2)),
        training=Training(epochs=epochs),
        **fields,  # type: ignore[arg-type]
    )


def regularizer(importance: str, method: str, **fields: object) -> Regularizer:
    """A regularizer with the paper's settings, changed by ``fields``."""
    given: dict[str, object] = {"strength": 1e3, "history": MovingAverage(new=0.5), **fields}
    return Regularizer(IMPORTANCES[importance], METHODS[method], **given)  # type: ignore[arg-type]


def result(
    experiment: Experiment, level: float = 0.85, spread: float = 0.06, seconds: float = 0.4
) -> Result:
    """An invented result with a final average accuracy near ``level``, the same at every call."""
    random = np.random.default_rng([experiment.seed, len(experiment.label)])
    shared = np.random.default_rng(
        experiment.seed
    ).normal()  # methods of one seed share their luck
    wanted = level + spread * (0.7 * shared + 0.5 * random.normal())
    epochs = experiment.training.epochs
    rise = 1 - np.exp(-4 * np.arange(1, epochs + 1) / epochs)
    now, accuracy, test = np.full(TASKS, 0.5), [], []
    for task in range(TASKS):
        end = now + random.normal(0, 0.03, TASKS)
        end[:task] = end[:task] - (0.99 - wanted) * 2 / TASKS
        end[task] = 0.99 - 0.01 * task
        path = np.clip(
            now + rise[:, None] * (end - now) + random.normal(0, 0.006, (epochs, TASKS)), 0, 1
        )
        now = path[-1]
        accuracy.append([[round(float(v), 4) for v in row[: task + 1]] for row in path])
        test.append([round(float(v), 4) for v in now])
    held = experiment.regularizer is not None
    return Result(
        experiment,
        accuracy=accuracy,
        validation=[[min(1.0, v + 0.002) for v in row] for row in test],
        test=test,
        initial=[0.5] * TASKS,
        seconds={
            "training": 9.5 + random.random(),
            "consolidation": seconds * (1 + 0.1 * random.random()) if held else 0.0,
            "evaluation": 1.2,
            "total": 11.0 + seconds,
        },
        penalty_bytes=int(35_080 * (1 + 500 * seconds)) if held else 0,
        floats_per_parameter=50.0 if held else 0.0,
        versions={"holdfast": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.9"},
        machine={"threads": 1, "cores": 2},
    )


def table(
    preset: str, seeds: Sequence[int], epochs: int = 4, lift: float = 0.0
) -> Iterator[Result]:
    """The paper's table for one preset."""
    for importance in IMPORTANCES:
        for method, level in LEVEL.items():
            chosen = regularizer(importance, method)
            original = None
            if preset == "original-code" and method == "diagonal":
                matched = (
                    EWC(labels="predicted") if importance == "ewc" else MAS(outputs="softmax")
                )
                chosen = dataclasses.replace(chosen, importance=matched)
                original = OriginalDiagonal("batches")
            if preset == "original-code" and (importance, method) == ("ewc", "block_diagonal"):
                chosen = dataclasses.replace(chosen, approximation=BlockDiagonal(size=10))
            for seed in seeds:
                yield result(
                    experiment(
                        preset, epochs, regularizer=chosen, original_diagonal=original, seed=seed
                    ),
                    level + lift - 0.03 * (importance == "mas"),
                    seconds=SECONDS[method],
                )


def beside(preset: str, seeds: Sequence[int], epochs: int = 4) -> Iterator[Result]:
    """Baselines, other histories, another anchor, single tasks, and other diagonals."""
    for seed in seeds:
        yield result(experiment(preset, epochs, seed=seed), 0.66)
        yield result(experiment(preset, epochs, seed=seed, mode="joint"), 0.985, 0.002)
        yield result(experiment(preset, epochs, seed=seed, role="single"), 0.99, 0.002)
        for history in (Sum(), Mean()):
            changed = regularizer("ewc", "count_sketch", history=history)
            yield result(experiment(preset, epochs, seed=seed, regularizer=changed), 0.87)
        each = regularizer("ewc", "diagonal", anchor="each")
        yield result(experiment(preset, epochs, seed=seed, regularizer=each), 0.85)
        if preset == "original-code":
            plain = regularizer("ewc", "diagonal")
            yield result(experiment(preset, epochs, seed=seed, regularizer=plain), 0.85)
            flat = dataclasses.replace(plain, importance=EWC(labels="predicted"))
            yield result(
                experiment(
                    preset,
                    epochs,
                    seed=seed,
                    regularizer=flat,
                    original_diagonal=OriginalDiagonal("examples"),
                ),
                0.88,
            )


def tuning(seeds: Sequence[int], epochs: int = 4) -> Iterator[Result]:
    """The fair preset's search, best at λ = 1000."""
    for importance in IMPORTANCES:
        for method, level in LEVEL.items():
            for power in np.arange(1, 5.5, 0.5):
                strength = float(f"{10**power:.4g}")
                chosen = regularizer(importance, method, strength=strength)
                for seed in seeds:
                    worse = 0.06 * abs(power - 3.0)
                    yield result(
                        experiment("fair", epochs, seed=seed, regularizer=chosen, role="tune"),
                        level - worse,
                        0.0,
                    )


def fisher(folder: Path, seeds: Sequence[int]) -> None:
    """The matrix study of Figures 1 and 2."""
    (folder / "fisher").mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        random = np.random.default_rng(seed)
        rows = random.lognormal(0, 1.5, (6, 220)) * random.choice([-1, 1], (6, 220))
        full = np.abs(rows.T @ rows)
        sketched = full * np.exp(random.normal(0, 0.1, full.shape))
        pictures = {
            name: (255 * np.clip(m / full.max(), 0, 1) ** 0.25).astype(np.uint8)
            for name, m in (("full", full), ("count_sketch", sketched))
        }
        np.savez_compressed(folder / "fisher" / f"seed{seed}.npz", **pictures)  # type: ignore[arg-type]
        errors = [
            (Diagonal(), [0.947 + 0.004 * random.normal()]),
            (BlockDiagonal(size=50), [0.828 + 0.01 * random.normal()]),
            (CountSketch(size=50), [float(v) for v in random.gamma(1, 0.07, 5)]),
            (LowRank(rank=1), [0.06]),
            (LowRank(rank=50), [3e-11]),
        ]
        streamed = [(LowRank(rank=50, group=1), [2e-9]), (LowRank(rank=50), [1e-6] * 5)]
        data = {
            "format": 1,
            "seed": seed,
            "study": {},
            "errors": [{"approximation": to_json(a), "values": v} for a, v in errors],
            "streamed": [{"approximation": to_json(a), "values": v} for a, v in streamed],
            "spectrum": [12 * 10 ** (-0.35 * k) for k in range(80)],
            "stable_rank": {
                "trace": 1.6 + 0.1 * random.random(),
                "frobenius": 1.1 + 0.2 * random.random(),
            },
            "heat_map": {"tile": 40, "pool": "max of |entry|", "scale": "the fourth root"},
        }
        (folder / "fisher" / f"seed{seed}.json").write_text(json.dumps(data))


def decision_maps(folder: Path, result: Result) -> None:
    """Decision maps after every task, drawn from the blobs themselves."""
    x, y = np.meshgrid(np.linspace(*WINDOW[0], 150), np.linspace(*WINDOW[1], 100))
    maps, log_odds = [], np.zeros_like(x)
    for task in range(TASKS):
        for (centre, _), sign in zip(BLOBS[task], (-1, 1), strict=True):
            log_odds = log_odds + sign * 9 * np.exp(
                -((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / 0.12
            )
        maps.append((255 / (1 + np.exp(-log_odds))).astype(np.uint8))
    boundaries.save(folder, result.experiment.id, maps, WINDOW)


def folder(
    path: Path,
    *,
    presets: Sequence[str] = ("paper", "original-code", "fair"),
    seeds: int = 3,
    epochs: int = 4,
    extras: bool = True,
    matrix: bool = True,
    maps: bool = True,
) -> Path:
    """A whole results folder."""
    for number, preset in enumerate(presets):
        for found in table(preset, range(seeds), epochs, 0.02 * number):
            found.save(path)
            if maps and found.experiment.seed == 0:
                decision_maps(path, found)
        if extras:
            for found in beside(preset, range(seeds), epochs):
                found.save(path)
        if preset == "fair":
            for found in tuning((1000, 1001), epochs):
                found.save(path)
    if matrix:
        fisher(path, range(5))
    return path


def made_up(experiment: Experiment, level: float = 0.75) -> Result:
    """A result of any recipe: accuracies around ``level`` that follow from the experiment's id."""
    random = np.random.default_rng(int(experiment.id, 16))
    stream = experiment.stream
    tasks = len(stream.classes) if isinstance(stream, CIFAR100Shift) else stream.length
    epochs = experiment.training.epochs
    held = experiment.regularizer is not None

    def draw(*shape: int) -> list:
        return np.clip(level + random.uniform(-0.02, 0.02, shape), 0, 1).tolist()

    return Result(
        experiment,
        accuracy=[draw(epochs, task + 1) for task in range(tasks)],
        validation=draw(tasks, tasks),
        test=draw(tasks, tasks),
        initial=draw(tasks),
        seconds={"training": 1.0, "consolidation": 1.0, "evaluation": 1.0, "total": 3.0},
        penalty_bytes=1000 if held else 0,
        floats_per_parameter=2.0 if held else 0.0,
        versions=results.versions(),
        machine=results.machine(),
    )


def reproduced(
    folder: Path,
    recipe: str,
    preset: str,
    seeds: int = 2,
    settings: Sequence[str] = (),
    best: float = 3.0,
    make: Callable[[Experiment], Result] = made_up,
    smoke: bool = False,
) -> None:
    """What a recipe would run of a preset, made up; all searches find their best at 10^``best``."""
    known: dict[str, Result] = {}

    def score(experiment: Experiment) -> float | None:
        found = known.get(experiment.id)
        return None if found is None else float(np.mean(found.validation[-1]))

    request = Request((preset,), seeds, smoke, settings=tuple(settings))
    while True:
        jobs = RECIPES[recipe].jobs(request, score)
        new = [job.experiment for job in jobs if job.id not in known]
        if not new:
            return
        for wanted in new:
            found = make(wanted)
            if wanted.role == "tune":
                level = 0.0  # of holding nothing
                if wanted.regularizer is not None:
                    level = max(
                        0.0, 0.95 - 0.1 * abs(np.log10(wanted.regularizer.strength) - best)
                    )
                flat = [[level] * found.tasks]
                found = dataclasses.replace(
                    found, validation=flat, test=[], accuracy=[], initial=[]
                )
            known[wanted.id] = found
            found.save(folder)
