"""The report of the study on permuted MNIST (section 5.2 and appendix B.2 of the paper)."""

from holdfast.report import pairs, sections, tasks
from holdfast.report.blocks import Block, Missing, Section
from holdfast.report.choice import choice
from holdfast.report.equal_memory import at_equal_memory
from holdfast.report.loading import Study
from holdfast.report.longer_stream import longer_stream
from holdfast.report.sketch_size import sketch_sizes

__all__ = ["permuted_mnist_sections"]

ABOUT = {
    "paper": "The text of the paper, taken at its word: correct rows for every method, α = 0.25 as "
    "the weight of the new task, the strength of every method chosen from its grid of whole powers "
    "of ten, here on validation data. MAS is that of the softmax outputs, to which that grid belongs.",
    "original-code": "What produced the printed numbers: the flattened-batch diagonal divided by the "
    "number of batches, α = 0.25 as the weight of the OLD tasks, the first task scaled like all "
    "others, Adam re-created every epoch, batches never shuffled, MAS on softmax outputs, no ½ in "
    "the penalty (its λ of 100 is our 200), and the λ that the authors found best on test data.",
    "fair": "Correct rows for every method, one epoch a task, and for each method the strength that "
    "was best on validation data, the last 5,000 training images, which are not learnt from.",
    "sketch-size": "The text of the paper with two epochs a task: the size of the sketch at one "
    "strength for all, and at the best strength of each.",
    "twenty-tasks": "The rules of `fair` on a stream twice as long, at the strengths that were best "
    "for half of it.",
}


def permuted_mnist_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    summary = [pairs.main_comparison(study), tasks.scale(study), *sections.runs(study)]
    return [
        Section("summary", "Summary", sections.present(summary)),
        *sections.accuracy(study, ABOUT),
        sections.differences(study),
        _memory(study),
        *sections.learning(study),
        *_tasks(study),
        _sizes(study),
        choice(study),
        sections.reading(study),
    ]


def _memory(study: Study) -> Section:
    """Who wins in the memory it takes, and whether that holds when memory is short."""
    tables = [at_equal_memory(study, preset) for preset in ("fair", "twenty-tasks")]
    blocks: list[Block] = sections.present(
        [*tables, *longer_stream(study, "fair", "twenty-tasks")]
    )
    command = f"{study.command()} --preset fair --seeds {study.enough}"
    missing = Missing("The comparison at equal memory was not run.", command)
    return Section("memory", "At equal memory", blocks or [missing])


def _tasks(study: Study) -> list[Section]:
    parts = []
    for preset in study.presets:
        figure = tasks.at_the_end(study, preset)
        if figure is not None:
            parts.append(Section(f"tasks-{preset}", f"Preset {preset}", [figure], level=3))
    return [Section("tasks", "Each task at the end", []), *parts]


def _sizes(study: Study) -> Section:
    figure = sketch_sizes(study, "sketch-size")
    missing = Missing(
        "The effect of the sketch's size was not run.", f"{study.command()} --preset sketch-size"
    )
    return Section("size", "The size of the sketch", [figure or missing])
