"""Running one experiment: learn, consolidate, test, task after task."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from holdfast import results
from holdfast.adam import FlatAdam
from holdfast.checkpoint import Checkpoints, State
from holdfast.experiment import Experiment
from holdfast.penalty import Penalty
from holdfast.results import Result
from holdfast.seeds import derive
from holdfast.streams import Task, join
from holdfast.training import accuracies, learn

__all__ = ["PATIENCE", "check_network", "execute"]

PATIENCE = 60.0  # seconds of work that are worth a checkpoint
SHARED = 1 / 60  # of it for a finished first task, from which every other method starts
LONG = 1 / 6  # of it for one epoch: what takes so long is not done twice
AHEAD = 20  # tasks; in longer streams testing what lies further ahead than the next task takes too long


class _Stopwatch:
    """Processor time per kind of work, which other work does not change; the total by the clock."""

    def __init__(self) -> None:
        self.seconds = {"training": 0.0, "consolidation": 0.0, "evaluation": 0.0, "total": 0.0}
        self._begun = time.perf_counter()

    def resume(self, seconds: dict[str, float]) -> None:
        """Add what an earlier process has spent."""
        for what, spent in seconds.items():
            self.seconds[what] += spent

    def so_far(self) -> dict[str, float]:
        """The seconds of a run that is not at its end."""
        total = self.seconds["total"] + time.perf_counter() - self._begun
        return {**self.seconds, "total": total}

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the time of the block to one kind of work."""
        clock = time.perf_counter if what == "total" else time.process_time
        begun = clock()
        yield
        self.seconds[what] += clock() - begun


def execute(
    experiment: Experiment,
    *,
    progress: Callable[[float], None] | None = None,
    after_task: Callable[[nn.Module], None] | None = None,
    folder: Path | None = None,
    patience: float = PATIENCE,
) -> Result:
    """Run an experiment; the same experiment gives the same accuracies on the same machine.

    Args:
        experiment: What to run.
        progress: Called with the finished fraction after every epoch.
        after_task: Called with the network after every task learnt here, for pictures; it must not change it.
        folder: A results folder in which a long run leaves checkpoints between epochs, and goes on from
            one that is there; without it nothing is kept. See :class:`Checkpoints`.
        patience: Seconds between two checkpoints; an epoch that takes a sixth of it is always kept, a
            finished first task after a sixtieth.

    Raises:
        ValueError: The network does not fit the stream.
        FloatingPointError: The network diverged.
    """
    watch = _Stopwatch()
    with watch.measure("total"), torch.random.fork_rng(devices=[]):
        checkpoints = None if folder is None else Checkpoints(folder, experiment)
        run = _Run(experiment, watch, progress, checkpoints, patience)
        for index in range(run.first, len(run.tasks)):
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


def check_network(experiment: Experiment) -> None:
    """Refuse an experiment whose data are wrong, or whose network cannot answer them, before any training.

    Raises:
        ValueError: An input cannot be read, or there are fewer outputs than classes.
    """
    _check_network(
        experiment,
        experiment.model.build(experiment.seed),
        experiment.stream.tasks(derive(experiment.seed, "data")),
    )


@torch.no_grad()
def _check_network(experiment: Experiment, model: nn.Module, tasks: Sequence[Task]) -> None:
    """Let a network answer one example of every task."""
    recipe, was_training = experiment.model, model.training
    model.eval()
    for task in tasks:
        x, _ = next(task.train.batches(1))
        try:
            outputs = model(x).shape[1]
        except (RuntimeError, IndexError) as error:
            shape = " × ".join(map(str, x.shape[1:]))
            raise ValueError(
                f"{recipe!r} cannot answer {task.name}, whose inputs are {shape}: {error}"
            ) from error
        labels = [part.labels for part in (task.train, task.validation, task.test)]
        largest = max(int(part.max()) for part in labels if len(part))
        if largest >= outputs:
            raise ValueError(
                f"{recipe!r} has {outputs} outputs, but labels of {task.name} go up to {largest}: "
                f"it needs at least {largest + 1} outputs, one per class"
            )
    model.train(was_training)


class _Run:
    """The state of a run between two tasks."""

    def __init__(
        self,
        experiment: Experiment,
        watch: _Stopwatch,
        progress: Callable[[float], None] | None,
        checkpoints: Checkpoints | None,
        patience: float,
    ) -> None:
        self.experiment, self.watch, self.progress = experiment, watch, progress
        self.checkpoints, self.patience = checkpoints, patience
        self.saved = self.last = time.perf_counter()  # a checkpoint, the end of an epoch
        self.tasks: Sequence[Task] = experiment.stream.tasks(derive(experiment.seed, "data"))
        self.penalty: Penalty | None = None
        self.penalty_bytes = 0
        self._fresh_network()
        _check_network(experiment, self.model, self.tasks)
        self.accuracy: list[list[list[float]]] = []
        self.validation: list[list[float]] = []
        self.test: list[list[float]] = []
        self.first = 0
        self.state = None if checkpoints is None else checkpoints.load()
        self.tested = experiment.role != "tune"  # test data has no part in choosing a strength
        if self.state is None:
            untrained = [task.test for task in self.tasks]
            self.initial = accuracies(self.model, untrained) if self.tested else []
        else:
            self._resume(self.state)

    def _resume(self, state: State) -> None:
        """Take up what an earlier process measured; :meth:`learn_task` takes up the rest."""
        self.first, self.penalty = state.task, state.penalty
        self.accuracy, self.validation = state.record["accuracy"], state.record["validation"]
        self.test, self.initial = state.record["test"], state.record["initial"]
        self.penalty_bytes = state.record["penalty_bytes"]
        self.watch.resume(state.record["seconds"])

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
        generator = _generator(experiment.seed, "order", index)
        epochs: list[list[float]] = []
        if self.state is not None:
            epochs = self._restore(self.state, generator)
            self.state = None
        split = self.tasks[index].train
        if experiment.mode == "joint":
            split = join([task.train for task in self.tasks[: index + 1]])
        seen = [task.test for task in self.tasks[: index + 1]] if self.tested else []
        begun = time.process_time()  # of the epoch: evaluation and checkpoints are not training

        def after_epoch(epoch: int) -> None:
            nonlocal begun
            self.watch.seconds["training"] += time.process_time() - begun
            with self.watch.measure("evaluation"):
                epochs.append(accuracies(self.model, seen) if seen else [])
            self._keep(index, epochs, generator)
            if self.progress is not None:
                self.progress((index + (epoch + 1) / experiment.training.epochs) / len(self.tasks))
            begun = time.process_time()

        learn(
            self.model,
            split,
            experiment.training,
            self.optimizer,
            generator=generator,
            penalty=self.penalty,
            after_epoch=after_epoch,
            done=len(epochs),
        )
        with self.watch.measure("evaluation"):
            if index + 1 == len(self.tasks):
                held_out = [task.validation for task in self.tasks]
                self.validation.append(accuracies(self.model, held_out))
            if self.tested:
                unseen = self.tasks[index + 1 :]  # the rest is known by now
                if len(self.tasks) > AHEAD:
                    unseen = unseen[:1]  # all that forward transfer asks for
                later = accuracies(self.model, [task.test for task in unseen]) if unseen else []
                self.test.append([*epochs[-1], *later])
                self.accuracy.append(epochs)

    def _keep(self, index: int, epochs: list[list[float]], generator: torch.Generator) -> None:
        """Leave a checkpoint if enough work has been done since the last."""
        if self.checkpoints is None:
            return
        now = time.perf_counter()
        long = now - self.last >= self.patience * LONG
        self.last = now
        shared = index == 0 and len(epochs) == self.experiment.training.epochs
        worth = shared and self.watch.so_far()["total"] >= self.patience * SHARED
        if now - self.saved < self.patience and not (long or worth):
            return
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"adam.{name}": t for name, t in self.optimizer.state().items()}
        tensors |= {"global": torch.get_rng_state(), "order": generator.get_state()}
        record = {
            "accuracy": self.accuracy,
            "validation": self.validation,
            "test": self.test,
            "initial": self.initial,
            "epochs": epochs,
            "penalty_bytes": self.penalty_bytes,
            "seconds": self.watch.so_far(),
        }
        self.checkpoints.save(State(index, len(epochs), record, tensors, self.penalty))
        self.saved = self.last = time.perf_counter()

    def _restore(self, state: State, generator: torch.Generator) -> list[list[float]]:
        """Bring network, optimiser and generators to where they were; returns the accuracies since."""

        def part(prefix: str) -> dict[str, torch.Tensor]:
            found = {k: v for k, v in state.tensors.items() if k.startswith(prefix)}
            return {k.removeprefix(prefix): v for k, v in found.items()}

        self.model.load_state_dict(part("model."))
        self.optimizer.restore(part("adam."))
        torch.set_rng_state(state.tensors["global"])
        generator.set_state(state.tensors["order"])
        epochs: list[list[float]] = state.record["epochs"]
        return epochs

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
                    limit=experiment.limit,
                    progress=False,
                )
            if experiment.storage != "float32":
                self.penalty = self.penalty.to(dtype=getattr(torch, experiment.storage))
        self.penalty_bytes = max(self.penalty_bytes, self.penalty.nbytes)


def _generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator for one purpose of a run."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
