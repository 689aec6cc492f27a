"""Streams on MNIST: what is shared, what is held out, what every batch becomes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.configuration import from_json, to_json
from holdfast.models import MLP, MODELS, Model, MultiHeadMLP, WideResNet
from holdfast.streams import (
    STREAMS,
    CIFAR100Shift,
    PermutedMNIST,
    RotatedMNIST,
    Split,
    SplitMNIST,
    Stream,
    Task,
)
from holdfast.streams.rotated_mnist import Rotation

SMALL: dict[str, Any] = {"source": "generated", "validation": 300}


def first(split: Split, size: int = 50) -> torch.Tensor:
    x, _ = next(split.batches(size))
    return x


def splits(task: Task) -> tuple[Split, Split, Split]:
    return task.train, task.validation, task.test


@pytest.mark.parametrize(
    "stream", [PermutedMNIST(**SMALL), RotatedMNIST(**SMALL), SplitMNIST(**SMALL, head="multi")]
)
def test_streams_become_json_and_come_back(stream: Stream) -> None:
    assert from_json(Stream, to_json(stream)) == stream
    assert hash(stream) == hash(dataclasses.replace(stream))


def test_every_stream_is_registered_and_built_from_its_name() -> None:
    assert set(STREAMS) == {
        "toy", "permuted_mnist", "rotated_mnist", "split_mnist", "cifar100_shift",
    }  # fmt: skip
    for name, cls in STREAMS.items():
        assert from_json(Stream, {"name": name}) == cls()
    assert from_json(Stream, to_json(CIFAR100Shift())) == CIFAR100Shift()


class TestParts:
    def test_validation_is_the_last_images_and_not_learnt(self) -> None:
        task = PermutedMNIST(**SMALL).tasks(0)[0]
        assert [len(s) for s in splits(task)] == [1700, 300, 500]
        whole = PermutedMNIST(source="generated", validation=1).tasks(0)[0].train
        assert torch.equal(task.validation.inputs[:-1], whole.inputs[1700:])
        assert torch.equal(task.train.inputs, whole.inputs[:1700])

    def test_training_on_all_keeps_the_validation_images(self) -> None:
        apart, all_ = (
            PermutedMNIST(**SMALL, train_on_validation=flag).tasks(0)[0] for flag in (False, True)
        )
        assert len(all_.train) == 2000
        assert torch.equal(all_.validation.inputs, apart.validation.inputs)
        assert torch.equal(all_.train.inputs[1700:], all_.validation.inputs)

    def test_sizes(self) -> None:
        task = PermutedMNIST(**SMALL, train_size=40, test_size=20).tasks(0)[0]
        assert [len(s) for s in splits(task)] == [40, 300, 20]

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"validation": 2000}, "the data set has 2,000"),
            ({"train_size": 1701}, "at most 1,700"),
            ({"test_size": 501}, "test_size is at most 500"),
        ],
    )
    def test_too_much(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PermutedMNIST(**{**SMALL, **fields}).tasks(0)

    @pytest.mark.parametrize(
        ("cls", "fields", "message"),
        [
            (PermutedMNIST, {"source": "emnist"}, "unknown source"),
            (PermutedMNIST, {"validation": 0}, "validation is 1 or larger"),
            (PermutedMNIST, {"length": 0}, "length is 1 or larger"),
            (PermutedMNIST, {"permutation": "none"}, "unknown permutation"),
            (RotatedMNIST, {"length": 0}, "length is 1 or larger"),
            (RotatedMNIST, {"step": float("nan")}, "degrees"),
            (SplitMNIST, {"groups": ((0, 1), (2,))}, "equally many"),
            (SplitMNIST, {"groups": ((0, 1), (1, 2))}, "at most once"),
            (SplitMNIST, {"groups": ((0, 10),)}, "0 to 9"),
            (SplitMNIST, {"head": "two"}, "unknown head"),
        ],
    )
    def test_refuses(self, cls: type, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            cls(**fields)


class TestPermuted:
    def test_tasks_share_the_bytes(self) -> None:
        tasks = PermutedMNIST(**SMALL).tasks(0)
        assert len(tasks) == 10
        for part in ("train", "validation", "test"):
            assert len({getattr(task, part).inputs.data_ptr() for task in tasks}) == 1
        train, validation, _ = splits(tasks[0])
        assert train.inputs.dtype == torch.uint8
        held = train.inputs.untyped_storage().data_ptr()
        assert validation.inputs.untyped_storage().data_ptr() == held

    def test_the_first_task_is_plain(self) -> None:
        task = PermutedMNIST(**SMALL).tasks(3)[0]
        assert torch.equal(first(task.train), task.train.inputs[:50].float() / 255)

    @pytest.mark.parametrize("permutation", ["independent", "cumulative"])
    def test_every_task_has_its_own_order_in_all_parts(self, permutation: Any) -> None:
        tasks = PermutedMNIST(**SMALL, permutation=permutation).tasks(0)
        pixel_names = torch.arange(784, dtype=torch.uint8)[None]  # columns told apart below 256
        seen = set()
        for task in tasks:
            orders = []
            for split in splits(task):
                assert split.transform is not None
                orders.append(split.transform(pixel_names)[0])
            assert torch.equal(orders[0], orders[1])
            assert torch.equal(orders[0], orders[2])
            assert torch.equal(orders[0].sort()[0], (pixel_names[0].float() / 255).sort()[0])
            seen.add(tuple(orders[0].tolist()))
        assert len(seen) == 10

    def test_cumulative_composes_and_independent_does_not(self) -> None:
        independent = PermutedMNIST(length=4)._orders(5, 784)
        cumulative = PermutedMNIST(length=4, permutation="cumulative")._orders(5, 784)
        assert torch.equal(independent[1], cumulative[1])
        assert torch.equal(cumulative[2], cumulative[1][independent[2]])
        assert torch.equal(cumulative[3], cumulative[2][independent[3]])

    def test_the_seed_decides_and_more_tasks_change_nothing(self) -> None:
        one, same, other, longer = (
            PermutedMNIST(**SMALL, length=length).tasks(seed)
            for seed, length in ((0, 3), (0, 3), (1, 3), (0, 5))
        )
        assert torch.equal(first(one[2].train), first(same[2].train))
        assert torch.equal(first(one[2].train), first(longer[2].train))
        assert not torch.equal(first(one[2].train), first(other[2].train))

    @pytest.mark.data
    def test_on_real_digits(self, real_data: Path) -> None:
        tasks = PermutedMNIST().tasks(0)
        assert [len(s) for s in splits(tasks[4])] == [55_000, 5_000, 10_000]
        x = first(tasks[4].train)
        assert x.shape == (50, 784)
        assert float(x.max()) == 1.0
        assert torch.equal(x.sort(1)[0], first(tasks[0].train).sort(1)[0])


class TestRotated:
    def test_quarter_turns_are_exact(self) -> None:
        images = torch.randint(0, 256, (9, 28, 28), dtype=torch.uint8)
        for turns in range(5):
            turned = Rotation(90.0 * turns)(images.flatten(1)).view(-1, 28, 28)
            expected = torch.rot90(images.float() / 255, turns, (1, 2))
            torch.testing.assert_close(turned, expected, rtol=0, atol=1e-4)

    def test_a_small_turn_moves_the_right_way(self) -> None:
        image = torch.zeros(1, 28, 28, dtype=torch.uint8)
        image[0, 13:15, 24] = 255  # to the right of the centre; counter-clockwise, it goes up
        turned = Rotation(30)(image.flatten(1)).view(28, 28)
        rows = turned.sum(1)
        assert float((rows * torch.arange(28)).sum() / rows.sum()) < 10

    def test_tasks(self) -> None:
        tasks = RotatedMNIST(**SMALL, length=3, step=45).tasks(0)
        assert [task.name for task in tasks] == ["0°", "45°", "90°"]
        assert torch.equal(first(tasks[0].test), tasks[0].test.inputs[:50].float() / 255)
        assert torch.equal(first(tasks[2].test), Rotation(90)(tasks[0].test.inputs[:50]))


class TestSplit:
    @pytest.mark.parametrize(
        ("head", "labels"), [("all", [4, 5]), ("shared", [0, 1]), ("multi", [0, 1])]
    )
    def test_labels(self, head: Any, labels: list[int]) -> None:
        groups = ((9, 0), (1, 2), (5, 3))
        task = SplitMNIST(**SMALL, groups=groups, head=head).tasks(0)[2]
        assert task.train.labels.unique().tolist() == labels
        whole = PermutedMNIST(**SMALL).tasks(0)[0].train
        fives = task.train.inputs[task.train.labels == labels[0]]
        assert torch.equal(fives, whole.inputs[whole.labels == 5])

    def test_the_parts_are_all_digits_once(self) -> None:
        tasks = SplitMNIST(**SMALL).tasks(0)
        assert len(tasks) == 5
        assert sum(len(task.train) for task in tasks) == 1700
        assert sum(len(task.test) for task in tasks) == 500
        labels = torch.cat([task.test.labels for task in tasks]).bincount()
        assert labels.tolist() == [50] * 10

    def test_multi_head_learns_each_task_in_its_head(self) -> None:
        tasks = SplitMNIST(**SMALL, head="multi").tasks(0)
        network = MultiHeadMLP((784, 16, 2), heads=5).build(0)
        x = first(tasks[3].train)
        assert x.shape == (50, 785)
        outputs = network(x)
        assert outputs.shape == (50, 2)
        body = network.get_submodule("body")
        assert torch.equal(outputs, body(x[:, :784])[:, 6:8])
        outputs.sum().backward()
        gradient = list(network.parameters())[-1].grad
        assert gradient is not None
        assert gradient.nonzero().flatten().tolist() == [6, 7]
        mixed = torch.cat([x[:1], first(tasks[0].train)[:1]])
        torch.testing.assert_close(network(mixed)[1], body(mixed[:, :784])[1, :2])


def test_models_are_built_by_name() -> None:
    for model in (MLP((4, 2)), MultiHeadMLP((4, 2), heads=3), WideResNet(depth=10, width=1)):
        assert type(model) in MODELS.values()
        assert from_json(Model, to_json(model)) == model
        one, two = (list(model.build(1).parameters()) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    with pytest.raises(ValueError, match="heads"):
        MultiHeadMLP((4, 2), heads=0)
