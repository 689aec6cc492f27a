"""Claims are decided by numbers, and only by enough of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import fake_results
from holdfast.report.boundaries import _columns
from holdfast.report.claims import Finding, above_zero, near
from holdfast.report.loading import Study, read
from holdfast.report.matrix_claims import MATRIX_CLAIMS
from holdfast.report.measures import summary
from holdfast.report.pairs import decision
from holdfast.report.paper import Printed
from holdfast.report.standard import enough_seeds
from holdfast.report.toy_claims import ACCURACY_CLAIMS

ENOUGH_SEEDS = enough_seeds("toy")


def _study(folder: Path, level: Callable[[str, int], float], seeds: int, **costs: float) -> Study:
    """EWC and MAS of the methods that claims compare, with chosen accuracies per method and seed."""
    for importance in fake_results.IMPORTANCES:
        for method in fake_results.LEVEL:
            for seed in range(seeds):
                held = fake_results.regularizer(importance, method)
                experiment = fake_results.experiment(regularizer=held, seed=seed, epochs=1)
                made = fake_results.result(experiment, seconds=costs.get(method, 1.0))
                value = level(method, seed)
                test = [[value] * fake_results.TASKS] * fake_results.TASKS
                dataclasses.replace(made, test=test).save(folder)
    return read(folder)


def _finding(study: Study, words: str, preset: str = "paper") -> Finding:
    (claim,) = [c for c in [*ACCURACY_CLAIMS, *MATRIX_CLAIMS] if words in c.text]
    return claim.decide(study, preset)


def _better_sketch(method: str, seed: int) -> float:
    return {"count_sketch": 0.9}.get(method, 0.8) + 0.001 * (seed % 3) * (method == "diagonal")


def test_twenty_seeds_decide_and_nineteen_do_not(tmp_path: Path) -> None:
    few = _study(tmp_path / "few", _better_sketch, ENOUGH_SEEDS - 1)
    enough = _study(tmp_path / "enough", _better_sketch, ENOUGH_SEEDS)
    claim = "Sketched beats diagonal (EWC)"
    assert _finding(few, claim).verdict == "undecided"
    assert _finding(few, claim).reason == "19 of 20 seeds"
    assert _finding(enough, claim).verdict == "holds"
    assert _finding(enough, "Full beats sketched (MAS)").verdict == "does not hold"
    assert _finding(enough, "consistently").verdict == "holds"
    assert _finding(enough, "t ≤ 50").verdict == "holds"


def test_a_sketch_that_differs_in_more_than_its_size_decides_nothing(tmp_path: Path) -> None:
    _study(tmp_path, lambda method, seed: 0.7 if method == "count_sketch" else 0.8, ENOUGH_SEEDS)
    for importance in fake_results.IMPORTANCES:
        for seed in range(ENOUGH_SEEDS):
            held = fake_results.regularizer(importance, "count_sketch")
            plain = fake_results.experiment(regularizer=held, seed=seed, epochs=1)
            training = dataclasses.replace(plain.training, reset="epoch")
            made = fake_results.result(dataclasses.replace(plain, training=training))
            test = [[0.95] * fake_results.TASKS] * fake_results.TASKS
            dataclasses.replace(made, test=test).save(tmp_path)
    assert _finding(read(tmp_path), "t ≤ 50").verdict == "does not hold"


def test_an_interval_that_contains_zero_decides_nothing(tmp_path: Path) -> None:
    study = _study(
        tmp_path,
        lambda method, seed: 0.8 + (0.05 if (seed + len(method)) % 2 else -0.05),
        ENOUGH_SEEDS,
    )
    assert _finding(study, "Sketched beats diagonal (EWC)").verdict == "undecided"
    assert _finding(study, "Sketched beats diagonal (EWC)").reason.endswith("contains 0")


def test_costs_are_decided_by_seconds_and_bytes(tmp_path: Path) -> None:
    study = _study(tmp_path, _better_sketch, 1, rank_50=9.0, full=90.0, diagonal=0.9)
    assert _finding(study, "requires significantly more computation").verdict == "holds"
    assert _finding(study, "The full matrix is not affordable").verdict == "holds"
    assert _finding(study, "one pass").verdict == "holds"
    cheap = _study(tmp_path / "cheap", _better_sketch, 1, rank_50=1.1, diagonal=0.1)
    assert _finding(cheap, "requires significantly more computation").verdict == "does not hold"
    assert _finding(cheap, "Low rank (50) is not affordable").verdict == "does not hold"
    assert _finding(cheap, "one pass").verdict == "does not hold"


def test_what_was_not_run_is_undecided(tmp_path: Path) -> None:
    fake_results.result(fake_results.experiment()).save(tmp_path)
    study = read(tmp_path)
    for claim in ACCURACY_CLAIMS:
        assert claim.decide(study, "paper").verdict == "undecided", claim.text
    for claim in MATRIX_CLAIMS:
        assert claim.decide(study, "").verdict == "undecided", claim.text


def test_matrix_claims_need_five_networks(tmp_path: Path) -> None:
    fake_results.result(fake_results.experiment()).save(tmp_path)
    fake_results.fisher(tmp_path, range(4))
    assert _finding(read(tmp_path), "not approximated by its diagonal", "").verdict == "undecided"
    fake_results.fisher(tmp_path, range(5))
    study = read(tmp_path)
    assert _finding(study, "not approximated by its diagonal", "").verdict == "holds"
    assert _finding(study, "Rank 50 is a good", "").verdict == "holds"
    assert _finding(study, "misses 8.1 %", "").verdict == "holds"
    assert _finding(study, "approximates better", "").verdict == "holds"


def test_every_claim_names_its_source_once() -> None:
    claims = [*ACCURACY_CLAIMS, *MATRIX_CLAIMS]
    assert all(claim.source for claim in claims)
    assert len({claim.text for claim in claims}) == len(claims)


def test_a_difference_is_decided_by_its_interval() -> None:
    up = summary([1.0 + 0.1 * (k % 3) for k in range(20)])
    down = summary([-1.0 - 0.1 * (k % 3) for k in range(20)])
    assert above_zero(up, 20).verdict == "holds"
    assert above_zero(down, 20).verdict == "does not hold"
    assert above_zero(None, 20).verdict == "undecided"
    assert decision(up, "A", "B", 20).text == "A better"
    assert decision(down, "A", "B", 20).text == "B better"
    assert decision(down, "A", "B", 20).tone == "bad"
    assert decision(down, "A", "B", 20, expected=-1.0).tone == "good"
    assert decision(summary([1.0] * 5), "A", "B", 20).note == "5 of 20 seeds"
    assert decision(summary([1.0, 1.1, 1.2]), "A", "B", 3).text == "A better"


@pytest.mark.parametrize(("value", "verdict"), [(8.5, "holds"), (60.0, "does not hold")])
def test_a_printed_number_is_near_within_two_standard_errors(value: float, verdict: str) -> None:
    values = summary([value + 0.1 * k for k in range(-2, 3)])
    assert near(values, Printed(8.1, 10.2, 5, ""), 1, " %").verdict == verdict


def test_boundaries_show_one_seed_that_all_methods_have(tmp_path: Path) -> None:
    for found in fake_results.table("paper", range(3), epochs=1):
        found.save(tmp_path)
        if found.experiment.seed:  # seed 0 has no maps
            fake_results.decision_maps(tmp_path, found)
    chosen = _columns(read(tmp_path), "paper", "ewc")
    assert len(chosen) == 6
    assert {run.seed for _, run in chosen} == {2}  # the seed of the paper's own figure
