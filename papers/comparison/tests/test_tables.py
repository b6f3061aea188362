"""The summary, the folded tables and the remarks of a paper's page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed_comparison.results import Results
from testbed_comparison.rows import Figures
from testbed_comparison.tables import LONG_TABLE, System, system_page

COMPUTING = {"processor": "A processor", "instruction_set": "AVX2", "torch": "2.9"}


def row(name, item="Figure 1", **keys):
    return {
        "item": item,
        "name": name,
        "kind": "measured",
        "paper": "80",
        "unit": "%",
        "scenario": "one",
        "ours": {"metric": "accuracy", "at": {"method": name}},
    } | keys


@pytest.fixture
def page(tmp_path, monkeypatch):
    # None of these results is compared with a scenario.
    monkeypatch.setattr(Results, "scenarios_to_run", lambda self, figures: [])

    def write(rows, values, **keys):
        kept = {}
        for name, numbers in values.items():
            kept[f'accuracy at {{"method": "{name}"}}'] = numbers
        scenario = {
            "date": "2026-11-27",
            "revision": "abc",
            "computing": [COMPUTING],
            "seeds": [1],
            "runs": 4,
            "trains": True,
            "digest": "",
            "values": kept,
        }
        (tmp_path / "results.json").write_text(json.dumps({"one": scenario}))
        figures = Figures(paper="a paper", conditions=(), rows=tuple(rows), **keys)
        return system_page(System(Path(tmp_path), figures, Results(tmp_path)), {})

    return write


def test_summary_counts_rows_and_figures_of_each_word(page):
    rows = [row("near"), row("far"), row("missing", "Table 2")]
    text = page(rows, {"near": [0.80, 0.801], "far": [0.5, 0.51]})
    assert "3 rows: 1 agrees, 1 differs, 1 not run." in text
    assert "| agrees | 1 | Figure 1 (1 of 2) |" in text
    assert "| differs | 1 | Figure 1 (1 of 2) |" in text
    assert "| not run | 1 | Table 2 |" in text


def test_headlines_precede_default_conditions(page):
    headline = {"claim": "it learns", "rows": ["near"], "differs": "data"}
    text = page([row("near")], {"near": [0.80, 0.801]}, headlines=[headline])
    line = "| it learns | 80 % | 80.05 ± 0.64 % | 1 | data | agrees |"
    assert text.index(line) < text.index("## Default conditions")


def test_rows_of_one_figure_are_grouped_and_share_remarks(page):
    rows = [
        row("one", note="a remark"),
        row("two", "Table 2"),
        row("three", note="a remark"),
    ]
    text = page(rows, {})
    assert (
        "| Figure 1 | one | 80 % | – |  | not run | 1 |\n"
        "|  | three | 80 % | – |  | not run | 1 |\n"
        "| Table 2 | two | 80 % | – |  | not run |  |\n"
    ) in text
    assert text.count("a remark") == 1


def test_wide_interval_around_paper_value_gets_remark(page):
    text = page([row("wide"), row("far")], {"wide": [0.7, 0.9], "far": [0.5, 0.51]})
    assert "| wide | 80 % | 80 ± 1.3e+02 % | 2 | differs | 1 |" in text
    assert "| far | 80 % | 50.5 ± 6.4 % | 2 | differs |  |" in text
    assert "1. our interval contains the paper's value, but is too wide" in text


def test_only_long_tables_are_folded(page):
    rows = [row(f"row {number}") for number in range(LONG_TABLE)]
    text = page(rows, {})
    assert f"<summary>All {LONG_TABLE} rows</summary>\n\n|" in text
    assert "<details" not in page(rows[1:], {})


def test_sensitivity_table_has_one_line_per_parameter_of_row(page):
    value = {"scenario": "one", "ours": row("far")["ours"]}
    sensitivity = [
        {"row": "near", "parameter": "rate", "values": [{"value": "1mbit", **value}]},
        {"row": "far", "parameter": "rate", "values": [{"value": "2mbit", **value}]},
        {"row": "near", "parameter": "delay", "values": [{"value": "3ms", **value}]},
    ]
    values = {"near": [0.80, 0.801], "far": [0.5, 0.51]}
    text = page([row("near"), row("far")], values, sensitivity=sensitivity)
    assert (
        "| near | 80 % | 80.05 ± 0.64 % | rate | 1mbit: 50.5 ± 6.4 % |\n"
        "|  |  |  | delay | 3ms: 50.5 ± 6.4 % |\n"
        "| far | 80 % |"
    ) in text


def test_provenance_has_one_line_per_processor(page):
    text = page([row("near")], {"near": [0.80, 0.801]})
    assert "| 1 | 4 | 2026-11-27 | abc | A processor (AVX2) | 2.9 |" in text
