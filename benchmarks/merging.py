"""What is lost when the Kronecker products of several tasks become one.

A small perceptron learns five tasks of digits, held by the products of all tasks side by side, which are
their exact sum. Every rule of merging takes the same rows, and is compared with that sum:

- error: ‖Ω̂ − Ω‖²_F / ‖Ω‖²_F;
- kept: ⟨Ω_t, Ω̂⟩ / ⟨Ω_t, Ω_t⟩ of the task that keeps least; more than 1 where tasks are alike;
- numbers: what is stored, per parameter.

    OMP_NUM_THREADS=1 python benchmarks/merging.py --out results/families
"""

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

import holdfast as hf
from holdfast.adam import FlatAdam
from holdfast.analysis import inner
from holdfast.matrices import KroneckerMatrix
from holdfast.models import MLP, Model
from holdfast.seeds import derive
from holdfast.streams import STREAMS, Stream
from holdfast.training import Training, learn

BATCH = 100
STRENGTH = 100.0
NAMES = ("error", "kept", "numbers")

EXACT = "side by side"
WAYS = {
    EXACT: hf.Kronecker(merge="stack"),
    "averaged, the default": hf.Kronecker(),
    "nearest": hf.Kronecker(merge="nearest"),
    "averaged, eigenvalue-corrected": hf.Kronecker(correction="eigen"),
    "side by side, rank 16": hf.Kronecker(rank=16, merge="stack"),
    "averaged, rank 16": hf.Kronecker(rank=16),
    "nearest, rank 16": hf.Kronecker(rank=16, merge="nearest"),
    "averaged, rank 4": hf.Kronecker(rank=4),
}
USUAL = "inputs averaged, gradients summed"  # what is often done

Found = dict[str, dict[str, list[float]]]  # rule -> what -> a value per seed


@dataclasses.dataclass(frozen=True)
class Setup:
    """Tasks, a network, and how it learns them."""

    stream: Stream
    model: Model
    training: Training


NETWORK, TRAINING = MLP((784, 64, 32, 10)), Training(epochs=5)
SETUPS = {
    "permuted": Setup(STREAMS["permuted_mnist"](length=5, train_size=2000), NETWORK, TRAINING),
    # two digits a task, one head
    "split": Setup(STREAMS["split_mnist"](train_size=10_000), NETWORK, TRAINING),
}


def matrices(setup: Setup, seed: int) -> dict[str, KroneckerMatrix]:
    """What every rule makes of all tasks."""
    penalties: dict[str, hf.Penalty | None] = dict.fromkeys(WAYS)
    model = setup.model.build(seed)
    optimizer = FlatAdam(model, setup.training.lr)
    for index, task in enumerate(setup.stream.tasks(derive(seed, "data"))):
        order = torch.Generator().manual_seed(derive(seed, "order", index))
        held = penalties[EXACT]
        learn(model, task.train, setup.training, optimizer, generator=order, penalty=held)
        for name, approximation in WAYS.items():
            regularizer = hf.Regularizer(hf.EWC(), approximation, STRENGTH)
            data = task.train.batches(BATCH)
            penalties[name] = regularizer.consolidate(
                model, data, previous=penalties[name], seed=seed, progress=False
            )
    found = {}
    for name, penalty in penalties.items():
        assert penalty is not None
        assert isinstance(penalty.matrix, KroneckerMatrix)
        found[name] = penalty.matrix
    return found | {USUAL: usual(found[EXACT])}


def usual(products: KroneckerMatrix) -> KroneckerMatrix:
    """One product: the inputs' factors averaged over tasks, those of the outputs' gradients summed."""
    blocks = [
        dataclasses.replace(
            block,
            inputs=block.inputs.mean(0, keepdim=True),
            outputs=block.outputs.sum(0, keepdim=True),
        )
        for block in products.blocks
    ]
    return KroneckerMatrix(blocks, products.rest)


def single(products: KroneckerMatrix, task: int) -> KroneckerMatrix:
    """The products of one task."""
    blocks = [
        block.with_parts({name: part[task : task + 1] for name, part in block.parts.items()})
        for block in products.blocks
    ]
    return KroneckerMatrix(blocks, torch.zeros_like(products.rest))


def measure(setup: Setup, seed: int, found: Found) -> None:
    """Add one seed to every rule."""
    merged = matrices(setup, seed)
    exact = merged[EXACT]
    tasks = [single(exact, task) for task in range(exact.terms)]
    for name, matrix in merged.items():
        kept = min(inner(task, matrix) / inner(task, task) for task in tasks)
        values = hf.frobenius_error(matrix, exact), kept, matrix.nbytes / 4 / matrix.dim
        for what, value in zip(NAMES, values, strict=True):
            found[name][what].append(float(f"{value:.4g}"))


def page(command: str, setups: dict[str, Found]) -> str:
    """Means over seeds, and the range of what the worst task keeps."""
    text = ["# One Kronecker product for several tasks", "", f"    {command}", ""]
    text += [*(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    text += [*(__doc__ or "").split("\n\n")[2].splitlines(), ""]
    text += ["Error and kept: means over seeds; in brackets the lowest and the highest.", ""]
    for name, found in setups.items():
        seeds = len(found[EXACT]["error"])
        text += [f"## {name}: {SETUPS[name].stream!r}, {seeds} seeds", ""]
        text += ["| rule | numbers per parameter | error | kept by the task that keeps least |"]
        text += ["|---|---:|---:|---:|"]
        for rule, own in sorted(found.items(), key=lambda x: statistics.mean(x[1]["error"])):
            cells = [f"{statistics.mean(own['numbers']):.2f}"]
            cells += [spread(own[what]) for what in ("error", "kept")]
            text.append(f"| {rule} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def spread(values: Sequence[float]) -> str:
    """The mean, and between what it lies."""
    return f"{statistics.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/families"))
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    setups: dict[str, Found] = {}
    for name, setup in SETUPS.items():
        setups[name] = defaultdict(lambda: defaultdict(list))
        for seed in range(chosen.seeds):
            measure(setup, seed, setups[name])
            print(f"{name}: seed {seed}", flush=True)
    write(chosen.out, chosen.seeds, setups)


def write(out: Path, seeds: int, setups: dict[str, Found]) -> None:
    """JSON and a Markdown page."""
    command = f"OMP_NUM_THREADS=1 python benchmarks/merging.py --seeds {seeds}"
    out.mkdir(parents=True, exist_ok=True)
    body = {"command": command, "torch": torch.__version__, "setups": setups}
    (out / "merging.json").write_text(json.dumps(body, indent=1) + "\n")
    (out / "merging.md").write_text(page(command, setups))


if __name__ == "__main__":
    main()
