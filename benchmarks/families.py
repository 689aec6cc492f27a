"""Error of the quadratic form per byte and per second, for every family of approximations.

A network learns a first task and is consolidated with each approximation at several budgets. Then the
quadratic form is compared with the exact one, from all rows in float64, in four kinds of directions:

- random: normal vectors;
- free: θ − θ* along the training of the next task without a penalty;
- held: the same under the exact penalty;
- own: the same under the approximation's own penalty, which drives the optimiser to what it does not see.

    OMP_NUM_THREADS=1 python benchmarks/families.py toy --out results/families
"""

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.configuration import to_json
from holdfast.models import MLP, Model
from holdfast.seeds import derive
from holdfast.streams import STREAMS, Split, Stream
from holdfast.training import FlatAdam, Training, learn

BATCH = 100
RANDOM = 100  # random directions per seed
KINDS = ("random", "free", "held", "own")
WITHIN = 0.1  # the error that the second table asks for

Recipe = Callable[[int], hf.Approximation]
Entry = dict[str, Any]  # a line of the JSON file


@dataclasses.dataclass(frozen=True)
class Setup:
    """Two tasks, a network, how it learns, and the strength of the penalties."""

    stream: Stream
    model: Model
    first: Training
    second: Training
    strength: float


SETUPS = {
    "toy": Setup(
        STREAMS["toy"](length=2),
        MLP((2, 128, 64, 2)),
        Training(epochs=100),
        Training(epochs=25),
        strength=1e3,
    ),
    "mnist": Setup(
        STREAMS["permuted_mnist"](length=2, train_size=1000),
        MLP((784, 16, 10)),
        Training(epochs=20),
        Training(epochs=10),
        strength=1e3,
    ),
}

# At a budget of t numbers per parameter, t a multiple of 5.
FAMILIES: dict[str, Recipe] = {
    "CountSketch": lambda t: hf.CountSketch(t),
    "OSNAP, 5 per column": lambda t: hf.OSNAP(t, nonzeros=5),
    "Rademacher": lambda t: hf.DenseSketch(t),
    "Gaussian": lambda t: hf.DenseSketch(t, kind="gaussian"),
    "SRHT": lambda t: hf.SRHT(t),
    "Nyström": lambda t: hf.Nystrom(t),
    "low rank, grouped": lambda t: hf.LowRank(t, group=64),
    "low rank, row by row": lambda t: hf.LowRank(t, group=1),
    "CountSketch into Frequent Directions": lambda t: hf.LowRank(t, shrink=True),
    "Frequent Directions": lambda t: hf.LowRank(t, group=1, shrink=True),
    "diagonal plus low rank, row by row": lambda t: hf.DiagonalPlusLowRank(t, group=1),
    "Kronecker plus low rank, row by row": lambda t: hf.KroneckerPlusLowRank(t, group=1),
    "blocks": lambda t: hf.BlockDiagonal(t),
}
# Without a budget of one's choice.
FIXED: dict[str, hf.Approximation] = {
    "diagonal": hf.Diagonal(),
    "Kronecker": hf.Kronecker(),
    "Kronecker, eigenvalue-corrected": hf.Kronecker(correction="eigen"),
    "Kronecker of rank 16": hf.Kronecker(rank=16),
    "Kronecker of rank 4": hf.Kronecker(rank=4),
}


@dataclasses.dataclass
class Line:
    """What one approximation at one budget gave, over seeds and draws."""

    family: str
    budget: int | None
    approximation: hf.Approximation
    nbytes: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: dict[str, list[Tensor]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def quantile(self, kind: str, q: float) -> float:
        """Over directions, seeds and draws."""
        return float(torch.cat(self.errors[kind]).quantile(q))

    def to_json(self) -> dict[str, Any]:
        """One entry of the JSON file; ``per_seed`` has the medians."""
        return {
            "family": self.family,
            "budget": self.budget,
            "approximation": to_json(self.approximation),
            "nbytes": self.nbytes,
            "seconds": statistics.median(self.seconds),
            "errors": {
                kind: {
                    "median": self.quantile(kind, 0.5),
                    "q90": self.quantile(kind, 0.9),
                    "medians": [float(f"{e.median():.3g}") for e in self.errors[kind]],
                }
                for kind in KINDS
            },
        }


def candidates(budgets: Sequence[int], only: str = "") -> Iterator[Line]:
    """A line per family and budget; those whose family has ``only`` in its name."""
    for family, make in FAMILIES.items():
        for budget in budgets if only in family else ():
            yield Line(family, budget, make(budget))
    for family, approximation in FIXED.items():
        if only in family:
            yield Line(family, None, approximation)


class Problem:
    """One network after its first task, its rows, and the way it learns the second."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed = setup, seed
        self.one, self.two = (t.train for t in setup.stream.tasks(derive(seed, "data"))[:2])
        self.model = setup.model.build(seed)
        self._learn(self.model, self.one, setup.first, "first")
        self.anchor = nn.utils.parameters_to_vector(self.model.parameters()).detach().double()
        everything = self.consolidate(hf.LowRank(rank=len(self.one), group=1)).matrix
        assert isinstance(everything, hf.FactoredMatrix)
        self.rows = everything.factor  # all of them, over √n

    def _learn(
        self,
        model: nn.Module,
        split: Split,
        training: Training,
        order: str,
        penalty: hf.Penalty | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(derive(self.seed, order))
        optimizer = FlatAdam(model, training.lr)
        options: dict[str, Any] = {"generator": generator, "after_epoch": after_epoch}
        learn(model, split, training, optimizer, penalty=penalty, **options)

    def consolidate(self, approximation: hf.Approximation, draw: int = 0) -> hf.Penalty:
        """The first task's penalty; the same rows for every approximation."""
        regularizer = hf.Regularizer(hf.EWC(), approximation, self.setup.strength)
        seed = derive(self.seed, "sketch", draw)
        data = self.one.batches(BATCH)
        return regularizer.consolidate(self.model, data, seed=seed, progress=False)

    def directions(self, penalty: hf.Penalty | None) -> Tensor:
        """θ − θ* after every epoch of the second task, as columns."""
        model = self.setup.model.build(self.seed)
        model.load_state_dict(self.model.state_dict())
        found: list[Tensor] = []

        def keep(_: int) -> None:
            here = nn.utils.parameters_to_vector(model.parameters()).detach().double()
            found.append(here - self.anchor)

        self._learn(model, self.two, self.setup.second, "second", penalty, keep)
        return torch.stack(found, 1)

    def form(self, directions: Tensor) -> Tensor:
        """δᵀΩδ of every column, from all rows."""
        parts = (part.double() @ directions for part in self.rows.split(200))
        return torch.cat(list(parts)).square().sum(0)


def forms(matrix: hf.PSDMatrix, directions: Tensor) -> Tensor:
    """δᵀΩ̂δ of every column."""
    if isinstance(matrix, hf.FactoredMatrix):
        return (matrix.factor.double() @ directions).square().sum(0)
    return torch.stack([matrix.quadratic(delta) for delta in directions.T.contiguous()]).double()


def measure(problem: Problem, lines: Sequence[Line], draws: int) -> dict[str, list[float]]:
    """Add one seed to every line; returns δᵀΩδ / (‖δ‖² λ₁) along the recorded directions."""
    m = len(problem.anchor)
    random = torch.Generator().manual_seed(derive(problem.seed, "directions"))
    whole = problem.consolidate(hf.Full(form="factored"))
    assert isinstance(whole.matrix, hf.FactoredMatrix)
    shared = {
        "random": torch.randn(m, RANDOM, generator=random, dtype=torch.float64),
        "free": problem.directions(None),
        "held": problem.directions(whole),
    }
    exact = {kind: problem.form(D) for kind, D in shared.items()}
    for line in lines:
        for draw in range(draws):
            start = time.process_time()
            penalty = problem.consolidate(line.approximation, draw)
            line.seconds.append(time.process_time() - start)
            line.nbytes = penalty.matrix.nbytes
            for kind, D in shared.items():
                error = (forms(penalty.matrix, D) - exact[kind]).abs() / exact[kind]
                line.errors[kind].append(error)
            if draw == 0:
                D = problem.directions(penalty)
                true = problem.form(D)
                line.errors["own"].append((forms(penalty.matrix, D) - true).abs() / true)
    largest = torch.linalg.matrix_norm(whole.matrix.gram(), 2)
    return {
        kind: [float(f"{x:.3e}") for x in exact[kind] / shared[kind].square().sum(0) / largest]
        for kind in ("free", "held")
    }


def table(entries: Sequence[Entry]) -> list[str]:
    """Best first at every budget, in the directions of the next task."""
    text = [
        "| approximation | kB | seconds | random | free | held | own |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for x in sorted(entries, key=lambda x: (x["budget"] or 0, x["errors"]["free"]["median"])):
        errors = [x["errors"][kind] for kind in KINDS]
        cells = [f"{error['median']:.2g} ({error['q90']:.2g})" for error in errors]
        name = x["family"] if x["budget"] is None else f"{x['family']}, t = {x['budget']}"
        cost = f"{x['nbytes'] / 1000:.0f} | {x['seconds']:.2f}"
        text.append(f"| {name} | {cost} | {' | '.join(cells)} |")
    return text


def needed(entries: Sequence[Entry]) -> list[str]:
    """The smallest budget of every family that is good enough, in each kind of direction."""
    text = ["| family | random | free | held | own |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(x["family"] for x in entries):
        cells = []
        for kind in KINDS:
            own = [x for x in entries if x["family"] == family]
            good = [x for x in own if x["errors"][kind]["median"] <= WITHIN]
            best = min(good, key=lambda x: x["nbytes"], default=None)
            cells.append(
                f"{best['nbytes'] / 1000:.0f} kB, {best['seconds']:.2f} s" if best else "none"
            )
        text.append(f"| {family} | {' | '.join(cells)} |")
    return text


def write(out: Path, name: str, meta: dict[str, Any], entries: list[Entry], recorded: Any) -> None:
    """JSON and a Markdown page; entries of other approximations that are there already stay."""
    out.mkdir(parents=True, exist_ok=True)
    path, commands = out / f"{name}.json", [meta["command"]]
    if path.exists():
        old = json.loads(path.read_text())
        if all(old["meta"][key] == meta[key] for key in ("setup", "draws")):
            new = {(x["family"], x["budget"]) for x in entries}
            kept = [x for x in old["lines"] if (x["family"], x["budget"]) not in new]
            entries = kept + entries
            if kept:
                commands = list(dict.fromkeys([*old["meta"]["commands"], *commands]))
    meta = {"commands": commands, **{k: v for k, v in meta.items() if k != "command"}}
    body = {"meta": meta, "lines": entries, "recorded": recorded}
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    page = [
        f"# Approximations of the quadratic form: {name}",
        "",
        *[f"    {command}" for command in commands],
        "",
        f"{meta['parameters']:,} parameters, {meta['examples']:,} examples, {meta['seeds']} seeds, draws "
        f"per seed: {meta['draws']}. |δᵀΩ̂δ − δᵀΩδ| / δᵀΩδ: median (90 % quantile) over directions, "
        "seeds and draws. Seconds of one consolidation: processor time, one thread, median. "
        "What the directions are: `benchmarks/families.py`.",
        "",
        *table(entries),
        "",
        f"The smallest budget measured whose median error is at most {WITHIN:.0%}:",
        "",
        *needed(entries),
        "",
    ]
    (out / f"{name}.md").write_text("\n".join(page))


def run(
    name: str,
    setup: Setup,
    out: Path,
    *,
    seeds: int,
    draws: int,
    budgets: Sequence[int],
    only: str = "",
) -> None:
    """Measure seed by seed; what is there is written after each."""
    lines, recorded = list(candidates(budgets, only)), []
    listed = " ".join(map(str, budgets)) + (f" --only {shlex.quote(only)}" if only else "")
    for seed in range(seeds):
        start = time.process_time()
        problem = Problem(setup, seed)
        recorded.append(measure(problem, lines, draws))
        print(f"{name}: seed {seed}, {time.process_time() - start:.0f} s", flush=True)
        meta = {
            "command": f"OMP_NUM_THREADS=1 python benchmarks/families.py {name} --seeds {seeds} "
            f"--draws {draws} --budgets {listed}",
            "parameters": len(problem.anchor),
            "examples": len(problem.one),
            "seeds": seed + 1,
            "draws": draws,
            "setup": to_json(setup),
            "load": round(os.getloadavg()[0], 1),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        }
        write(out, name, meta, [line.to_json() for line in lines], recorded)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("setup", choices=SETUPS, nargs="?", default="toy")
    parser.add_argument("--out", type=Path, default=Path("results/families"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--budgets", type=int, nargs="+", default=[5, 10, 25, 50])
    parser.add_argument("--only", default="", help="families with this in their name")
    chosen = vars(parser.parse_args())
    torch.set_num_threads(1)
    name, out = chosen.pop("setup"), chosen.pop("out")
    run(name, SETUPS[name], out, **chosen)


if __name__ == "__main__":
    main()
