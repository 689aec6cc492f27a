"""Run suites, print each line as it is measured, and keep JSON and a Markdown table."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from holdfast.bench.measuring import PAIRS, Measurement
from holdfast.bench.suites import SUITES
from holdfast.configuration import lookup

__all__ = ["run"]


def run(
    names: Sequence[str] = (),
    out: Path | None = None,
    *,
    pairs: int = PAIRS,
    quick: bool = False,
    say: Callable[[str], object] = print,
) -> list[Measurement]:
    """Measure.

    Args:
        names: Suites; none means all.
        out: A folder for ``<suite>.json`` and ``<suite>.md``; None keeps nothing.
        pairs: Interleaved pairs per ratio.
        quick: Small sizes, to see that everything runs; the targets do not apply to them.
        say: Takes a line of text per measurement.
    """
    suites = {name: lookup("suite", SUITES, name) for name in names or SUITES}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[Measurement] = []
    try:
        for name, suite in suites.items():
            lines: list[Measurement] = []
            for line in suite(pairs, quick):
                lines.append(line)
                say(_sentence(line))
                if out is not None:
                    _write(out, name, lines, pairs, quick)
            found += lines
    finally:
        torch.set_num_threads(threads)
    return found


def _sentence(line: Measurement) -> str:
    target = "" if line.target is None else f"  target ≤ {line.target:g}"
    met = {True: "  met", False: "  MISSED", None: ""}[line.met]
    spread = "" if line.low == line.high else f" ({line.low:.2f} to {line.high:.2f})"
    return (
        f"{line.suite}: {line.what}: {line.value:.3g}{spread}{target}{met}  {line.note}".rstrip()
    )


def _write(out: Path, name: str, lines: Sequence[Measurement], pairs: int, quick: bool) -> None:
    """After every line, so that a run that is cut short keeps what it has."""
    out.mkdir(parents=True, exist_ok=True)
    meta: dict[str, Any] = {
        "command": f"holdfast bench {name} --pairs {pairs}" + (" --quick" if quick else ""),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": 1,
        "date": time.strftime("%Y-%m-%d"),
    }
    body = {"meta": meta, "lines": [{**asdict(line), "met": line.met} for line in lines]}
    temporary = out / f".{name}.json"
    temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    os.replace(temporary, out / f"{name}.json")
    table = [
        f"# {name}",
        "",
        f"`{meta['command']}`, torch {meta['torch']}, one thread, {meta['machine']}, {meta['cores']} cores, "
        f"load {meta['load']} (other work on the machine included).",
        "",
        "| what | value | quartiles | target | reached | note |",
        "|---|---|---|---|---|---|",
    ]
    for x in lines:
        target = "" if x.target is None else f"≤ {x.target:g}"
        met = {True: "yes", False: "**no**", None: ""}[x.met]
        spread = "" if x.low == x.high else f"{x.low:.2f}–{x.high:.2f}"
        table.append(f"| {x.what} | {x.value:.3g} | {spread} | {target} | {met} | {x.note} |")
    (out / f"{name}.md").write_text("\n".join([*table, ""]))
