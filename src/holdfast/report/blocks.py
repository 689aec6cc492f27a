"""The values a report is made of: cells, tables, figures, sections.

They become Markdown here and HTML in the page's template.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "MISSING",
    "Block",
    "Cell",
    "Column",
    "Figure",
    "Missing",
    "Panel",
    "Section",
    "Table",
    "Text",
    "between",
    "number",
    "plus_minus",
    "signed",
    "size",
]

MISSING = "—"
Tone = Literal["", "good", "bad", "open", "quiet"]


@dataclass(frozen=True)
class Cell:
    """One cell.

    Args:
        text: What is read.
        value: What is sorted by; None sorts last.
        note: A second, smaller line.
        tone: Meaning that is shown as colour, never by colour alone.
    """

    text: str = MISSING
    value: float | str | None = None
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Column:
    """A column's heading; ``help`` explains it in the page's tooltip and in the notes."""

    label: str
    numeric: bool = True
    help: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its caption, a note that says how to read it, and the command that makes it."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    command: str = ""
    kind: str = field(default="table", init=False)

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.name}: a row of {len(row)} cells"

    def markdown(self) -> str:
        """The table as GitHub-flavoured Markdown."""
        head = "| " + " | ".join(_escape(c.label) for c in self.columns) + " |"
        rule = "|" + "|".join("---:" if c.numeric else "---" for c in self.columns) + "|"
        body = ["| " + " | ".join(_markdown(cell) for cell in row) + " |" for row in self.rows]
        parts = [f"**{self.title}**", "", head, rule, *body]
        if self.note:
            parts += ["", self.note]
        if self.command:
            parts += ["", f"Made by `{self.command}`."]
        return "\n".join(parts)


@dataclass(frozen=True)
class Panel:
    """One picture: SVG text for the page and the files, and PNG bytes for places without SVG."""

    name: str
    alt: str
    svg: str
    png: bytes
    wide: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels side by side (one below the other on a phone) under one caption."""

    name: str
    title: str
    panels: Sequence[Panel]
    caption: str = ""
    kind: str = field(default="figure", init=False)

    def markdown(self) -> str:
        """Links to the picture files beside the report."""
        links = [f"![{_escape(p.alt)}](figures/{p.name}.png)" for p in self.panels]
        return "\n".join([f"**{self.title}**", "", *links, "", self.caption]).rstrip()


@dataclass(frozen=True)
class Text:
    """Paragraphs of plain text; with ``bullets`` each is an item of a list."""

    paragraphs: Sequence[str]
    bullets: bool = False
    lead: bool = False
    kind: str = field(default="text", init=False)

    def markdown(self) -> str:
        """The paragraphs, separated as Markdown wants them."""
        if self.bullets:
            return "\n".join(f"- {p}" for p in self.paragraphs)
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True)
class Missing:
    """A study that was not run yet, and the command that runs it."""

    what: str
    command: str
    kind: str = field(default="missing", init=False)

    def markdown(self) -> str:
        """One sentence."""
        return f"*{self.what}* To run it: `{self.command}`"


Block = Table | Figure | Text | Missing


@dataclass(frozen=True)
class Section:
    """A heading with its blocks; ``level`` 2 starts an entry of the contents, 3 a part of it."""

    name: str
    title: str
    blocks: Sequence[Block]
    level: int = 2

    def markdown(self) -> str:
        """Heading and blocks."""
        parts = [f"{'#' * self.level} {self.title}", *(b.markdown() for b in self.blocks)]
        return "\n\n".join(parts)


def _escape(text: str) -> str:
    """Text that stays inside its Markdown table cell."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _markdown(cell: Cell) -> str:
    return _escape(cell.text) + (f" ({_escape(cell.note)})" if cell.note else "")


def _plain(value: float, digits: int) -> str:
    """A number with a true minus sign, which zero never has."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def number(value: float | None, digits: int = 1) -> Cell:
    """A plain number."""
    if value is None or math.isnan(value):
        return Cell()
    return Cell(_plain(value, digits), value)


def amount(value: float) -> Cell:
    """Numbers per parameter: one decimal, and two digits of what is less than one."""
    return Cell(f"{value:.2g}" if 0 < value < 0.95 else _plain(value, 1), value)


def signed(value: float | None, digits: int = 1) -> Cell:
    """A difference: the sign is always shown, and nothing is "−0.0"."""
    if value is None or math.isnan(value):
        return Cell()
    return Cell(f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−"), value)


def between(low: float, high: float) -> str:
    """An interval of differences, with as many digits as show on which side of zero it lies."""
    digits = 1
    while low * high > 0 and 0 in (round(low, digits), round(high, digits)) and digits < 4:
        digits += 1
    return f"{signed(low, digits).text} to {signed(high, digits).text}"


def plus_minus(mean: float | None, std: float | None, digits: int = 1) -> Cell:
    """Mean ± standard deviation; one seed has no deviation."""
    if mean is None or math.isnan(mean):
        return Cell()
    text = _plain(mean, digits)
    return Cell(text if std is None or math.isnan(std) else f"{text} ± {std:.{digits}f}", mean)


def size(count: float | None) -> Cell:
    """Bytes in the unit that leaves one to three digits before the point."""
    if count is None:
        return Cell()
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return Cell(f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}", count)
