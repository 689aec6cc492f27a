"""The command ``holdfast data``."""

import gzip
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli_data import data_app
from holdfast.data import mnist
from test_data import small


def call(*words: str) -> Result:
    return CliRunner().invoke(data_app, list(words))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    return tmp_path


def test_path(folder: Path) -> None:
    assert call("path").stdout.strip() == str(folder)
    assert call("path", "mnist").stdout.strip() == str(folder / "mnist")
    assert call("path", "mnist", "--data-dir", "/x").stdout.strip() == "/x/mnist"
    wrong = call("path", "mnits")
    assert wrong.exit_code == 2
    assert "did you mean 'mnist'" in wrong.stderr


def test_list(folder: Path) -> None:
    listed = call("list").stdout
    assert "mnist: missing train-images-idx3-ubyte" in listed
    assert "cifar100: missing cifar-100-python.tar.gz" in listed
    for part in mnist.OFFICIAL.parts:
        (folder / "mnist").mkdir(exist_ok=True)
        (folder / "mnist" / part.name).touch()
    assert "mnist: here" in call("list").stdout


def test_fetch_keeps_what_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = small()
    given.write(folder / "mnist")
    monkeypatch.setattr(mnist.fetch, "__defaults__", (None, given.source))
    done = call("fetch", "mnist")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("(checked)") == 4


def test_fetch_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = small()
    given.write(folder / "mnist")
    (folder / "mnist" / "test-labels.gz").write_bytes(gzip.compress(b"other"))
    monkeypatch.setattr(mnist.fetch, "__defaults__", (None, given.source))
    done = call("fetch", "mnist")
    assert done.exit_code == 2
    assert "error: MNIST is not on this machine" in done.stderr
    assert call("fetch", "imagenet").exit_code == 2
