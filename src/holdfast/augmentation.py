"""Random changes to batches of images: flip, translation, cutout."""

import dataclasses

import torch
from torch import Tensor

__all__ = ["Augmentation"]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Every image of a batch is flipped, moved and cut on its own; the generator decides all of it.

    Flip and translation are one gather: only the indices of rows and columns change. The random numbers are
    drawn on the CPU, so that the same generator gives the same images on every device.

    Attributes:
        flip: Mirror left and right with probability ½.
        translate: Move by up to so many pixels each way; what comes in is mirrored at the border.
        cutout: Side of a square of zeros with its centre anywhere in the image, cut off at the border; 0 for
            none. Zero is the mean colour, as images are normalised before.

    References:
        DeVries and Taylor, Improved Regularization of Convolutional Neural Networks with Cutout,
        https://arxiv.org/abs/1708.04552
    """

    flip: bool = True
    translate: int = 4
    cutout: int = 8

    def __post_init__(self) -> None:
        for name in ("translate", "cutout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 or larger, got {getattr(self, name)}")

    def check(self, height: int, width: int) -> None:
        """Refuse images that are too small to be moved so far."""
        if self.translate >= min(height, width):
            raise ValueError(
                f"translate is smaller than an image of {height} × {width}, got {self.translate}"
            )

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The changed images, shape (batch, channels, height, width), stored channels last.

        Args:
            images: Normalised images of that shape; left as they are.
            generator: A generator on the CPU.
        """
        if images.dim() != 4:
            raise ValueError(
                f"expected images (batch, channels, height, width), got {tuple(images.shape)}"
            )
        count, _, height, width = images.shape
        self.check(height, width)
        device = images.device
        rows = self._moved(count, height, generator).to(device)
        columns = self._moved(count, width, generator)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        columns = columns.to(device)
        which = torch.arange(count, device=device)
        # Indices around a slice put the channels last, which is how convolutions like them.
        moved = images[which[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        if self.cutout:
            inside_rows = self._cut(count, height, generator).to(device)
            inside_columns = self._cut(count, width, generator).to(device)
            hole = inside_rows[:, :, None] & inside_columns[:, None, :]
            moved = moved.masked_fill(hole[..., None], 0)
        return moved.permute(0, 3, 1, 2)

    def _moved(self, count: int, size: int, generator: torch.Generator) -> Tensor:
        """Where every line of the result is read, shape (count, size), mirrored at the borders."""
        shift = torch.randint(-self.translate, self.translate + 1, (count, 1), generator=generator)
        line = (torch.arange(size) + shift).abs()
        return torch.where(line >= size, 2 * (size - 1) - line, line)

    def _cut(self, count: int, size: int, generator: torch.Generator) -> Tensor:
        """Which lines the square covers, shape (count, size)."""
        first = torch.randint(size, (count, 1), generator=generator) - self.cutout // 2
        line = torch.arange(size)
        return (line >= first) & (line < first + self.cutout)
