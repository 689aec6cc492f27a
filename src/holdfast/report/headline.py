"""Which setting stands for a cell of the paper's table when several were run."""

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from holdfast.report.naming import epochs
from holdfast.report.selection import Selection, cell, selections
from holdfast.report.settings import Setting
from holdfast.report.standard import main_history, main_scales, scale

__all__ = ["baselines", "companions", "headlines", "primaries", "sized"]

_RESET = {"original-code": "epoch"}  # when Adam starts anew; with every task elsewhere
_ORIGINAL_BLOCK = {"ewc": 10}  # the original code passed a block size for MAS alone
_OUTPUTS = {"cifar100": "softmax"}  # of MAS, where both were run: what the printed λ belongs to
_PAPER_SIZE = {
    "block_diagonal": ("size", 50),
    "count_sketch": ("size", 50),
    "low_rank": ("rank", 50),
}


def _distance(
    setting: Setting, tuned: dict[str, Selection], scales: dict[str, str]
) -> tuple[Any, ...]:
    """How far a setting lies from the one the paper reports for its cell.

    The scale comes first: a trial of another length or with fewer images stands for nothing. In
    `original-code` the diagonal is the flattened one, divided by the number of batches (as in
    the code of their time), and the block size is the preset's own. Where strengths were tuned
    it is the chosen one.
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
        scale(setting.experiment) != scales[setting.preset],
        name != "" and parameters.get(name) != wanted,
        parameters.get("copies", 1) != 1,
        setting.part("importance").get("outputs") != _OUTPUTS.get(setting.recipe, "logits"),
        len(setting.variant),
        setting.history != main_history(setting.recipe, setting.preset),
        setting.anchor != "latest",
        setting.experiment.get("training", {}).get("reset") != _RESET.get(setting.preset, "task"),
        diagonal,
        setting.part("importance").get("labels", "true") != "true",  # of EWC: the paper's rows
        setting.storage != "float32",
        selection is not None and selection.chosen != setting.strength,
        -len(setting.runs),
        -epochs(setting),
        setting.key,
    )


def _best(settings: Iterable[Setting], key: Callable[[Setting], Hashable]) -> list[Setting]:
    """The nearest setting of every cell, in the order of the tables."""
    settings = tuple(settings)
    tuned, scales = selections(settings), main_scales(settings)
    cells: dict[Hashable, list[Setting]] = {}
    for setting in settings:
        if setting.role == "report" and setting.approximation is not None:
            cells.setdefault((setting.preset, setting.importance, key(setting)), []).append(
                setting
            )
    found = [
        min(members, key=lambda setting: _distance(setting, tuned, scales))
        for members in cells.values()
    ]
    return sorted(found, key=lambda setting: setting.order)


def headlines(settings: Iterable[Setting]) -> list[Setting]:
    """One setting per (preset, importance, approximation): the paper's, or the nearest to it."""
    return _best(settings, lambda s: s.approximation)


def primaries(settings: Iterable[Setting]) -> list[Setting]:
    """The columns of the paper's table: like :func:`headlines`, with a cell for every rank."""
    return _best(settings, lambda s: (s.approximation, s.rank))


def companions(settings: Iterable[Setting]) -> list[Setting]:
    """The flattened diagonals of presets whose own diagonal is the correct one.

    The paper printed its numbers for them.
    """
    settings = tuple(settings)
    own = primaries(settings)
    correct = {(s.preset, s.importance) for s in own if s.approximation == "diagonal"}
    correct -= {(s.preset, s.importance) for s in own if s.flattened is not None}
    flattened = [s for s in settings if s.flattened and (s.preset, s.importance) in correct]
    others = [s for s in settings if s.flattened is None]  # they say what the scale is
    return [s for s in _best([*flattened, *others], lambda s: s.flattened) if s.flattened]


def sized(settings: Iterable[Setting]) -> list[Setting]:
    """Every approximation at every size, every precision and every scale that was run."""

    def key(setting: Setting) -> Hashable:
        parts = json.dumps(setting.part("approximation"), sort_keys=True)
        return parts, setting.storage, setting.limit, scale(setting.experiment)

    return _best(settings, key)


def baselines(settings: Iterable[Setting], *, every_scale: bool = False) -> list[Setting]:
    """No regularisation and joint training: one of each per preset, at the scale of its tables.

    Args:
        settings: All settings.
        every_scale: One of each for every scale that was run instead.
    """
    settings = tuple(settings)
    scales = main_scales(settings)
    found: dict[Hashable, list[Setting]] = {}
    for setting in settings:
        if setting.role == "report" and setting.approximation is None:
            own = scale(setting.experiment) if every_scale else ""
            found.setdefault((setting.preset, setting.mode, own), []).append(setting)

    def distance(setting: Setting) -> tuple[Any, ...]:
        other = scale(setting.experiment) != scales[setting.preset]
        return other, -len(setting.runs), -epochs(setting), setting.key

    return sorted((min(members, key=distance) for members in found.values()), key=_by_order)


def _by_order(setting: Setting) -> tuple[Any, ...]:
    return setting.order
