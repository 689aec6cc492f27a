"""Small generated stand-ins with the shape of the real data sets, for smoke runs and tests."""

from collections.abc import Sequence

import numpy as np
import torch

from holdfast.data.images import Images

__all__ = ["generated"]

SEED = 20  # the stand-in is one data set, not a family: it never depends on the seed of a run
NOISE = 40.0  # grey levels: learnable in an epoch, not trivially


def generated(
    classes: Sequence[str], shape: Sequence[int], *, train: int = 200, test: int = 50
) -> Images:
    """Noisy copies of one random picture per class, classes in turn.

    Args:
        classes: Names of the classes.
        shape: Of an image: height, width, and channels if there are any.
        train: Training images per class.
        test: Test images per class.
    """
    random = np.random.default_rng(SEED)
    coarse = random.uniform(0, 255, (len(classes), 4, 4, *shape[2:]))
    rows, columns = (np.arange(size) * 4 // size for size in shape[:2])
    pictures = coarse[:, rows][:, :, columns]

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = np.tile(np.arange(len(classes)), count)
        noise = random.standard_normal((len(labels), *shape), dtype=np.float32)
        pixels = np.clip(pictures[labels] + NOISE * noise, 0, 255).astype(np.uint8, order="C")
        return torch.from_numpy(pixels), torch.from_numpy(labels)

    return Images(*draw(train), *draw(test), tuple(classes), "the generated stand-in")
