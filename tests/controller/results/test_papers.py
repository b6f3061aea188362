"""What is run again of publications' figures, and what the documentation shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.scenario.loading import load
from testbed.scenario.schema import PaperRow
from testbed_controller.lab.paths import ROOT
from testbed_controller.results import papers
from testbed_controller.results.reproduction import outcome

DOCS = ROOT / "docs"


def row(**keys: object) -> PaperRow:
    return PaperRow.model_validate({"name": "row", "figure": "accuracy", **keys})


@pytest.mark.parametrize(
    ("kind", "paper", "ours", "reading", "word"),
    [
        ("seconds", 10.0, 10.5, "", "reproduced"),
        ("seconds", 10.0, 10.51, "", "not reproduced"),
        ("seconds", 10.0, 9.5, "so", "reproduced under a stated reading"),
        ("share", 0.1276, 0.157, "", "reproduced"),
        ("share", 0.1276, 0.16, "so", "not reproduced"),
        ("seconds", None, 1.0, "", None),
        ("seconds", 1.0, None, "", None),
    ],
)
def test_a_figure_is_reproduced_within_five_percent_and_a_share_within_three_points(kind, paper, ours, reading, word):
    assert outcome(row(), kind, paper, ours, reading) == word


def test_a_ranking_is_reproduced_on_the_same_side():
    over, minus = (row(claim="ranking", **{key: {"a": 1}}) for key in ("over", "minus"))
    assert outcome(over, "number", 1.2, 3.0, "") == "reproduced"
    assert outcome(over, "number", 1.2, 0.99, "") == "not reproduced"
    assert outcome(minus, "share", 0.2, 0.01, "") == "reproduced"
    assert outcome(minus, "share", 0.2, -0.01, "") == "not reproduced"
    assert outcome(minus, "share", None, 0.01, "") == "reproduced"  # without a value the first is the larger
    assert outcome(over, "number", None, 0.9, "") == "not reproduced"


def test_a_ratio_on_the_other_side_of_one_is_not_reproduced():
    ratio = row(over={"a": 1})
    assert outcome(ratio, "number", 1.02, 0.998, "") == "not reproduced", "a gain that is a loss"
    assert outcome(ratio, "number", 1.02, 1.01, "") == "reproduced"
    assert outcome(ratio, "number", 1.0, 0.98, "") == "reproduced", "the paper claims that both are alike"
    assert outcome(row(), "number", 1.02, 0.998, "") == "reproduced", "one figure alone has no other side"


def test_the_page_begins_with_its_claims_and_counts_no_outcomes():
    head = (DOCS / papers.PAGE).read_text(encoding="utf-8").partition("\n## ")[0]
    for word in ("**Exact:**", "**Agrees under calibrated conditions:**", "**Differs:**"):
        assert word in head
    assert "papers: all" not in head


def test_what_is_changed_of_a_scenario_makes_it_stale_and_how_long_it_may_take_does_not():
    usual = papers.Entry("stahl-example")
    kept = {"stahl-example": {"digest": usual.digest()}}
    assert papers.stale([usual, papers.Entry("stahl-example", ("time_limit=5h",))], kept) == []
    other = papers.Entry("stahl-example", ("seed=7",))
    assert papers.stale([usual, other], kept) == [other]
    assert papers.stale([usual], {}) == [usual]
    noted = [
        papers.Entry(
            "stahl-example", (f"paper={{source: s, rows: [{{name: {name}, figure: latency, note: {note}}}]}}",)
        )
        for name, note in (("a", "b"), ("a", "c"), ("d", "b"))
    ]
    assert noted[0].digest() == noted[1].digest() != noted[2].digest(), "a note is no figure"
    assert noted[0].runs() == noted[2].runs() == usual.runs() != other.runs(), "a row that is new needs no run"


def test_what_is_no_longer_listed_is_no_longer_kept(tmp_path: Path) -> None:
    (tmp_path / papers.LIST).write_text("stahl-example: {}\n")
    (tmp_path / papers.PAGE).write_text("")
    (tmp_path / papers.RESULTS).write_text(json.dumps({"gone": {}}))
    result = json.loads((DOCS / papers.RESULTS).read_text())["stahl-example"]
    papers.keep(tmp_path, {"stahl-example": result})
    assert list(papers.kept(tmp_path)) == ["stahl-example"]


def test_runs_that_did_not_finish_are_no_result(tmp_path: Path) -> None:
    entry = papers.Entry("stahl-example")
    with pytest.raises(InputError, match="a run of stahl-example is not there: run 'testbed papers' again"):
        papers.result(entry, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "running"}))
    with pytest.raises(InputError, match="a run of stahl-example was cut off"):
        papers.result(entry, tmp_path)


def test_runs_that_are_not_trusted_are_no_result(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"status": "finished"}))
    (tmp_path / "paper.json").write_text(
        json.dumps({"rows": [{"name": "a", "untrusted": 0}, {"name": "b", "untrusted": 1}]})
    )
    with pytest.raises(InputError, match="a run of the row 'b' is not trusted"):
        papers.result(papers.Entry("stahl-example"), tmp_path)
    assert not [row for found in papers.kept(DOCS).values() for row in found["rows"] if row["untrusted"]]


def test_what_is_kept_names_the_processor_and_the_kernels(tmp_path: Path) -> None:
    kind = {"processor": "EPYC", "instruction_set": "AVX2", "torch": "2.13.0"}
    facts = {"status": "finished", "revision": "abc", "date": "2026-11-26T00:00", "seed": 1, "repetition": 0}
    manifest = {**facts, "wall_seconds": 1.0, "host": {"computing": [kind]}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "paper.json").write_text(json.dumps({"rows": []}))
    found = papers.result(papers.Entry("stahl-example"), tmp_path)
    page = papers.written("<!-- papers: stahl-example -->\n<!-- end -->\n", {"stahl-example": {**found, "reading": ""}})
    assert "revision abc, on EPYC (AVX2, torch 2.13.0)." in page


def test_the_page_has_what_was_kept_and_nothing_typed_by_hand() -> None:
    page = (DOCS / papers.PAGE).read_text(encoding="utf-8")
    kept = papers.shown(DOCS)
    assert papers.written(page, kept) == page
    for name in kept:
        assert f"<!-- papers: {name} -->" in page


def test_what_a_scenario_says_of_its_rows_is_in_it_alone() -> None:
    file = {each.scenario: load(f"papers/{each.scenario}", each.changes).paper for each in papers.listed(DOCS)}
    for name, found in papers.kept(DOCS).items():
        assert not {"reading", *papers.WORDS} & {key for each in (found, *found["rows"]) for key in each}, name
    for name, found in papers.shown(DOCS).items():
        said = {row.name: (row.note, row.explains) for row in file[name].rows}
        assert found["reading"] == file[name].reading
        assert all(said[row["name"]] == (row["note"], row["explains"]) for row in found["rows"])


def test_words_of_a_scenario_are_shown_as_they_are_now() -> None:
    part = "paper={source: s, rows: [{name: a, figure: latency, value: 2 s, note: new}]}"
    facts = {"kind": "seconds", "ours": 2.01}
    results = {"stahl-example": {"digest": "", "rows": [{**facts, "name": "a"}, {**facts, "name": "no more"}]}}
    entry = papers.Entry("stahl-example", (part, "paper.reading=by title"))
    found = papers.worded([entry], results)["stahl-example"]
    assert found["reading"] == "by title"
    assert [(row["name"], row["note"], row["paper"]) for row in found["rows"]] == [("a", "new", 2.0)]
    assert found["rows"][0]["outcome"] == "reproduced under a stated reading"


def test_a_row_with_one_thing_changed_explains_one_that_did_not_come_out() -> None:
    def kept(*rows: tuple[str, str, str]) -> dict[str, object]:
        facts = {
            "measure": "",
            "kind": "number",
            "paper": 2.0,
            "ours": 1.0,
            "half_width": None,
            "runs": 1,
            "untrusted": 0,
        }
        rest = {"condition": None, "holds": None, "note": ""}
        listed = [{**facts, **rest, "name": name, "outcome": word, "explains": other} for name, word, other in rows]
        return {"command": "", "reading": "", "seeds": [1], "runs": 1, "date": "", "revision": "", "rows": listed}

    results = {
        "one": kept(("a: x", "not reproduced", ""), ("b", "not reproduced", ""), ("c", "reproduced", "a: x")),
        "two": kept(("d", "not reproduced", "one: b"), ("e", "reproduced", ""), ("f", "reproduced", "e")),
        "three": kept(("g", "not reproduced", ""), ("h", "reproduced", "")),
    }
    for row in results["three"]["rows"]:
        row["formula"] = "t = F / r"
    page = papers.written("".join(f"<!-- papers: {name} -->\n<!-- end -->\n" for name in results), results)
    assert "| a: x | 2 | 1 | – | 0.5 | 1 | not reproduced | comes out as 'c' |" in page
    assert "| c | 2 | 1 | – | 0.5 | 1 | explains a: x |  |" in page
    assert "| d | 2 | 1 | – | 0.5 | 1 | does not explain one: b |  |" in page
    assert "| e | 2 | 1 | – | 0.5 | 1 | reproduced |  |" in page, "what came out needs no other row"
    assert "| g | 2 | 1 | – | 0.5 | 1 | not reproduced | by a formula: t = F / r |" in page
    assert "| h | 2 | 1 | – | 0.5 | 1 | reproduced |  |" in page


def test_what_explains_a_row_names_one() -> None:
    listed = {entry.scenario: load(f"papers/{entry.scenario}").paper for entry in papers.listed(DOCS)}
    known = {name: {row.name for row in part.rows} for name, part in listed.items() if part}
    for name, part in listed.items():
        for row in part.rows if part else ():
            scenario, _, other = row.explains.partition(": ")
            assert not row.explains or row.explains in known[name] or other in known[scenario]


def test_every_listed_scenario_can_be_run() -> None:
    names = [entry.scenario for entry in papers.listed(DOCS) if entry.digest()]
    assert len(names) == len(set(names))
