"""Examples and the snippets of the documentation are executed."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path) -> None:
    said = run(path)
    assert said.strip()
    if path.stem == "quickstart":
        without, held = (float(x) for x in re.findall(r"([\d.]+)%", said))
        assert held > without + 5
    if path.stem == "amp_accumulation":
        assert float(said.split()[-1]) < 1e-6


def test_readme_snippets_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", block],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def modules() -> list[str]:
    found = pkgutil.walk_packages(holdfast.__path__, "holdfast.")
    return [m.name for m in found if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_are_true(name: str) -> None:
    failures, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failures == 0
