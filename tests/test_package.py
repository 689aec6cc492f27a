"""The package as people import it."""

import subprocess
import sys

import pytest

import holdfast


def test_every_public_name_is_there() -> None:
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast._HOMES) | {"losses"} == set(holdfast.__all__)
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CountSketsch'"):
        _ = holdfast.CountSketsch


@pytest.mark.parametrize("code", ["import holdfast", "import holdfast.cli"])
def test_nothing_heavy_is_imported_before_it_is_used(code: str) -> None:
    heavy = ("torch", "matplotlib", "jinja2")
    check = f"{code}, sys; sys.exit([m for m in {heavy} if m in sys.modules] != [])"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
