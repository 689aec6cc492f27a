"""What a sweep shows while it runs: a live display on a terminal, plain lines elsewhere."""

from abc import ABC, abstractmethod
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

__all__ = ["Display", "Lines", "Live", "duration", "for_console"]


def duration(seconds: float) -> str:
    """Seconds in words, e.g. ``1 h 05 min``."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02d} min"


class Display(ABC):
    """Receives what happens; the number of jobs may grow while a sweep runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    @abstractmethod
    def total(self, finished: int, total: int, left: float | None) -> None:
        """Jobs finished, jobs in all, and the seconds left if they can be estimated."""

    @abstractmethod
    def started(self, slot: int, label: str) -> None:
        """A process began a job."""

    @abstractmethod
    def progress(self, slot: int, fraction: float) -> None:
        """A process got on with its job."""

    @abstractmethod
    def finished(self, slot: int, label: str, note: str, seconds: float) -> None:
        """A process finished a job."""

    @abstractmethod
    def message(self, text: str, *, bad: bool = False) -> None:
        """Something worth a line of its own."""


class Lines(Display):
    """One line per finished job."""

    def __init__(self, console: Console) -> None:
        self._console, self._count, self._left = console, "", ""

    def total(self, finished: int, total: int, left: float | None) -> None:
        self._count = f"[{finished}/{total}]"
        self._left = "" if left is None else f", about {duration(left)} left"

    def started(self, slot: int, label: str) -> None:
        return None

    def progress(self, slot: int, fraction: float) -> None:
        return None

    def finished(self, slot: int, label: str, note: str, seconds: float) -> None:
        self._line(f"{self._count} {label}: {note} in {seconds:.1f} s{self._left}")

    def message(self, text: str, *, bad: bool = False) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Live(Display):
    """A bar for the whole sweep and one for every process."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._all = self._progress.add_task("[bold]all runs", total=1, note="")
        self._slots: dict[int, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for task in self._slots.values():
            self._progress.remove_task(task)
        self._progress.stop()

    def total(self, finished: int, total: int, left: float | None) -> None:
        time_left = "" if left is None else f", about {duration(left)} left"
        self._progress.update(
            self._all, completed=finished, total=total, note=f"{finished} of {total}{time_left}"
        )

    def started(self, slot: int, label: str) -> None:
        if slot in self._slots:
            self._progress.remove_task(self._slots[slot])
        self._slots[slot] = self._progress.add_task(escape(label), total=1.0, note="")

    def progress(self, slot: int, fraction: float) -> None:
        self._progress.update(self._slots[slot], completed=fraction)

    def finished(self, slot: int, label: str, note: str, seconds: float) -> None:
        self._progress.update(self._slots[slot], completed=1.0)
        self._progress.console.print(
            f"[green]✓[/] {escape(label)}  [bold]{escape(note)}[/]  [dim]{seconds:.1f} s[/]",
            highlight=False,
        )

    def message(self, text: str, *, bad: bool = False) -> None:
        self._progress.console.print(Text(text, style="red" if bad else ""))


def for_console(console: Console) -> Display:
    """The display that suits where the output goes."""
    return Live(console) if console.is_terminal else Lines(console)
