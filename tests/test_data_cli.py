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
        with (folder / "mnist" / part.name).open("wb") as file:
            file.truncate(part.raw_size)
    assert "mnist: here" in call("list").stdout
    first = folder / "mnist" / mnist.OFFICIAL.parts[0].name
    first.write_bytes(b"short")
    (folder / "cifar100").mkdir()
    (folder / "cifar100" / "cifar100_10cls.npz").write_bytes(b"PK\3\4 the beginning only")
    listed = call("list").stdout
    assert "mnist: damaged." in listed
    assert f"  {first} is truncated: expected 47,040,016 bytes, got 5; it is not used" in listed
    assert "cifar100: damaged." in listed
    assert "cifar100_10cls.npz is truncated or not an npz file" in listed
    first.unlink()
    (folder / "mnist" / mnist.OFFICIAL.parts[1].name).write_bytes(b"")
    assert "mnist: missing train-images-idx3-ubyte; damaged." in call("list").stdout


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
