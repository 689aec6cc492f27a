"""What a penalty loses in final accuracy when its sketch is kept in bfloat16 or int8.

    OMP_NUM_THREADS=1 python benchmarks/storage.py --out results/bench
    OMP_NUM_THREADS=1 python benchmarks/storage.py --study permuted-mnist --seeds 2 --out results/bench

The same experiment (EWC, CountSketch(50), the strength of the original code) with the same seeds in three
precisions; differences are paired by seed. Runs are kept under OUT/storage-runs, so that one that is cut
short goes on.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import track

import holdfast as hf
from holdfast import metrics, results
from holdfast.execution import execute
from holdfast.experiment import Experiment
from holdfast.recipes import RECIPES
from holdfast.recipes.recipe import Request

STORAGES = ("float32", "bfloat16", "int8")
SHORTER = {"toy": {}, "permuted-mnist": {"tasks": 5, "epochs": 1}}


def base(study: str) -> Experiment:
    """The sketched EWC of the original code, on permuted MNIST with fewer tasks and epochs."""
    plan = RECIPES[study].jobs(Request(("original-code",), seeds=1), lambda *_: None)
    wanted = [job.experiment for job in plan if hasattr(job, "experiment")]
    found = next(
        e
        for e in wanted
        if e.regularizer is not None
        and isinstance(e.regularizer.importance, hf.EWC)
        and isinstance(e.regularizer.approximation, hf.CountSketch)
    )
    if study == "toy":
        return found
    stream = dataclasses.replace(found.stream, length=SHORTER[study]["tasks"])
    training = dataclasses.replace(found.training, epochs=SHORTER[study]["epochs"])
    return dataclasses.replace(found, stream=stream, training=training)


def runs(study: str, seeds: int) -> Iterator[Experiment]:
    first = base(study)
    for seed in range(first.seed, first.seed + seeds):
        for storage in STORAGES:
            yield dataclasses.replace(first, seed=seed, storage=storage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--study", choices=sorted(SHORTER), default="toy")
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.out / "storage-runs"
    found: dict[str, list[float]] = {storage: [] for storage in STORAGES}
    for experiment in track(list(runs(options.study, options.seeds)), "training"):
        path = results.path_of(folder, experiment)
        if not path.exists():
            execute(experiment).save(folder)
        found[experiment.storage].append(100 * metrics.average_accuracy(results.load(path).test))
    write(options, found)


def write(options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    command = f"python benchmarks/storage.py --study {options.study} --seeds {options.seeds}"
    first = base(options.study)
    lines = [
        f"# Storage and final accuracy: {options.study}",
        "",
        f"`OMP_NUM_THREADS=1 {command}`: {first.label}, {first.stream.length} tasks, "
        f"{first.training.epochs} epochs each, seeds {first.seed} to {first.seed + options.seeds - 1}, "
        f"torch {torch.__version__}. Average accuracy after the last task, in per cent; differences to "
        "float32 are paired by seed.",
        "",
        "| storage | mean | standard deviation | difference to float32 | its standard error |",
        "|---|---|---|---|---|",
    ]
    for storage, values in found.items():
        pairs = [a - b for a, b in zip(values, found["float32"], strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        difference = (
            "" if storage == "float32" else f"{statistics.fmean(pairs):+.2f} | {error:.2f}"
        )
        lines.append(
            f"| {storage} | {statistics.fmean(values):.2f} | {spread:.2f} | {difference or ' | '} |"
        )
    name = f"storage-{options.study}"
    body = {"command": command, "date": time.strftime("%Y-%m-%d"), "accuracy": found}
    (options.out / f"{name}.json").write_text(json.dumps(body, indent=2) + "\n")
    (options.out / f"{name}.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
