"""From settings to numbers in per cent: what a table, a figure or a claim asks of a setting."""

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from holdfast import metrics
from holdfast.metrics import Summary
from holdfast.report.settings import Run, Setting

__all__ = [
    "Summary",
    "by_seed",
    "difference",
    "finals",
    "first_task_drop",
    "floats",
    "mean_accuracy",
    "median_seconds",
    "standard_error",
    "summary",
    "transfer",
    "work_seconds",
    "work_tests",
]

_TEST = 10_000  # test images of MNIST

# Finding the quantile takes 0.15 s and a report asks for hundreds of intervals, over few counts.
_quantile = functools.cache(metrics.student_quantile)


def summary(values: Sequence[float]) -> Summary | None:
    """What :func:`holdfast.metrics.summarise` says, quickly; None if there are no values."""
    if len(values) < 2:
        return metrics.summarise(values) if values else None
    mean, std, count = statistics.fmean(values), statistics.stdev(values), len(values)
    half = _quantile(0.975, count - 1) * std / math.sqrt(count)
    return Summary(mean, std, mean - half, mean + half, count)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Summary | None:
    """Paired differences over the seeds both have; None if they share none."""
    seeds = sorted(first.keys() & second.keys())
    return summary([first[seed] - second[seed] for seed in seeds])


def standard_error(values: Summary) -> float:
    r"""Standard error of the mean, :math:`s/\sqrt n`; not a number for one value."""
    return values.std / math.sqrt(values.count)


def by_seed(setting: Setting, measure: Callable[[Run], float]) -> dict[int, float]:
    """``measure`` of every run, in per cent."""
    return {run.seed: 100.0 * measure(run) for run in setting.runs}


def finals(setting: Setting) -> dict[int, float]:
    """Mean test accuracy over all tasks after the last one, by seed, in per cent."""
    return by_seed(setting, lambda run: metrics.average_accuracy(run.result.test))


def mean_accuracy(setting: Setting) -> float:
    """The mean of :func:`finals`."""
    return statistics.fmean(finals(setting).values())


def floats(setting: Setting) -> float:
    """32-bit numbers per parameter of the matrix alone: without the anchor, which every method has."""
    if setting.approximation is None:
        return 0.0
    return max(run.result.floats_per_parameter for run in setting.runs) - 1


def first_task_drop(setting: Setting) -> dict[int, float]:
    """How much of the first task is lost by the end, by seed, in points."""
    return by_seed(setting, lambda run: run.result.test[0][0] - run.result.test[-1][0])


def median_seconds(setting: Setting, part: str) -> float:
    """Seconds of one run spent in ``part`` (training, consolidation, evaluation, total).

    The median over runs: a run that shared its core with other work counts as one, whatever it took.
    """
    return statistics.median(run.result.seconds[part] for run in setting.runs)


def work_seconds(setting: Setting) -> float:
    """Seconds of training and consolidation: evaluation is the experiment's, not the method's."""
    return median_seconds(setting, "training") + median_seconds(setting, "consolidation")


def work_tests(setting: Setting) -> float | None:
    """Time of training and consolidation, in tests on one task of the same run; None if none was timed.

    Every run of a preset is tested alike, and where the machine is slow or shared, tests take longer too:
    runs from different machines can be compared, which their seconds cannot.
    """
    found = []
    for run in setting.runs:
        seconds = run.result.seconds
        if seconds["evaluation"] > 0:
            work = seconds["training"] + seconds["consolidation"]
            found.append(work * _tests(run) / seconds["evaluation"])
    return statistics.median(found) if found else None


def _tests(run: Run) -> float:
    """On how many tasks a run was tested under the clock; a validation set counts by its size."""
    result, stream = run.result, run.experiment["stream"]
    epochs = sum(len(seen) for task in result.accuracy for seen in task)
    ahead = sum(len(row) - task - 1 for task, row in enumerate(result.test))
    size = stream.get("test") or stream.get("test_size") or _TEST
    held_out = sum(map(len, result.validation)) * stream["validation"] / size
    return epochs + ahead + held_out


def transfer(setting: Setting, alone: Mapping[int, Sequence[float]]) -> dict[str, Summary | None]:
    """Forgetting, transfers and intransigence of a setting, in points.

    Args:
        setting: The method.
        alone: By seed, the accuracy on every task of a network trained on that task alone.
    """
    known = [run for run in setting.runs if run.seed in alone]
    measured = {
        "forgetting": [metrics.forgetting(run.result.test) for run in setting.runs],
        "backward": [metrics.backward_transfer(run.result.test) for run in setting.runs],
        "forward": [
            metrics.forward_transfer(run.result.test, run.result.initial) for run in setting.runs
        ],
        "intransigence": [
            metrics.intransigence(run.result.test, alone[run.seed]) for run in known
        ],
        "first_task": [run.result.test[-1][0] for run in setting.runs],
    }
    return {name: summary([100 * v for v in values]) for name, values in measured.items()}
