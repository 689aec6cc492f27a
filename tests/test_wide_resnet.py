"""The Wide-ResNet: its size, and its function written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.wide_resnet import wide_resnet


@pytest.mark.parametrize(("classes", "count"), [(5, 2_747_605), (10, 2_748_890), (100, 2_772_020)])
def test_number_of_parameters(classes: int, count: int) -> None:
    network = wide_resnet(depth=16, width=4, dropout=0.2, classes=classes)
    assert sum(p.numel() for p in network.parameters()) == count
    running = [b for name, b in network.named_buffers() if "running" in name]
    assert sum(b.numel() for b in running) == 3616


def written_out(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """WRN-10 in evaluation mode: one block per group, from the weights alone."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, scale, shift = (
            weights[f"{name}.{part}"].view(1, -1, 1, 1)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    x = functional.conv2d(x, weights["conv.weight"], padding=1)
    for index, stride in enumerate((1, 2, 2)):
        name = f"blocks.{index}"
        active = norm(x, f"{name}.norm1").clamp(min=0)
        out = functional.conv2d(active, weights[f"{name}.conv1.weight"], None, stride, 1)
        out = norm(out, f"{name}.norm2").clamp(min=0)
        out = functional.conv2d(out, weights[f"{name}.conv2.weight"], padding=1)
        x = out + functional.conv2d(active, weights[f"{name}.shortcut.weight"], None, stride)
    x = norm(x, "norm").clamp(min=0)
    x = functional.avg_pool2d(x, x.shape[-1]).flatten(1)
    return x @ weights["linear.weight"].T + weights["linear.bias"]


def test_forward_equals_the_written_out_network() -> None:
    network = wide_resnet(depth=10, width=2, classes=3).double()
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.copy_(torch.rand_like(tensor) + 0.5)  # norms and biases that do something
        assert tensor.dim() != 1 or "conv" not in name  # convolutions have no biases
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    network.eval()
    torch.testing.assert_close(network(x), written_out(network.state_dict(), x))


def test_dropout_sits_inside_the_blocks() -> None:
    network = wide_resnet(depth=10, width=1, dropout=0.3)
    drops = [name for name, m in network.named_modules() if isinstance(m, nn.Dropout)]
    assert drops == [f"blocks.{i}.dropout" for i in range(3)]
    assert all(m.p == 0.3 for m in network.modules() if isinstance(m, nn.Dropout))


def test_dropout_drops_the_share_it_is_told_independently() -> None:
    drop = wide_resnet(depth=10, width=1, dropout=0.2).blocks[0].dropout
    x = torch.rand(8, 16, 32, 31).add_(0.5).contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    torch.manual_seed(0)
    y = drop(x)
    kept = y != 0
    count = x.numel()
    assert abs(float(kept.float().mean()) - 0.8) < 5 * (0.8 * 0.2 / count) ** 0.5
    torch.testing.assert_close(y[kept], x[kept] / 0.8, rtol=1e-4, atol=0)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept / 0.8, rtol=1e-4, atol=0)
    # Neighbours in every direction, and within a drawn word, fall independently.
    for shift in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 4, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        both = float((kept & kept.roll(shift, (0, 1, 2, 3))).float().mean())
        assert abs(both - 0.64) < 5 * (0.64 * 0.36 / count) ** 0.5 * 2
    torch.manual_seed(0)
    assert torch.equal(drop(x), y)
    assert not torch.equal(drop(x), y)
    torch.testing.assert_close(
        drop(x.detach()[::2]).mean(), x.detach()[::2].mean(), rtol=0.02, atol=0
    )
    assert drop.eval()(x) is x


def test_a_shortcut_convolves_only_where_channels_change() -> None:
    network = wide_resnet(depth=16, width=4)
    assert [block.shortcut is not None for block in network.blocks] == [True, False] * 3
    narrow = wide_resnet(depth=10, width=1)
    assert [block.shortcut is not None for block in narrow.blocks] == [False, True, True]


def test_initial_weights() -> None:
    network = wide_resnet()
    conv = network.blocks[-1].conv2.weight
    expected = (2 / (9 * 256)) ** 0.5  # fan-out
    assert abs(float(conv.detach().std()) / expected - 1) < 0.01
    assert not network.linear.bias.any()


def test_autocast_is_for_training_only() -> None:
    plain, cast = wide_resnet(10, 1, 0.0), wide_resnet(10, 1, 0.0, autocast=True)
    cast.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, 32, 32)
    trained, exact = cast.train()(x), plain.train()(x)
    assert trained.dtype == torch.float32
    assert not torch.equal(trained, exact)
    torch.testing.assert_close(trained, exact, rtol=0.1, atol=0.1)
    cast.load_state_dict(plain.state_dict())  # the running statistics differ by now
    assert torch.equal(cast.eval()(x), plain.eval()(x))


def test_dropout_of_nearly_everything() -> None:
    network = wide_resnet(depth=10, width=1, dropout=1 - 1e-7)
    assert network.train()(torch.randn(2, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 15}, "6n \\+ 4"),
        ({"depth": 4}, "6n \\+ 4"),
        ({"width": 0}, "width"),
        ({"dropout": 1.0}, "probability"),
    ],
)
def test_refuses(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wide_resnet(**fields)
