"""Decision maps: what a network says about every point of the plane."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.results import atomic

__all__ = ["HEIGHT", "WIDTH", "decision_map", "path_of", "save"]

WIDTH, HEIGHT = 150, 100  # pixels; the grid of the original figures
Window = tuple[tuple[float, float], tuple[float, float]]


@torch.no_grad()
def decision_map(model: nn.Module, window: Window) -> NDArray[np.uint8]:
    """The probability of class 1 on a grid, 0 to 255; row 0 is the lowest y, column 0 the lowest x.

    Args:
        model: A network with two inputs and two outputs.
        window: The corners, (lowest x, highest x) and (lowest y, highest y).
    """
    (left, right), (bottom, top) = window
    y, x = torch.meshgrid(
        torch.linspace(bottom, top, HEIGHT), torch.linspace(left, right, WIDTH), indexing="ij"
    )
    was_training = model.training
    model.eval()
    probability = model(torch.stack([x.reshape(-1), y.reshape(-1)], 1)).softmax(1)[:, 1]
    model.train(was_training)
    pixels: NDArray[np.uint8] = (
        (probability.reshape(HEIGHT, WIDTH) * 255).round().to(torch.uint8).numpy()
    )
    return pixels


def path_of(folder: Path, run: str) -> Path:
    """Where the maps of a run are kept."""
    return Path(folder) / "boundaries" / f"{run}.npz"


def save(folder: Path, run: str, maps: list[NDArray[np.uint8]], window: Window) -> Path:
    """Write the maps after every task, (tasks, HEIGHT, WIDTH), and the window, atomically."""
    path = path_of(folder, run)
    arrays: dict[str, Any] = {"maps": np.stack(maps), "window": np.asarray(window)}
    with atomic(path) as file:
        np.savez_compressed(file, **arrays)
    return path
