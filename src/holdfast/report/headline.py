"""Which setting stands for a cell of the paper's table when several were run."""

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.report.selection import Selection, cell, selections
from holdfast.report.settings import Setting

__all__ = ["headlines", "primaries"]

_RESET = {"original-code": "epoch"}  # when Adam starts anew; with every task elsewhere
_ORIGINAL_BLOCK = {"ewc": 10}  # the original code passed a block size for MAS alone
_PAPER_SIZE = {
    "block_diagonal": ("size", 50),
    "count_sketch": ("size", 50),
    "low_rank": ("rank", 50),
}


def _distance(setting: Setting, tuned: dict[str, Selection]) -> tuple[Any, ...]:
    """How far a setting lies from the one the paper reports for its cell.

    In `original-code` that is the flattened diagonal, divided by the number of batches (as it was
    when the numbers were made), and the block size is the preset's own. In `fair` it is the chosen
    strength.
    """
    name, wanted = _PAPER_SIZE.get(setting.approximation or "", ("", None))
    if setting.preset == "original-code" and setting.approximation == "block_diagonal":
        wanted = _ORIGINAL_BLOCK.get(setting.importance or "", wanted)
    parameters = setting.part("approximation")
    if setting.preset == "original-code" and setting.approximation == "diagonal":
        diagonal = {"batches": 0, "examples": 1}.get(setting.flattened or "", 2)
    else:
        diagonal = int(setting.flattened is not None)
    selection = tuned.get(cell(setting))
    return (
        name != "" and parameters.get(name) != wanted,
        parameters.get("copies", 1) != 1,
        setting.history != "moving_average",
        setting.anchor != "latest",
        setting.experiment.get("training", {}).get("reset") != _RESET.get(setting.preset, "task"),
        diagonal,
        selection is not None and selection.chosen != setting.strength,
        -int(setting.experiment.get("training", {}).get("epochs", 0)),
        -len(setting.runs),
        setting.key,
    )


def _best(settings: Iterable[Setting], *, ranks: bool) -> Iterator[Setting]:
    settings = tuple(settings)
    tuned = selections(settings)
    cells: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        if setting.role == "report" and setting.approximation is not None:
            key = (setting.preset, setting.importance, setting.approximation)
            cells.setdefault((*key, setting.rank if ranks else None), []).append(setting)
    for members in cells.values():
        yield min(members, key=lambda setting: _distance(setting, tuned))


def headlines(settings: Iterable[Setting]) -> list[Setting]:
    """One setting per (preset, importance, approximation): the paper's, or the nearest to it."""
    return sorted(_best(settings, ranks=False), key=lambda setting: setting.order)


def primaries(settings: Iterable[Setting]) -> list[Setting]:
    """The columns of the paper's table: like :func:`headlines`, with a cell for every rank."""
    return sorted(_best(settings, ranks=True), key=lambda setting: setting.order)
