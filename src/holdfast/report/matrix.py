"""Figures 1 and 2: how well the importance matrix is approximated, its spectrum, its pictures."""

from typing import TYPE_CHECKING

import numpy as np

from holdfast.report.blocks import Cell, Column, Figure, Table, plus_minus
from holdfast.report.comparison import compared, delta_cell, paper_cell, statistics, within
from holdfast.report.figures import COLOURS, panel, power, tidy
from holdfast.report.loading import Fisher, Study
from holdfast.report.measures import Summary, summary
from holdfast.report.paper import FROBENIUS, STABLE_RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "errors",
    "frobenius",
    "heat_maps",
    "ranks",
    "share_of_diagonal",
    "spectrum",
    "stable_ranks",
    "streamed",
]

_NOISE = 1e-12  # eigenvalues below this share of the first are rounding
_NAMES = {
    ("diagonal", None): "Diagonal",
    ("block_diagonal", None): "Block-diagonal (50 × 50)",
    ("count_sketch", None): "Sketched (t = 50)",
    ("low_rank", 1): "Rank 1",
    ("low_rank", 50): "Rank 50",
}


def errors(study: Study, key: tuple[str, int | None]) -> list[float]:
    """All relative squared Frobenius errors of an approximation, in per cent."""
    return [100 * value for network in study.fisher for value in network.errors.get(key, ())]


def share_of_diagonal(study: Study) -> list[float]:
    """Share of the squared Frobenius norm on the diagonal, in per cent: what its error leaves."""
    return [100 - value for value in errors(study, ("diagonal", None))]


def stable_ranks(study: Study, definition: str) -> list[float]:
    """The stable rank of every network by one definition (``trace`` or ``frobenius``)."""
    return [network.stable_rank[definition] for network in study.fisher]


def frobenius(study: Study) -> Table:
    """The table inside Figure 1."""
    rows: list[list[Cell]] = []
    for key, name in _NAMES.items():
        values, paper = summary(errors(study, key)), FROBENIUS[key]
        delta, error = compared(values, paper)
        rows.append(
            [
                Cell(name, str(len(rows))),
                paper_cell(paper),
                _error(values),
                Cell(str(values.count), values.count) if values else Cell(),
                delta_cell(delta, error),
                within(delta, error),
            ]
        )
    return Table(
        "frobenius",
        "Relative squared Frobenius error ‖Ω̂ − Ω‖²/‖Ω‖², per cent",
        [
            Column("Approximation", numeric=False),
            Column("Paper"),
            Column("Ours", help="Mean ± standard deviation (ddof 1)"),
            Column("Values", help="Networks, times sketches where the approximation is random"),
            Column("Difference (SE)"),
            Column("Within 2 SE", numeric=False),
        ],
        rows,
        f"{len(study.fisher)} networks, each trained jointly on the first four tasks.",
        study.command(),
    )


def ranks(study: Study) -> Table:
    """Stable rank by both definitions."""
    rows = []
    for name, definition, paper, meaning in (
        ("‖Ω‖²_F / λ₁²", "frobenius", STABLE_RANK, "what the printed number is"),
        ("tr Ω / λ₁", "trace", None, "the stable rank of W, the r of Theorem 1"),
    ):
        values = summary(stable_ranks(study, definition))
        delta, error = compared(values, paper)
        rows.append(
            [
                Cell(name, name, meaning),
                paper_cell(paper, 2),
                statistics(values, 2),
                Cell(str(values.count), values.count) if values else Cell(),
                delta_cell(delta, error, 2),
                within(delta, error, 2),
            ]
        )
    return Table(
        "stable-rank",
        "Stable rank of the empirical Fisher",
        [
            Column("Definition", numeric=False),
            Column("Paper"),
            Column("Ours"),
            Column("Networks"),
            Column("Difference (SE)"),
            Column("Within 2 SE", numeric=False),
        ],
        rows,
        command=study.command(),
    )


def spectrum(study: Study) -> Figure | None:
    """Figure 2: the leading eigenvalues of every network."""
    lines = [np.asarray(n.spectrum, float) for n in study.fisher if len(n.spectrum)]
    if not lines:
        return None

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        for line in lines:
            shown = line[: min(60, int((line > line[0] * _NOISE).sum()))]
            axes.semilogy(
                np.arange(1, len(shown) + 1), shown, "-", marker=".", ms=4,
                color=COLOURS["count_sketch"][0], alpha=0.75, lw=1,
            )  # fmt: skip
        axes.yaxis.set_major_formatter(lambda value, _: power(np.log10(value)))
        axes.minorticks_off()
        axes.set_xlabel("index of the eigenvalue")
        axes.set_ylabel("eigenvalue")
        axes.set_title("Spectrum of the empirical Fisher")
        tidy(axes)

    top = ", ".join(f"{line[0]:.3g}" for line in lines)
    return Figure(
        "spectrum",
        "Figure 2: the spectrum",
        [
            panel(
                "spectrum",
                f"Leading eigenvalues on a logarithmic axis; the largest are {top}",
                draw,
            )
        ],
        "The largest eigenvalues of the 8,770 × 8,770 empirical Fisher, up to 60 of them, one line "
        f"per network ({len(lines)}).",
    )


def heat_maps(study: Study) -> Figure | None:
    """Figure 1: the full and the sketched matrix as pictures."""
    network = next((n for n in study.fisher if n.pictures), None)
    if network is None:
        return None
    titles = {"full": "Full", "count_sketch": "Sketched (t = 50)"}
    panels = []
    for key, title in titles.items():
        if key not in network.pictures:
            continue
        picture = network.pictures[key]

        def draw(canvas: "Canvas", picture: np.ndarray = picture, title: str = title) -> None:
            axes = canvas.subplots()
            image = axes.imshow(picture / 255, cmap="magma", vmin=0, vmax=1, interpolation="none")
            axes.set_title(title)
            axes.set_xticks([])
            axes.set_yticks([])
            for spine in axes.spines.values():
                spine.set_visible(True)
            canvas.colorbar(image, ax=axes, shrink=0.85, pad=0.02).outline.set_visible(False)

        alt = f"Heat map of the {title.lower()} empirical Fisher of network {network.seed}"
        panels.append(panel(f"fisher-{key}", alt, draw, width=5.2, height=4.4))
    if not panels:
        return None
    return Figure(
        "fisher",
        "Figure 1: the empirical Fisher, full and sketched",
        panels,
        _pixels(network),
    )


def _pixels(network: Fisher) -> str:
    """How 8,770² entries became a picture."""
    how = network.heat_map
    side = len(next(iter(network.pictures.values())))
    return (
        f"Network {network.seed}, trained jointly on the first four tasks. Each of the {side} × "
        f"{side} pixels stands for a tile of {how.get('tile', '?')} × {how.get('tile', '?')} "
        f"entries: the {how.get('pool', '?')} in it. Shown is: {how.get('scale', '?')}; both "
        "pictures are on the scale of the full matrix."
    )


def streamed(study: Study) -> Table | None:
    """Low rank in one pass: what streaming loses against the best matrix of that rank."""
    keys = list(dict.fromkeys(key for network in study.fisher for key in network.streamed))
    rows = []
    for rank, group in keys:
        found = [100 * v for n in study.fisher for v in n.streamed.get((rank, group), ())]
        values, best = summary(found), summary(errors(study, ("low_rank", rank)))
        how = "every row by itself" if group == 1 else "signed sums of rows (group auto)"
        rows.append(
            [
                Cell(f"Rank {rank}", rank),
                Cell(how, str(group)),
                _error(values),
                _error(best),
                Cell(str(len(found)), len(found)),
            ]
        )
    if not rows:
        return None
    return Table(
        "streamed",
        "Low rank in one pass: relative squared Frobenius error, per cent",
        [
            Column("Rank", numeric=False),
            Column("Rows streamed", numeric=False),
            Column("One pass", help="Mean ± standard deviation (ddof 1)"),
            Column("Best possible", help="From the eigenvalues of the full matrix"),
            Column("Values"),
        ],
        rows,
        "One pass over the data in O(rank × parameters) memory.",
        study.command(),
    )


def _error(values: Summary | None) -> Cell:
    """An error in per cent; one that rounds to nothing keeps its magnitude."""
    if values is None:
        return Cell()
    if 0 < values.mean < 0.05:
        return Cell(f"{values.mean:.0e}".replace("e-0", "e-").replace("-", "−"), values.mean)
    return plus_minus(values.mean, values.std)
