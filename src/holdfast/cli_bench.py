"""``holdfast bench``: speed on this machine, as ratios."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli_errors import clear_errors

__all__ = ["bench"]


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="penalty, step, memory, growth, consolidation.", show_default="all of them"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep JSON and a table per suite in this folder.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Interleaved pairs per ratio.")] = 15,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: does it run? The targets do not apply.")
    ] = False,
) -> None:
    """Measure consolidation and the penalty step against plain training, in one thread.

    Every number is a ratio of two measurements taken in turn, the median over pairs. The peers are
    compared by benchmarks/peers.py, in an environment of their own.
    """
    with clear_errors():
        from holdfast.bench import run

        run(suites or (), out, pairs=pairs, quick=quick, say=typer.echo)
