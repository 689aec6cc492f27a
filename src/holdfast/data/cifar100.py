"""CIFAR-100: 50,000 + 10,000 colour images of 32 × 32 in a hundred classes."""

import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from holdfast.data import cache, restricted_pickle
from holdfast.data.cache import CorruptData, DataFile, MissingData
from holdfast.data.cifar100_classes import CLASSES, find
from holdfast.data.download import download
from holdfast.data.images import Images

__all__ = ["ARCHIVE", "SUBSET", "damaged", "fetch", "load", "missing"]

NAME = "cifar100"
SUBSET = "cifar100_10cls.npz"  # ten classes only, where the archive is not to be had

ARCHIVE = DataFile(
    "cifar-100-python.tar.gz",
    169_001_437,
    "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
)

Arrays = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]


def load(
    classes: Sequence[str] = CLASSES,
    folder: Path | None = None,
    archive: DataFile = ARCHIVE,
    *,
    fetching: bool = True,
) -> Images:
    """The images of some classes, height × width × channel, labelled by their place in ``classes``.

    They are read from the file of ten classes if it is there and has them, else from the official archive,
    which is fetched if needed.

    Args:
        classes: Names of classes.
        folder: The folder of all data sets, see :func:`holdfast.data.cache.root`.
        archive: What the archive is.
        fetching: Whether a missing archive may be fetched.

    Raises:
        ValueError: A class does not exist; the message has the nearest names.
        MissingData: The files are not there and cannot be fetched.
        CorruptData: A file is not what it should be.
    """
    wanted = [find(name) for name in classes]
    place = cache.root(folder) / NAME
    absent: list[str] = []
    if (place / SUBSET).exists():
        arrays = _read_npz(place / SUBSET)
        whole = set(np.unique(arrays[1])) & set(np.unique(arrays[3]))  # to learn, and to test on
        absent = [name for name in classes if find(name) not in whole]
        if not absent:
            return _choose(arrays, wanted, tuple(classes), SUBSET)
    if not (place / archive.name).exists():
        if not fetching:
            raise MissingData(_instructions(place, archive, "fetching is switched off", absent))
        try:
            _fetch(place, archive)
        except MissingData as error:
            raise MissingData(_instructions(place, archive, str(error), absent)) from error
    return _choose(_read_archive(place / archive.name, archive), wanted, tuple(classes), NAME)


def missing(folder: Path | None = None, archive: DataFile = ARCHIVE) -> list[str]:
    """Names of missing files; nothing is missing where the archive or the ten classes are."""
    place = cache.root(folder) / NAME
    there = (place / archive.name).exists() or (place / SUBSET).exists()
    return [] if there else [archive.name]


def damaged(folder: Path | None = None, archive: DataFile = ARCHIVE) -> list[str]:
    """What is wrong with the files that are there, as far as it can be told without reading them."""
    place = cache.root(folder) / NAME
    problems = []
    if (place / archive.name).exists():
        try:
            cache.check_size(place / archive.name, archive)
        except CorruptData as error:
            problems.append(str(error))
    if (place / SUBSET).exists() and not zipfile.is_zipfile(place / SUBSET):
        problems.append(f"{place / SUBSET} is truncated or not an npz file")
    return problems


def fetch(
    folder: Path | None = None, archive: DataFile = ARCHIVE, *, timeout: float = 30.0
) -> list[Path]:
    """Fetch the official archive unless it is there and right; returns its path.

    Raises:
        MissingData: It could not be fetched; the message says how to get it by hand.
    """
    place = cache.root(folder) / NAME
    if not _intact(place, archive):
        try:
            _fetch(place, archive, timeout)
        except MissingData as error:
            raise MissingData(_instructions(place, archive, str(error))) from error
    return [place / archive.name]


def _fetch(place: Path, archive: DataFile, timeout: float = 30.0) -> None:
    """Fetch the archive, unless another process has done so in the meantime."""
    with cache.exclusive(place):
        if not _intact(place, archive):
            download(archive, place, timeout=timeout)


def _intact(place: Path, archive: DataFile) -> bool:
    """Whether the archive is there and right."""
    try:
        cache.check(place / archive.name, archive)
    except (FileNotFoundError, CorruptData):
        return False
    return True


def _choose(
    arrays: Arrays, wanted: Sequence[int], classes: tuple[str, ...], origin: str
) -> Images:
    """The images of the wanted original labels, in the order of the file."""
    place = np.full(len(CLASSES), -1, np.int64)
    place[list(wanted)] = np.arange(len(wanted))
    chosen: list[torch.Tensor] = []
    for images, fine in (arrays[:2], arrays[2:]):
        labels = place[fine]
        chosen += [
            torch.from_numpy(images[labels >= 0]),
            torch.from_numpy(labels[labels >= 0]),
        ]
    return Images(chosen[0], chosen[1], chosen[2], chosen[3], classes, origin)


def _read_npz(path: Path) -> Arrays:
    """The arrays of the ten-class file, with the original labels; none may hold objects."""
    try:
        with path.open("rb") as raw, _opened(raw, path) as file:
            names = [f"{kind}_{part}" for part in ("train", "test") for kind in ("x", "y", "fine")]
            lacking = [name for name in (*names, "class_names") if name not in file.files]
            if lacking:
                raise CorruptData(f"{path} lacks the arrays {', '.join(lacking)}")
            content = {name: _array(file, name, path) for name in (*names, "class_names")}
    except CorruptData:
        raise
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, zlib.error) as error:
        # a RuntimeError is zipfile's word for what is encrypted, or packed in a way it does not know
        raise CorruptData(f"{path} is damaged or not an npz file ({error})") from error
    except ValueError as error:  # np.load's word for a file that is no npz
        raise CorruptData(f"{path} is not an npz file of plain arrays ({error})") from error
    original = _original_labels(content["class_names"], path)
    for part in ("train", "test"):
        x, y, fine = (content[f"{kind}_{part}"] for kind in ("x", "y", "fine"))
        _check_images(x, fine, f"{path}, {part}")
        if y.dtype.kind not in "iu":
            raise CorruptData(f"{path}: expected y_{part} of whole numbers, got {y.dtype}")
        right = y.shape == fine.shape and bool(np.isin(y, np.arange(len(original))).all())
        if not right or not bool((original[y] == fine).all()):
            raise CorruptData(f"{path}: y_{part} and class_names contradict fine_{part}")
    return content["x_train"], content["fine_train"], content["x_test"], content["fine_test"]


def _opened(raw: IO[bytes], path: Path) -> NpzFile:
    """The npz file in a file; numpy would as well read a single array."""
    file = np.load(raw, allow_pickle=False)
    if not isinstance(file, NpzFile):
        raise CorruptData(f"{path} is not an npz file: it holds a single array")
    return file


def _original_labels(names: NDArray[Any], path: Path) -> NDArray[np.int64]:
    """The original labels of the classes an npz file names."""
    if names.ndim != 1 or names.dtype.kind != "U":
        raise CorruptData(
            f"{path}: expected class_names to be a list of names, got {names.dtype} {names.shape}"
        )
    try:
        return np.array([find(str(name)) for name in names], np.int64)
    except ValueError as error:
        raise CorruptData(f"{path}: class_names: {error}") from error


def _array(file: NpzFile, name: str, path: Path) -> NDArray[Any]:
    """One array of an npz file."""
    try:
        array: NDArray[Any] = file[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise CorruptData(f"{path}: the array {name!r} cannot be read ({error})") from error
        raise CorruptData(
            f"{path}: the array {name!r} holds Python objects, which may run code when they are read; "
            "save it again as numbers"
        ) from error
    return array


def _read_archive(path: Path, archive: DataFile) -> Arrays:
    """The arrays of the official archive, which is checked before anything in it is read."""
    cache.check(path, archive)
    found: list[NDArray[Any]] = []
    with tarfile.open(path, "r:gz") as content:
        for part in ("train", "test"):
            member = f"cifar-100-python/{part}"
            try:
                source = content.extractfile(member)
            except KeyError:
                source = None
            if source is None:
                raise CorruptData(f"{path} has no {member}")
            batch = restricted_pickle.read(source.read(), f"{path.name}: {member}")
            try:
                pixels, fine = batch[b"data"], np.array(batch[b"fine_labels"], dtype=np.int64)
                images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise CorruptData(f"{path}: {member} is not a batch of CIFAR ({error})") from error
            images = np.ascontiguousarray(images)
            _check_images(images, fine, f"{path}, {part}")
            found += [images, fine]
    return found[0], found[1], found[2], found[3]


def _check_images(images: NDArray[Any], fine: NDArray[Any], where: str) -> None:
    """Refuse images or labels of the wrong shape, type or range."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise CorruptData(
            f"{where}: expected uint8 images of 32 × 32 × 3, got {images.dtype} {images.shape}"
        )
    if fine.dtype != np.int64 or fine.shape != images.shape[:1]:
        raise CorruptData(
            f"{where}: expected {len(images):,} labels, int64, got {fine.shape} {fine.dtype}"
        )
    if not bool(np.isin(fine, np.arange(len(CLASSES))).all()):
        raise CorruptData(f"{where}: labels run from 0 to {len(CLASSES) - 1}, others were found")


def _instructions(place: Path, archive: DataFile, problem: str, absent: Sequence[str] = ()) -> str:
    """What to do by hand."""
    what = "CIFAR-100 is"
    if absent:
        what = (
            f"{place / SUBSET} has no {', '.join(absent)}; the archive, which has all classes, is"
        )
    elif (place / SUBSET).exists():
        what = f"{place / SUBSET} has the paper's ten classes; the archive, which has all, is"
    lines = [
        f"{what} not on this machine and could not be fetched.",
        f"Download {archive.name}",
        f"from {' or '.join(archive.urls) or 'the page of CIFAR-100'}",
        f"into {place}",
        f"or set {cache.VARIABLE} to a folder that has it in '{NAME}'. What was tried:",
    ]
    return "\n".join([*lines, *(f"  {line}" for line in problem.splitlines())])
