"""Wide residual networks for small images."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["WideBlock", "WideResidualNetwork", "wide_resnet"]


class _Dropout(nn.Dropout):
    """Dropout from 16 random bits a number: a sixth of a step of WRN-16-4 went into torch's 64.

    The probability is rounded to a multiple of 2⁻¹⁶.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Zero some of the numbers in training, and scale the others up."""
        dropped = min(round(self.p * 2**16), 2**16 - 1)
        dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
        if not self.training or x.device.type != "cpu" or not dense or not dropped:
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = words.view(torch.int16).as_strided(x.shape, x.stride())
        kept = (bits >= dropped - 2**15).to(x.dtype)
        return x * kept.mul_(2**16 / (2**16 - dropped))


class WideBlock(nn.Module):
    """BatchNorm, ReLU, convolution, twice, with dropout before the second, added to a shortcut.

    Where the number of channels changes, the shortcut is a 1 × 1 convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = _Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        elif stride != 1:
            raise ValueError(f"a block of {inputs} channels keeps its size, got stride {stride}")

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images out, smaller by the stride."""
        active = functional.relu(self.norm1(x))
        out = self.conv1(active)
        out = self.conv2(self.dropout(functional.relu(self.norm2(out))))
        added: Tensor = out + (x if self.shortcut is None else self.shortcut(active))
        return added


class WideResidualNetwork(nn.Module):
    """Three groups of wide blocks at full, half and quarter size, then one linear layer.

    Args:
        depth: Layers, 6n + 4 for n blocks a group.
        width: Channels are 16, 32 and 64 times this.
        dropout: Probability of dropout inside the blocks.
        classes: Outputs.
        autocast: Train in bfloat16 where torch thinks it safe; evaluation and importance stay in float32.
    """

    def __init__(
        self, depth: int, width: int, dropout: float, classes: int, autocast: bool = False
    ) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        channels = (16, 16 * width, 32 * width, 64 * width)
        self.autocast, self.channels_last = autocast, True
        self.conv = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        groups = []
        for group in range(3):
            for block in range(blocks):
                inputs = channels[group] if block == 0 else channels[group + 1]
                stride = 2 if block == 0 and group > 0 else 1
                groups.append(WideBlock(inputs, channels[group + 1], stride, dropout))
        self.blocks = nn.Sequential(*groups)
        self.norm = nn.BatchNorm2d(channels[3])
        self.linear = nn.Linear(channels[3], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, classes), of normalised images (batch, 3, height, width)."""
        if self.autocast and self.training:
            with torch.autocast(x.device.type, torch.bfloat16):
                return self._logits(x).float()
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        x = functional.relu(self.norm(self.blocks(self.conv(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def wide_resnet(
    depth: int = 16,
    width: int = 4,
    dropout: float = 0.2,
    classes: int = 5,
    autocast: bool = False,
) -> WideResidualNetwork:
    """A Wide-ResNet, by default the WRN-16-4 of 2,747,605 parameters.

    Args:
        depth: Layers: 10, 16, 22, 28 …
        width: The widening factor.
        dropout: Probability of dropout between the two convolutions of a block.
        classes: Outputs.
        autocast: Train in bfloat16 where torch thinks it safe.

    References:
        Zagoruyko and Komodakis, Wide Residual Networks,
        https://arxiv.org/abs/1605.07146
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth is 6n + 4 with n ≥ 1: 10, 16, 22, 28 …, got {depth}")
    if width < 1 or classes < 1:
        raise ValueError(f"width and classes are 1 or larger, got {width} and {classes}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability below 1, got {dropout}")
    return WideResidualNetwork(depth, width, dropout, classes, autocast)
