"""From a results folder to rows, Markdown, figures and one page."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fake_results
from holdfast import metrics, report
from holdfast.report.blocks import Cell, Column, Table, between, plus_minus, signed, size
from holdfast.report.loading import read
from holdfast.report.measures import summary
from holdfast.report.paper import Printed
from holdfast.results import ForeignResult


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_results.folder(tmp_path_factory.mktemp("toy"), seeds=2, epochs=3)


@pytest.fixture(scope="module")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(results, tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def rows(results: Path) -> list[dict]:
    return report.rows(results)


# rows


def test_rows_are_plain_json_with_the_promised_fields(rows: list[dict]) -> None:
    assert json.loads(json.dumps(rows)) == rows
    promised = "importance approximation parameters preset mean std seeds paper headline"
    for row in rows:
        assert set(promised.split()) | {"history", "anchor", "strength"} <= set(row)
        assert row["importance"] in ("ewc", "mas")
        assert 0 < row["mean"] < 100
        assert row["seeds"] == 2


def test_exactly_one_headline_per_cell_and_headlines_first(rows: list[dict]) -> None:
    cells = {(r["importance"], r["approximation"], r["preset"]) for r in rows}
    heads = [(r["importance"], r["approximation"], r["preset"]) for r in rows if r["headline"]]
    assert Counter(heads) == Counter(cells)
    flags = [r["headline"] for r in rows]
    assert flags == sorted(flags, reverse=True)


def test_the_headline_is_the_papers_setting(rows: list[dict]) -> None:
    heads = {(r["preset"], r["importance"], r["approximation"]): r for r in rows if r["headline"]}
    assert heads["paper", "ewc", "low_rank"]["parameters"]["rank"] == 50
    assert heads["paper", "ewc", "count_sketch"]["history"]["name"] == "moving_average"
    assert heads["paper", "ewc", "diagonal"]["anchor"] == "latest"
    assert heads["original-code", "ewc", "diagonal"]["original_diagonal"] == "batches"
    assert heads["original-code", "ewc", "block_diagonal"]["parameters"]["size"] == 10
    assert heads["original-code", "mas", "block_diagonal"]["parameters"]["size"] == 50
    assert heads["fair", "mas", "full"]["paper"] == 89.9


def test_the_papers_number_belongs_to_its_setting(rows: list[dict]) -> None:
    ranks = {
        r["parameters"]["rank"]: r["paper"] for r in rows if _is(r, "paper", "ewc", "low_rank")
    }
    assert ranks == {1: 83.2, 50: 93.9}
    histories = {
        r["history"]["name"]: r["paper"] for r in rows if _is(r, "paper", "ewc", "count_sketch")
    }
    assert histories == {"moving_average": 92.1, "sum": None, "mean": None}
    diagonals = {
        r["original_diagonal"]: r["paper"]
        for r in rows
        if _is(r, "original-code", "ewc", "diagonal") and r["anchor"] == "latest"
    }
    assert diagonals == {"batches": 88.0, "examples": 88.0, None: None}


def _is(row: dict, *cell: str) -> bool:
    return (row["preset"], row["importance"], row["approximation"]) == cell


def test_mean_and_deviation_are_those_of_the_runs(results: Path, rows: list[dict]) -> None:
    values = [
        100 * metrics.average_accuracy(found.test)
        for found in fake_results.table("paper", range(2), epochs=3)
        if found.experiment.regularizer == fake_results.regularizer("ewc", "count_sketch")
    ]
    row = next(r for r in rows if _is(r, "paper", "ewc", "count_sketch") and r["headline"])
    expected = metrics.summarise(values)
    assert row["mean"] == pytest.approx(expected.mean)
    assert row["std"] == pytest.approx(expected.std)


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    next(fake_results.table("paper", [0])).save(tmp_path)
    (row,) = report.rows(tmp_path)
    assert row["std"] is None
    assert row["headline"] is True


def test_tuning_and_single_runs_are_not_rows(tmp_path: Path) -> None:
    for found in fake_results.beside("paper", [0]):
        found.save(tmp_path)
    next(fake_results.tuning([100])).save(tmp_path)
    kinds = [
        (r["approximation"], r["history"]["name"], r["anchor"]) for r in report.rows(tmp_path)
    ]
    assert sorted(kinds) == [
        ("count_sketch", "mean", "latest"),
        ("count_sketch", "sum", "latest"),
        ("diagonal", "moving_average", "each"),
    ]


def test_the_chosen_strength_is_the_headline_of_fair(tmp_path: Path) -> None:
    for found in fake_results.tuning([100, 101]):
        found.save(tmp_path)
    for strength in (10.0, 1000.0):
        chosen = fake_results.regularizer("ewc", "diagonal", strength=strength)
        seeds = range(3) if strength == 10 else range(1)  # the wrong one has more seeds
        for seed in seeds:
            experiment = fake_results.experiment("fair", regularizer=chosen, seed=seed)
            fake_results.result(experiment).save(tmp_path)
    (head,) = [r for r in report.rows(tmp_path) if r["headline"]]
    assert head["strength"] == 1000.0
    study = read(tmp_path)
    assert {s.chosen for s in study.selections.values()} == {1000.0}
    assert all(s.inside for s in study.selections.values())


# bad input


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holdfast reproduce"):
        report.write(tmp_path)


def test_a_folder_of_two_recipes_is_refused(tmp_path: Path) -> None:
    experiment = fake_results.experiment()
    fake_results.result(experiment).save(tmp_path)
    fake_results.result(dataclasses.replace(experiment, recipe="other")).save(tmp_path)
    with pytest.raises(ValueError, match="other, toy"):
        report.rows(tmp_path)


def test_a_foreign_format_is_refused(tmp_path: Path) -> None:
    path = fake_results.result(fake_results.experiment()).save(tmp_path)
    path.write_text(path.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(ForeignResult, match="99"):
        report.rows(tmp_path)


def test_broken_files_are_named_on_the_page_and_escaped(tmp_path: Path) -> None:
    next(fake_results.table("paper", [0])).save(tmp_path)
    (tmp_path / "runs" / "<b>half.json").write_text("{")
    (tmp_path / "fisher").mkdir()
    (tmp_path / "fisher" / "seed0.json").write_text("{}")
    page = report.write(tmp_path).read_text()
    assert "&lt;b&gt;half.json" in page
    assert "<b>half" not in page
    assert "seed0.json" in page


# partial folders


def test_a_partial_folder_says_what_is_missing(tmp_path: Path) -> None:
    fake_results.folder(
        tmp_path, presets=["paper"], seeds=1, extras=False, matrix=False, maps=False
    )
    page = report.write(tmp_path)
    text = page.read_text()
    for preset in ("original-code", "fair"):
        assert f"holdfast reproduce toy --preset {preset}" in text
    assert "The study of Figures 1 and 2 was not run." in text
    assert "No decision maps were stored." in text
    assert "No strength was tuned here." in text
    assert page == tmp_path / "report.html"
    assert not list((tmp_path / "figures").glob("boundaries*"))


def test_only_baselines_still_make_a_page(tmp_path: Path) -> None:
    fake_results.result(fake_results.experiment()).save(tmp_path)
    text = report.write(tmp_path).read_text()
    assert "No regularisation" in text
    assert report.rows(tmp_path) == []


def test_an_unknown_recipe_gets_the_general_sections(tmp_path: Path) -> None:
    for found in fake_results.table("paper", [0]):
        changed = dataclasses.replace(found.experiment, recipe="something-new")
        dataclasses.replace(found, experiment=changed).save(tmp_path)
    text = report.write(tmp_path).read_text()
    assert "<h1>something-new</h1>" in text
    assert 'id="accuracy-paper"' in text
    assert 'id="boundaries"' not in text


# the page, the Markdown, the figures


class _Loads(HTMLParser):
    """Collects everything a browser would fetch, ids and unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("#"):
                self.sources.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def test_the_page_loads_nothing(written: Path) -> None:
    text = written.read_text()
    assert not re.search(r"https?:", text)
    loads = _Loads()
    loads.feed(text)
    assert all(source.startswith("data:") for source in loads.sources)
    assert [i for i, n in Counter(loads.ids).items() if n > 1] == []


def test_the_page_shows_every_part_of_the_study(written: Path) -> None:
    text = written.read_text()
    for table in (
        *(f"{kind}-{p}" for p in ("paper", "original-code", "fair") for kind in _TABLES),
        *("main", "runs", "claims", "claims-matrix", "frobenius", "streamed", "stable-rank"),
        "choice-fair",
    ):
        assert f'id="table-{table}"' in text, table
    for figure in (
        *(f"{kind}-{p}" for p in ("paper", "original-code", "fair") for kind in _FIGURES),
        *("differences", "fisher", "spectrum", "sensitivity-fair"),
    ):
        assert f'id="figure-{figure}"' in text, figure


_TABLES = ("accuracy", "beside", "differences", "transfer")
_FIGURES = ("accuracy", "curves", "boundaries")


def test_every_figure_is_described_and_stands_beside_the_page(written: Path) -> None:
    text = written.read_text()
    alts = re.findall(r'<svg role="img" aria-label="([^"]+)"', text)
    assert len(alts) == text.count("<svg")
    assert min(map(len, alts)) > 30
    svgs = {path.stem for path in (written.parent / "figures").glob("*.svg")}
    pngs = {path.stem for path in (written.parent / "figures").glob("*.png")}
    assert svgs == pngs
    assert len(svgs) == len(alts)


def test_figure_files_are_valid_and_turn_dark_by_themselves(written: Path) -> None:
    for path in (written.parent / "figures").glob("*.svg"):
        tree = ET.fromstring(path.read_text())
        assert tree.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in path.read_text()
        ids = [e.get("id") for e in tree.iter() if e.get("id")]
        assert len(ids) == len(set(ids))
    for path in (written.parent / "figures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for found in fake_results.table("paper", [0]):
        found.save(tmp_path)
    first = report.write(tmp_path, tmp_path / "a").parent
    second = report.write(tmp_path, tmp_path / "b").parent
    names = [p.relative_to(first) for p in sorted(first.rglob("*")) if p.is_file()]
    assert names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_markdown_has_the_same_tables(written: Path) -> None:
    text = (written.parent / "report.md").read_text()
    tables = re.findall(r"^\|(?:---:?\|)+$", text, re.MULTILINE)
    assert len(tables) == written.read_text().count("<table")
    for line in text.splitlines():
        if line.startswith("| "):
            assert not re.search(r"\bnan\b", line), line
    for link in re.findall(r"\((figures/[^)]+)\)", text):
        assert (written.parent / link).exists()


def test_tables_name_paper_difference_seeds_and_command(written: Path) -> None:
    text = (written.parent / "report.md").read_text()
    start = text.index("**Average test accuracy after the last task, per cent: `paper`**")
    table = text[start : text.index("Made by", start) + 90]
    for word in ("Paper", "Ours", "Seeds", "Seeds 0–4", "Difference (SE)", "Within 2 SE"):
        assert word in table
    assert "88.0 ± 7.4" in table
    assert "`holdfast reproduce toy --preset paper --seeds 2 --epochs 3`" in table


# the small parts


def test_summary_agrees_with_the_metrics() -> None:
    values = [81.2, 90.5, 77.0, 88.8]
    ours, theirs = summary(values), metrics.summarise(values)
    assert ours is not None
    assert dataclasses.astuple(ours) == pytest.approx(dataclasses.astuple(theirs))
    assert summary([]) is None


def test_the_papers_standard_error_is_of_the_sample() -> None:
    assert Printed(0, 2.0, 5, "").standard_error == pytest.approx(1.0)
    assert Printed(0, None, 5, "").standard_error == 0


def test_cells_read_well() -> None:
    assert plus_minus(-0.04, 0.2).text == "0.0 ± 0.2"
    assert plus_minus(3.0, float("nan")).text == "3.0"
    assert plus_minus(float("nan"), 1.0).text == "—"
    assert signed(-0.04).text == "+0.0"
    assert signed(-1.26).text == "−1.3"
    assert size(35_080).text == "35.1 kB"
    assert size(7).text == "7 B"


def test_an_interval_shows_on_which_side_of_zero_it_lies() -> None:
    assert between(-3.928, -0.031) == "−3.93 to −0.03"
    assert between(0.0004, 1.5) == "+0.0004 to +1.5000"
    assert between(-3.928, 0.031) == "−3.9 to +0.0"
    assert between(1.6, 5.7) == "+1.6 to +5.7"
    assert between(0.0, 0.0) == "+0.0 to +0.0"
    assert between(1e-9, 1.0) == "+0.0000 to +1.0000"  # equal to rounding


def test_markdown_cells_cannot_break_out() -> None:
    column = [Column("a|b", numeric=False)]
    text = Table("t", "T", column, [[Cell("x | <script>\ny", note="n|m")]]).markdown()
    assert "| a\\|b |" in text
    assert "| x \\| &lt;script> y (n\\|m) |" in text
