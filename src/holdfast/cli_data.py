"""``holdfast data``: fetch, list and find the data sets."""

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli_errors import clear_errors

__all__ = ["data_app"]

data_app = typer.Typer(
    help="Data sets: fetch them, see which are there, and where.", no_args_is_help=True
)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="The folder of all data sets.",
        show_default="$HOLDFAST_DATA, else the platform's cache folder",
    ),
]


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar100 or all.")],
    folder: Folder = None,
) -> None:
    """Fetch a data set, or what is missing or damaged of it; every file is checked.

    An interrupted download goes on where it stopped.
    """
    with clear_errors():
        from holdfast.configuration import lookup
        from holdfast.data import DATASETS

        lookup("data set", {**DATASETS, "all": None}, name)
        for chosen in DATASETS if name == "all" else (name,):
            for path in DATASETS[chosen].fetch(folder):
                typer.echo(f"{path} (checked)")


@data_app.command("list")
def list_sets(folder: Folder = None) -> None:
    """Show the known data sets and which of them are here."""
    with clear_errors():
        from holdfast.data import DATASETS

        for name, module in DATASETS.items():
            summary = (module.__doc__ or "").splitlines()[0]
            absent = module.missing(folder)
            state = f"missing {', '.join(absent)}" if absent else "here"
            damaged = module.damaged(folder)
            if damaged:  # as far as sizes tell; fetch and every use check all of it
                state = "; ".join([*([state] if absent else []), "damaged"])
            typer.echo(f"{name}: {state}. {summary}")
            for problem in damaged:
                typer.echo(f"  {problem}")


@data_app.command()
def path(
    name: Annotated[
        str | None, typer.Argument(help="A data set.", show_default="all of them")
    ] = None,
    folder: Folder = None,
) -> None:
    """Print the folder of a data set, or of all."""
    with clear_errors():
        from holdfast.configuration import lookup
        from holdfast.data import DATASETS, root

        if name is not None:
            lookup("data set", DATASETS, name)
        typer.echo(str(root(folder) / (name or "")))
