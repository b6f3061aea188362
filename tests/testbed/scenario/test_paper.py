"""What a scenario may say of a publication's figures: which runs rows are about, in what they are measured."""

import pytest

from testbed.scenario.paper import figure_problems, is_at, paper_value, problems, row_kind
from testbed.scenario.schema import PaperPart, PaperRow
from testbed.trace.figures import Reporting
from testbed.trace.registry import figures_of

FIGURES = figures_of(Reporting())
POINTS = [{"workload.method": {"name": "single", "options": {"depth": 2}}}, {"workload.method": {"name": "gpipe"}}]


def row(**keys):
    return PaperRow(**{"name": "a row", "figure": "step_time", **keys})


def paper(*rows, **keys):
    return PaperPart(source="Table 1", rows=rows or (row(),), **keys)


def said(found):
    return [(".".join(map(str, each.key)), each.text) for each in found]


def test_a_point_is_named_by_swept_keys_and_by_keys_inside_them():
    assert is_at(POINTS[0], {})
    assert is_at(POINTS[0], {"workload.method": POINTS[0]["workload.method"]})
    assert is_at(POINTS[0], {"workload.method.name": "single", "workload.method.options.depth": 2})
    assert not is_at(POINTS[1], {"workload.method.options.depth": 2})
    assert not is_at(POINTS[0], {"workload": {}})


def test_a_row_is_measured_in_what_its_figure_is_and_a_ratio_is_a_number():
    assert row_kind(row(), FIGURES) == "seconds"
    assert row_kind(row(over={}), FIGURES) == "number"
    assert row_kind(row(over_figure="duration"), FIGURES) == "number"
    assert row_kind(row(figure="plan.figures.wire_bytes"), FIGURES) == "bytes"
    assert row_kind(row(figure="plan.figures.messages"), FIGURES) == "number"
    with pytest.raises(KeyError):
        row_kind(row(figure="no_such_figure"), FIGURES)


def test_the_papers_value_has_the_units_of_its_figure():
    assert paper_value(row(), "seconds") is None
    assert paper_value(row(value="250ms"), "seconds") == 0.25
    assert paper_value(row(value="1.5", over={}), "number") == 1.5
    with pytest.raises(ValueError, match="has no unit"):
        paper_value(row(value=0.25), "seconds")


def test_rows_about_points_that_are_not_swept_are_refused():
    wrong = paper(row(at={"workload.method.name": "ring"}), row(over={"workload.method.name": "gpipe"}))
    ((key, text),) = said(problems(wrong, POINTS))
    assert key == "paper.rows.0.at"
    assert text.startswith("no point of the sweep has workload.method.name: ring")
    assert said(problems(wrong, None)) == []  # of a run that was kept the points are not known
    assert said(problems(None, POINTS)) == []


def test_figures_that_there_are_not_or_that_are_no_numbers_are_refused_at_the_points_of_their_row():
    wrong = paper(
        row(figure="step_tim", at={"workload.method.name": "single"}),
        row(figure="status", at={"workload.method.name": "single"}),
        row(value="3 apples", at={"workload.method.name": "single"}),
        row(expect="about 3s", at={"workload.method.name": "single"}),
    )
    found = dict(said(figure_problems(wrong, POINTS[0], FIGURES)))
    assert found["paper.rows.0.figure"].startswith("there is no figure 'step_tim': did you mean 'step_time'?")
    assert found["paper.rows.1.figure"].startswith("'status' is no number")
    assert "not a unit of duration" in found["paper.rows.2.value"]
    assert "is not a condition" in found["paper.rows.3.expect"]
    assert said(figure_problems(wrong, POINTS[1], FIGURES)) == []


def test_one_axis_shows_one_kind_of_figure():
    rows = (row(name="time"), row(name="bytes", figure="plan.wire_bytes"))
    charts = [{"title": "t", "what": "bars", "x": ["here"], "series": [{"label": "l", "rows": ["time", "bytes"]}]}]
    ((key, text),) = said(figure_problems(paper(*rows, charts=charts), {}, FIGURES))
    assert key == "paper.charts.0.series"
    assert text == "one axis cannot show bytes and seconds: make a chart of each"
