"""``holdfast inspect`` and ``holdfast list``: what a file holds, and what is known."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli_errors import clear_errors, stop

__all__ = ["inspect", "list_known"]


def inspect(
    file: Annotated[Path, typer.Argument(help="A penalty file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a penalty file holds: how it was made, shapes, sizes, whether its bytes are whole."""
    with clear_errors():
        from holdfast.storage import describe

        described = describe(file)
        if as_json:
            typer.echo(json.dumps(described, indent=1, ensure_ascii=False))
        else:
            _print_tree(str(file), described)
        if not described["intact"]:
            stop(f"{file} is damaged: its bytes are not those that were written")


def list_known() -> None:
    """Show the known recipes and presets, importances, approximations, histories, streams and models."""
    with clear_errors():
        from rich.console import Console
        from rich.markup import escape
        from rich.tree import Tree

        from holdfast.approximation import APPROXIMATIONS
        from holdfast.history import HISTORIES
        from holdfast.importance import IMPORTANCES
        from holdfast.models import MODELS
        from holdfast.recipes import RECIPES
        from holdfast.streams import STREAMS

        tree = Tree("[bold]recipes[/]  holdfast reproduce RECIPE --preset PRESET")
        for name, recipe in RECIPES.items():
            branch = tree.add(f"[bold]{name}[/]  {recipe.summary}")
            for preset, meaning in recipe.presets.items():
                branch.add(f"{preset}  [dim]{meaning}[/]")
        console = Console()
        console.print(tree, highlight=False)
        for axis, members in (
            ("regularizer.importance", IMPORTANCES),
            ("regularizer.approximation", APPROXIMATIONS),
            ("regularizer.history", HISTORIES),
            ("stream", STREAMS),
            ("model", MODELS),
        ):
            tree = Tree(f"[bold]{axis}[/]")
            for name, member in members.items():
                said = escape((member.__doc__ or "").strip().splitlines()[0])
                tree.add(f"{name}  [dim]{said}[/]")
            console.print(tree, highlight=False)


def _print_tree(title: str, value: dict[str, Any]) -> None:
    """Nested values as a tree."""
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    def grow(tree: Tree, value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, dict) or (isinstance(item, list) and any(map(_nested, item))):
                grow(tree.add(f"[bold]{escape(str(key))}[/]"), item)
            else:
                tree.add(f"{escape(str(key))}: {escape(json.dumps(item, ensure_ascii=False))}")

    tree = Tree(f"[bold]{escape(title)}[/]")
    grow(tree, value)
    Console().print(tree)


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)
