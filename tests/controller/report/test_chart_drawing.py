"""Drawing of charts: axes, legends, intervals and colours."""

from __future__ import annotations

import math
import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from testbed.common.formats import MetricKind
from testbed_controller.report import drawing, html
from testbed_controller.report.charts import (
    COLOURS,
    SERIES,
    Axis,
    BarPlot,
    Bars,
    Chart,
    Line,
    LinePlot,
    Window,
)
from testbed_controller.report.comparison import mean_line
from testbed_controller.report.drawing import PRINT_WIDTHS, inline, save, save_all


def test_figures_above_bars_stand_above_all_or_none() -> None:
    kinds = [Bars(f"kind {index}", [0.12] * 4, "blue") for index in range(6)]
    assert not drawing.draw(BarPlot(list("abcd"), kinds, y=Axis("x"))).axes[0].texts
    assert (
        len(drawing.draw(BarPlot(list("abcd"), kinds[:2], y=Axis("x"))).axes[0].texts)
        == 8
    )


@pytest.mark.parametrize(
    ("count", "name"),
    [
        (1, "a rather long name of series "),
        (6, "a rather long name of series "),
        (6, "pi"),
    ],
)
def test_a_legend_stays_within_the_plot(count: int, name: str) -> None:
    names = [
        f"{name}{index}" * (4 if index == 3 and len(name) > 2 else 1)
        for index in range(count)
    ]
    for plot in (
        drawing.draw(
            LinePlot(
                [Line(name, [(0, 1)], "blue") for name in names],
                x_range=(0, 1),
                y=Axis("x"),
            )
        ),
        drawing.draw(
            BarPlot(["one"], [Bars(name, [1.0], "blue") for name in names], y=Axis("x"))
        ),
    ):
        plot.draw_without_rendering()
        [legend] = plot.legends
        assert len(legend.get_texts()) == count
        box, whole = legend.get_window_extent(), plot.bbox
        assert box.x0 >= whole.x0
        assert box.x1 <= whole.x1
        assert box.y1 <= whole.y1 + 1


def test_a_plot_is_the_same_each_time_and_its_text_is_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plot = LinePlot(
            [Line("one & <all>", [(0, 1), (1, 2)], "blue")], x_range=(0, 1), y=Axis("x")
        )
        save(plot, tmp_path / name)
    for kind in (".svg", ".pdf", "-wide.svg", "-wide.pdf"):
        assert (tmp_path / f"a{kind}").read_bytes() == (
            tmp_path / f"b{kind}"
        ).read_bytes()
    assert ">one &amp; &lt;all&gt;</text>" in (tmp_path / "a.svg").read_text()
    shown = inline(plot, "x")
    assert "var(--blue)" in shown
    assert "#0072b2" not in shown
    for end, inches in PRINT_WIDTHS.items():
        assert (
            f'viewBox="0 0 {inches * 72:g} ' in (tmp_path / f"a{end}.svg").read_text()
        )
    assert b"/FontType 3" not in (tmp_path / "a.pdf").read_bytes()
    assert b"/CIDFontType2" in (tmp_path / "a.pdf").read_bytes(), "text, not outlines"


def test_saved_names_are_those_of_written_files(tmp_path: Path) -> None:
    plot = LinePlot([Line("a", [(0, 1)], "blue")], x_range=(0, 1), y=Axis("x"))
    charts = [Chart("Loss", "", plot), Chart("Links", "no links", None)]
    names = save_all(tmp_path, [*charts, Chart("Idle time", "", plot)])
    assert names == ["1-loss", "3-idle-time"]
    files = {file.name for file in tmp_path.iterdir()}
    endings = (".svg", ".pdf", "-wide.svg", "-wide.pdf")
    assert files == {name + ending for name in names for ending in endings}


def test_axes_have_titles_with_the_unit_that_fits() -> None:
    for highest, kind, title in (
        (0.02, "seconds", "time (ms)"),
        (300.0, "seconds", "time (s)"),
        (5e6, "bytes", "time (MB)"),
        (0.9, "share", "time (%)"),
        (7.0, "number", "time"),
    ):
        axes = drawing.draw(
            LinePlot(
                [Line("a", [(0, highest)], "blue")],
                x_range=(0, 1),
                y=Axis("time", kind),
            )
        ).axes[0]
        assert (axes.get_ylabel(), axes.get_xlabel()) == (title, "time (s)")


def test_an_axis_of_epochs_has_whole_numbers() -> None:
    for last in (3, 9, 15):
        line = Line("a", [(epoch, 0.5) for epoch in range(1, last + 1)], "blue")
        axes = drawing.draw(
            LinePlot([line], x_range=(1, last), x="epoch", y=Axis("loss"))
        ).axes[0]
        assert all(float(place).is_integer() for place in axes.get_xticks())


def test_axes_are_logarithmic_where_values_are_far_apart() -> None:
    def scales(values: list[float], kind: MetricKind = "number") -> str:
        line = Line("a", list(enumerate(values)), "blue")
        return (
            drawing.draw(LinePlot([line], x_range=(0, 2), y=Axis("a", kind)))
            .axes[0]
            .get_yscale()
        )

    assert [scales([2.3, 0.1]), scales([2.3, 0.5]), scales([2.3, 0.0])] == [
        "log",
        "linear",
        "linear",
    ]
    assert scales([0.9, 0.01], "share") == "linear"
    line = [Line("a", [(5.0, 1.0), (200.0, 2.0)], "blue", mark_points=True)]
    assert (
        drawing.draw(LinePlot(line, x_range=(5, 200), y=Axis("a"), swept=True))
        .axes[0]
        .get_xscale()
        == "log"
    )
    assert (
        drawing.draw(BarPlot(["a", "b"], [Bars("a", [1.0, 90.0], "blue")], y=Axis("a")))
        .axes[0]
        .get_yscale()
        == "linear"
    )


@pytest.mark.parametrize("width", PRINT_WIDTHS.values())
def test_labels_lie_above_the_data(width: float) -> None:
    windows = [Window(at, at + 1, f"kill worker{at}") for at in (1, 2, 40, 95)]
    lines = [
        Line(f"a rather long name {index}", [(0, 5), (100, 9)], colour)
        for index, colour in enumerate(SERIES)
    ]
    plot = drawing.draw(
        LinePlot(lines, windows, x_range=(0, 100), y=Axis("loss")), width=width
    )
    plot.draw_without_rendering()
    axes = plot.axes[0]
    area, boxes = (
        axes.get_window_extent(),
        [text.get_window_extent() for text in axes.texts],
    )
    [legend] = plot.legends
    assert len(boxes) == 3, "the second one would lie on the first"
    for box in boxes:
        assert area.y1 <= box.y0
        assert box.y1 <= legend.get_window_extent().y0 + 1
        assert box.x1 <= plot.bbox.x1
    assert not any(left.overlaps(right) for left, right in pairwise(boxes))


def test_repetitions_are_a_mean_with_its_interval() -> None:
    line = mean_line(
        "a",
        [[(0, 1.0), (2, 3.0), (4, 9.0)], [(0, 3.0), (1, 4.0), (2, 5.0)], []],
        "blue",
    )
    assert line.points == [(0, 2.0), (2, 4.0)], (
        "over the x that all reach; without points it does not count"
    )
    # Student's 97.5 % quantile of one degree of freedom, for two values one from their mean.
    assert line.half_widths == pytest.approx([12.706, 12.706], rel=1e-4)
    assert mean_line("a", [[(0, 1.0)]], "blue").half_widths == ()


@pytest.mark.parametrize("marks", [True, False])
def test_intervals_around_shares_end_at_all(marks: bool) -> None:
    line = Line(
        "a", [(0, 0.5), (1, 0.9)], "blue", mark_points=marks, half_widths=[0.2, 0.3]
    )
    axes = drawing.draw(
        LinePlot([line], x_range=(0, 1), y=Axis("accuracy", "share"))
    ).axes[0]
    assert axes.collections[0].get_datalim(axes.transData).y1 == pytest.approx(100)
    axes = drawing.draw(LinePlot([line], x_range=(0, 1), y=Axis("loss"))).axes[0]
    assert axes.collections[0].get_datalim(axes.transData).y1 == pytest.approx(1.2)


@pytest.mark.parametrize("mark_points", [True, False])
def test_intervals_around_shares_begin_at_nothing(mark_points: bool) -> None:
    line = Line(
        "a",
        [(0, 0.02), (1, 0.5)],
        "blue",
        mark_points=mark_points,
        half_widths=[0.1, 0.1],
    )
    plot = LinePlot([line], x_range=(0, 1), y=Axis("accuracy", "share"))
    axes = drawing.draw(plot).axes[0]
    assert axes.get_ylim()[0] == 0
    assert axes.collections[0].get_datalim(axes.transData).y0 == pytest.approx(0)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_values_without_a_place_on_the_axis_are_omitted(odd: float) -> None:
    points = [(0, odd), (1, 1.0), (2, 3.0)]
    lines = [
        Line("a", points, "blue"),
        Line("b", points, "orange", half_widths=[None, 0.1, 0.2]),
        Line("c", [(0, odd)], "green"),
    ]
    axes = drawing.draw(LinePlot(lines, x_range=(0, 2), y=Axis("loss"))).axes[0]
    assert axes.get_ylim() == pytest.approx((0, 3.2 * 1.06))
    assert len(axes.lines) == 2
    bars = Bars("a", [odd, 2.0], "blue", [0.1, 0.1])
    axes = drawing.draw(BarPlot(["x", "y"], [bars], y=Axis("loss"))).axes[0]
    assert len(axes.patches) == 1


def test_intervals_around_bars_lie_within_a_logarithmic_axis() -> None:
    bars = Bars("a", [1.0, 200.0], "blue", [0.1, 100.0])
    axes = drawing.draw(BarPlot(["x", "y"], [bars], y=Axis("loss"))).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[1] > 300


def test_intervals_around_negative_bars_are_whole() -> None:
    bars = Bars("a", [-0.5], "blue", [0.3])
    axes = drawing.draw(BarPlot(["x"], [bars], y=Axis("margin"))).axes[0]
    interval = axes.collections[0].get_datalim(axes.transData)
    assert interval.y0 == pytest.approx(-0.8)
    assert axes.get_ylim()[0] < -0.8


def test_intervals_around_bars_of_shares_end_at_all() -> None:
    axes = drawing.draw(
        BarPlot(["a"], [Bars("b", [0.9], "blue", [0.3])], y=Axis("accuracy", "share"))
    ).axes[0]
    assert axes.collections[0].get_datalim(axes.transData).y1 == pytest.approx(100)


@pytest.mark.parametrize("palette", ["light", "dark"])
def test_colour_blind_readers_can_tell_series_apart(palette: str) -> None:
    style = (Path(html.__file__).parent / "templates" / "style.css").read_text()
    found = re.findall(
        r"--(\w+): (#[0-9a-f]{6});",
        style.split("@media (prefers-color-scheme: dark)")[palette == "dark"],
    )
    colours = [dict(found)[name] for name in SERIES]
    for seen in SEEN_BY.values():
        worst = min(
            np.linalg.norm(_lab(a, seen) - _lab(b, seen))
            for a, b in combinations(colours, 2)
        )
        assert worst >= 15
    if palette == "light":
        assert colours == [COLOURS[name] for name in SERIES]


SEEN_BY = {
    "all": np.eye(3),
    "protanopes": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopes": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopes": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
"""Linear RGB as others see it: Machado, Oliveira and Fernandes (2009), severity 1."""


def _lab(colour: str, seen: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a colour in CIELAB, where 2.3 is a difference just noticed."""
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = seen @ np.where(
        values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
    )
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("width", PRINT_WIDTHS.values())
@pytest.mark.parametrize(
    "places", [[0, 1, 5, 10, 50], [1, 2, 50], [5, 10, 50, 200, 5000], [0.001, 0.002]]
)
def test_figures_on_the_axis_do_not_touch(places: list[float], width: float) -> None:
    line = Line("a", [(place, 1.0) for place in places], "blue", mark_points=True)
    plot = LinePlot([line], x_range=(places[0], places[-1]), y=Axis("a"), swept=True)
    figure = drawing.draw(plot, width=width)
    figure.draw_without_rendering()
    labels = [
        text.get_window_extent()
        for text in figure.axes[0].get_xticklabels()
        if text.get_text()
    ]
    assert len(labels) > 1
    assert not any(left.overlaps(right) for left, right in pairwise(labels))


def test_negative_values_stand_within_the_axes() -> None:
    line = Line(
        "a", [(0, -3.0), (1, 2.0)], "blue", mark_points=True, half_widths=[1.0, 1.0]
    )
    bottom, top = (
        drawing.draw(LinePlot([line], x_range=(0, 1), y=Axis("margin")))
        .axes[0]
        .get_ylim()
    )
    assert bottom < -4.0
    assert top > 3.0
    assert (
        drawing.draw(BarPlot(["a"], [Bars("b", [-0.5], "blue")], y=Axis("margin")))
        .axes[0]
        .get_ylim()[0]
        < -0.5
    )
    assert (
        drawing.draw(
            LinePlot([Line("a", [(0, 2.0)], "blue")], x_range=(0, 1), y=Axis("loss"))
        )
        .axes[0]
        .get_ylim()[0]
        == 0
    )


@pytest.mark.parametrize("names", [SERIES[:3], ["blue"] * 3])
def test_intervals_of_series_at_the_same_places_stand_side_by_side(
    names: list[str],
) -> None:
    lines = [
        Line(name, [(0, 1.0), (1, 1.0)], name, mark_points=True, half_widths=[0.2, 0.2])
        for name in names
    ]
    axes = drawing.draw(LinePlot(lines, x_range=(0, 1), y=Axis("x"))).axes[0]
    at = [
        bars.get_transform().transform(bars.get_segments()[0])[0][0]
        for bars in axes.collections
    ]
    assert all(right - left >= 2.5 for left, right in pairwise(at)), (
        "pixels, at 100 an inch"
    )


def test_names_in_a_legend_are_whole() -> None:
    name = "method=pipeline micro_batches 4, rate 5 mbit, a rather long name of series that no column of a paper holds"
    plot = drawing.draw(
        LinePlot(
            [Line(f"{name} {end}", [(0, 1)], "blue") for end in "abc"],
            x_range=(0, 1),
            y=Axis("x"),
        )
    )
    assert [
        text.get_text().replace("\n", " ") for text in plot.legends[0].get_texts()
    ] == [f"{name} {end}" for end in "abc"]
