"""What every test starts from: fixed generators and one thread."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

REAL = "real data"


@pytest.fixture(autouse=True)
def fixed_generators() -> None:
    """A test's own random data is the same whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the global generator is part of what is tested
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors: threads cost more than they bring, and they change the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def real_folder() -> Path | None:
    """What HOLDFAST_DATA says before any test changes it."""
    folder = os.environ.get("HOLDFAST_DATA")
    return Path(folder) if folder else None


@pytest.fixture
def real_data(real_folder: Path | None, record_property: Callable[[str, object], None]) -> Path:
    """The folder of the real data sets; a test that wants it is skipped where there is none."""
    if real_folder is None:
        pytest.skip("HOLDFAST_DATA is not set: no real data sets here")
    record_property(REAL, True)
    return real_folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests ran on real data: without it the others pass all the same."""
    reports = terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", [])
    names = sorted({r.nodeid for r in reports if (REAL, True) in r.user_properties})
    terminalreporter.write_line(f"on real data: {', '.join(names) or 'no test'}")
