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
    labels = [f"{line['peer']}\n{line['what']}" for line in lines]
    # an approximation is off by what it is; a peer is wrong where it is further off than ours
    wrong = [(x["error"] or 0) > max(WRONG, 1.1 * (x["our_error"] or 0)) for x in lines]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(lines) + 1.2), constrained_layout=True)
    colours = ["#c44e52" if bad else "#4c72b0" for bad in wrong]
    bars = axes.barh(labels, [line["slower"] for line in lines], color=colours)
    for bar, line, bad in zip(bars, lines, wrong, strict=True):
        text = f" {line['slower']:.1f} ×" + (f", error {line['error']:.0%}" if bad else "")
        axes.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, text, va="center", size=8)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlim(right=3 * max(line["slower"] for line in lines))
    axes.set_xlabel("time / Holdfast's time (red: off by more than 1 %, and by more than ours)")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(folder / f"peers.{kind}", dpi=150)


if __name__ == "__main__":
    main()
