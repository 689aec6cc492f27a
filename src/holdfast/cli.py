"""The command line. Everything heavy is imported by the command that needs it, so that help is instant."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        "the command line needs typer: pip install 'holdfast[experiments]'"
    ) from error

from holdfast.cli_bench import bench
from holdfast.cli_data import data_app
from holdfast.cli_errors import clear_errors, writing
from holdfast.cli_show import inspect, list_known

__all__ = ["app", "main", "seconds"]

app = typer.Typer(
    name="holdfast",
    help="Learn new tasks while holding on to the old ones: experiments and penalty files.",
    epilog="Start with: [bold]holdfast reproduce toy --smoke[/], which runs everything once in a minute.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(data_app, name="data")
app.command()(inspect)
app.command("list")(list_known)
app.command()(bench)

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field, e.g. regularizer.strength=1e3 or regularizer.approximation=diagonal. "
        "Repeatable; an unknown field or value lists the known ones.",
    ),
]


def main() -> None:
    """The entry point."""
    app()


def seconds(text: str) -> float:
    """A time budget such as ``90s``, ``150m`` or ``1h30m`` in seconds."""
    units, number = {"h": 3600, "m": 60, "s": 1}, r"([0-9]+(?:\.[0-9]+)?)"
    text = text.replace(" ", "")
    if re.fullmatch(rf"({number}[hms])+", text):
        total = sum(
            float(value) * units[unit] for value, unit in re.findall(rf"{number}([hms])", text)
        )
        if total > 0:
            return total
    raise ValueError(f"a time budget is written like 90s, 150m or 1h30m, got {text!r}")


@app.command()
def reproduce(
    recipe: Annotated[str, typer.Argument(help="Which study, e.g. toy; see holdfast list.")],
    preset: Annotated[
        str | None,
        typer.Option(
            help="A preset of the recipe, or all; see holdfast list.",
            show_default="paper, or the first; with --smoke all",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to N−1 are reported.")] = 5,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, one thread each.", show_default="one per core"),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Everything once, tiny, in under a minute.")
    ] = False,
    extras: Annotated[
        bool, typer.Option(help="Also what stands beside the paper's own table.")
    ] = True,
    time_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop in time, e.g. 150m, 2h; runs that do not end by then leave a checkpoint.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder.", show_default="results/RECIPE")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs per task; the same as --set training.epochs=N."),
    ] = None,
    train_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Learn from so many images, per class for cifar100; "
            "the same as --set stream.train_size=N.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The folder of all data sets; see holdfast data.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Run methods with this approximation alone, e.g. kronecker, or the ends (nothing held, "
            "joint training). Repeatable.",
        ),
    ] = None,
    settings: Settings = None,
) -> None:
    """Run a study of the paper and write its report.

    Runs that are in the results folder already are kept: the same command resumes after Ctrl-C, a kill or
    the end of a time budget. The last line is the path of the report.

    [dim]holdfast reproduce toy --seeds 20 --preset all --jobs 2 --time-budget 150m[/]
    """
    with clear_errors(resumes=True):
        from rich.console import Console

        from holdfast.configuration import lookup
        from holdfast.display import for_console
        from holdfast.execution import check_network
        from holdfast.recipes import RECIPES, Request
        from holdfast.reproduction import reproduce as run_recipe

        chosen = lookup("recipe", RECIPES, recipe)
        presets = chosen.choose_presets(preset or ("all" if smoke else chosen.default))
        settings = [*_sizes(epochs, train_size), *(settings or [])]
        if data_dir is not None:
            os.environ["HOLDFAST_DATA"] = str(data_dir)  # for the worker processes, too
        request = Request(
            presets, 1 if smoke else seeds, smoke, extras, tuple(settings), tuple(only or ())
        )
        for (
            name
        ) in request.presets:  # wrong settings and missing data are said before anything runs
            check_network(request.adjust(chosen.example(name, smoke)))
        folder = out or Path("results") / (f"{recipe}-smoke" if smoke else recipe)
        budget = None if time_budget is None else seconds(time_budget)
        with writing(folder):
            summary = run_recipe(
                chosen,
                request,
                folder,
                for_console(Console()),
                jobs=jobs or _cores(),
                budget=budget,
            )
        if summary.left:
            left = len(summary.left)
            fit = "run does not fit" if left == 1 else "runs do not fit"
            typer.echo(f"{left} {fit} into the time budget; the same command goes on.")
        ran, kept = summary.ran, summary.kept
        typer.echo(
            f"{ran} {'run' if ran == 1 else 'runs'} finished, {kept} {'was' if kept == 1 else 'were'} "
            "there already."
        )
        for label, reason in summary.failed:
            typer.echo(f"failed: {label}: {reason}", err=True)
        if summary.ran + summary.kept:
            with writing(folder):
                page = _report(folder, folder)
            typer.echo(str(page))
        if summary.failed:
            raise typer.Exit(1)


@app.command()
def run(
    source: Annotated[
        str,
        typer.Argument(help="A JSON file with one experiment, - for standard input, or a recipe."),
    ],
    preset: Annotated[
        str | None,
        typer.Option(help="With a recipe: which preset.", show_default="paper, or its first"),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the experiment as JSON and run nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Results folder.")] = Path("results/runs"),
    settings: Settings = None,
) -> None:
    """Run one experiment, and print where its result is.

    The network after its first task stays in the folder's checkpoints/, for other methods on the same stream;
    holdfast reproduce removes it at its end.

    [dim]holdfast run toy --set training.epochs=20 --set seed=7[/]
    """
    with clear_errors(resumes=True):
        from rich.console import Console
        from rich.progress import Progress

        from holdfast import results
        from holdfast.checkpoint import Checkpoints
        from holdfast.execution import execute
        from holdfast.reproduction import check_writable, memory_note
        from holdfast.settings import change_all

        experiment = change_all(_experiment(source, preset), settings or [])
        if show:
            typer.echo(json.dumps(experiment.to_json(), indent=1, ensure_ascii=False))
            return
        path = results.path_of(out, experiment)
        if path.exists():
            try:
                result = results.load(path)
            except results.BrokenResult as broken:
                typer.echo(f"{broken}; running it again", err=True)
            else:
                typer.echo(f"{experiment.label}: {result.outcome}")
                typer.echo(f"{path} (was there already)")
                return
        note = memory_note([experiment], 1)
        if note is not None:
            typer.echo(note, err=True)
        with writing(out):
            check_writable(out)
            with Progress(console=Console(stderr=True), transient=True) as progress:
                bar = progress.add_task(experiment.label, total=1.0)
                result = execute(
                    experiment, progress=lambda f: progress.update(bar, completed=f), folder=out
                )
            result.save(out)
            Checkpoints(out, experiment).remove()
        typer.echo(f"{experiment.label}: {result.outcome}")
        typer.echo(str(path))


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A recipe (reads results/RECIPE) or a folder.")],
    format: Annotated[str, typer.Option(help="html or json.")] = "html",
    out: Annotated[
        Path | None, typer.Option(help="Where the report goes.", show_default="the results folder")
    ] = None,
) -> None:
    """Make the report of a results folder; it trains nothing.

    [dim]holdfast report toy --format json[/]
    """
    with clear_errors():
        from holdfast.configuration import lookup

        lookup("format", {"html": None, "json": None}, format)
        folder = _results_folder(source)
        if format == "json":
            from holdfast.report import rows

            if out is not None:
                raise ValueError(
                    "json goes to standard output: --out is for html; redirect it with >"
                )
            typer.echo(json.dumps(rows(folder), indent=1, ensure_ascii=False))
            return
        with writing(out or folder):
            typer.echo(str(_report(folder, out or folder)))


def _sizes(epochs: int | None, train_size: int | None) -> list[str]:
    """The options that scale a study, as settings: they are part of an experiment's identity."""
    settings = [] if epochs is None else [f"training.epochs={epochs}"]
    return settings if train_size is None else [*settings, f"stream.train_size={train_size}"]


def _experiment(source: str, preset: str | None) -> Any:
    """The experiment named on the command line."""
    from holdfast.configuration import lookup
    from holdfast.experiment import Experiment
    from holdfast.recipes import RECIPES

    path = Path(source)
    if source != "-" and path.suffix != ".json" and not path.is_file():
        recipe = lookup("recipe, and no such JSON file:", RECIPES, source)
        return recipe.example(preset or recipe.default)
    if source != "-" and not path.is_file():
        raise ValueError(
            f"there is no file {source}; expected a JSON file with one experiment, - for standard input, "
            f"or a recipe ({', '.join(RECIPES)})"
        )
    try:
        data = json.loads(sys.stdin.buffer.read() if source == "-" else path.read_bytes())
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{source} is not JSON: {error}") from error
    if isinstance(data, dict) and "experiment" in data:  # a result file holds its experiment
        data = data["experiment"]
    return Experiment.from_json(data)


def _results_folder(source: str) -> Path:
    """A recipe's folder under the current directory, or the folder itself."""
    from holdfast.recipes import RECIPES

    folder = Path("results") / source if source in RECIPES else Path(source)
    if not folder.is_dir():
        known = ", ".join(RECIPES)
        raise ValueError(
            f"no results folder {folder}; expected a folder, or a recipe ({known}) that was run here: "
            f"holdfast reproduce {source if source in RECIPES else next(iter(RECIPES))}"
        )
    return folder


def _report(folder: Path, out: Path) -> Path:
    """Write the report."""
    from holdfast.report import write

    page: Path = write(folder, out)
    return page


def _cores() -> int:
    """The cores this process may use."""
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


if __name__ == "__main__":
    main()
