"""The report of the study on CIFAR-100 (section 5.3 and appendix B.3 of the paper)."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from holdfast.augmentation import Augmentation
from holdfast.data.cache import DataError
from holdfast.report import pairs, sections, tasks
from holdfast.report.blocks import Figure, Section
from holdfast.report.choice import choice
from holdfast.report.figures import panel
from holdfast.report.loading import Study
from holdfast.streams.cifar100_shift import MEAN, STD, CIFAR100Shift, normalise

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["cifar100_sections"]

ABOUT = {
    "paper": "The strengths that the paper prints, in its text's convention (with ½, and the first "
    "task's matrix whole: where its code, which is known for the other studies alone, had neither, "
    "its penalty was 1.5 times as strong at the same λ). Rows are of single examples; `flattened` "
    "is the diagonal as the original code computes it. MAS is that of the softmax outputs, as in "
    "the authors' code, unless logits are named. Neither the paper nor its code says how many "
    "epochs a task was learnt: the number stands in the table of scales. In every preset training "
    "runs in bfloat16 where torch thinks it safe, importance and accuracy are computed in float32, "
    "and 50 training images a class are held out. The penalty holds weights; the running means and "
    "variances of BatchNorm follow the new task.",
    "fair": "Correct rows for every method, and for each the strength that was best on the 50 "
    "training images a class that are held out.",
}
COPIES = 5  # augmentations of an image, as in the paper's figure


def cifar100_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    summary = [pairs.main_comparison(study), tasks.scale(study), *sections.runs(study)]
    return [
        Section("summary", "Summary", sections.present(summary)),
        *sections.accuracy(study, ABOUT),
        sections.differences(study),
        *sections.learning(study),
        *_tasks(study),
        *_samples(study),
        choice(study),
        sections.reading(study),
    ]


def _tasks(study: Study) -> list[Section]:
    parts = []
    for preset in study.presets:
        figure = tasks.over_epochs(study, preset)
        if figure is not None:
            parts.append(Section(f"tasks-{preset}", f"Preset {preset}", [figure], level=3))
    return [Section("tasks", "Task by task", []), *parts]


def _samples(study: Study) -> list[Section]:
    """Images and their augmentations, where the data set is at hand; results do not hold it."""
    stream = study.settings[0].runs[0].result.experiment.stream
    if not isinstance(stream, CIFAR100Shift) or stream.augmentation is None:
        return []
    try:
        learnt = [task.train for task in stream.tasks(0, fetching=False)]
    except DataError:  # a report fetches nothing, and does without pictures
        return []
    panels = []
    for index, (split, names) in enumerate(zip(learnt, stream.classes, strict=True)):
        first = [int((split.labels == place).nonzero()[0]) for place in range(len(names))]
        rows = dict(zip(names, split.inputs[first], strict=True))
        panels.append(
            panel(
                f"augmentation-task-{index + 1}",
                f"One image of {', '.join(names)}, each with {COPIES} random augmentations",
                partial(
                    _images, rows=rows, augmentation=stream.augmentation, title=f"Task {index + 1}"
                ),
                height=4.6,
            )
        )
    caption = (
        f"The first training image of each class and {COPIES} draws of what training sees of it: "
        f"{_changes(stream.augmentation)}. Importance and accuracy are computed on images as they "
        "are."
    )
    return [
        Section("samples", "Images", [Figure("augmentation", "Augmentation", panels, caption)])
    ]


def _changes(augmentation: Augmentation) -> str:
    """What is done to an image, in words."""
    side, far = augmentation.cutout, augmentation.translate
    said = ["mirrored"] if augmentation.flip else []
    said += [f"moved by up to {far} pixels"] if far else []
    said += [f"with a square of {side} × {side} cut out"] if side else []
    return ", ".join(said) or "as it is"


def _images(
    canvas: "Canvas", rows: dict[str, torch.Tensor], augmentation: Augmentation, title: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    axes = canvas.subplots(len(rows), COPIES + 1, squeeze=False)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    for line, (name, image) in zip(axes, rows.items(), strict=True):
        batch = normalise(image[None].repeat(COPIES, 1, 1, 1))
        changed = augmentation(batch, generator).permute(0, 2, 3, 1) * std + mean
        shown = [image, *changed.round().clamp(0, 255).to(torch.uint8)]
        for place, (axis, picture) in enumerate(zip(line, shown, strict=True)):
            axis.imshow(picture.numpy(), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if place == 0:
                axis.set_ylabel(name.replace("_", " "), rotation=0, ha="right", va="center")
    canvas.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=10)
