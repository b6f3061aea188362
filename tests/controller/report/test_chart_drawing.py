"""Drawing of charts: axes, legends, labels and colours. Confidence intervals are in test_chart_intervals.py."""

from __future__ import annotations

import math
import re
from itertools import combinations, product
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
from testbed_controller.report.drawing import PRINT_WIDTHS, inline, save, save_all
from tests.controller.report.drawn_charts import (
    assert_disjoint,
    boxes_of,
    draw_axes,
    draw_bars,
    draw_lines,
    texts_of,
)

LONG_NAME = "a rather long name of series "
ENDINGS = (".svg", ".pdf", "-wide.svg", "-wide.pdf")
"""Endings of the files of one plot: two formats in two widths."""


def test_values_above_bars_appear_for_all_bars_or_none() -> None:
    groups = ["a", "b", "c", "d"]
    kinds = [Bars("kind", [0.12] * 4, "blue")] * 6
    # 6 · 4 bars are too narrow for values above them, 2 · 4 are not.
    crowded = draw_bars(groups, *kinds, y=Axis("x"))
    assert not crowded.texts
    spacious = draw_bars(groups, *kinds[:2], y=Axis("x"))
    assert len(spacious.texts) == 8


@pytest.mark.parametrize(("count", "name"), [(1, LONG_NAME), (6, LONG_NAME), (6, "pi")])
def test_legend_stays_within_plot(count: int, name: str) -> None:
    names = [f"{name}{index}" for index in range(count)]
    if name == LONG_NAME and count > 3:
        # One name alone is wider than the plot.
        names[3] *= 4
    lines = []
    bars = []
    for name in names:
        lines.append(Line(name, [(0, 1)], "blue"))
        bars.append(Bars(name, [1.0], "blue"))
    for figure in (
        drawing.draw(LinePlot(lines, x_range=(0, 1), y=Axis("x"))),
        drawing.draw(BarPlot(["one"], bars, y=Axis("x"))),
    ):
        # Positions of texts are known only after a layout.
        figure.draw_without_rendering()
        [legend] = figure.legends
        assert len(legend.get_texts()) == count
        box = legend.get_window_extent()
        area = figure.bbox
        assert box.x0 >= area.x0
        assert box.x1 <= area.x1
        # One pixel of tolerance, as boxes of texts end between pixels.
        assert box.y1 <= area.y1 + 1


def test_saved_plots_are_reproducible_and_keep_text_as_text(tmp_path: Path) -> None:
    line = Line("one & <all>", [(0, 1), (1, 2)], "blue")
    plot = LinePlot([line], x_range=(0, 1), y=Axis("x"))
    for name in ("a", "b"):
        save(plot, tmp_path / name)
    for ending in ENDINGS:
        first = (tmp_path / f"a{ending}").read_bytes()
        assert first == (tmp_path / f"b{ending}").read_bytes()
    assert ">one &amp; &lt;all&gt;</text>" in (tmp_path / "a.svg").read_text()
    # Pages choose the colours of their light or dark style.
    embedded = inline(plot, "x")
    assert "var(--blue)" in embedded
    assert "#0072b2" not in embedded
    for ending, inches in PRINT_WIDTHS.items():
        # An inch has 72 points, the unit of the drawing.
        view_box = f'viewBox="0 0 {inches * 72:g} '
        assert view_box in (tmp_path / f"a{ending}.svg").read_text()
    # Publishers refuse Type 3 fonts, which are outlines.
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontType 3" not in pdf
    assert b"/CIDFontType2" in pdf, "text, not outlines"


def test_saved_names_are_those_of_written_files(tmp_path: Path) -> None:
    plot = LinePlot([Line("a", [(0, 1)], "blue")], x_range=(0, 1), y=Axis("x"))
    charts = [Chart("Loss", "", plot), Chart("Links", "no links", None)]
    names = save_all(tmp_path, [*charts, Chart("Idle time", "", plot)])
    # The chart without a plot has no file, but its number.
    assert names == ["1-loss", "3-idle-time"]
    for name, ending in product(names, ENDINGS):
        assert (tmp_path / f"{name}{ending}").is_file()
    # And no other files.
    assert len(list(tmp_path.iterdir())) == len(names) * len(ENDINGS)


@pytest.mark.parametrize(
    ("highest", "kind", "title"),
    [
        (0.02, "seconds", "time (ms)"),
        (300.0, "seconds", "time (s)"),
        (5e6, "bytes", "time (MB)"),
        (0.9, "share", "time (%)"),
        (7.0, "number", "time"),
    ],
)
def test_axis_title_has_unit_that_fits_values(
    highest: float, kind: MetricKind, title: str
) -> None:
    line = Line("a", [(0, highest)], "blue")
    axes = draw_lines(line, y=Axis("time", kind))
    assert axes.get_ylabel() == title
    assert axes.get_xlabel() == "time (s)"


@pytest.mark.parametrize("last", [3, 9, 15])
def test_axis_of_epochs_has_whole_numbers(last: int) -> None:
    line = Line("a", [(epoch, 0.5) for epoch in range(1, last + 1)], "blue")
    plot = LinePlot([line], x_range=(1, last), x="epoch", y=Axis("loss"))
    for tick in draw_axes(plot).get_xticks():
        assert float(tick).is_integer()


def test_axes_are_logarithmic_if_values_are_far_apart() -> None:
    def scale_of(values: list[float], kind: MetricKind = "number") -> str:
        line = Line("a", list(enumerate(values)), "blue")
        axes = draw_lines(line, x_range=(0, 2), y=Axis("a", kind))
        return str(axes.get_yscale())

    assert scale_of([2.3, 0.1]) == "log"
    assert scale_of([2.3, 0.5]) == "linear"
    # Zero has no place on a logarithmic axis.
    assert scale_of([2.3, 0.0]) == "linear"
    # Shares are read against 100 %.
    assert scale_of([0.9, 0.01], "share") == "linear"
    line = Line("a", [(5.0, 1.0), (200.0, 2.0)], "blue", mark_points=True)
    axes = draw_lines(line, x_range=(5, 200), y=Axis("a"), swept=True)
    assert axes.get_xscale() == "log"
    axes = draw_bars(["a", "b"], Bars("a", [1.0, 90.0], "blue"), y=Axis("a"))
    assert axes.get_yscale() == "linear"


@pytest.mark.parametrize("width", PRINT_WIDTHS.values())
def test_labels_of_windows_lie_above_data(width: float) -> None:
    windows = []
    for start in (1, 2, 40, 95):
        windows.append(Window(start, start + 1, f"kill worker{start}"))
    lines = []
    for index, colour in enumerate(SERIES):
        lines.append(Line(f"a rather long name {index}", [(0, 5), (100, 9)], colour))
    plot = LinePlot(lines, windows, x_range=(0, 100), y=Axis("loss"))
    figure = drawing.draw(plot, width=width)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    area = axes.get_window_extent()
    boxes = boxes_of(axes.texts)
    [legend] = figure.legends
    assert len(boxes) == 3, "the second label would overlap the first"
    for box in boxes:
        assert area.y1 <= box.y0
        assert box.y1 <= legend.get_window_extent().y0 + 1
        assert box.x1 <= figure.bbox.x1
    assert_disjoint(boxes)


@pytest.mark.parametrize("not_finite", [math.nan, math.inf])
def test_values_that_are_not_finite_are_omitted(not_finite: float) -> None:
    points = [(0, not_finite), (1, 1.0), (2, 3.0)]
    lines = [
        Line("a", points, "blue"),
        Line("b", points, "orange", half_widths=[None, 0.1, 0.2]),
        Line("c", [(0, not_finite)], "green"),
    ]
    axes = draw_lines(*lines, x_range=(0, 2), y=Axis("loss"))
    # The highest value with its interval is 3.0 + 0.2, and 6 % of the axis remain above it.
    assert axes.get_ylim() == pytest.approx((0, 3.2 * 1.06))
    # Line "c" has no value left.
    assert len(axes.lines) == 2
    bars = Bars("a", [not_finite, 2.0], "blue", [0.1, 0.1])
    axes = draw_bars(["x", "y"], bars, y=Axis("loss"))
    assert len(axes.patches) == 1


def test_negative_values_lie_within_axes() -> None:
    line = Line(
        "a",
        [(0, -3.0), (1, 2.0)],
        "blue",
        mark_points=True,
        half_widths=[1.0, 1.0],
    )
    axes = draw_lines(line, y=Axis("margin"))
    bottom, top = axes.get_ylim()
    # The intervals reach from -3 - 1 to 2 + 1.
    assert bottom < -4.0
    assert top > 3.0
    axes = draw_bars(["a"], Bars("b", [-0.5], "blue"), y=Axis("margin"))
    assert axes.get_ylim()[0] < -0.5
    axes = draw_lines(Line("a", [(0, 2.0)], "blue"), y=Axis("loss"))
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize("width", PRINT_WIDTHS.values())
@pytest.mark.parametrize(
    "values", [[0, 1, 5, 10, 50], [1, 2, 50], [5, 10, 50, 200, 5000], [0.001, 0.002]]
)
def test_tick_labels_do_not_touch(values: list[float], width: float) -> None:
    points = [(value, 1.0) for value in values]
    line = Line("a", points, "blue", mark_points=True)
    plot = LinePlot([line], x_range=(values[0], values[-1]), y=Axis("a"), swept=True)
    figure = drawing.draw(plot, width=width)
    figure.draw_without_rendering()
    boxes = boxes_of(figure.axes[0].get_xticklabels())
    assert len(boxes) > 1
    assert_disjoint(boxes)


def test_names_in_legend_are_not_shortened() -> None:
    name = "method=pipeline micro_batches 4, rate 5 mbit, a rather long name of series that no column of a paper holds"
    names = [f"{name} a", f"{name} b", f"{name} c"]
    lines = []
    for name in names:
        lines.append(Line(name, [(0, 1)], "blue"))
    figure = drawing.draw(LinePlot(lines, x_range=(0, 1), y=Axis("x")))
    (legend,) = figure.legends
    # Long names continue on another line.
    words = " ".join(texts_of(legend.get_texts())).split()
    assert words == " ".join(names).split()


VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
"""Transformations of linear RGB to simulate colour blindness: Machado, Oliveira and Fernandes (2009), severity 1."""
LEAST_DISTANCE = 15
"""Minimum CIELAB distance of two series."""


@pytest.mark.parametrize("palette", ["light", "dark"])
def test_colour_blind_readers_can_distinguish_series(palette: str) -> None:
    style = (Path(html.__file__).parent / "templates" / "style.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    section = dark if palette == "dark" else light
    by_name = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", section))
    colours = [by_name[name] for name in SERIES]
    for vision in VISION.values():
        for first, second in combinations(colours, 2):
            difference = to_cielab(first, vision) - to_cielab(second, vision)
            assert np.linalg.norm(difference) >= LEAST_DISTANCE
    if palette == "light":
        # Saved plots use the same colours as pages.
        for name in SERIES:
            assert by_name[name] == COLOURS[name]


def to_cielab(colour: str, vision: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Convert #rrggbb, as seen with ``vision``, to CIELAB, where 2.3 is a just noticeable difference."""
    values = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    # Gamma expansion of sRGB (IEC 61966-2-1).
    expanded = np.where(
        values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
    )
    linear = vision @ expanded
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    # Relative to white, D65.
    xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    # 0.008856 is (6/29)³, below which CIE 1976 is linear.
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
