"""Running one experiment: learn, consolidate, test, task after task."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from holdfast import results
from holdfast.experiment import Experiment
from holdfast.penalty import Penalty
from holdfast.results import Result
from holdfast.seeds import derive
from holdfast.streams import Task, join
from holdfast.training import FlatAdam, accuracies, learn

__all__ = ["execute"]


class _Stopwatch:
    """Seconds per kind of work."""

    def __init__(self) -> None:
        self.seconds = {"training": 0.0, "consolidation": 0.0, "evaluation": 0.0, "total": 0.0}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time of the block to one kind of work."""
        begun = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begun


def execute(
    experiment: Experiment,
    *,
    progress: Callable[[float], None] | None = None,
    after_task: Callable[[nn.Module], None] | None = None,
) -> Result:
    """Run an experiment; the same experiment gives the same accuracies on the same machine.

    Args:
        experiment: What to run.
        progress: Called with the finished fraction after every epoch.
        after_task: Called with the network after every task, for pictures; it must not change it.

    Raises:
        FloatingPointError: The network diverged.
    """
    watch = _Stopwatch()
    with watch.measure("total"), torch.random.fork_rng(devices=[]):
        run = _Run(experiment, watch, progress)
        for index in range(len(run.tasks)):
            run.learn_task(index)
            if after_task is not None:
                after_task(run.model)
            if index + 1 < len(run.tasks):  # nothing is learnt after the last task
                run.consolidate(index)
    count = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    return Result(
        experiment,
        accuracy=run.accuracy,
        validation=run.validation,
        test=run.test,
        initial=run.initial,
        seconds={name: round(value, 3) for name, value in watch.seconds.items()},
        penalty_bytes=run.penalty_bytes,
        floats_per_parameter=run.penalty_bytes / 4 / count,
        versions=results.versions(),
        machine=results.machine(),
    )


class _Run:
    """The state of a run between two tasks."""

    def __init__(
        self,
        experiment: Experiment,
        watch: _Stopwatch,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.experiment, self.watch, self.progress = experiment, watch, progress
        self.tasks: Sequence[Task] = experiment.stream.tasks(derive(experiment.seed, "data"))
        self.penalty: Penalty | None = None
        self.penalty_bytes = 0
        self._fresh_network()
        self.accuracy: list[list[list[float]]] = []
        self.validation: list[list[float]] = []
        self.test: list[list[float]] = []
        self.initial = accuracies(self.model, [task.test for task in self.tasks])

    def _fresh_network(self) -> None:
        """Start from the initial weights."""
        self.model = self.experiment.model.build(self.experiment.seed)
        self.optimizer = FlatAdam(self.model, self.experiment.training.lr)

    def learn_task(self, index: int) -> None:
        """Train on one task and test on all."""
        experiment = self.experiment
        if experiment.role == "single" and index > 0:
            self._fresh_network()
        torch.manual_seed(derive(experiment.seed, "dropout", index))  # inside a fork: see execute
        split = self.tasks[index].train
        if experiment.mode == "joint":
            split = join([task.train for task in self.tasks[: index + 1]])
        seen = [task.test for task in self.tasks[: index + 1]]
        epochs: list[list[float]] = []
        before = self.watch.seconds["evaluation"]

        def after_epoch(epoch: int) -> None:
            with self.watch.measure("evaluation"):
                epochs.append(accuracies(self.model, seen))
            if self.progress is not None:
                self.progress((index + (epoch + 1) / experiment.training.epochs) / len(self.tasks))

        with self.watch.measure("training"):
            learn(
                self.model,
                split,
                experiment.training,
                self.optimizer,
                generator=_generator(experiment.seed, "order", index),
                penalty=self.penalty,
                after_epoch=after_epoch,
            )
        self.watch.seconds["training"] -= self.watch.seconds["evaluation"] - before
        self.accuracy.append(epochs)
        with self.watch.measure("evaluation"):
            self.validation.append(accuracies(self.model, [t.validation for t in self.tasks]))
            self.test.append(accuracies(self.model, [t.test for t in self.tasks]))

    def consolidate(self, index: int) -> None:
        """Add one task to the penalty."""
        experiment, split = self.experiment, self.tasks[index].train
        if experiment.regularizer is None:
            return
        seed, size = derive(experiment.seed, "consolidation"), experiment.training.batch_size
        order = None
        if experiment.training.shuffle:
            generator = _generator(experiment.seed, "consolidation order", index)
            order = torch.randperm(len(split), generator=generator)
        with self.watch.measure("consolidation"):
            if experiment.original_diagonal is not None:
                self.penalty = experiment.original_diagonal.consolidate(
                    experiment.regularizer,
                    self.model,
                    split,
                    size,
                    order=order,
                    previous=self.penalty,
                    seed=seed,
                )
            else:
                self.penalty = experiment.regularizer.consolidate(
                    self.model,
                    split.batches(size, order),
                    previous=self.penalty,
                    seed=seed,
                    progress=False,
                )
        self.penalty_bytes = max(self.penalty_bytes, self.penalty.nbytes)


def _generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator for one purpose of a run."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
