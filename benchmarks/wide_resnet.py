"""How long the Wide-ResNet is to learn, and in which precision: the first task alone, without any penalty.

Trains the plain network of the CIFAR-100 study on its first task with the code of the experiments, in float32
and with bfloat16 autocast, on a seed that is never reported, and keeps validation and test accuracy after
every epoch. The number of epochs of the study is chosen from the validation accuracy written here.

    OMP_NUM_THREADS=1 python benchmarks/wide_resnet.py --out results/bench
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional

from holdfast import results
from holdfast.adam import FlatAdam
from holdfast.models import WideResNet
from holdfast.recipes import RECIPES
from holdfast.recipes.tuning import SEEDS
from holdfast.seeds import derive
from holdfast.training import accuracies, learn


def learning(autocast: bool, epochs: int, smoke: bool) -> dict[str, object]:
    """Accuracies after every epoch of the first task, and the seconds of an epoch."""
    experiment = RECIPES["cifar100"].example("paper", smoke=smoke)
    assert isinstance(experiment.model, WideResNet)
    task = experiment.stream.tasks(derive(SEEDS[0], "data"))[0]
    model = WideResNet(**{**vars(experiment.model), "autocast": autocast}).build(SEEDS[0])
    optimizer = FlatAdam(model, experiment.training.lr)
    training = type(experiment.training)(**{**vars(experiment.training), "epochs": epochs})
    record: list[list[float]] = []
    seconds: list[float] = []
    begun = time.perf_counter()

    def after_epoch(epoch: int) -> None:
        nonlocal begun
        seconds.append(time.perf_counter() - begun)
        record.append(accuracies(model, [task.validation, task.test]))
        print(f"autocast {autocast}, epoch {epoch + 1}: {record[-1]}", flush=True)
        begun = time.perf_counter()

    torch.manual_seed(derive(SEEDS[0], "dropout", 0))
    generator = torch.Generator().manual_seed(derive(SEEDS[0], "order", 0))
    learn(model, task.train, training, optimizer, generator=generator, after_epoch=after_epoch)
    return {
        "autocast": autocast,
        "validation": [round(row[0], 4) for row in record],
        "test": [round(row[1], 4) for row in record],
        "seconds": statistics.median(seconds),
    }


def steps(pairs: int, smoke: bool) -> list[dict[str, object]]:
    """Seconds of a training step of batch 64, the ways timed in turn."""
    experiment = RECIPES["cifar100"].example("paper", smoke=smoke)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(0, 5, (64,))
    ways = [(autocast, last) for autocast in (False, True) for last in (False, True)]
    found: dict[tuple[bool, bool], list[float]] = {way: [] for way in ways}
    networks = {}
    for autocast, last in ways:
        model = WideResNet(**{**vars(experiment.model), "autocast": autocast}).build(0).train()
        model.channels_last = last
        networks[autocast, last] = model, FlatAdam(model, 1e-3)
    for pair in range(pairs + 1):
        for way, (model, optimizer) in networks.items():
            begun = time.perf_counter()
            for parameter in model.parameters():
                parameter.grad.zero_()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if pair:  # the first compiles
                found[way].append(time.perf_counter() - begun)
    return [
        {"autocast": a, "channels last": c, "seconds": statistics.median(found[a, c])}
        for a, c in ways
    ]


def table(data: dict[str, object]) -> str:
    """What was measured, as Markdown."""
    timed, learnt = data["steps"], data["learning"]
    assert isinstance(timed, list)
    assert isinstance(learnt, list)
    plain = timed[0]["seconds"]
    lines = [
        "# WRN-16-4 on the first task of the CIFAR-100 study",
        "",
        f"Made by `{data['command']}`.",
        "",
    ]
    lines += [
        "| Arithmetic of training | Memory format | Step, s | In units of the first |",
        "|---|---|---:|---:|",
    ]
    for row in timed:
        lines.append(
            f"| {'bfloat16 autocast' if row['autocast'] else 'float32'} "
            f"| {'channels last' if row['channels last'] else 'as stored'} "
            f"| {row['seconds']:.3f} | {row['seconds'] / plain:.2f} |"
        )
    epochs = [
        e
        for e in (5, 10, 15, 20, 25, 30, 40, 50, 60)
        if e <= max(len(r["validation"]) for r in learnt)
    ]
    lines += [
        "",
        "Accuracy after so many epochs, per cent: the mean of the five epochs up to it.",
        "",
    ]
    lines += [
        f"| Training | Images | {' | '.join(map(str, epochs))} |",
        "|---|---|" + "---:|" * len(epochs),
    ]
    for row in learnt:
        for images in ("validation", "test"):
            cells = [
                f"{100 * statistics.fmean(row[images][max(0, e - 5) : e]):.1f}"
                if e <= len(row[images])
                else ""
                for e in epochs
            ]
            name = "bfloat16 autocast" if row["autocast"] else "float32"
            lines.append(f"| {name} | {images} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for wide-resnet.json and .md"
    )
    parser.add_argument(
        "--epochs", type=int, nargs=2, default=(30, 30), help="in float32, in bfloat16"
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a tiny network and few images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data: dict[str, object] = {
        "command": f"python benchmarks/wide_resnet.py --epochs {options.epochs[0]} {options.epochs[1]}",
        "machine": results.machine(),
        "versions": results.versions(),
    }
    learnt: list[dict[str, object]] = []
    data |= {"steps": steps(options.pairs, options.smoke), "learning": learnt}
    options.out.mkdir(parents=True, exist_ok=True)
    for autocast, epochs in ((True, options.epochs[1]), (False, options.epochs[0])):
        learnt.append(learning(autocast, epochs, options.smoke))
        (options.out / "wide-resnet.json").write_text(json.dumps(data, indent=1) + "\n")
        (options.out / "wide-resnet.md").write_text(table(data))
    print(table(data))


if __name__ == "__main__":
    main()
