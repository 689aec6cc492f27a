"""A data set of labelled images in memory: bytes, held once."""

import dataclasses

import torch
from torch import Tensor

from holdfast.data.cache import CorruptData

__all__ = ["Images"]


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Training and test images with labels.

    Attributes:
        train: uint8, one image per entry of dimension 0.
        train_labels: int64 indices into ``classes``.
        test: uint8, images of the same shape.
        test_labels: int64 indices into ``classes``.
        classes: The names of the classes.
        origin: Where the images come from, for messages.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    origin: str

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, part), getattr(self, f"{part}_labels")
            if images.dtype != torch.uint8 or labels.dtype != torch.int64:
                raise TypeError(
                    f"images are uint8 and labels int64, got {images.dtype}, {labels.dtype}"
                )
            if len(images) != len(labels):
                raise CorruptData(
                    f"{self.origin}: {len(images):,} {part} images but {len(labels):,} labels; "
                    "the files do not belong together"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.classes):
                raise CorruptData(
                    f"{self.origin}: {part} labels run from {int(labels.min())} to "
                    f"{int(labels.max())}, there are {len(self.classes)} classes"
                )
        if self.train.shape[1:] != self.test.shape[1:]:
            raise CorruptData(
                f"{self.origin}: training images are {tuple(self.train.shape[1:])}, "
                f"test images {tuple(self.test.shape[1:])}"
            )
