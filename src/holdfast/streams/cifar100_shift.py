"""CIFAR-100 under distribution shift: the same superclasses, other classes of them in every task."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from holdfast.augmentation import Augmentation
from holdfast.data import Images, cifar100, generated
from holdfast.data.cifar100_classes import same_superclass
from holdfast.streams.stream import Split, Stream, Task

__all__ = ["MEAN", "STD", "CIFAR100Shift", "normalise"]

# Of the colour channels, from 0 to 255, as the Wide-ResNet was published with.
MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)
SIDE = 32  # pixels


def normalise(stored: Tensor) -> Tensor:
    """uint8 images, channels last, to numbers of mean 0 and deviation 1, shape (batch, 3, height, width)."""
    x = stored.float().sub_(stored.new_tensor(MEAN, dtype=torch.float32))
    return x.div_(stored.new_tensor(STD, dtype=torch.float32)).permute(0, 3, 1, 2)


@dataclasses.dataclass(frozen=True)
class CIFAR100Shift(Stream):
    """One head over superclasses; a task shows one class of each.

    Attributes:
        classes: Per task, the name of one class for each output. Names in the same place share a superclass.
        source: ``"cifar100"``, or ``"generated"``: a small stand-in of the same shape.
        validation: Training images per class, the last ones, that are set aside to choose strengths on.
        train_size: Learn from the first so many images per class only; ``None`` takes all.
        test_size: Test on the first so many test images per class only; ``None`` takes all.
        augmentation: Random changes of the training images; ``None`` for none. Importance and accuracy never
            see them.

    References:
        Ramasesh, Dyer and Raghu, Anatomy of Catastrophic Forgetting,
        https://arxiv.org/abs/2007.07400
    """

    classes: tuple[tuple[str, ...], ...] = (
        ("dolphin", "apple", "lamp", "maple_tree", "bicycle"),
        ("whale", "orange", "television", "willow_tree", "motorcycle"),
    )
    source: Literal["cifar100", "generated"] = "cifar100"
    validation: int = 50
    train_size: int | None = None
    test_size: int | None = None
    augmentation: Augmentation | None = dataclasses.field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        if not self.classes or not all(self.classes) or len(set(map(len, self.classes))) != 1:
            raise ValueError(f"classes are tasks of equally many names, got {self.classes}")
        for names in zip(*self.classes, strict=True):
            same_superclass(names)
        every = [name for names in self.classes for name in names]
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice:
            raise ValueError(f"a class stands in one place only, but {', '.join(twice)} does not")
        if self.source not in ("cifar100", "generated"):
            raise ValueError(f"unknown source {self.source!r}; known: cifar100, generated")
        for name in ("validation", "train_size", "test_size"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} is 1 or larger, got {count}")
        if self.augmentation is not None:
            self.augmentation.check(SIDE, SIDE)

    @property
    def learnt(self) -> str:
        if self.train_size is not None:
            return f"{self.train_size:,} a class"
        return f"all but {self.validation:,} a class"

    def tasks(self, seed: int, *, fetching: bool = True) -> Sequence[Task]:
        every = tuple(name for names in self.classes for name in names)
        images, width = self._images(every, fetching), len(self.classes[0])
        tasks = []
        for index, names in enumerate(self.classes):
            labels = range(index * width, (index + 1) * width)
            learnt, chosen, tested = [], [], []
            for label in labels:
                train = (images.train_labels == label).nonzero().squeeze(1)
                if self.validation >= len(train):
                    raise ValueError(
                        f"validation sets {self.validation} images per class aside, "
                        f"{every[label]} has {len(train)}"
                    )
                test = (images.test_labels == label).nonzero().squeeze(1)
                self._check_size("train_size", len(train) - self.validation)
                self._check_size("test_size", len(test))
                learnt.append(train[: -self.validation][: self.train_size])
                chosen.append(train[-self.validation :])
                tested.append(test[: self.test_size])
            train_part, test_part = (
                (images.train, images.train_labels % width),
                (images.test, images.test_labels % width),
            )
            tasks.append(
                Task(
                    f"task {index + 1} ({', '.join(names)})",
                    _split(*train_part, learnt, self.augmentation),
                    _split(*train_part, chosen),
                    _split(*test_part, tested),
                )
            )
        return tasks

    def _check_size(self, name: str, most: int) -> None:
        """Refuse to take more images of a class than there are."""
        size = getattr(self, name)
        if size is not None and size > most:
            raise ValueError(f"{name} is at most {most:,} per class here, got {size:,}")

    def _images(self, classes: tuple[str, ...], fetching: bool) -> Images:
        """The images of all tasks."""
        if self.source == "generated":
            return generated(classes, (SIDE, SIDE, 3), train=100, test=50)
        return cifar100.load(classes, fetching=fetching)


def _split(
    images: Tensor,
    labels: Tensor,
    parts: Sequence[Tensor],
    augmentation: Augmentation | None = None,
) -> Split:
    """Images by index, class after class as they lie in the parts, read normalised."""
    index = torch.cat(list(parts))
    return Split(images[index], labels[index], normalise, augmentation)
