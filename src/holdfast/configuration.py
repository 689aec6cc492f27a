r"""Recipes as values: frozen dataclasses that become JSON and come back equal.

A recipe (an importance, an approximation, a history, a stream, …) is a frozen dataclass. Members
of an axis are listed in one literal dict, ``name -> class``; everything else that needs the list
(the command line, error messages, documentation, tests) reads that dict.
"""

import dataclasses
import difflib
import functools
import numbers
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

__all__ = [
    "from_json",
    "keep_as",
    "keep_positive",
    "key_of",
    "lookup",
    "plain",
    "positive",
    "register",
    "to_json",
]

T = TypeVar("T")
Registry = Mapping[str, type]

_REGISTRIES: dict[type, tuple[str, Registry]] = {}  # axis (base class) -> (its noun, its members)

QUIET = "quiet"  # in the metadata of a field: written only where it differs from its default


def register(axis: type, noun: str, members: Registry) -> Registry:
    """Declare the members of an axis, so that a field of that type can be read from JSON."""
    _REGISTRIES[axis] = (noun, members)
    return members


def lookup(noun: str, members: Mapping[str, T], name: object) -> T:
    """The member called ``name``, or an error that lists the known ones."""
    if isinstance(name, str) and name in members:
        return members[name]
    near = difflib.get_close_matches(str(name), members, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {noun} {name!r}; known: {', '.join(members)}{hint}")


def key_of(members: Registry, value: object) -> str:
    """The name under which the class of ``value`` is registered."""
    for key, cls in members.items():
        if type(value) is cls:
            return key
    raise ValueError(f"{type(value).__name__} is not registered; known: {', '.join(members)}")


def positive(name: str, value: object, otherwise: str = "") -> int:
    """A count as a plain integer; NumPy's integers are as good."""
    try:
        whole = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = 0
    if whole < 1:
        also = f" {otherwise}" if otherwise else ""
        raise ValueError(f"{name} must be a positive integer{also}, got {value!r}")
    return whole


def keep_positive(recipe: object, *names: str, otherwise: str = "") -> None:
    """Let fields of a recipe be positive integers, of Python's kind: their files are JSON."""
    for name in names:
        object.__setattr__(recipe, name, positive(name, getattr(recipe, name), otherwise))


def keep_as(recipe: object, part: object, *names: str) -> None:
    """Let fields of a recipe be what they are in a part of it."""
    for name in names:
        object.__setattr__(recipe, name, getattr(part, name))


def plain(value: Any) -> Any:
    """A number as one of Python's, of NumPy's; anything else as it is."""
    real = isinstance(value, numbers.Real) and not isinstance(value, int | float)
    return float(value) if real else value


def to_json(value: Any) -> Any:
    """A recipe as plain JSON values; members of a registered axis carry their name.

    A field with ``metadata={QUIET: True}`` is left out while it has its default: an option that came
    later does not change what older files and the names of runs say.

    Raises:
        TypeError: A value that JSON cannot hold is part of the recipe.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not (f.metadata.get(QUIET) and getattr(value, f.name) == f.default)
        }
        for _, members in _REGISTRIES.values():
            for key, cls in members.items():
                if type(value) is cls:
                    return {"name": key, **fields}
        for axis in _REGISTRIES:  # a member of one's own goes by the name of its class
            if isinstance(value, axis):
                return {"name": f"{type(value).__module__}:{type(value).__qualname__}", **fields}
        return fields
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):  # written for people and for comparison; it cannot be read back
        return _name_of(value)
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form")


def _name_of(function: Any) -> str:
    """Where a function is defined; an object that can be called goes by its class."""
    if isinstance(function, functools.partial):
        return f"partial({_name_of(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def from_json(kind: Any, data: Any, what: str = "") -> Any:
    """Build a value of type ``kind`` from what :func:`to_json` returned.

    ``kind`` may be a dataclass, the base class of a registered axis, or any annotation a field of
    a recipe carries. ``what`` is the path of the field, for messages.
    """
    what = what or getattr(kind, "__name__", str(kind))
    if kind in _REGISTRIES:
        noun, members = _REGISTRIES[kind]
        if not isinstance(data, Mapping) or "name" not in data:
            raise ValueError(
                f"{what}: expected an object with a 'name' ({', '.join(members)}), got {data!r}"
            )
        cls = lookup(noun, members, data["name"])
        return _build(cls, {k: v for k, v in data.items() if k != "name"}, what)
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), data, what)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _from_union(args, data, what)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise ValueError(f"{what}: expected a list, got {data!r}")
        inner = [args[0]] * len(data) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(inner) != len(data):
            raise ValueError(f"{what}: expected {len(inner)} values, got {len(data)}")
        return tuple(
            from_json(k, v, f"{what}[{i}]")
            for i, (k, v) in enumerate(zip(inner, data, strict=True))
        )
    if origin is typing.Literal:
        if data not in args or isinstance(data, bool) != any(
            isinstance(a, bool) for a in args if a == data
        ):
            raise ValueError(
                f"{what}: unknown value {data!r}; known: {', '.join(map(repr, args))}"
            )
        return data
    if origin in (dict, Mapping) or (origin and issubclass(origin, Mapping)):
        if not isinstance(data, Mapping):
            raise ValueError(f"{what}: expected an object, got {data!r}")
        return {
            from_json(args[0], k, what): from_json(args[1], v, f"{what}.{k}")
            for k, v in data.items()
        }
    return _scalar(kind, data, what)


def _scalar(kind: Any, data: Any, what: str) -> Any:
    if kind is Any:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind in (int, float, str, bool, type(None)):
        if type(data) is kind:
            return data
        name = "null" if kind is type(None) else kind.__name__
        raise ValueError(f"{what}: expected {name}, got {data!r}")
    if typing.get_origin(kind) is Callable or kind is Callable:
        raise ValueError(f"{what}: a function cannot be read from a file; build it in Python")
    raise TypeError(f"{what}: no rule to read {kind!r}")


def _from_union(args: tuple[Any, ...], data: Any, what: str) -> Any:
    if data is None and type(None) in args:
        return None
    reasons = []
    for kind in args:
        if kind is type(None):
            continue
        try:
            return from_json(kind, data, what)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" or ".join(reasons))


def _build(cls: type, data: Any, what: str) -> Any:
    if not isinstance(data, Mapping):
        raise ValueError(
            f"{what}: expected an object with the fields of {cls.__name__}, got {data!r}"
        )
    kinds = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in data:
        lookup(f"field of {what}", fields, name)
    missing = [
        n
        for n, f in fields.items()
        if n not in data
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{what}: missing {', '.join(missing)}")
    return cls(**{n: from_json(kinds[n], v, f"{what}.{n}") for n, v in data.items()})
