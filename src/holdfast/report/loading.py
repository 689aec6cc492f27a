"""From a results folder to a :class:`Study`: runs by setting, and the artefacts beside them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.recipes import RECIPES
from holdfast.report.command import command
from holdfast.report.headline import baselines, companions, headlines, primaries, sized
from holdfast.report.selection import Selection, searched, selections
from holdfast.report.settings import PRESET_ORDER, Run, Setting, group
from holdfast.report.standard import enough_seeds
from holdfast.results import load_all

__all__ = ["Fisher", "Study", "read"]


@dataclass(frozen=True)
class Fisher:
    """The study of the importance matrix of one network (Figures 1 and 2).

    Args:
        seed: The network's seed.
        errors: ‖Ω̂ − Ω‖²_F / ‖Ω‖²_F, (approximation, rank or None) -> one value per draw.
        streamed: The same for low rank computed in one pass, (rank, group) -> one value per draw.
        spectrum: Eigenvalues, largest first.
        stable_rank: ``trace`` is tr Ω / λ₁, ``frobenius`` is ‖Ω‖²_F / λ₁².
        pictures: Heat maps, 0 to 255.
        heat_map: How entries became pixels.
    """

    seed: int
    errors: Mapping[tuple[str, int | None], Sequence[float]]
    streamed: Mapping[tuple[int, int | str], Sequence[float]]
    spectrum: Sequence[float]
    stable_rank: Mapping[str, float]
    pictures: Mapping[str, NDArray[np.uint8]]
    heat_map: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Study:
    """Everything a report is made from."""

    recipe: str
    settings: tuple[Setting, ...]
    fisher: tuple[Fisher, ...] = ()
    boundaries: Mapping[str, Path] | None = None
    problems: tuple[str, ...] = ()

    @cached_property
    def presets(self) -> tuple[str, ...]:
        """The presets that were run: those of all recipes first, then in the order of the recipe's own."""
        found = {s.preset for s in self.settings}
        own = tuple(RECIPES[self.recipe].presets) if self.recipe in RECIPES else ()
        order = (*PRESET_ORDER, *(preset for preset in own if preset not in PRESET_ORDER))
        return tuple(sorted(found, key=lambda p: (p not in order, _index(order, p), p)))

    @cached_property
    def headlines(self) -> list[Setting]:
        """One setting per (preset, importance, approximation)."""
        return headlines(self.settings)

    @cached_property
    def primaries(self) -> list[Setting]:
        """The cells of the paper's table."""
        return primaries(self.settings)

    @cached_property
    def companions(self) -> list[Setting]:
        """The flattened diagonals beside the correct ones of the paper's table."""
        return companions(self.settings)

    @cached_property
    def enough(self) -> int:
        """Seeds below which this study decides nothing."""
        return enough_seeds(self.recipe)

    @cached_property
    def selections(self) -> dict[str, Selection]:
        """The tuned strengths."""
        return selections(self.settings)

    def reported(self, preset: str) -> list[Setting]:
        """The settings of a preset that are reported: neither tuning nor single tasks."""
        return [s for s in self.settings if s.preset == preset and s.role == "report"]

    def shown(self, preset: str) -> list[Setting]:
        """The rows of the paper's table and the flattened diagonals beside them."""
        found = [s for s in (*self.primaries, *self.companions) if s.preset == preset]
        return sorted(found, key=lambda setting: setting.order)

    def sized(self, preset: str) -> list[Setting]:
        """Every approximation at every size and every scale, each at its chosen strength."""
        return [s for s in self._sized if s.preset == preset]

    @cached_property
    def _sized(self) -> list[Setting]:
        return sized(self.settings)

    def baselines(self, preset: str, *, every_scale: bool = False) -> list[Setting]:
        """No regularisation and joint training, as far as they were run."""
        found = baselines(self.settings, every_scale=every_scale)
        return [s for s in found if s.preset == preset]

    def alone(self, preset: str) -> dict[int, list[float]]:
        """By seed, the accuracy on every task of a network trained on that task alone."""
        return {
            run.seed: [row[task] for task, row in enumerate(run.result.test)]
            for setting in self.settings
            if setting.role == "single" and setting.preset == preset
            for run in setting.runs
        }

    def find(
        self, preset: str, importance: str, approximation: str, rank: int | None = None
    ) -> Setting | None:
        """The cell of the paper's table, or None if it was not run."""
        wanted = (preset, importance, approximation, rank)
        for s in self.primaries:
            if (s.preset, s.importance, s.approximation, s.rank) == wanted:
                return s
        return None

    def tried_aside(self, preset: str) -> list[Setting]:
        """The tuning runs of a preset whose reported strengths were all found elsewhere: made one by one."""
        reported = [s for s in self.reported(preset) if s.strength is not None]
        own = (s for s in reported if searched(s, self.selections.values()) == preset)
        if not reported or next(own, None) is not None:
            return []
        return [s for s in self.settings if s.preset == preset and s.role == "tune"]

    def one_by_one(self, preset: str) -> str:
        """How the runs of :meth:`tried_aside` are made."""
        seeds = sorted({seed for setting in self.tried_aside(preset) for seed in setting.seeds})
        seed = f"--set seed={seeds[0]}" if seeds else ""
        return (
            f"holdfast run {self.recipe} --preset {preset} --set regularizer.approximation=NAME "
            f"--set regularizer.strength=X {seed} --set role=tune --out FOLDER"
        )

    def command(self, preset: str | None = None) -> str:
        """The command that makes (or resumes) what is shown."""
        reported = {p: self.reported(p) for p in self.presets}
        return command(self.recipe, reported, preset, self.selections)


def _index(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def read(folder: Path) -> Study:
    """Read a results folder.

    Raises:
        FileNotFoundError: The folder, or results in it, do not exist.
        ForeignResult: A result has another format version.
        ValueError: The results belong to more than one recipe.
    """
    problems: list[str] = []
    results = load_all(folder, lambda error: problems.append(str(error)))
    runs = [Run(id, result.experiment.to_json(), result) for id, result in results.items()]
    if not runs:
        raise FileNotFoundError(f"no results in {folder}; `holdfast reproduce RECIPE` makes them")
    recipes = sorted({str(run.experiment["recipe"]) for run in runs})
    if len(recipes) > 1:
        raise ValueError(
            f"{folder} holds results of {', '.join(recipes)}; a report is about one recipe: "
            "give every recipe a folder of its own"
        )
    return Study(
        recipe=recipes[0],
        settings=group(runs),
        fisher=tuple(_fishers(folder, problems)),
        boundaries={path.stem: path for path in sorted((folder / "boundaries").glob("*.npz"))},
        problems=tuple(problems),
    )


def _fishers(folder: Path, problems: list[str]) -> Iterator[Fisher]:
    """The matrix studies; a file that cannot be read is a problem, not the end of the report."""
    for path in sorted((folder / "fisher").glob("seed*.json")):
        try:
            yield _fisher(path)
        except (ValueError, KeyError, TypeError, OSError) as error:
            problems.append(f"{path.name}: {type(error).__name__}: {error}")


def _fisher(path: Path) -> Fisher:
    data = json.loads(path.read_bytes())
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
        pictures = {name: stored[name] for name in stored.files}
    return Fisher(
        seed=int(data["seed"]),
        errors={
            (name, part.get("rank") if name == "low_rank" else None): values
            for name, part, values in _entries(data["errors"])
        },
        streamed={
            (part["rank"], part["group"]): values for _, part, values in _entries(data["streamed"])
        },
        spectrum=[float(value) for value in data["spectrum"]],
        stable_rank={name: float(value) for name, value in data["stable_rank"].items()},
        pictures=pictures,
        heat_map=data["heat_map"],
    )


def _entries(
    entries: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any], list[float]]]:
    """Name, parameters and errors of every approximation in a list of them."""
    for entry in entries:
        part = entry["approximation"]
        yield part["name"], part, [float(value) for value in entry["values"]]
