"""From a results folder to Markdown tables, figures and one self-contained HTML page.

Nothing is trained here; only result files are read.

A recipe adds its own sections with one file and one line in :data:`SECTIONS`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.report import sections as generic
from holdfast.report.blocks import Figure, Section
from holdfast.report.cifar100 import cifar100_sections
from holdfast.report.comparison import printed
from holdfast.report.frontier import frontier_sections
from holdfast.report.loading import Study, read
from holdfast.report.measures import finals, floats, summary
from holdfast.report.naming import epochs
from holdfast.report.permuted_mnist import permuted_mnist_sections
from holdfast.report.settings import Setting
from holdfast.report.toy import toy_sections
from holdfast.results import atomic

__all__ = ["SECTIONS", "rows", "write"]

SECTIONS: dict[str, Callable[[Study], list[Section]]] = {
    "toy": toy_sections,
    "permuted-mnist": permuted_mnist_sections,
    "cifar100": cifar100_sections,
    "frontier": frontier_sections,
}


def write(results_dir: Path, out_dir: Path | None = None) -> Path:
    """Write ``report.html``, ``report.md`` and ``figures/`` and return the page's path.

    Args:
        results_dir: The folder with ``runs/`` and, where made, ``fisher/`` and ``boundaries/``.
        out_dir: Where the report goes; the results folder itself by default.

    Raises:
        FileNotFoundError: There are no results.
        ValueError: The results belong to more than one recipe, or to another format version.
    """
    from holdfast.report.figures import standalone
    from holdfast.report.page import render

    study = read(Path(results_dir))
    out = Path(results_dir if out_dir is None else out_dir)
    sections = SECTIONS.get(study.recipe, generic.sections)(study)
    panels = [p for s in sections for b in s.blocks if isinstance(b, Figure) for p in b.panels]
    for panel in panels:
        _put(out / "figures" / f"{panel.name}.svg", standalone(panel.svg).encode())
        _put(out / "figures" / f"{panel.name}.png", panel.png)
    made = f"Made by `holdfast report {study.recipe}` from the result files alone."
    title = f"# {study.recipe}\n\n{made}"
    text = "\n\n".join([title, *(section.markdown() for section in sections)])
    _put(out / "report.md", f"{text}\n".encode())
    return _put(out / "report.html", render(study, sections).encode())


def _put(path: Path, content: bytes) -> Path:
    with atomic(path) as file:
        file.write(content)
    return path


def rows(results_dir: Path) -> list[dict[str, Any]]:
    """The accuracy table as plain values, for ``--format json``.

    Per row: ``importance`` and ``approximation`` (registry keys), their ``parameters``,
    ``history``, ``anchor``, ``strength``, ``original_diagonal``, ``preset``, ``mean`` and ``std``
    (per cent, ddof 1; null for one seed), ``seeds`` (how many), ``paper`` (the printed mean or
    null), ``headline`` and ``command``; ``tasks``, ``epochs`` and ``images`` (a task's training examples in
    words), ``storage``, ``limit`` (examples that consolidation looks at, null for all) and
    ``floats_per_parameter`` (of the matrix). Exactly one row per (importance, approximation, preset) is
    the headline, the paper's setting or the nearest to it, and these come first. Baselines without a
    regularizer have neither key and are in the report alone.
    """
    study = read(Path(results_dir))
    reported = [s for s in study.settings if s.role == "report" and s.approximation is not None]
    others = [s for s in reported if s not in study.headlines]
    return [_row(study, s, headline=True) for s in study.headlines] + [
        _row(study, s, headline=False) for s in others
    ]


def _row(study: Study, setting: Setting, *, headline: bool) -> dict[str, Any]:
    values = summary(list(finals(setting).values()))
    assert values is not None  # a setting has at least one run
    paper = printed(study, setting)
    return {
        "importance": setting.importance,
        "approximation": setting.approximation,
        "parameters": setting.parameters,
        "preset": setting.preset,
        "mean": values.mean,
        "std": None if math.isnan(values.std) else values.std,
        "seeds": values.count,
        "paper": None if paper is None else paper.value,
        "headline": headline,
        "history": setting.part("history"),
        "anchor": setting.anchor,
        "strength": setting.strength,
        "original_diagonal": setting.flattened,
        "tasks": setting.runs[0].result.tasks,
        "epochs": epochs(setting),
        "images": setting.runs[0].result.experiment.stream.learnt,
        "storage": setting.storage,
        "limit": setting.limit,
        "floats_per_parameter": floats(setting),
        "command": study.command(setting.preset),
    }
