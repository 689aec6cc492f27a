"""The report of the synthetic study (section 5.1 and appendix B.1 of the paper)."""

from statistics import fmean

from holdfast.report import claims, matrix, pairs, sections
from holdfast.report.blocks import Block, Missing, Section, Text
from holdfast.report.boundaries import boundaries
from holdfast.report.choice import choice
from holdfast.report.comparison import compared
from holdfast.report.loading import Study
from holdfast.report.matrix_claims import MATRIX_CLAIMS
from holdfast.report.measures import finals, summary
from holdfast.report.paper import accuracy
from holdfast.report.settings import words
from holdfast.report.toy_claims import ACCURACY_CLAIMS, reproduced

__all__ = ["toy_sections"]


def toy_sections(study: Study) -> list[Section]:
    """All sections, in order."""
    return [
        Section("summary", "Summary", [*_verdict(study), *sections.runs(study)]),
        _claims(study),
        *sections.accuracy(study),
        sections.differences(study),
        _matrix(study),
        *sections.learning(study),
        *_boundaries(study),
        choice(study),
        sections.reading(study),
    ]


def _verdict(study: Study) -> list[Block]:
    """The study in plain sentences, every number computed from the results."""
    lead = [_main_sentence(study), _tally(study)]
    said = []
    if "original-code" in study.presets:
        found = reproduced(study, "original-code")
        reason = f" ({found.reason})" if found.reason else ""
        said.append(f"The printed table, run as the original code ran it: {found.number}{reason}.")
        said += _normalisations(study)
    if study.fisher:
        said.append(_matrix_sentence(study))
    blocks = [Text(lead, lead=True), pairs.main_comparison(study)]
    return sections.present([*blocks, Text(said, bullets=True) if said else None])


def _main_sentence(study: Study) -> str:
    """Whether sketching beats the diagonal, over everything that was run."""
    verdicts = {
        (preset, claim.text): claim.decide(study, preset).verdict
        for preset in study.presets
        for claim in ACCURACY_CLAIMS
        if claim.text.startswith("Sketched beats diagonal")
    }
    total, kinds = len(verdicts), list(verdicts.values())
    yes, no = kinds.count("holds"), kinds.count("does not hold")
    if not total or yes == no == 0:
        return (
            f"Whether the sketch beats the diagonal is undecided in all {total} comparisons "
            "(presets × EWC and MAS)."
        )
    return (
        f"The sketch beats the diagonal in {yes} of {total} comparisons (presets × EWC and MAS) "
        f"and loses to it in {no}; {total - yes - no} are undecided."
    )


def _tally(study: Study) -> str:
    counts = claims.count(study, ACCURACY_CLAIMS, study.presets)
    for verdict, number in claims.count(study, MATRIX_CLAIMS, [""]).items():
        counts[verdict] += number
    return (
        f"Of the paper's claims, each decided for every preset it applies to, {counts['holds']} "
        f"hold, {counts['does not hold']} do not hold and {counts['undecided']} are undecided."
    )


def _normalisations(study: Study) -> list[str]:
    """Which normalisation of the flattened diagonal is nearer to the printed number."""
    said = []
    for importance in ("ewc", "mas"):
        found = []
        paper = accuracy(study.recipe, importance, "diagonal", None)
        for setting in study.reported("original-code"):
            plain = setting.history == "moving_average" and setting.anchor == "latest"
            if setting.importance == importance and setting.flattened and plain:
                ours = summary(list(finals(setting).values()))
                delta, error = compared(ours, paper)
                if ours and delta is not None and error and error > 0:
                    found.append((abs(delta) / error, setting.flattened, ours.mean))
        if len(found) > 1 and paper:
            parts = [
                f"÷ {name} gives {mean:.1f} % ({far:.1f} SE away)" for far, name, mean in found
            ]
            said.append(
                f"The original code's flattened diagonal ({words(importance)}, printed "
                f"{paper.value} %): "
                f"{', '.join(parts)}. Nearer: ÷ {min(found)[1]}."
            )
    return said


def _matrix_sentence(study: Study) -> str:
    sketch = fmean(matrix.errors(study, ("count_sketch", None)) or [float("nan")])
    diagonal = fmean(matrix.errors(study, ("diagonal", None)) or [float("nan")])
    rank = fmean(matrix.stable_ranks(study, "frobenius"))
    return (
        f"The matrix: the diagonal misses {diagonal:.1f} % of its squared norm (paper 94.7), the "
        f"sketch {sketch:.1f} % (paper 8.1); its stable rank is {rank:.2f} (paper 1.26)."
    )


def _claims(study: Study) -> Section:
    accuracy_table = claims.table(
        study, ACCURACY_CLAIMS, study.presets, "claims", "Accuracy and cost, decided per preset"
    )
    blocks: list[Block] = [
        Text(
            [
                "Each claim of the abstract, the contributions and the captions that numbers can "
                "decide. “Significantly more” and “not affordable” are taken as more than twice "
                "as much as the sketch, “slightly larger” and “one pass, as the diagonal does” as "
                "at most twice as much as the diagonal."
            ]
        ),
        accuracy_table,
    ]
    if study.fisher:
        title = "The matrix (Figures 1 and 2)"
        blocks.append(claims.table(study, MATRIX_CLAIMS, [""], "claims-matrix", title))
    return Section("claims", "What holds", blocks)


def _matrix(study: Study) -> Section:
    title = "The importance matrix"
    if not study.fisher:
        missing = Missing("The study of Figures 1 and 2 was not run.", study.command())
        return Section("matrix", title, [missing])
    blocks = [
        matrix.heat_maps(study),
        matrix.frobenius(study),
        matrix.streamed(study),
        matrix.spectrum(study),
        matrix.ranks(study),
    ]
    return Section("matrix", title, sections.present(blocks))


def _boundaries(study: Study) -> list[Section]:
    parts = [Section("boundaries", "Decision boundaries", [])]
    for preset in study.presets:
        figure = boundaries(study, preset)
        if figure is not None:
            parts.append(Section(f"boundaries-{preset}", f"Preset {preset}", [figure], level=3))
    if len(parts) == 1:
        missing = Missing("No decision maps were stored.", study.command())
        return [Section("boundaries", "Decision boundaries", [missing])]
    return parts
