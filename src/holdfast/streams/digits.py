"""What all streams on MNIST share: which images are learnt, chosen on and reported."""

import dataclasses
from typing import Literal

from torch import Tensor

from holdfast.data import Images, generated, mnist
from holdfast.streams.stream import Stream

__all__ = ["DigitStream", "Digits"]

Labelled = tuple[Tensor, Tensor]  # uint8 rows of 784 pixels, labels


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
    """The images of a stream, held once and shared by its tasks."""

    train: Labelled
    validation: Labelled
    test: Labelled


@dataclasses.dataclass(frozen=True)
class DigitStream(Stream):
    """Tasks made of MNIST.

    Attributes:
        source: ``"mnist"``, or ``"generated"``: a small stand-in of the same shape, for smoke runs and tests.
        validation: How many training images, the last ones, strengths are chosen on.
        train_on_validation: Whether these are also learnt from, as where no validation data is set aside: all
            60,000 images are learnt, and the validation accuracy is one of training.
        train_size: Learn from the first so many images only; ``None`` takes all.
        test_size: Test on the first so many test images only; ``None`` takes all.
    """

    source: Literal["mnist", "generated"] = "mnist"
    validation: int = 5000
    train_on_validation: bool = False
    train_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        if self.source not in ("mnist", "generated"):
            raise ValueError(f"unknown source {self.source!r}; known: mnist, generated")
        for name in ("validation", "train_size", "test_size"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} is 1 or larger, got {count}")

    @property
    def learnt(self) -> str:
        if self.train_size is not None:
            return f"{self.train_size:,}"
        return "all" if self.train_on_validation else f"all but {self.validation:,}"

    def _digits(self) -> Digits:
        """Read the data set and part it."""
        images = self._images()
        x, y = images.train.flatten(1), images.train_labels
        if self.validation >= len(x):
            raise ValueError(
                f"validation sets {self.validation:,} images aside, the data set has {len(x):,}"
            )
        first = len(x) - self.validation
        stop = len(x) if self.train_on_validation else first
        if self.train_size is not None:
            if self.train_size > stop:
                raise ValueError(f"train_size is at most {stop:,} here, got {self.train_size:,}")
            stop = self.train_size
        if self.test_size is not None and self.test_size > len(images.test):
            raise ValueError(
                f"test_size is at most {len(images.test):,} here, got {self.test_size:,}"
            )
        tests = images.test.flatten(1)[: self.test_size], images.test_labels[: self.test_size]
        return Digits((x[:stop], y[:stop]), (x[first:], y[first:]), tests)

    def _images(self) -> Images:
        """The data set as it is."""
        if self.source == "generated":
            return generated([str(digit) for digit in range(10)], (28, 28))
        return mnist.load()
