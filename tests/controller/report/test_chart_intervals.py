"""Confidence intervals of repetitions: their computation and drawing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from testbed_controller.report.charts import SERIES, Axis, Bars, Line
from testbed_controller.report.comparison import mean_line
from tests.controller.report.drawn_charts import draw_bars, draw_lines

SHARE = Axis("accuracy", "share")


def drawn_interval(axes: Any) -> Any:
    """Return the bounding box of all drawn intervals, in units of the data."""
    return axes.collections[0].get_datalim(axes.transData)


def test_repetitions_are_drawn_as_mean_with_interval() -> None:
    repetitions = [
        [(0, 1.0), (2, 3.0), (4, 9.0)],
        [(0, 3.0), (1, 4.0), (2, 5.0)],
        [],
    ]
    line = mean_line("a", repetitions, "blue")
    assert line.points == [(0, 2.0), (2, 4.0)], "x of all repetitions that have points"
    # Student's 97.5 % quantile of one degree of freedom, for two values one from their mean.
    assert line.half_widths == pytest.approx([12.706, 12.706], rel=1e-4)
    assert mean_line("a", [[(0, 1.0)]], "blue").half_widths == ()


@pytest.mark.parametrize("mark_points", [True, False])
def test_intervals_of_shares_end_at_one_hundred_percent(mark_points: bool) -> None:
    line = Line(
        "a",
        [(0, 0.5), (1, 0.9)],
        "blue",
        mark_points=mark_points,
        half_widths=[0.2, 0.3],
    )
    axes = draw_lines(line, y=SHARE)
    assert drawn_interval(axes).y1 == pytest.approx(100)
    # Without this limit the interval ends at 0.9 + 0.3.
    axes = draw_lines(line, y=Axis("loss"))
    assert drawn_interval(axes).y1 == pytest.approx(1.2)


@pytest.mark.parametrize("mark_points", [True, False])
def test_intervals_of_shares_begin_at_zero(mark_points: bool) -> None:
    # 0.02 - 0.1 is negative.
    line = Line(
        "a",
        [(0, 0.02), (1, 0.5)],
        "blue",
        mark_points=mark_points,
        half_widths=[0.1, 0.1],
    )
    axes = draw_lines(line, y=SHARE)
    assert axes.get_ylim()[0] == 0
    assert drawn_interval(axes).y0 == pytest.approx(0)


def test_intervals_of_bars_lie_within_logarithmic_axis() -> None:
    bars = Bars("a", [1.0, 200.0], "blue", [0.1, 100.0])
    axes = draw_bars(["x", "y"], bars, y=Axis("loss"))
    assert axes.get_yscale() == "log"
    # The upper interval ends at 200 + 100.
    assert axes.get_ylim()[1] > 300


def test_intervals_of_negative_bars_are_complete() -> None:
    bars = Bars("a", [-0.5], "blue", [0.3])
    axes = draw_bars(["x"], bars, y=Axis("margin"))
    # -0.5 - 0.3
    assert drawn_interval(axes).y0 == pytest.approx(-0.8)
    assert axes.get_ylim()[0] < -0.8


def test_intervals_of_bars_of_shares_end_at_one_hundred_percent() -> None:
    bars = Bars("b", [0.9], "blue", [0.3])
    axes = draw_bars(["a"], bars, y=SHARE)
    assert drawn_interval(axes).y1 == pytest.approx(100)


@pytest.mark.parametrize(
    "colours", [SERIES[:3], ["blue"] * 3], ids=["different colours", "equal colours"]
)
def test_intervals_of_series_at_equal_places_lie_side_by_side(
    colours: list[str],
) -> None:
    lines = []
    for colour in colours:
        points = [(0, 1.0), (1, 1.0)]
        lines.append(
            Line(colour, points, colour, mark_points=True, half_widths=[0.2, 0.2])
        )
    axes = draw_lines(*lines, y=Axis("x"))
    positions = []
    for intervals in axes.collections:
        first_segment = intervals.get_segments()[0]
        positions.append(intervals.get_transform().transform(first_segment)[0][0])
    for left, right in pairwise(positions):
        # In pixels, at 100 an inch.
        assert right - left >= 2.5


def test_whiskers_at_edges_of_plot_are_not_clipped() -> None:
    points = [(0, 1.0), (1, 5.0)]
    line = Line("a", points, "blue", mark_points=True, half_widths=[0.5, 0.5])
    axes = draw_lines(line, y=Axis("a"), swept=True)
    for artist in (*axes.collections, *axes.containers[0].get_children()):
        assert not artist.get_clip_on()
