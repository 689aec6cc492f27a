"""Many jobs on a few processes: resumed, estimated, within a time budget, stopped without loss."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.display import Display, duration
from holdfast.jobs import Estimator, Job
from holdfast.process import Event, Process

__all__ = ["Estimator", "Summary", "sweep"]

INTERVAL = 2.0  # seconds between two estimates of the time left, which look at every waiting job
MARGIN = 1.1  # a run may take this much longer than runs of its kind did
WORTH_STARTING = 10.0  # seconds before the end of a budget; what runs longer leaves a checkpoint
WORTH_SHARING = 60.0  # seconds of a run whose beginning another waits for


@dataclass
class Summary:
    """How a sweep ended.

    Attributes:
        ran: Jobs finished now.
        kept: Jobs whose files were there already.
        failed: Label and reason of every job that failed.
        left: Labels of jobs that the time budget left out.
    """

    ran: int = 0
    kept: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class _Sweep:
    """The state of a running sweep."""

    def __init__(
        self,
        source: Callable[[], Sequence[Job]],
        folder: Path,
        display: Display,
        estimator: Estimator,
        deadline: float | None,
        jobs: int,
    ) -> None:
        self.source, self.folder, self.display = source, folder, display
        self.estimator, self.deadline, self.jobs = estimator, deadline, jobs
        self.summary = Summary()
        self.settled: set[str] = set()  # finished, kept or failed
        self.pending: list[Job] = []
        self.processes: list[Process] = []
        self.events: queue.Queue[Event] = queue.Queue()
        self.shown = 0.0

    @property
    def busy(self) -> list[Process]:
        return [p for p in self.processes if p.job is not None]

    def ask(self, done: str | None = None) -> None:
        """Ask the source again, and queue what is neither settled nor running, in its order.

        Args:
            done: Some work that has just been done: who waits for it may have its result by now.
        """
        running = {p.job.id for p in self.busy if p.job is not None}
        # the files of the others were looked for already
        waiting = {job.id for job in self.pending if job.work != done}
        self.pending = []
        for job in self.source():
            if job.id in self.settled or job.id in running:
                continue
            if job.id not in waiting and job.done(self.folder):
                self.settled.add(job.id)
                self.summary.kept += 1
            else:
                self.pending.append(job)

    def run(self) -> Summary:
        self.ask()
        try:
            while True:
                self.start_jobs()
                if not self.busy:
                    before = len(self.pending)
                    self.ask()
                    if not self.pending or len(self.pending) == before:
                        break
                    continue
                self.handle(self.wait())
        except TimeoutError:
            self.give_up([p.job for p in self.busy if p.job is not None])
        finally:
            for process in self.processes:
                process.stop()
        self.summary.left += [job.label for job in self.pending]
        return self.summary

    def give_up(self, late: list[Job]) -> None:
        """Say what the end of the budget stops; checkpoints stay."""
        notes = [
            f"{job.label} ({'its checkpoint is kept' if job.spent(self.folder) else 'begins again'})"
            for job in late
        ]
        self.display.message(
            f"the time budget is used up; stopped {', '.join(notes)}: the same command goes on"
        )
        self.summary.left += [job.label for job in late]

    def start_jobs(self) -> None:
        """Give every free process a job."""
        while self.pending and len(self.busy) < self.jobs:
            job = self.choose()
            if job is None:
                break
            self.pending.remove(job)
            process = next((p for p in self.processes if p.job is None), None)
            if process is None:
                slot = min(set(range(self.jobs)) - {p.slot for p in self.processes})
                process = Process(slot, self.folder, self.events)
                self.processes.append(process)
            process.give(job)
            self.display.started(process.slot, job.label)
        self.show_total()

    def choose(self) -> Job | None:
        """The first job that ends in time; if none does, one that gets on until its checkpoint."""
        learning = self.being_learnt()
        being_done = {p.job.work for p in self.busy if p.job is not None}
        free = [
            job
            for job in self.pending
            if job.beginning not in learning and job.work not in being_done
        ]
        fitting = next((job for job in free if self.fits(job)), None)
        if fitting is not None or self.deadline is None:
            return fitting
        if self.deadline - time.monotonic() < WORTH_STARTING:
            return None
        longest = [job for job in free if job.resumable]
        return max(longest, key=lambda job: job.spent(self.folder), default=None)

    def being_learnt(self) -> set[str]:
        """What running jobs begin with and others will take over from them, once it is there.

        To wait for it takes no longer than to do it a second time, and ends with the running job at the
        latest. A process whose run is half done is beyond its beginning, also where that was not kept.
        """
        names = set()
        for process in self.busy:
            job = process.job
            if job is None or job.beginning is None or process.fraction >= 0.5:
                continue
            expected = self.estimator.expect(job)
            short = expected is not None and expected < WORTH_SHARING
            if not short and not job.begun(self.folder):
                names.add(job.beginning)
        return names

    def fits(self, job: Job) -> bool:
        if self.deadline is None:
            return True
        left = self.deadline - time.monotonic()
        expected = self.estimator.expect(job) or 0.0
        if MARGIN * expected <= left:
            return True
        return left > 0 and MARGIN * (expected - job.spent(self.folder)) <= left

    def wait(self) -> Event:
        """The next event, or TimeoutError at the deadline."""
        while True:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise TimeoutError
            try:
                return self.events.get(timeout=0.5)
            except queue.Empty:
                continue

    def handle(self, event: Event) -> None:
        process, message = event
        job = process.job
        if job is None:
            return
        if "progress" in message:
            process.fraction = message["progress"]
            self.display.progress(process.slot, process.fraction)
            if time.monotonic() - self.shown > INTERVAL:
                self.show_total()
            return
        process.job = None
        self.settled.add(job.id)
        seconds = time.monotonic() - process.begun
        if "done" in message:
            self.summary.ran += 1
            self.estimator.record(job, seconds)
            self.show_total()
            self.display.finished(process.slot, job.label, message["done"], seconds)
        else:
            self.fail(process, job, message)
        # what it decides may come before what waits, and what waits may be the same work
        if job.decides or any(other.work == job.work for other in self.pending):
            self.ask(job.work)

    def fail(self, process: Process, job: Job, message: dict[str, Any]) -> None:
        reason = message.get("failed") or message["gone"]
        if message.get("fatal"):
            raise OSError(f"{job.label}: {reason}")
        if "gone" in message:  # killed or crashed: the next job gets a new process
            self.processes.remove(process)
            process.stop()
            reason = " ".join([reason, *(line.strip() for line in process.errors)])
        self.summary.failed.append((job.label, reason))
        self.show_total()
        count = f"[{self.finished}/{self.finished + len(self.unsettled())}]"
        text = f"{count} {job.label} failed: {reason}\n{message.get('trace', '')}"
        self.display.message(text, bad=True)

    def unsettled(self) -> list[Job]:
        return [*self.pending, *(p.job for p in self.busy if p.job is not None)]

    def show_total(self) -> None:
        self.shown = time.monotonic()
        total = self.finished + len(self.unsettled())
        self.display.total(self.finished, total, self.seconds_left())

    @property
    def finished(self) -> int:
        """Jobs that are done with, well or badly."""
        return self.summary.ran + self.summary.kept + len(self.summary.failed)

    def seconds_left(self) -> float | None:
        """Expected seconds until all is done, if anything is known."""
        total = 0.0
        for job in self.pending:
            expected = self.estimator.expect(job)
            if expected is None:
                return None
            total += expected
        for process in self.busy:
            running = process.job
            assert running is not None
            elapsed = time.monotonic() - process.begun
            if process.fraction > 0.02:
                total += elapsed * (1 / process.fraction - 1)
            else:
                expected = self.estimator.expect(running) or 0.0
                total += max(0.0, expected - elapsed)
        return total / self.jobs


def sweep(
    source: Callable[[], Sequence[Job]],
    folder: Path,
    display: Display,
    *,
    jobs: int = 1,
    budget: float | None = None,
    estimator: Estimator | None = None,
) -> Summary:
    """Run jobs in order of importance on worker processes with one thread each.

    Jobs whose files are complete are kept. Whatever stops a sweep (Ctrl-C, a kill, the budget), the same call
    goes on where it was: files appear only when they are complete.

    Args:
        source: Returns the wanted jobs, the most important first. Asked again when jobs that decide about
            others are finished, and when nothing is left.
        folder: Where the files go.
        display: Shows what happens.
        jobs: Number of processes.
        budget: Seconds. Jobs that are expected to end within them come first, then those that leave a
            checkpoint; what still runs at the end is stopped.
        estimator: What is known about durations.

    Raises:
        OSError: The results cannot be written.
    """
    if jobs < 1:
        raise ValueError(f"the number of processes is 1 or larger, got {jobs}")
    if budget is not None and not budget > 0:
        raise ValueError(f"the time budget is larger than 0, got {duration(budget)}")
    deadline = None if budget is None else time.monotonic() + budget
    return _Sweep(source, Path(folder), display, estimator or Estimator(), deadline, jobs).run()
