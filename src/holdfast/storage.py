"""Penalty <-> one safetensors file with a versioned header; no pickle anywhere.

The header is JSON under the metadata key ``holdfast``; beside it, under ``sha256``, is a digest of its
text and of every tensor, so that a flipped bit is seen wherever it is.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.configuration import key_of
from holdfast.matrices import MATRICES
from holdfast.parameters import ParameterSpace
from holdfast.penalty import Penalty, TaskRecord

__all__ = ["FORMAT", "FileError", "describe", "digest", "load", "save"]

FORMAT = 1
_HEADER, _DIGEST = "holdfast", "sha256"  # keys of the file's metadata
_FIELDS = {"library", "matrix", "parameters", "strength", "recipe", "tasks"}


class FileError(ValueError):
    """A file is not a penalty, or no longer the one that was written."""


def save(penalty: Penalty, path: str | Path) -> None:
    """Write ``penalty`` to ``path``: all of it, or nothing.

    Raises:
        OSError: It cannot be written; what was at ``path`` before is untouched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}; create it first")
    tensors = {"anchor": penalty.anchor}
    tensors |= {f"matrix.{name}": t for name, t in penalty.matrix.tensors.items()}
    tensors |= {f"offset.{i}": t for i, t in enumerate(penalty.offset)}
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {
        "format": FORMAT,
        "library": version("holdfast"),
        "matrix": key_of(MATRICES, penalty.matrix),
        "parameters": [
            list(x) for x in zip(penalty.space.names, penalty.space.shapes, strict=True)
        ],
        "strength": penalty.strength,
        "recipe": penalty.recipe,
        "tasks": [
            {"examples": t.examples, "seed": t.seed, "hash_ids": list(t.hash_ids)}
            for t in penalty.tasks
        ],
    }
    text = json.dumps(header)
    part = path.with_name(f".{secrets.token_hex(8)}.part")  # same folder: replacing is atomic
    try:
        part.touch()
        mode = part.stat().st_mode  # that of any new file; the writer makes its own private
        save_file(tensors, part, metadata={_HEADER: text, _DIGEST: digest(text, tensors)})
        with open(part, "rb+") as written:
            os.fsync(written.fileno())
        part.chmod(mode)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def load(path: str | Path, *, mapped: bool = False) -> Penalty:
    """Read a penalty and check every byte of it.

    Args:
        path: What :func:`save` wrote.
        mapped: Leave the numbers in the file and let the system read them as they are needed, instead of
            copying them to memory. The file must not be changed while the penalty is in use.

    Raises:
        FileError: The file is foreign, truncated, damaged, or of a newer format.
    """
    header, tensors, intact = _read(Path(path), mapped)
    if not intact:
        raise FileError(
            f"{path}: damaged: header and tensors are not those that were written (their digest "
            "differs); use another copy, or consolidate again"
        )
    space = ParameterSpace(
        tuple(name for name, _ in header["parameters"]),
        tuple(tuple(shape) for _, shape in header["parameters"]),
    )
    parts = {
        name.removeprefix("matrix."): t
        for name, t in tensors.items()
        if name.startswith("matrix.")
    }
    count = sum(name.startswith("offset.") for name in tensors)
    offset = [tensors[f"offset.{i}"] for i in range(count)]
    return Penalty(
        space=space,
        matrix=MATRICES[header["matrix"]].from_tensors(parts),
        anchor=tensors["anchor"],
        strength=header["strength"],
        offset=tuple(offset),
        recipe=header["recipe"],
        tasks=tuple(
            TaskRecord(t["examples"], t["seed"], tuple(t["hash_ids"])) for t in header["tasks"]
        ),
    )


def describe(path: str | Path) -> dict[str, Any]:
    """The header of a file, the shapes of its tensors, and whether its bytes are whole.

    Raises:
        FileError: The file is foreign, truncated, or of a newer format.
    """
    header, tensors, intact = _read(Path(path), mapped=True)
    return {
        **header,
        "file_bytes": Path(path).stat().st_size,
        "tensors": {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in tensors.items()
        },
        "intact": intact,
    }


def _read(path: Path, mapped: bool) -> tuple[dict[str, Any], dict[str, Tensor], bool]:
    """Header, tensors, and whether their digest is the one that was written."""
    if not path.is_file():
        what = "a folder, not a file" if path.is_dir() else "no such file"
        raise FileError(f"{path}: {what}; expected what Penalty.save wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if not {_HEADER, _DIGEST} <= metadata.keys():
                raise FileError(
                    f"{path}: a safetensors file, but not one that Penalty.save wrote "
                    "(its metadata has no Holdfast header)"
                )
            text = metadata[_HEADER]
            header = _header(path, json.loads(text))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            if not mapped:  # the file's own memory would change with the file
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise FileError(
            f"{path}: not a readable penalty file: foreign, truncated or damaged ({error})"
        ) from error
    return header, tensors, digest(text, tensors) == metadata[_DIGEST]


def _header(path: Path, header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or "format" not in header:
        raise FileError(f"{path}: damaged: its header has no format version")
    if header["format"] != FORMAT:
        raise FileError(
            f"{path}: format {header['format']}, this version of Holdfast reads format {FORMAT}; "
            f"it was written by holdfast {header.get('library')}: use that version or a newer one"
        )
    missing = _FIELDS - header.keys()
    if missing:
        raise FileError(f"{path}: damaged: its header lacks {', '.join(sorted(missing))}")
    return header


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the header, then names, dtypes, shapes and bytes."""
    sha = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        sha.update(f"{name}:{t.dtype}:{tuple(t.shape)};".encode())
        sha.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
