"""Penalty <-> one safetensors file with a versioned header; no pickle anywhere."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from holdfast.matrices import MATRICES
from holdfast.parameters import ParameterSpace
from holdfast.penalty import Penalty, TaskRecord

__all__ = ["FORMAT", "FileError", "describe", "load", "save"]

FORMAT = 1
_KEY = "holdfast"


class FileError(ValueError):
    """A file is not a penalty, or no longer the one that was written."""


def save(penalty: Penalty, path: str | Path) -> None:
    """Write ``penalty`` to ``path``: all of it, or nothing."""
    path = Path(path)
    tensors = {"anchor": penalty.anchor}
    tensors |= {f"matrix.{name}": t for name, t in penalty.matrix.tensors.items()}
    tensors |= {f"offset.{i}": t for i, t in enumerate(penalty.offset)}
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    kinds = {cls: name for name, cls in MATRICES.items()}
    header = {
        "format": FORMAT,
        "library": version("holdfast"),
        "matrix": kinds[type(penalty.matrix)],
        "parameters": [
            list(x) for x in zip(penalty.space.names, penalty.space.shapes, strict=True)
        ],
        "strength": penalty.strength,
        "recipe": penalty.recipe,
        "tasks": [
            {"examples": t.examples, "seed": t.seed, "hash_ids": list(t.hash_ids)}
            for t in penalty.tasks
        ],
        "digest": _digest(tensors),
    }
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, name, metadata={_KEY: json.dumps(header)})
        with open(name, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: str | Path) -> Penalty:
    """Read a penalty and check every byte of it.

    Raises:
        FileError: The file is foreign, truncated, damaged, or of a newer format.
    """
    header, tensors = _read(Path(path))
    if _digest(tensors) != header["digest"]:
        raise FileError(f"{path}: the tensors are not those that were written (digest differs)")
    space = ParameterSpace(
        tuple(name for name, _ in header["parameters"]),
        tuple(tuple(shape) for _, shape in header["parameters"]),
    )
    parts = {
        name.removeprefix("matrix."): t
        for name, t in tensors.items()
        if name.startswith("matrix.")
    }
    offset = [tensors[f"offset.{i}"] for i in range(2) if f"offset.{i}" in tensors]
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
    """The header of a file, the shapes of its tensors, and whether its bytes are whole."""
    header, tensors = _read(Path(path))
    return {
        **header,
        "file_bytes": Path(path).stat().st_size,
        "tensors": {
            name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in tensors.items()
        },
        "intact": _digest(tensors) == header["digest"],
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.exists():
        raise FileError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise FileError(f"{path}: a safetensors file, but not a Holdfast penalty")
            header = json.loads(metadata[_KEY])
            if header.get("format") != FORMAT:
                raise FileError(
                    f"{path}: format {header.get('format')}, this version reads {FORMAT}; "
                    f"it was written by holdfast {header.get('library')}"
                )
            return header, {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: not a readable penalty file ({error})") from error


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        sha.update(f"{name}:{t.dtype}:{tuple(t.shape)};".encode())
        sha.update(memoryview(t.reshape(-1).view(torch.uint8).numpy()))
    return sha.hexdigest()
