"""The command line: it teaches, refuses clearly, and runs."""

import errno
import json
import os
import warnings
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast as hf
from holdfast import memory, results
from holdfast.cli import app, seconds
from holdfast.models import mlp
from holdfast.recipes import RECIPES

TINY = [
    *("--set", "training.epochs=1", "--set", "stream.length=2", "--set", "stream.train=20"),
    *("--set", "regularizer.approximation.size=3"),
]


def holdfast(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def test_help_names_every_command_and_option() -> None:
    outcome = holdfast("--help")
    assert outcome.exit_code == 0
    for word in ("reproduce", "run", "report", "inspect", "list", "--smoke"):
        assert word in outcome.output
    outcome = holdfast("reproduce", "--help")
    for word in ("--preset", "--seeds", "--jobs", "--smoke", "--time-budget", "--out", "--set"):
        assert word in outcome.output
    assert "resumes after Ctrl-C" in outcome.output


REFUSED = {
    "recipe": (["reproduce", "tpy"], "unknown recipe 'tpy'; known: toy"),
    "preset": (
        ["reproduce", "toy", "--preset", "papr"],
        "unknown preset of toy 'papr'; known: paper",
    ),
    "method": (
        ["reproduce", "toy", "--set", "regularizer.approximation=sketch"],
        "unknown approximation 'sketch'; known: diagonal",
    ),
    "field": (
        ["reproduce", "toy", "--set", "training.epoch=1"],
        "unknown field of training 'epoch'; known: epochs",
    ),
    "no value": (["reproduce", "toy", "--set", "seed"], "expected field=value"),
    "jobs": (["reproduce", "toy", "--jobs", "0"], "Invalid value for '--jobs'"),
    "seeds": (["reproduce", "toy", "--seeds", "0"], "Invalid value for '--seeds'"),
    "budget": (["reproduce", "toy", "--time-budget", "soon"], "written like 90s, 150m or 1h30m"),
    "only": (["reproduce", "toy", "--only", "kroneker"], "did you mean 'kronecker'?"),
    "no digits": (["reproduce", "toy", "--time-budget", ".s"], "written like 90s, 150m or 1h30m"),
    "run": (["run", "nothing"], "known: toy"),
    "no file": (["run", "nothing.json"], "there is no file nothing.json"),
    "report": (["report", "toy"], "no results folder results/toy"),
    "report format": (
        ["report", "toy", "--format", "pdf"],
        "unknown format 'pdf'; known: html, json",
    ),
    "inspect": (["inspect", "nothing.safetensors"], "nothing.safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_ends_with_code_2_and_says_what_is_known(case: str) -> None:
    arguments, message = REFUSED[case]
    outcome = holdfast(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.output
    assert "Traceback" not in outcome.output
    assert not list(Path().rglob("*.json"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("90s", 90), ("150m", 9000), ("1h30m", 5400), ("1.5h", 5400), ("2 h", 7200)],
)
def test_time_budgets(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5x", "1h30", "1.2.3m", "0s"])
def test_wrong_time_budgets(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 150m or 1h30m"):
        seconds(text)


def test_list_shows_the_registries() -> None:
    outcome = holdfast("list")
    assert outcome.exit_code == 0
    for word in ("toy", "original-code", "count_sketch", "mas", "moving_average", "mlp"):
        assert word in outcome.output
    assert "E[a aᵀ] ⊗ E[g gᵀ]" in outcome.output  # brackets are not markup
    assert ":math:" not in outcome.output
    assert ":class:" not in outcome.output


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_default_preset(recipe: str) -> None:
    shown = holdfast("run", recipe, "--show")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["preset"] == RECIPES[recipe].default


def test_run_shows_runs_and_keeps(tmp_path: Path) -> None:
    shown = holdfast("run", "toy", "--show", "--set", "seed=3")
    data = json.loads(shown.stdout)
    assert data["seed"] == 3
    assert not (tmp_path / "results").exists()
    first = holdfast("run", "toy", "--out", "here", *TINY)
    assert first.exit_code == 0, first.output
    (path,) = Path("here/runs").iterdir()
    assert first.stdout.splitlines()[-1] == str(path)
    again = holdfast("run", str(path), "--out", "here")  # a result file holds its experiment
    assert again.exit_code == 0
    assert "was there already" in again.stdout
    path.write_text("{")
    repaired = holdfast("run", "toy", "--out", "here", *TINY)
    assert "running it again" in repaired.output
    assert results.load(path).experiment.training.epochs == 1
    piped = holdfast("run", "-", "--show", text=shown.stdout)
    assert json.loads(piped.stdout) == data


def test_run_reads_a_file_and_names_what_is_wrong_in_it(tmp_path: Path) -> None:
    file = tmp_path / "experiment.json"
    file.write_text('{"recipe": "toy"}')
    assert (
        "experiment: missing preset, stream, model, training" in holdfast("run", str(file)).output
    )
    file.write_text("{")
    assert "is not JSON" in holdfast("run", str(file)).output
    file.write_bytes(b"\xff\xfe")
    assert f"{file} is not JSON" in holdfast("run", str(file)).output
    assert (
        "there is no file nope.json; expected a JSON file" in holdfast("run", "nope.json").output
    )


def test_a_warning_is_a_line_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where in the library it was raised is nothing that a command's user can act on."""
    spelled = warnings.formatwarning

    def warned(*_: object, **__: object) -> NoReturn:
        print(warnings.formatwarning("the matrix is zero", UserWarning, "penalty.py", 12, "x = 1"))
        raise ValueError("and that is an error")

    monkeypatch.setattr("holdfast.execution.execute", warned)
    outcome = holdfast("run", "toy", "--out", "here", *TINY)
    assert "warning: the matrix is zero\n" in outcome.output
    assert "penalty.py" not in outcome.output
    assert warnings.formatwarning is spelled


@pytest.mark.parametrize(
    ("where", "command", "goes_on"),
    [
        ("holdfast.execution.execute", ["run", "toy", *TINY], True),
        ("holdfast.report.write", ["report", "here"], False),
    ],
)
def test_what_is_stopped_goes_on_only_where_it_does(
    where: str, command: list[str], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    Path("here").mkdir()
    monkeypatch.setattr(where, stopped)
    outcome = holdfast(*command)
    assert outcome.exit_code == 130
    assert "stopped" in outcome.output
    assert ("the same command goes on" in outcome.output) is goes_on


def test_a_full_disk_and_a_forbidden_folder_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Path("file").write_text("")
    blocked = holdfast("reproduce", "toy", "--smoke", "--out", "file/below")
    assert blocked.exit_code == 2
    assert "a file stands where a folder is needed" in blocked.output
    monkeypatch.setattr(os, "fsync", full)
    for arguments in (
        ["run", "toy", "--out", "here", *TINY],
        ["reproduce", "toy", "--out", "here"],
    ):
        outcome = holdfast(*arguments)
        assert outcome.exit_code == 2
        assert "the disk is full; free some space" in outcome.output
        assert not list(Path("here").rglob("*.*"))


@pytest.mark.parametrize("command", [["run", "toy"], ["reproduce", "toy", "--jobs", "2"]])
def test_too_little_memory_is_said_before_anything_is_learnt(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda _: 5 * 10**6)
    monkeypatch.setattr("holdfast.execution.learn", lambda *_, **__: pytest.fail("it was trained"))
    monkeypatch.setattr("holdfast.reproduction.sweep", lambda *_, **__: pytest.fail("it was run"))
    outcome = holdfast(*command, "--set", "model.sizes=[2,9999,2]")
    assert outcome.exit_code == 2, outcome.output
    assert "error: there is not enough memory: " in outcome.output
    assert "of 49,997 parameters takes " in outcome.output
    assert "5 MB are free: what fits is regularizer.approximation" in outcome.output


def test_run_says_how_much_memory_a_large_matrix_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.reproduction.WORTH_SAYING", 0)
    outcome = holdfast("run", "toy", *TINY)
    assert outcome.exit_code == 0, outcome.output
    assert "while a task is consolidated, beside the penalty" in outcome.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("5 TB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
    ],
)
def test_memory_that_runs_out_is_no_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("holdfast.execution.learn", fail)
    outcome = holdfast("run", "toy", *TINY)
    assert outcome.exit_code == 2
    assert "error: there is not enough memory" in outcome.output
    monkeypatch.setattr("holdfast.execution.learn", lambda *_, **__: 1 / 0)
    assert isinstance(holdfast("run", "toy", *TINY).exception, ZeroDivisionError)


def test_a_network_with_too_few_outputs_is_refused_at_once() -> None:
    for command in ("run", "reproduce"):
        outcome = holdfast(command, "toy", "--set", "model.sizes=[2,4,1]")
        assert outcome.exit_code == 2, outcome.output
        assert "has 1 outputs, but labels of task 1 go up to 1" in outcome.output


def test_a_folder_of_another_version_is_refused() -> None:
    runs = Path("results/toy/runs")
    runs.mkdir(parents=True)
    (runs / "0123456789abcdef.json").write_text('{"format": 99}')
    outcome = holdfast("reproduce", "toy")
    assert outcome.exit_code == 2
    assert "results of two formats are not mixed" in outcome.output


def test_inspect_shows_a_penalty_and_sees_damage(tmp_path: Path) -> None:
    regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(3), strength=5.0)
    data = [(torch.randn(8, 2), torch.randint(0, 2, (8,)))]
    file = tmp_path / "penalty.safetensors"
    regularizer.consolidate(mlp((2, 4, 2)), data, seed=0).save(file)
    shown = holdfast("inspect", str(file))
    assert shown.exit_code == 0
    assert "count_sketch" in shown.stdout
    described = json.loads(holdfast("inspect", str(file), "--json").stdout)
    assert described["intact"] is True
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    damaged = holdfast("inspect", str(file))
    assert damaged.exit_code == 2
    assert "is damaged" in damaged.output


def test_some_methods_alone() -> None:
    options = [
        "--smoke",
        "--preset",
        "paper",
        "--jobs",
        "1",
        "--only",
        "diagonal",
        "--only",
        "ends",
    ]
    outcome = holdfast("reproduce", "toy", *options)
    assert outcome.exit_code == 0, outcome.output
    found = [result.experiment for result in results.load_all(Path("results/toy-smoke")).values()]
    methods = {e.regularizer and type(e.regularizer.approximation).__name__ for e in found}
    assert methods == {None, "Diagonal"}
    assert not Path("results/toy-smoke/fisher").exists()


def test_a_budget_that_no_run_fits_into_is_no_error() -> None:
    outcome = holdfast("reproduce", "toy", "--time-budget", "1s", "--jobs", "1", "--out", "new")
    assert outcome.exit_code == 0, outcome.output
    assert "do not fit into the time budget; the same command goes on" in outcome.stdout
    assert "0 runs finished" in outcome.stdout


def test_the_smoke_of_one_table_from_command_to_report() -> None:
    options = ["--smoke", "--no-extras", "--preset", "original-code", "--jobs", "1"]
    outcome = holdfast("reproduce", "toy", *options)
    assert outcome.exit_code == 0, outcome.output
    page = Path(outcome.stdout.splitlines()[-1])
    assert page == Path("results/toy-smoke/report.html")
    assert page.exists()
    assert "13 runs finished, 0 were there already" in outcome.stdout
    rows = json.loads(holdfast("report", str(page.parent), "--format", "json").stdout)
    assert (
        len([row for row in rows if row["headline"]]) == 10
    )  # two importances, five approximations
    assert {row["preset"] for row in rows} == {"original-code"}
