"""Decision maps."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from holdfast import boundaries


class Right(nn.Module):
    """Class 1 on the right of x = 1, surer and surer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros(len(x)), 10 * (x[:, 0] - 1)], 1)


class Up(nn.Module):
    """Class 1 above y = 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros(len(x)), 1e6 * x[:, 1]], 1)


WINDOW = ((-0.5, 2.5), (-0.75, 1.25))


def test_columns_are_x_and_rows_are_y_from_the_bottom() -> None:
    right = boundaries.decision_map(Right(), WINDOW)
    assert right.shape == (100, 150)
    assert right.dtype == np.uint8
    assert (right == right[0]).all()
    assert right[0, 0] == 0
    assert right[0, -1] == 255
    assert (np.diff(right[0].astype(int)) >= 0).all()
    assert abs(int(np.argmax(right[0] > 127)) - 75) <= 1  # x = 1 is the middle
    up = boundaries.decision_map(Up(), WINDOW)
    assert (up == up[:, :1]).all()
    assert up[0, 0] == 0
    assert up[-1, 0] == 255
    y = np.linspace(-0.75, 1.25, 100)
    assert ((up[:, 0] > 127) == (y > 0)).all()


def test_maps_are_kept_with_their_window(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    maps = [boundaries.decision_map(model, WINDOW) for _ in range(2)]
    assert (maps[0] == maps[1]).all()  # no dropout
    assert model.training
    path = boundaries.save(tmp_path, "abc", maps, WINDOW)
    assert path == tmp_path / "boundaries" / "abc.npz"
    with np.load(path) as stored:
        assert stored["maps"].shape == (2, 100, 150)
        assert stored["window"].tolist() == [[-0.5, 2.5], [-0.75, 1.25]]
