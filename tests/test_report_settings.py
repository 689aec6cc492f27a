"""Which settings a table shows, what they are called, and the command beside it."""

import dataclasses
from pathlib import Path

import pytest

from fake_results import made_up
from holdfast import report
from holdfast.approximation import BlockDiagonal, CountSketch, Diagonal, LowRank
from holdfast.experiment import Experiment, Storage
from holdfast.history import MovingAverage, Sum
from holdfast.recipes import RECIPES
from holdfast.report.loading import read
from holdfast.report.naming import names
from holdfast.report.standard import main_history
from holdfast.report.tasks import scale
from holdfast.settings import change_all
from holdfast.streams import CIFAR100Shift


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "none"))


def example(preset: str = "fair", recipe: str = "permuted-mnist", **changes: object) -> Experiment:
    """The recipe's own example with changes of its regularizer, training and stream."""
    found = RECIPES[recipe].example(preset)
    held, training, stream = found.regularizer, found.training, found.stream
    assert held is not None
    parts: dict[str, object] = {}
    for name, value in changes.items():
        if name in ("history", "anchor", "strength", "approximation"):
            held = dataclasses.replace(held, **{name: value})  # type: ignore[arg-type]
        elif name in ("epochs", "lr"):
            training = dataclasses.replace(training, **{name: value})  # type: ignore[arg-type]
        elif name in ("train_size", "length"):
            stream = dataclasses.replace(stream, **{name: value})  # type: ignore[arg-type]
        else:
            parts[name] = value
    if parts.get("mode") == "joint" or parts.pop("plain", False):
        held = None  # type: ignore[assignment]
    return dataclasses.replace(
        found,
        regularizer=held,
        training=training,
        stream=stream,
        **parts,  # type: ignore[arg-type]
    )


def save(folder: Path, experiment: Experiment, seeds: int = 1) -> None:
    for seed in range(seeds):
        made_up(dataclasses.replace(experiment, seed=seed)).save(folder)


AVERAGE = MovingAverage(new=0.25)


@pytest.mark.parametrize(
    ("recipe", "preset", "history"),
    [
        *(("toy", preset, "moving_average") for preset in RECIPES["toy"].presets),
        *(("frontier", preset, "sum") for preset in RECIPES["frontier"].presets),
        ("permuted-mnist", "fair", "sum"),
        ("permuted-mnist", "twenty-tasks", "sum"),
        ("permuted-mnist", "paper", "moving_average"),
        ("permuted-mnist", "original-code", "moving_average"),
        ("permuted-mnist", "sketch-size", "moving_average"),
        ("cifar100", "paper", "moving_average"),
        ("something-new", "paper", "moving_average"),
    ],
)
def test_the_main_history_of_a_preset(recipe: str, preset: str, history: str) -> None:
    assert main_history(recipe, preset) == history


def test_the_headline_has_the_history_of_its_preset(tmp_path: Path) -> None:
    for history in (Sum(), AVERAGE):
        save(tmp_path / "fair", example(history=history), seeds=1 if history == Sum() else 3)
        save(tmp_path / "paper", example("paper", history=history))
    for preset, wanted in (("fair", "sum"), ("paper", "moving_average")):
        (head,) = [row for row in report.rows(tmp_path / preset) if row["headline"]]
        assert head["history"]["name"] == wanted


def test_a_table_of_two_histories_says_which(tmp_path: Path) -> None:
    save(tmp_path, example(history=AVERAGE))  # the sum was not run
    block = BlockDiagonal(50)
    save(tmp_path, example(approximation=block, limit=10_000))
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| EWC · Sketched (t = 50), moving average |" in text
    assert "| EWC · Block-diagonal (50 × 50), from 10,000 examples, sum |" in text


@pytest.mark.parametrize("trial", [{"epochs": 7}, {"train_size": 500}, {"length": 3}])
def test_a_trial_of_another_scale_does_not_replace_the_headline(
    tmp_path: Path, trial: dict[str, int]
) -> None:
    save(tmp_path, example(), seeds=1)
    save(tmp_path, example(**trial), seeds=2)
    study = read(tmp_path)
    (head,) = study.primaries
    assert len(head.runs) == 1
    report.write(tmp_path)


def test_without_the_recipes_own_scale_the_most_runs_are_the_table(tmp_path: Path) -> None:
    save(tmp_path, example(epochs=3), seeds=2)
    save(tmp_path, example(epochs=9), seeds=1)
    (head,) = read(tmp_path).primaries
    assert len(head.runs) == 2


def test_rows_that_differ_in_epochs_say_so(tmp_path: Path) -> None:
    save(tmp_path, example())
    save(tmp_path, example(approximation=CountSketch(50), epochs=4, plain=True))
    save(tmp_path, example(approximation=BlockDiagonal(50), epochs=4))
    save(tmp_path, example(plain=True))
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| EWC · Sketched (t = 50), 1 epoch |" in text
    assert "| EWC · Block-diagonal (50 × 50), 4 epochs |" in text
    assert "| No regularisation | nothing is held, training epochs 4 |" in text


def test_names_say_what_differs_and_nothing_else(tmp_path: Path) -> None:
    for strength in (1.0, 10.0):
        save(tmp_path, example(strength=strength))
    save(tmp_path, example(anchor="each"))
    save(tmp_path, example(approximation=CountSketch(50, copies=2)))
    study = read(tmp_path)
    assert sorted(names(study.reported("fair")).values()) == [
        "Sketched (t = 50), anchor each",
        "Sketched (t = 50), copies 1, λ = 1",
        "Sketched (t = 50), copies 1, λ = 10",
        "Sketched (t = 50), copies 2",
    ]
    assert list(names(study.reported("fair")[:1]).values()) == ["Sketched (t = 50)"]


@pytest.mark.parametrize(
    ("runs", "command"),
    [
        ([({}, 2)], "--preset fair --seeds 2"),
        ([({"epochs": 5}, 2)], "--preset fair --seeds 2 --only count_sketch --epochs 5"),
        (
            [({"epochs": 5, "train_size": 600}, 1)],
            "--preset fair --seeds 1 --only count_sketch --epochs 5 --train-size 600",
        ),
        (
            [({}, 3), ({"epochs": 5}, 1)],
            "--preset fair --seeds 3 && holdfast reproduce permuted-mnist --preset fair --seeds 1 "
            "--only count_sketch --epochs 5",
        ),
        (
            [({}, 3), ({"approximation": Diagonal()}, 5), ({"approximation": LowRank(50)}, 3)],
            "--preset fair --seeds 3 && holdfast reproduce permuted-mnist --preset fair --seeds 5 "
            "--only diagonal",
        ),
        (
            [({}, 3), ({"approximation": Diagonal()}, 9), ({"approximation": LowRank(50)}, 5)],
            "--preset fair --seeds 3 && holdfast reproduce permuted-mnist --preset fair --seeds 5 "
            "--only low_rank && holdfast reproduce permuted-mnist --preset fair --seeds 9 --only diagonal",
        ),
    ],
)
def test_the_command_makes_what_is_shown(
    tmp_path: Path, runs: list[tuple[dict[str, int], int]], command: str
) -> None:
    for changes, seeds in runs:
        save(tmp_path, example(**changes), seeds)
    study = read(tmp_path)
    assert study.command("fair") == f"holdfast reproduce permuted-mnist {command}"
    assert study.command() == "holdfast reproduce permuted-mnist"


def test_the_scale_says_how_many_seeds_every_method_has(tmp_path: Path) -> None:
    save(tmp_path, example(), 3)
    save(tmp_path, example(approximation=Diagonal()), 5)
    assert scale(read(tmp_path)).rows[0][-1].text == "3–5"
    save(tmp_path, example(), 5)
    assert scale(read(tmp_path)).rows[0][-1].text == "5"


def test_the_command_of_another_network_and_stream(tmp_path: Path) -> None:
    found = RECIPES["cifar100"].example("paper")
    assert isinstance(found.stream, CIFAR100Shift)
    stream = dataclasses.replace(found.stream, augmentation=None, train_size=10)
    model = dataclasses.replace(found.model, depth=10)
    save(tmp_path, dataclasses.replace(found, stream=stream, model=model))
    command = read(tmp_path).command("paper")
    changes = "--train-size 10 --set model.depth=10 --set stream.augmentation=null"
    plain = "holdfast reproduce cifar100 --preset paper --seeds 1 --only count_sketch"
    assert command == f"{plain} {changes}"
    settings = [word for word in command.split() if word.startswith(("model", "stream"))]
    settings.append("stream.train_size=10")
    assert change_all(found, settings) == dataclasses.replace(found, stream=stream, model=model)


@pytest.mark.parametrize(
    ("searched", "options"),
    [("bfloat16", " --epochs 3 --set storage=bfloat16"), ("float32", " --epochs 3")],
)
def test_the_command_names_the_precision_that_was_asked_for(
    tmp_path: Path, searched: Storage, options: str
) -> None:
    half = dataclasses.replace(example(epochs=3), storage="bfloat16")
    save(tmp_path, half)
    save(tmp_path, dataclasses.replace(half, storage=searched, role="tune"))
    plain = "holdfast reproduce permuted-mnist --preset fair --seeds 1 --only count_sketch"
    assert read(tmp_path).command("fair") == plain + options


def test_the_command_of_all_presets(tmp_path: Path) -> None:
    for preset in RECIPES["permuted-mnist"].presets:
        save(tmp_path / "all", example(preset, epochs=5), 2)
    for preset in ("fair", "paper"):
        save(tmp_path / "two", example(preset, epochs=5 if preset == "fair" else 20), 2)
    plain = "holdfast reproduce permuted-mnist --preset"
    assert (
        read(tmp_path / "all").command("all")
        == f"{plain} all --seeds 2 --only count_sketch --epochs 5"
    )
    assert (
        read(tmp_path / "two").command("all")
        == f"{plain} paper --seeds 2 && {plain} fair --seeds 2 --only count_sketch --epochs 5"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_smoke_test_is_called_one(tmp_path: Path, recipe: str) -> None:
    for preset in RECIPES[recipe].presets:
        found = RECIPES[recipe].example(preset, smoke=True)
        save(tmp_path / preset, found)
        command = read(tmp_path / preset).command(preset)
        assert command == f"holdfast reproduce {recipe} --preset {preset} --smoke"
