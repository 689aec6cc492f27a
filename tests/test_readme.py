"""The table in the README is the one that the committed results give.

``python tests/test_readme.py`` writes it anew.
"""

import re
from pathlib import Path

from holdfast import report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"<!-- results -->\n(.*?)<!-- end of results -->", re.DOTALL)
NAMES = {
    "diagonal": "diagonal",
    "block_diagonal": "block-diagonal",
    "count_sketch": "sketched, t = 50",
    "low_rank": "rank {rank}",
    "full": "full",
}
PRESETS = ("paper", "original-code", "fair")
PRINTED_RANK_1 = {"ewc": 83.2, "mas": 85.5}  # the authors' notebooks; not in the paper's own table


def cell(row: dict) -> str:
    spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
    return f"{row['mean']:.1f}{spread} ({row['seeds']})"


def table(rows: list[dict]) -> str:
    """Paper's number, then every preset that has been run: mean ± standard deviation (seeds)."""
    presets = [p for p in PRESETS if any(r["preset"] == p for r in rows)]
    lines = [
        "| importance | matrix | printed | " + " | ".join(f"`{p}`" for p in presets) + " |",
        "|---|---|--:|" + "--:|" * len(presets),
    ]
    for importance in ("ewc", "mas"):
        for approximation in NAMES:
            for rank in (1, 50) if approximation == "low_rank" else (None,):
                found = {}
                for row in rows:
                    same = (row["importance"], row["approximation"]) == (importance, approximation)
                    mine = row["parameters"].get("rank") == rank
                    if same and mine and (row["headline"] or rank == 1):
                        found.setdefault(row["preset"], row)
                if not found:
                    continue
                printed = next(iter(found.values()))["paper"]
                printed = PRINTED_RANK_1[importance] if rank == 1 else printed
                cells = [cell(found[p]) if p in found else "—" for p in presets]
                name = NAMES[approximation].format(rank=rank)
                lines.append(
                    f"| {importance.upper()} | {name} | {printed:.1f} | "
                    + " | ".join(cells)
                    + " |"
                )
    return "\n".join(lines) + "\n"


def test_the_table_is_what_the_results_give() -> None:
    found = BLOCK.search(README.read_text())
    assert found
    assert found[1] == table(report.rows(ROOT / "results/toy"))


if __name__ == "__main__":
    text = table(report.rows(ROOT / "results/toy"))
    block = f"<!-- results -->\n{text}<!-- end of results -->"
    README.write_text(BLOCK.sub(lambda _: block, README.read_text()))
