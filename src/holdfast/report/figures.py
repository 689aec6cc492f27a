"""Drawing for two themes: matplotlib draws in the colours of the light one, the SVG carries names.

Every colour below is a name with a light and a dark value. In the SVG each becomes
``var(--name, light)``: the page sets the names by its theme, and a file on its own carries a small
style sheet for dark surroundings. Text stays text, so the page's font and size rules reach it.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from holdfast.report.blocks import Panel
from holdfast.report.settings import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "STYLE",
    "colour",
    "focus",
    "height",
    "legend",
    "line",
    "panel",
    "power",
    "tidy",
    "wrapped",
]

# name -> (light, dark). No two light values are equal: they are replaced by name.
COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#1d2329", "#e4e7ea"),
    "soft": ("#5d6770", "#9aa4ad"),
    "rule": ("#d5d9dd", "#363d45"),
    "diagonal": ("#c8500a", "#f79257"),
    "block_diagonal": ("#a8497f", "#e093bf"),
    "count_sketch": ("#0a66b0", "#5eb1f5"),
    "rank_1": ("#a17a00", "#dbb542"),
    "low_rank": ("#0b7a5a", "#46c39b"),
    "diagonal_plus_low_rank": ("#6d8b00", "#b5d34a"),
    "kronecker": ("#6a3fc4", "#ab8cf5"),
    "kronecker_plus_low_rank": ("#b3261e", "#f2807a"),
    "osnap": ("#2f8fd0", "#8accff"),
    "srht": ("#0097a7", "#5fdbe8"),
    "dense_sketch": ("#5b6fd6", "#a3b0ff"),
    "nystrom": ("#8a5a2b", "#d3a574"),
    "full": ("#3b4148", "#c5cbd1"),
    "baseline": ("#838c94", "#7e8890"),
}
_WRAP = 30  # characters of a name in a legend of two columns
_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the layout is the same everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": COLOURS["soft"][0],
    "axes.labelcolor": COLOURS["soft"][0],
    "axes.titlecolor": COLOURS["ink"][0],
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["soft"][0],
    "ytick.color": COLOURS["soft"][0],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": COLOURS["rule"][0],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
}


def colour(approximation: str | None, rank: int | None = None) -> str:
    """The light value of an approximation's colour."""
    name = "rank_1" if approximation == "low_rank" and rank == 1 else approximation
    return COLOURS.get(name or "", COLOURS["baseline"])[0]


def line(setting: Setting) -> str:
    """A method is solid, the flattened diagonal dash-dotted, the two ends of the scale dashed, dotted."""
    if setting.approximation is None:
        return ":" if setting.mode == "joint" else "--"
    return "-." if setting.flattened else "-"


def power(value: float) -> str:
    """A decimal power as text, without the mathematics mode that would bring its own font."""
    return "10" + f"{value:.3g}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def tidy(axes: "Axes", *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Light grid behind the data, short ticks."""
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    axes.grid(visible=True, axis=grid)


def focus(axes: "Axes", held: Iterable[float]) -> None:
    """End the axes below what is held: what holds nothing may lie far below, and is in the legend."""
    values = list(held)
    if values:
        low = min(values) - max(max(values) - min(values), 2.0)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], low))


def wrapped(name: str) -> str:
    """A name that fits into half the width of a picture."""
    return "\n".join(textwrap.wrap(name, _WRAP))


def height(names: Iterable[str]) -> float:
    """Inches for one pair of axes and a legend of two columns below it."""
    lines = sum(wrapped(name).count("\n") + 1 for name in names)
    return 3.5 + 0.18 * math.ceil((lines + 1) / 2)


def legend(canvas: "Figure") -> None:
    """The legend below the axes, long names on several lines."""
    handles, labels = [], []
    for axes in canvas.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.append(handle)
            labels.append(wrapped(label))
    canvas.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=2.4)


@contextmanager
def _canvas(name: str, width: float, height: float) -> "Iterator[Figure]":
    # Imported here: the command line must not pay for matplotlib before something is drawn.
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def panel(
    name: str,
    alt: str,
    draw: "Callable[[Figure], None]",
    *,
    width: float = 5.2,
    height: float = 3.4,
    wide: bool = False,
) -> Panel:
    """Draw one picture and return it as themed SVG and as PNG on white.

    Args:
        name: File name without ending; also keeps the ids of pictures on one page apart.
        alt: What the picture shows, for those who do not see it.
        draw: Draws into the empty figure.
        width: In inches.
        height: In inches.
        wide: Takes the whole width of the page, and scrolls inside its frame on a phone.
    """
    with _canvas(name, width, height) as figure:
        draw(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not once per format
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(pixels, format="png", dpi=130, facecolor="white", metadata={"Software": ""})
    return Panel(name, alt, _themed(vector.getvalue(), name), pixels.getvalue(), wide)


def _themed(svg: str, name: str) -> str:
    """Strip what a browser does not need, name the colours, make the ids unique to the picture."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", f"font-family: {_FONT}", svg)
    svg = re.sub(r'\sid="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    svg = svg.replace("xlink:href=", "href=").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    svg = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg)
    for key, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{key}, {light})")
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def standalone(svg: str) -> str:
    """The SVG as a file of its own: it turns to the dark colours by itself."""
    dark = " ".join(f"--{name}: {dark};" for name, (_, dark) in COLOURS.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    return svg.replace(">", f">{style}", 1) + "\n"


def inline(svg: str, alt: str) -> str:
    """The SVG as a part of an HTML page: no namespace, sized by the page, with a description."""
    from markupsafe import escape

    svg = re.sub(r' xmlns="[^"]*"| version="1.1"', "", svg)
    svg = re.sub(r' width="[^"]*pt" height="[^"]*pt"', "", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
