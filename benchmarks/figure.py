"""Draw the comparison with the peers from the JSON that peers.py wrote: time against error."""

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

WRONG = 0.01  # squared relative error from which a result is another one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results/bench"))
    folder = parser.parse_args().folder
    lines = json.loads((folder / "peers.json").read_text())["lines"]
    lines = sorted(lines, key=lambda line: line["slower"])
    labels = [f"{line['what']} · {line['peer']}" for line in lines]
    # an approximation is off by what it is; a peer is wrong where it is further off than ours
    wrong = [(x["error"] or 0) > max(WRONG, 1.1 * (x["our_error"] or 0)) for x in lines]
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(lines) + 1), constrained_layout=True)
    colours = ["#c44e52" if bad else "#4c72b0" for bad in wrong]
    times = [line["slower"] for line in lines]
    bars = axes.barh(labels, [time - 1 for time in times], left=1, color=colours)
    for bar, line, bad in zip(bars, lines, wrong, strict=True):
        text = f" {line['slower']:.2f} ×" + (f", wrong by {line['error']:.0%}" if bad else "")
        end, middle = max(1, line["slower"]), bar.get_y() + bar.get_height() / 2
        axes.text(end, middle, text, va="center", size=8)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.7 * min(*times, 1), 2 * max(times))
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20) if tick <= 2 * max(times)]
    axes.set_xticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.margins(y=0.01)
    axes.set_xlabel(
        "time in units of Holdfast's (red: off by more than 1 %, and by more than ours)"
    )
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(folder / f"peers.{kind}", dpi=150)


if __name__ == "__main__":
    main()
