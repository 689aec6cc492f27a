"""One self-contained HTML page: style, script and figures inline, nothing fetched."""

import re
from collections.abc import Sequence
from importlib import resources

from holdfast.recipes import RECIPES
from holdfast.report.blocks import Panel, Section
from holdfast.report.figures import COLOURS, inline
from holdfast.report.loading import Study

__all__ = ["render"]


def render(study: Study, sections: Sequence[Section]) -> str:
    """The page as HTML. Everything that comes from results is escaped by the template."""
    # Imported here: reading results must work without the packages that draw the report.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    def rich(text: str) -> Markup:
        """Escaped text in which `code` and **weight** are marked up."""
        marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        marked = re.sub(r"(?<=\d) %", "\u00a0%", marked)  # a number and its sign stay together
        return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))

    def picture(panel: Panel) -> Markup:
        return Markup(inline(panel.svg, panel.alt))

    environment = Environment(
        loader=PackageLoader("holdfast.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["rich"] = rich
    environment.filters["picture"] = picture
    done = [run for setting in study.settings for run in setting.runs]
    return environment.get_template("page.html.j2").render(
        recipe=study.recipe,
        about=_about(study.recipe),
        sections=sections,
        runs=len(done),
        presets=study.presets,
        style=Markup(_text("page.css").replace("/*colours*/", _colours())),
        script=Markup(_text("page.js")),
    )


def _about(recipe: str) -> str:
    """What the recipe says about itself, as a sentence."""
    known = RECIPES.get(recipe)
    return "" if known is None else f"{known.summary[:1].upper()}{known.summary[1:]}."


def _text(name: str) -> str:
    return resources.files("holdfast.report").joinpath(name).read_text(encoding="utf-8")


def _colours() -> str:
    """The colours of the figures as CSS variables, for both themes."""

    def block(index: int) -> str:
        return " ".join(f"--{name}: {pair[index]};" for name, pair in COLOURS.items())

    return (
        f":root {{ {block(0)} }}\n"
        "@media (prefers-color-scheme: dark) {\n"
        f"  :root:not([data-theme=light]) {{ {block(1)} }}\n}}\n"
        f":root[data-theme=dark] {{ {block(1)} }}\n"
    )
