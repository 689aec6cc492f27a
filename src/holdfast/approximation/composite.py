"""Several approximations side by side, each for some of the parameters."""

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.approximation.base import Approximation, Setting
from holdfast.matrices import Offset, PartsMatrix, PSDMatrix
from holdfast.matrices.parts import Ranges
from holdfast.parameters import ParameterSpace
from holdfast.rows import RowBatch
from holdfast.views import PartialRows

__all__ = ["Composite"]


@dataclass(frozen=True)
class Group:
    """The parameters of one approximation."""

    member: Approximation
    setting: Setting  # where it works: its own parameters, its own randomness
    positions: list[int]  # of its parameters among all
    ranges: Ranges  # of the whole flat vector


@dataclass(frozen=True)
class _State:
    groups: list[Group]
    states: list[Any]
    room: Tensor
    dim: int


@dataclass(frozen=True)
class Composite(Approximation):
    """An approximation for each group of parameters; terms between the groups are dropped.

    A parameter belongs to the first pattern that matches its name or the class of its layer, or a class that
    this is derived from (attention's ``out_proj`` is a ``"Linear"``). Within a group everything is as the
    approximation has it, across layers too. The data is read once; every member makes the backward passes
    of its own.

    Args:
        parts: Shell patterns (``"head.*"``, ``"*.bias"``, ``"Linear"``, ``"*"``) and the approximation of
            what they match, in order.

    Example:
        >>> from holdfast import Composite, Diagonal, LowRank
        >>> recipe = Composite({"Linear": LowRank(rank=50), "*": Diagonal()})
    """

    parts: Mapping[str, Approximation] | tuple[tuple[str, Approximation], ...]

    def __post_init__(self) -> None:
        given = tuple(self.parts.items()) if isinstance(self.parts, Mapping) else self.parts
        example = '{"*.bias": Diagonal(), "*": LowRank()}'
        if not isinstance(given, tuple) or not all(_is_pair(part) for part in given):
            raise TypeError(
                "parts: expected a mapping from patterns to approximations, as in "
                f"{example}, got {self.parts!r}"
            )
        parts: tuple[tuple[str, Approximation], ...] = given
        if not parts:
            raise ValueError(f"parts is empty; expected e.g. {example}")
        for pattern, member in parts:
            if not isinstance(pattern, str):
                named = (
                    f"; did you mean {pattern.__name__!r}?" if isinstance(pattern, type) else ""
                )
                raise TypeError(f"a pattern must be a string, got {pattern!r}{named}")
            if not isinstance(member, Approximation):
                raise TypeError(
                    f"the part {pattern!r} must be an instance of hf.Approximation, got {member!r}"
                )
        patterns = [pattern for pattern, _ in parts]
        twice = {pattern for pattern in patterns if patterns.count(pattern) > 1}
        if twice:
            raise ValueError(f"the pattern {twice.pop()!r} is there twice; join the two")
        object.__setattr__(self, "parts", parts)

    @property
    def members(self) -> tuple[tuple[str, Approximation], ...]:
        """The patterns and their approximations, in order."""
        assert isinstance(self.parts, tuple)
        return self.parts

    @property
    def fits_int8(self) -> bool:
        return all(member.fits_int8 for _, member in self.members)

    def positions(self, space: ParameterSpace) -> list[list[int]]:
        """Which parameters each part holds; only those of a last ``"*"`` may be none.

        Raises:
            ValueError: A parameter matches no pattern, or a pattern finds nothing to hold.
        """
        kinds = space.kinds or ((),) * len(space.names)
        found: list[list[int]] = [[] for _ in self.members]
        missing = []
        for i, (name, kind) in enumerate(zip(space.names, kinds, strict=True)):
            words = name, *kind
            fits = (
                place
                for place, (pattern, _) in enumerate(self.members)
                if any(fnmatch.fnmatchcase(word, pattern) for word in words)
            )
            first = next(fits, None)
            if first is None:
                missing.append(space.names[i])
            else:
                found[first].append(i)
        if missing:
            raise ValueError(
                f"no pattern of Composite matches {', '.join(missing)}; add '*': Diagonal() at the end "
                "for the rest, or leave these parameters free with exclude="
            )
        for (pattern, _), held in zip(self.members, found, strict=True):
            if not held and pattern != "*":
                layers = ", ".join(dict.fromkeys(kind[0] for kind in kinds if kind))
                raise ValueError(
                    f"{pattern!r} of Composite has no parameter to hold: what it matches is frozen or "
                    "excluded, or an earlier pattern takes it first, or nothing matches it; the held "
                    f"parameters are {', '.join(space.names)}, in layers of the classes {layers}"
                )
        return found

    def groups(self, setting: Setting) -> list[Group]:
        """The groups that have parameters."""
        return [
            Group(member, setting.part(held, place), held, _ranges(setting.space, held))
            for place, ((_, member), held) in enumerate(
                zip(self.members, self.positions(setting.space), strict=True)
            )
            if held
        ]

    def hash_ids(self, setting: Setting) -> tuple[str, ...]:
        ids = (group.member.hash_ids(group.setting) for group in self.groups(setting))
        return tuple(itertools.chain(*ids))

    def start(self, setting: Setting) -> _State:
        groups = self.groups(setting)
        room = setting.zeros(setting.dim if len(groups) > 1 else 0)
        states = [group.member.start(group.setting) for group in groups]
        return _State(groups, states, room, setting.dim)

    def update(self, state: Any, rows: RowBatch) -> None:
        alone = len(state.groups) == 1
        for group, own in zip(state.groups, state.states, strict=True):
            seen = rows if alone else PartialRows(rows, group.positions, group.ranges, state.room)
            group.member.update(own, seen)

    def finish(self, state: Any) -> PartsMatrix:
        pairs = zip(state.groups, state.states, strict=True)
        matrices = [group.member.finish(own) for group, own in pairs]
        return PartsMatrix(matrices, [group.ranges for group in state.groups], state.dim)

    def nbytes(self, setting: Setting) -> int:
        groups = self.groups(setting)
        room = setting.nbytes(setting.dim) if len(groups) > 1 else 0
        return room + sum(group.member.nbytes(group.setting) for group in groups)

    def add(self, old: PSDMatrix, offset: Offset, new: PSDMatrix) -> tuple[PSDMatrix, Offset]:
        assert isinstance(old, PartsMatrix)
        assert isinstance(new, PartsMatrix)
        known = list(zip(old.parts, old.offsets(offset), strict=True))
        if new.places[: len(known)] != old.places:
            raise ValueError(_changed(*(p for p, _ in self.members)))
        parts: list[PSDMatrix] = []
        offsets: list[Offset] = []
        for place, part in enumerate(new.parts):  # only the last part can be without parameters
            if place < len(known):
                part, own = self.members[place][1].add(*known[place], part)
            else:  # it had none before the network grew
                own = part.moved((), torch.zeros_like(part.diagonal())) if offset else ()
            parts.append(part)
            offsets.append(own)
        return PartsMatrix(parts, new.places, new.dim), tuple(itertools.chain(*offsets))

    def embed(self, matrix: PSDMatrix, space: ParameterSpace, index: Tensor) -> PSDMatrix:
        assert isinstance(matrix, PartsMatrix)
        grown = self._grown(matrix, space, index)
        parts = [
            member.embed(part, own, inner)
            for part, (member, own, _, inner) in zip(matrix.parts, grown, strict=True)
        ]
        return PartsMatrix(parts, [ranges for _, _, ranges, _ in grown], space.dim)

    def embed_offset(
        self, matrix: PSDMatrix, offset: Offset, space: ParameterSpace, index: Tensor
    ) -> Offset:
        assert isinstance(matrix, PartsMatrix)
        grown = self._grown(matrix, space, index)
        each = zip(matrix.parts, matrix.offsets(offset), grown, strict=True)
        found = [
            member.embed_offset(part, own, inside, inner)
            for part, own, (member, inside, _, inner) in each
        ]
        return tuple(itertools.chain(*found))

    def _grown(
        self, matrix: PartsMatrix, space: ParameterSpace, index: Tensor
    ) -> list[tuple[Approximation, ParameterSpace, Ranges, Tensor]]:
        """For every part: its member, its parameters, their ranges, and where its old entries go in them."""
        found = []
        each = zip(matrix.entries(), self.members, self.positions(space), strict=False)
        for entries, (pattern, member), held in each:
            ranges = _ranges(space, held)
            places = torch.full((space.dim,), -1)
            size = 0
            for start, end in ranges:
                places[start:end] = torch.arange(size, size + end - start)
                size += end - start
            inner = places[index.cpu()[entries]]
            if bool((inner < 0).any()):
                raise ValueError(_changed(pattern))
            found.append((member, space.part(held), ranges, inner))
        return found


def _is_pair(part: object) -> bool:
    return isinstance(part, tuple) and len(part) == 2


def _changed(*patterns: str) -> str:
    return (
        f"parameters that {', '.join(map(repr, patterns))} of Composite held before belong to another "
        "pattern now; keep the classes of their layers, or match them by name"
    )


def _ranges(space: ParameterSpace, held: Sequence[int]) -> Ranges:
    """Where some parameters lie in the flat vector; neighbours are joined."""
    found: list[tuple[int, int]] = []
    for start, end in (space.ranges[i] for i in held):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return tuple(found)
