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

__all__ = [
    "CorruptData",
    "DataError",
    "DataFile",
    "MissingData",
    "check",
    "check_size",
    "exclusive",
    "root",
]

VARIABLE = "HOLDFAST_DATA"
_TRIES = 100  # to make a folder that others remove at the same time


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
    """The folder of all data sets: as given, else ``$HOLDFAST_DATA``, else the platform's cache folder.

    Raises:
        MissingData: It cannot be a folder.
    """
    given = explicit if explicit is not None else os.environ.get(VARIABLE)
    try:
        folder = Path(given).expanduser() if given else _default()
    except RuntimeError as error:  # ~somebody
        raise MissingData(f"{given} is no folder for data: {error}") from error
    for place in (folder, *folder.parents):
        if os.path.exists(place):  # False also where nobody may look
            if not place.is_dir():
                raise MissingData(
                    f"{place} is a file, expected a folder for data sets; choose another one with "
                    f"--data-dir or {VARIABLE}"
                )
            break
    return folder


def _default() -> Path:
    """The folder for data that can be fetched again."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", "~/AppData/Local"))
    elif sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.expanduser() / "holdfast"


def check_size(path: Path, file: DataFile) -> None:
    """Refuse a file whose size differs from what is known, without reading it.

    Raises:
        CorruptData: It differs; the message names the file and says what to do.
    """
    size = path.stat().st_size
    if size != file.size:
        kind = "truncated" if size < file.size else "too long"
        raise CorruptData(
            f"{path} is {kind}: expected {file.size:,} bytes, got {size:,}; {_cure(path)}"
        )


def check(path: Path, file: DataFile) -> None:
    """Refuse a file whose size or content differs from what is known.

    Raises:
        CorruptData: It differs; the message names the file and says what to do.
    """
    check_size(path, file)
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != file.sha256:
        raise CorruptData(
            f"{path} is damaged or another file: expected SHA-256 {file.sha256}, got {found}; "
            f"{_cure(path)}"
        )


def _cure(path: Path) -> str:
    """What to do about a bad file."""
    command, folder = f"holdfast data fetch {path.parent.name}", path.parent.parent
    if folder != root():
        command += f" --data-dir {folder}"
    return f"it is not used: delete it, or replace it with `{command}`"


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time writes into a folder; the others wait. Nothing but what was written stays.

    Raises:
        MissingData: The folder cannot be written.
    """
    new = not folder.exists()
    try:
        lock = _lock(folder)
    except OSError as error:
        raise MissingData(f"{folder} cannot be written ({error.strerror or error})") from error
    try:
        yield
    finally:
        if lock is not None:
            (folder / ".lock").unlink(missing_ok=True)  # while it is ours: see _lock
            os.close(lock)
        if new:
            with contextlib.suppress(OSError):  # it is in use, as it should be
                folder.rmdir()


def _lock(folder: Path) -> int | None:
    """A lock that its holder removes, with the folder if that was new: who finds either gone, tries again."""
    path, tries = folder / ".lock", 0
    while True:
        tries += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if sys.platform == "win32":
                return None
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except (FileNotFoundError, FileExistsError):
            if tries == _TRIES or (folder.exists() and not folder.is_dir()):
                raise  # nobody removes it: it cannot be made
            continue  # removed by its last holder since
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)
