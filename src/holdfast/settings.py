"""Typed changes to a recipe from the command line: ``regularizer.strength=1e3``."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from holdfast.configuration import from_json, lookup

__all__ = ["change", "change_all"]

T = TypeVar("T")


def change_all(value: T, settings: Sequence[str], *, skip_absent: bool = False) -> T:
    """Apply ``field=value`` texts in order.

    Args:
        value: A frozen dataclass.
        settings: Texts like ``training.epochs=10``.
        skip_absent: Leave out a setting below a part that is null in this value, instead of refusing it.
    """
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ValueError(
                f"expected field=value, e.g. regularizer.strength=1e3, got {setting!r}"
            )
        if skip_absent and _absent(value, path):
            continue
        value = change(value, path.strip(), text.strip())
    return value


def change(value: T, path: str, text: str, where: str = "") -> T:
    """A copy of a frozen dataclass with one field, possibly of a part, read from text.

    The text is read as the field's type wants it: numbers and lists as JSON (``[2,128,2]``), ``null``, words
    as they are, and the name alone for a member with its default fields (``approximation=diagonal``).

    Raises:
        ValueError: An unknown field (the known ones are listed) or a value of the wrong type.
    """
    name, dot, rest = path.partition(".")
    here = f"{where}.{name}" if where else name
    fields = {f.name: f for f in dataclasses.fields(value)}  # type: ignore[arg-type]  # T is one
    lookup(f"field of {where or type(value).__name__.lower()}", fields, name)
    if not dot:
        kind = typing.get_type_hints(type(value))[name]
        return _replace(value, name, _read(kind, text, here))
    part = getattr(value, name)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        raise ValueError(f"{here} is {part!r} and has no field {rest!r}")
    return _replace(value, name, change(part, rest, text, here))


def _replace(value: T, name: str, new: Any) -> T:
    """The dataclass with one field replaced."""
    changed: T = dataclasses.replace(value, **{name: new})  # type: ignore[type-var]
    return changed


def _read(kind: Any, text: str, where: str) -> Any:
    """The text as a value of a field's type."""
    candidates: list[Any] = []
    try:
        candidates.append(json.loads(text))
    except ValueError:
        pass  # not JSON: a word
    candidates.append({"name": text} if _is_axis(kind) else text)
    problems = []
    for candidate in candidates:
        try:
            return from_json(kind, candidate, where)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[-1])  # the word as it was typed


def _is_axis(kind: Any) -> bool:
    """Whether a field holds members of an axis (its type is abstract), which a name alone stands for."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is_axis(k) for k in typing.get_args(kind))
    return inspect.isabstract(kind)


def _absent(value: Any, path: str) -> bool:
    """Whether a part on the way to the field is null."""
    for name in path.split(".")[:-1]:
        value = getattr(value, name, value)
        if value is None:
            return True
    return False
