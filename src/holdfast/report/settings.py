"""A setting is an experiment without its seed: the unit that a table has a row for."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.report.paper import Printed, paper_seeds
from holdfast.report.paper import accuracy as printed_accuracy
from holdfast.results import Result

__all__ = [
    "APPROXIMATION_ORDER",
    "IMPORTANCE_ORDER",
    "PRESET_ORDER",
    "Run",
    "Setting",
    "group",
    "words",
]

APPROXIMATION_ORDER = (
    "diagonal",
    "block_diagonal",
    "count_sketch",
    "osnap",
    "srht",
    "dense_sketch",
    "nystrom",
    "low_rank",
    "diagonal_plus_low_rank",
    "kronecker",
    "kronecker_plus_low_rank",
    "full",
)
IMPORTANCE_ORDER = ("ewc", "mas", "scp", "custom")
PRESET_ORDER = ("paper", "original-code", "fair")
_WORDS = {
    "ewc": "EWC",
    "mas": "MAS",
    "scp": "SCP",
    "diagonal": "Diagonal",
    "block_diagonal": "Block-diagonal",
    "count_sketch": "Sketched",
    "osnap": "OSNAP",
    "srht": "SRHT",
    "dense_sketch": "Dense sketch",
    "nystrom": "Nyström",
    "full": "Full",
    "low_rank": "Rank",
    "diagonal_plus_low_rank": "Diagonal + rank",
    "kronecker": "Kronecker",
    "kronecker_plus_low_rank": "Kronecker + rank",
}


def words(key: str | None) -> str:
    """A registry key as a reader writes it."""
    if key is None:
        return ""
    return _WORDS.get(key, key.replace("_", " ").capitalize())


@dataclass(frozen=True, eq=False)
class Run:
    """One result, with its experiment as the JSON that settings are compared by."""

    id: str
    experiment: Mapping[str, Any]
    result: Result

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.result.experiment.seed


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ in nothing but the seed."""

    experiment: Mapping[str, Any]
    runs: tuple[Run, ...]

    @cached_property
    def key(self) -> str:
        """Canonical JSON of the experiment without its seed."""
        return json.dumps(self.experiment, sort_keys=True, separators=(",", ":"))

    @property
    def recipe(self) -> str:
        """Name of the recipe the experiment came from."""
        return str(self.experiment["recipe"])

    @property
    def preset(self) -> str:
        """Name of the preset."""
        return str(self.experiment["preset"])

    @property
    def role(self) -> str:
        """``report``, ``tune`` or ``single``."""
        return str(self.experiment.get("role", "report"))

    @property
    def mode(self) -> str:
        """``sequential`` or ``joint``."""
        return str(self.experiment.get("mode", "sequential"))

    def part(self, axis: str) -> Mapping[str, Any]:
        """The JSON of the regularizer's ``axis``; empty without a regularizer."""
        found = (self.experiment.get("regularizer") or {}).get(axis)
        return found if isinstance(found, Mapping) else {}

    @property
    def importance(self) -> str | None:
        """Registry key of the importance; None without a regularizer."""
        return self.part("importance").get("name")

    @property
    def approximation(self) -> str | None:
        """Registry key of the approximation; None without a regularizer."""
        return self.part("approximation").get("name")

    @property
    def history(self) -> str | None:
        """Registry key of the history; None without a regularizer."""
        return self.part("history").get("name")

    @property
    def anchor(self) -> str | None:
        """``latest`` or ``each``; None without a regularizer."""
        return (self.experiment.get("regularizer") or {}).get("anchor")

    @property
    def strength(self) -> float | None:
        """λ; None without a regularizer."""
        return (self.experiment.get("regularizer") or {}).get("strength")

    @property
    def rank(self) -> int | None:
        """The rank of a low-rank matrix, which the paper's tables tell apart."""
        return self.part("approximation").get("rank") if self.approximation == "low_rank" else None

    @property
    def flattened(self) -> str | None:
        """How the original code's flattened diagonal is normalised; None for a correct one."""
        found = self.experiment.get("original_diagonal")
        return None if found is None else str(found["normalise"])

    @property
    def storage(self) -> str:
        """Precision in which the penalty keeps its matrix."""
        return str(self.experiment.get("storage", "float32"))

    @property
    def limit(self) -> int | None:
        """How many examples of a task consolidation looked at; None for all of them."""
        return self.experiment.get("limit")

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters of importance and approximation in one dict."""
        both = {**self.part("importance"), **self.part("approximation")}
        return {k: v for k, v in both.items() if k != "name"}

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that were run, ascending."""
        return tuple(run.seed for run in self.runs)

    @property
    def paper_runs(self) -> tuple[Run, ...]:
        """The runs with the paper's seeds, where these are known."""
        seeds = paper_seeds(self.recipe, self.preset) or ()
        return tuple(run for run in self.runs if run.seed in seeds)

    @property
    def paper(self) -> Printed | None:
        """The number the paper printed for this importance and approximation."""
        return printed_accuracy(self.recipe, self.importance, self.approximation, self.rank)

    @property
    def label(self) -> str:
        """The approximation, its size, and what it was computed from, as a table shows it."""
        if self.approximation is None:
            return "Joint training" if self.mode == "joint" else "No regularisation"
        said = [self._method]
        said += ["flattened"] if self.flattened else []
        said += [] if self.limit is None else [f"from {self.limit:,} examples"]
        said += [] if self.storage == "float32" else [self.storage]
        return ", ".join(said)

    @property
    def _method(self) -> str:
        """The approximation, its size and its variant."""
        name, parameters = words(self.approximation), self.part("approximation")
        if self.approximation == "kronecker":
            name = f"{name}, rank {parameters['rank']}" if "rank" in parameters else name
        elif "rank" in parameters:
            name = f"{name} {parameters['rank']}"
        elif self.approximation == "block_diagonal":
            name = f"{name} ({parameters['size']} × {parameters['size']})"
        elif "size" in parameters:
            name = f"{name} (t = {parameters['size']})"
        return ", ".join([name, *self.variant])

    @property
    def variant(self) -> list[str]:
        """What a member of a family is beside its size."""
        parameters = self.part("approximation")
        said = ["eigen"] if parameters.get("correction") == "eigen" else []
        if parameters.get("merge") == "stack" and (self.approximation or "").startswith("kron"):
            said.append("stack")  # elsewhere it changes the number of rows, which is in the floats
        said += ["shrunk"] if parameters.get("shrink") else []
        return said + (["Gaussian"] if parameters.get("kind") == "gaussian" else [])

    def deviation(self, base: "Setting | None") -> str:
        """In words, what differs from another setting of the same method."""
        said = []
        if self.approximation is None:
            said.append("all tasks so far at once" if self.mode == "joint" else "nothing is held")
        if base is None:
            return ", ".join(said)
        if self.flattened != base.flattened:
            how = "÷ examples" if self.flattened == "examples" else "÷ batches"
            said.append(f"flattened diagonal, {how}" if self.flattened else "correct diagonal")
        if self.part("history") != base.part("history"):
            said.append(f"history {_spell(self.part('history'))}")
        for axis in ("importance", "approximation"):
            # the flattened diagonal's labels and outputs come with it
            if self.part(axis) != base.part(axis) and self.flattened == base.flattened:
                said.append(_spell(self.part(axis), unlike=base.part(axis)))
        if self.anchor != base.anchor:
            said.append(f"anchor {self.anchor}")
        if self.strength != base.strength:
            said.append(f"λ = {self.strength:g}")
        ours, theirs = self.experiment, base.experiment
        known = ("regularizer", "original_diagonal", "recipe", "preset", "role")
        for field in sorted((ours.keys() | theirs.keys()) - set(known)):
            a, b = ours.get(field), theirs.get(field)
            if a != b:
                said.append(f"{field} {_spell(a, unlike=b) if isinstance(a, Mapping) else a}")
        return ", ".join(said)

    @property
    def _size(self) -> int:
        """Rank or size; 0 where the approximation has none."""
        parameters = self.part("approximation")
        return parameters.get("rank") or parameters.get("size") or 0

    @property
    def order(self) -> tuple[Any, ...]:
        """Where the setting stands in a table."""
        return (
            _place(PRESET_ORDER, self.preset),
            _place(IMPORTANCE_ORDER, self.importance),
            _place(APPROXIMATION_ORDER, self.approximation),
            self._size,
            self.key,
        )


def _spell(part: Mapping[str, Any], unlike: object = None) -> str:
    """A configuration in words: its name and its fields, or only those that differ."""
    if not isinstance(unlike, Mapping) or unlike.get("name") != part.get("name"):
        name = str(part.get("name", "")).replace("_", " ")
        fields = [f"{k} {v}" for k, v in part.items() if k != "name"]
    else:
        name, fields = "", [f"{k} {v}" for k, v in part.items() if unlike.get(k) != v]
    return " ".join([name, *fields]).strip()


def _place(order: Sequence[str], name: str | None) -> tuple[int, str]:
    return (order.index(name), "") if name in order else (len(order), name or "~")


def group(runs: Iterable[Run]) -> tuple[Setting, ...]:
    """Gather runs into settings, in the order of the tables."""
    found: dict[str, list[Run]] = {}
    parts: dict[str, dict[str, Any]] = {}
    for run in runs:
        experiment = {k: v for k, v in run.experiment.items() if k != "seed"}
        key = json.dumps(experiment, sort_keys=True)
        found.setdefault(key, []).append(run)
        parts[key] = experiment
    settings = [
        Setting(parts[key], tuple(sorted(members, key=lambda run: run.seed)))
        for key, members in found.items()
    ]
    return tuple(sorted(settings, key=lambda setting: setting.order))
