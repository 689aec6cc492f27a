"""Fetching a file: resumed where it stopped, checked, and in place only when it is right."""

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from holdfast.data.cache import CorruptData, DataFile, MissingData, check
from holdfast.progress import track

__all__ = ["download"]

CHUNK = 2**18
ATTEMPTS = 3  # per address, as long as each brings bytes


class _OtherFile(Exception):
    """An address has something else under this name."""


FAILURES = (  # of a network; a full disk is another OSError and ends everything
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    _OtherFile,
)


def download(
    file: DataFile, folder: Path, *, timeout: float = 30.0, progress: bool = True
) -> Path:
    """Fetch one file into a folder.

    What has arrived is kept in ``<name>.part``; a later call, or the next address, goes on from
    there. The file gets its name after its size and SHA-256 have been checked.

    Args:
        file: What to fetch and from where.
        folder: Where it goes; created if needed.
        timeout: Seconds without a byte after which an address is given up.
        progress: Show a bar when it takes long.

    Raises:
        MissingData: No address gave the right file; the message lists what each answered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part, path = folder / f"{file.name}.part", folder / file.name
    problems = []
    for url in file.urls:
        attempts = ATTEMPTS
        while attempts:
            attempts -= 1
            before = part.stat().st_size if part.exists() else 0
            try:
                _continue(url, part, file, timeout, progress)
                _accept(part, file)
            except CorruptData:
                problems.append(f"{url}: sent another file (size or SHA-256 differ)")
                if not before:
                    break  # all of it came from here: the next address
                attempts = 1  # what was there before may be what is wrong: once more, all of it
            except FAILURES as error:
                problems.append(f"{url}: {_reason(error)}")
                after = part.stat().st_size if part.exists() else 0
                if after <= before:
                    break  # no byte came: the next address
            else:
                os.replace(part, path)
                return path
    raise MissingData("\n".join([f"{file.name} could not be fetched", *problems]))


def _continue(url: str, part: Path, file: DataFile, timeout: float, progress: bool) -> None:
    """Append what is missing of ``part``; a server that cannot continue sends all of it again."""
    have = part.stat().st_size if part.exists() else 0
    if have >= file.size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "holdfast"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        _check_length(answer, file)
        continued = answer.status == 206 and _starts_at(answer, have)
        if have and answer.status == 206 and not continued:
            part.unlink()  # bytes of another place: begin again at the next attempt
            raise ConnectionError(f"asked for bytes from {have}, got {_range(answer)}")
        with part.open("ab" if continued else "wb") as out:
            have = have if continued else 0
            chunks = -(-(file.size - have) // CHUNK)
            for chunk in track(_chunks(answer), f"fetching {file.name}", chunks, progress):
                out.write(chunk)
                have += len(chunk)
                if have > file.size:
                    break  # wrong already; _accept says so
    if have < file.size:
        raise ConnectionError(f"the connection ended after {have:,} of {file.size:,} bytes")


def _chunks(answer: IO[bytes]) -> Iterator[bytes]:
    """The body as it arrives."""
    while True:
        try:
            chunk = answer.read(CHUNK)
        except FAILURES:
            raise
        except OSError as error:  # of TLS, of the route; writing is not in here
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if not chunk:
            return
        yield chunk


def _check_length(answer: http.client.HTTPResponse, file: DataFile) -> None:
    """Refuse what announces another size, such as the page of a login, before a byte of it is kept."""
    if answer.status == 206:
        size = _range(answer).rpartition("/")[2]
    else:
        size = answer.headers.get("Content-Length", "")
    if size.isdecimal() and int(size) != file.size:
        raise _OtherFile(f"sent another file ({int(size):,} bytes instead of {file.size:,})")


def _accept(part: Path, file: DataFile) -> None:
    """Check what has arrived; a wrong file is thrown away, it cannot be continued."""
    try:
        check(part, file)
    except CorruptData:
        part.unlink()
        raise


def _range(answer: http.client.HTTPResponse) -> str:
    """The range a server says it sent."""
    return answer.headers.get("Content-Range", "no Content-Range")


def _starts_at(answer: http.client.HTTPResponse, first: int) -> bool:
    """Whether a partial answer begins at the byte that was asked for."""
    return _range(answer).startswith(f"bytes {first}-")


def _reason(error: Exception) -> str:
    """The failure of an address in one line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, _OtherFile):
        return str(error)
    return f"{type(error).__name__}: {getattr(error, 'reason', None) or error}"
