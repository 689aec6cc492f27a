"""Streams hold no data, are seeded, and hand out splits in batches."""

import dataclasses

import pytest
import torch
from torch import Tensor

from holdfast.configuration import from_json, to_json
from holdfast.streams import STREAMS, CIFAR100Shift, PermutedMNIST, Split, Stream, Toy, join
from holdfast.streams.toy import BLOBS


def test_toy_has_five_tasks_with_three_draws_each() -> None:
    tasks = Toy().tasks(0)
    assert len(tasks) == 5
    for task in tasks:
        assert (len(task.train), len(task.validation), len(task.test)) == (2000, 400, 400)
        for split in (task.train, task.validation, task.test):
            assert split.inputs.shape == (len(split), 2)
            assert split.inputs.dtype == torch.float32
            assert split.labels.bincount().tolist() == [len(split) // 2] * 2
        first = task.test.inputs[:10]
        assert not torch.equal(task.validation.inputs[:10], first)
        assert not torch.equal(task.train.inputs[:10], first)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("label", [0, 1])
def test_toy_blobs_have_the_stated_means_and_deviations(index: int, label: int) -> None:
    split = Toy(train=40000).tasks(3)[index].train
    points = split.inputs[split.labels == label]
    mean, deviation = (torch.tensor(v) for v in BLOBS[index][label])
    error = deviation / len(points) ** 0.5
    assert ((points.mean(0) - mean).abs() < 5 * error).all()
    assert ((points.std(0) - deviation).abs() < 5 * error).all()


def test_toy_is_a_function_of_its_seed() -> None:
    a, b, c = (Toy().tasks(seed) for seed in (1, 1, 2))
    assert torch.equal(a[2].train.inputs, b[2].train.inputs)
    assert not torch.equal(a[2].train.inputs, c[2].train.inputs)
    # a shorter stream is the beginning of a longer one, whatever its other sizes
    short = Toy(length=3, test=100).tasks(1)
    assert len(short) == 3
    assert torch.equal(short[2].train.inputs, a[2].train.inputs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 6}, "length is 1 to 5, got 6"),
        ({"length": 0}, "length is 1 to 5"),
        ({"train": 3}, "even number"),
        ({"test": 0}, "even number"),
    ],
)
def test_toy_refuses_what_it_cannot_draw(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Toy(**fields)


def test_streams_are_values_that_come_back_from_json() -> None:
    stream = Toy(length=2, train=10)
    assert to_json(stream) == {
        "name": "toy",
        "length": 2,
        "train": 10,
        "validation": 400,
        "test": 400,
    }
    assert from_json(Stream, to_json(stream)) == stream
    assert all(dataclasses.is_dataclass(cls) for cls in STREAMS.values())
    with pytest.raises(ValueError, match=r"unknown stream 'tpy'; known: toy.*did you mean 'toy'"):
        from_json(Stream, {"name": "tpy"})


def numbered(count: int, **fields: object) -> Split:
    return Split(torch.arange(count).unsqueeze(1), torch.arange(count) % 3, **fields)  # type: ignore[arg-type]


def test_batches_cover_the_split_in_order() -> None:
    batches = list(numbered(10).batches(4))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert torch.cat([x for x, _ in batches]).flatten().tolist() == list(range(10))


def test_batches_follow_the_given_order_and_may_be_a_part() -> None:
    order = torch.tensor([7, 0, 7, 3])
    batches = list(numbered(10).batches(3, order))
    assert torch.cat([x for x, _ in batches]).flatten().tolist() == [7, 0, 7, 3]
    assert torch.cat([y for _, y in batches]).tolist() == [1, 0, 1, 0]


def test_transform_is_always_applied_and_augmentation_only_with_a_generator() -> None:
    def noise(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(len(x), 1, generator=generator)

    split = numbered(6, transform=lambda x: x * 10.0, augment=noise)
    plain = torch.cat([x for x, _ in split.batches(4)]).flatten()
    assert plain.tolist() == [0, 10, 20, 30, 40, 50]
    noisy = [
        torch.cat([x for x, _ in split.batches(4, None, torch.Generator().manual_seed(5))])
        for _ in range(2)
    ]
    assert torch.equal(noisy[0], noisy[1])
    assert (noisy[0].flatten() > plain).all()


def test_joined_splits_keep_their_own_transforms() -> None:
    parts = [numbered(3, transform=lambda x: x + 100), numbered(4, transform=lambda x: x + 200)]
    both = join(parts)
    assert len(both) == 7
    assert torch.cat([x for x, _ in both.batches(3)]).flatten().tolist() == [
        *(100, 101, 102),
        *(200, 201, 202, 203),
    ]
    found = [
        (x.flatten().tolist(), y.tolist()) for x, y in both.batches(2, torch.tensor([6, 1, 0]))
    ]
    assert found == [([101, 203], [1, 0]), ([100], [0])]  # within a batch: grouped by part


def test_joined_splits_without_transforms_are_one_split() -> None:
    both = join([numbered(2), numbered(3)])
    assert both.inputs.flatten().tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(ValueError, match="nothing to join"):
        join([])


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="one label per input, got 3 inputs and 2 labels"):
        Split(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="batch size is 1 or larger, got 0"):
        list(numbered(3).batches(0))
    with pytest.raises(ValueError, match="batch size is 1 or larger, got -1"):
        list(join([numbered(3, transform=abs), numbered(3)]).batches(-1))


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (Toy(train=40), "40"),
        (PermutedMNIST(), "all but 5,000"),
        (PermutedMNIST(train_on_validation=True), "all"),
        (PermutedMNIST(train_size=12_000), "12,000"),
        (CIFAR100Shift(), "all but 50 a class"),
        (CIFAR100Shift(train_size=5), "5 a class"),
    ],
)
def test_says_from_how_much_it_learns(stream: Stream, said: str) -> None:
    assert stream.learnt == said
