"""The tables in the README and the docs are those that the committed results give.

``python tests/test_readme.py`` writes them anew.
"""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import report
from holdfast.report.blocks import amount
from holdfast.report.frontier import floats, times_plain
from holdfast.report.loading import read
from holdfast.report.measures import Summary, finals, summary
from holdfast.report.naming import epochs
from holdfast.report.settings import Setting

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/results.md"]
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->\n(.*?)<!-- end of results -->", re.DOTALL)
NAMES = {
    "diagonal": "diagonal",
    "block_diagonal": "block-diagonal",
    "count_sketch": "sketched, t = 50",
    "low_rank": "rank {rank}",
    "full": "full",
}
TASKS = {"ten-tasks": "10 tasks", "twenty-tasks": "20 tasks", "fifty-tasks": "50 tasks"}
PRESETS = ("paper", "original-code", "fair")
PRINTED_RANK_1 = {"ewc": 83.2, "mas": 85.5}  # the authors' notebooks; not in the paper's own table


def cell(row: dict) -> str:
    spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
    return f"{row['mean']:.1f}{spread} ({row['seeds']})"


def study(recipe: str) -> str:
    """Paper's number, then every preset that has been run: mean ± standard deviation (seeds)."""
    rows = report.rows(ROOT / "results" / recipe)
    presets = [p for p in PRESETS if any(r["preset"] == p for r in rows)]
    lines = [
        "| importance | matrix | printed | " + " | ".join(f"`{p}`" for p in presets) + " |",
        "|---|---|--:|" + "--:|" * len(presets),
    ]
    for importance in ("ewc", "mas"):
        for approximation, name in NAMES.items():
            for rank in (1, 50) if approximation == "low_rank" else (None,):
                own = [
                    row
                    for row in rows
                    if (row["importance"], row["approximation"]) == (importance, approximation)
                    and row["parameters"].get("rank") == rank
                ]
                printed = PRINTED_RANK_1[importance] if rank == 1 else None
                flat = [row for row in own if row["original_diagonal"] == "batches"]
                lines += line(importance, "diagonal of flattened batches", flat, presets, printed)
                correct = [row for row in own if not row["original_diagonal"] and usual(row, rows)]
                lines += line(importance, name.format(rank=rank), correct, presets, printed)
    return "\n".join(lines + ends(recipe, presets)) + "\n"


def ends(recipe: str, presets: list[str]) -> list[str]:
    """The two ends of the scale: nothing is held, and all tasks at once."""
    found = read(ROOT / "results" / recipe)
    lines = []
    for mode in ("sequential", "joint"):
        own = {p: s for p in presets for s in found.baselines(p) if s.mode == mode}
        said = {preset: summary(list(finals(setting).values())) for preset, setting in own.items()}
        if said:
            cells = [spread(said[p]) if p in said else "—" for p in presets]
            name = next(iter(own.values())).label.lower()
            lines.append(f"| — | {name} | — | " + " | ".join(cells) + " |")
    return lines


def spread(values: Summary | None) -> str:
    assert values is not None
    return cell(
        {
            "mean": values.mean,
            "std": values.std if values.count > 1 else None,
            "seeds": values.count,
        }
    )


def usual(row: dict, rows: list[dict]) -> bool:
    """Whether a row is its preset's headline, or differs from one in the diagonal or the rank alone."""
    return row["headline"] or any(
        all(row[key] == other[key] for key in ("preset", "history", "anchor", "importance"))
        and (row["strength"] == other["strength"] or row["preset"] == "fair")
        for other in rows
        if other["headline"] and other["approximation"] in (row["approximation"], "count_sketch")
    )


def line(
    importance: str, name: str, rows: list[dict], presets: list[str], printed: float | None
) -> list[str]:
    """A row of the table, if there is anything to show."""
    found: dict[str, dict] = {}
    for row in rows:
        found.setdefault(row["preset"], row)
    if not found:
        return []
    printed = printed or next((row["paper"] for row in rows if row["paper"] is not None), None)
    cells = [cell(found[p]) if p in found else "—" for p in presets]
    number = "—" if printed is None else f"{printed:.1f}"
    return [f"| {importance.upper()} | {name} | {number} | " + " | ".join(cells) + " |"]


def frontier(streams: dict[str, str], first: str) -> str:
    """Accuracy on some streams and its price on the first, from little memory to much."""
    found = read(ROOT / "results/frontier")
    methods: dict[str, dict[str, Setting]] = {}
    columns: dict[str, None] = {}
    for preset, said in streams.items():
        settings = [*found.sized(preset), *found.baselines(preset, every_scale=True)]
        usual = min(map(epochs, settings))
        for setting in sorted(settings, key=lambda s: (epochs(s), floats(s))):
            longer = f", {epochs(setting)} epochs" if epochs(setting) > usual else ""
            columns[f"{said}{longer}"] = None
            methods.setdefault(setting.label, {})[f"{said}{longer}"] = setting
    lines = [
        f"| approximation | floats per parameter | {' | '.join(columns)} | × time of a plain run |",
        "|---|--:|" + "--:|" * (len(columns) + 1),
    ]
    for label, own in sorted(methods.items(), key=lambda m: floats(next(iter(m[1].values())))):
        means = [
            spread(summary(list(finals(own[s]).values()))) if s in own else "—" for s in columns
        ]
        timed = own.get(streams[first])
        times = times_plain(found, first, [timed] if timed else [])
        time = f"{times[0]:.1f}" if times and times[0] else "—"
        memory = amount(floats(next(iter(own.values())))).text
        lines.append(f"| {label} | {memory} | {' | '.join(means)} | {time} |")
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "toy": lambda: study("toy"),
    "permuted-mnist": lambda: study("permuted-mnist"),
    "cifar100": lambda: study("cifar100"),
    "frontier": lambda: frontier(TASKS, "ten-tasks"),
    "frontier-toy": lambda: frontier({"toy": "5 tasks"}, "toy"),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_what_the_results_give(name: str) -> None:
    pages = [(ROOT / page).read_text() for page in PAGES]
    found = [match[2] for page in pages for match in BLOCK.finditer(page) if match[1] == name]
    assert found == [TABLES[name]()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_are_kept(page: str) -> None:
    """Not to what a report leaves on one machine: a clone has only what git keeps."""
    folder = (ROOT / page).parent
    links = {
        (folder / link).resolve()
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text())
    }
    kept = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if kept.returncode == 0:
        assert links <= {(ROOT / path).resolve() for path in kept.stdout.splitlines()}
    assert [link for link in links if not link.exists()] == []


if __name__ == "__main__":
    for page in map(ROOT.joinpath, PAGES):
        page.write_text(
            BLOCK.sub(
                lambda m: f"<!-- results: {m[1]} -->\n{TABLES[m[1]]()}<!-- end of results -->",
                page.read_text(),
            )
        )
