"""Tasks in order. A new stream is one file and one line in ``STREAMS``."""

from holdfast.configuration import register
from holdfast.streams.cifar100_shift import CIFAR100Shift
from holdfast.streams.permuted_mnist import PermutedMNIST
from holdfast.streams.rotated_mnist import RotatedMNIST
from holdfast.streams.split_mnist import SplitMNIST
from holdfast.streams.stream import Split, Stream, Task, join
from holdfast.streams.toy import Toy

__all__ = [
    "STREAMS",
    "CIFAR100Shift",
    "PermutedMNIST",
    "RotatedMNIST",
    "Split",
    "SplitMNIST",
    "Stream",
    "Task",
    "Toy",
    "join",
]

STREAMS = register(
    Stream,
    "stream",
    {
        "toy": Toy,
        "permuted_mnist": PermutedMNIST,
        "rotated_mnist": RotatedMNIST,
        "split_mnist": SplitMNIST,
        "cifar100_shift": CIFAR100Shift,
    },
)
