"""Names that tell the settings of one table or figure apart: only what differs is said."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.report.settings import Setting

__all__ = ["epochs", "lengths", "names"]


def epochs(setting: Setting) -> int:
    """Epochs a task."""
    return int(setting.experiment["training"]["epochs"])


def lengths(setting: Setting) -> tuple[str, ...]:
    """How much is learnt, in words: tasks, images and epochs."""
    return tuple(spell(setting) for _, spell in _LENGTHS)


def names(settings: Iterable[Setting]) -> dict[Setting, str]:
    """The label of every setting, with the history, the anchor or the scale where these differ.

    Settings that would still read alike are told apart by their parameters, and by their strength.
    """
    settings = tuple(settings)
    said = {setting: [setting.label] for setting in settings}
    for aspect, spell in _ASPECTS:
        concerned = [s for s in settings if aspect(s) is not None]
        if len({str(aspect(s)) for s in concerned}) > 1:
            for setting in concerned:
                said[setting] += [text] if (text := spell(setting)) else []
    for tell in (_parameters, _strength):
        alike: dict[object, list[Setting]] = {}
        for setting, parts in said.items():
            alike.setdefault((setting.preset, setting.importance, *parts), []).append(setting)
        for members in alike.values():
            for setting in members:
                said[setting] += tell(setting, members)
    return {setting: ", ".join(parts) for setting, parts in said.items()}


def _parameters(setting: Setting, alike: Sequence[Setting]) -> list[str]:
    """Parameters of the method in which settings of one name differ."""
    given = [s.parameters for s in alike]
    fields = dict.fromkeys(field for parameters in given for field in parameters)
    differ = [f for f in fields if len({str(parameters.get(f)) for parameters in given}) > 1]
    return [f"{field} {setting.parameters.get(field)}" for field in differ]


def _strength(setting: Setting, alike: Sequence[Setting]) -> list[str]:
    several = len({s.strength for s in alike}) > 1
    return [f"λ = {setting.strength:g}"] if several and setting.strength is not None else []


def _history(setting: Setting) -> str:
    return (setting.history or "").replace("_", " ")


def _weight(setting: Setting) -> tuple[Any, Any] | None:
    """The weight of the new task and the start of a moving average."""
    if setting.history != "moving_average":
        return None
    part = setting.part("history")
    return part.get("new"), part.get("start")


def _spell_weight(setting: Setting) -> str:
    part = setting.part("history")
    return f"new {part.get('new'):g} from {part.get('start', 'first')}"


def _anchor(setting: Setting) -> str:
    return "" if setting.anchor == "latest" else f"anchor {setting.anchor}"


def _tasks(setting: Setting) -> int:
    return setting.runs[0].result.tasks


def _images(setting: Setting) -> str:
    size = setting.experiment["stream"].get("train_size")
    return "all images" if size is None else f"{size:,} images"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _reset(setting: Setting) -> str:
    when = setting.experiment["training"].get("reset")
    return "" if when == "task" else f"Adam anew: {when}"


_LENGTHS: tuple[tuple[Callable[[Setting], object], Callable[[Setting], str]], ...] = (
    (_tasks, lambda s: _counted(_tasks(s), "task")),
    (_images, _images),
    (epochs, lambda s: _counted(epochs(s), "epoch")),
)

# What may differ (None where it does not apply), and how it is said.
_ASPECTS: tuple[tuple[Callable[[Setting], object], Callable[[Setting], str]], ...] = (
    (lambda s: s.flattened, lambda s: f"÷ {s.flattened}"),
    (lambda s: s.history, _history),
    (_weight, _spell_weight),
    (lambda s: s.anchor, _anchor),
    (_reset, _reset),
    *_LENGTHS,
)
