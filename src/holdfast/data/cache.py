"""Where data sets live on disk, and the check that every file must pass before it is read."""

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":  # there two processes may fetch a file twice, which costs time only
    import fcntl

__all__ = ["CorruptData", "DataError", "DataFile", "MissingData", "check", "exclusive", "root"]

VARIABLE = "HOLDFAST_DATA"


class DataError(ValueError):
    """A data set cannot be read."""


class MissingData(DataError):
    """A data set is not on disk and could not be fetched."""


class CorruptData(DataError):
    """A file is not what it should be, and is not used."""


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file whose content is known.

    Attributes:
        name: Its name in the folder of its data set.
        size: Bytes.
        sha256: SHA-256 of the content, in hexadecimal.
        urls: Where it can be fetched, in the order to try.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...] = ()


def root(explicit: str | Path | None = None) -> Path:
    """The folder of all data sets: as given, else ``$HOLDFAST_DATA``, else the platform's cache folder."""
    if explicit is not None:
        return Path(explicit).expanduser()
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.expanduser() / "holdfast"


def check(path: Path, file: DataFile) -> None:
    """Refuse a file whose size or content differs from what is known.

    Raises:
        CorruptData: It differs; the message names the file and says what to do.
    """
    size = path.stat().st_size
    if size != file.size:
        kind = "truncated" if size < file.size else "too long"
        raise CorruptData(
            f"{path} is {kind}: expected {file.size:,} bytes, got {size:,}; {_cure(path)}"
        )
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.sha256:
        raise CorruptData(
            f"{path} is damaged or another file: expected SHA-256 {file.sha256}, got {found}; "
            f"{_cure(path)}"
        )


def _cure(path: Path) -> str:
    """What to do about a bad file."""
    return (
        f"it is not used: delete it, or replace it with `holdfast data fetch {path.parent.name}`"
    )


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time writes into a folder; the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    with (folder / ".lock").open("a") as lock:  # left behind: removing it would race
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
