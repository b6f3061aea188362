"""The HTML report of a run: completeness, escaping, timeline and map."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed_controller.report import html
from testbed_controller.report.charts import Axis, DeviceMap, Line, LinePlot, thin
from testbed_controller.report.drawing import inline
from testbed_controller.report.timeline import MOST_BARS, timeline
from testbed_controller.results.declared import metrics_spec_of_trial
from testbed_controller.results.recorder import initial_manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


def make_run(**changes: Any) -> Run:
    trial = recorded.make_trial()
    plan = recorded.make_plan()
    outcome = recorded.make_outcome(**changes)
    return Run(
        Path("somewhere"),
        trial,
        plan,
        outcome,
        initial_manifest(trial, outcome, "testbed run recorded.yaml"),
        metrics(outcome, trial.experiment, plan),
        metrics_spec_of_trial(trial),
    )


class TagReader(HTMLParser):
    """Check that tags are balanced, and collect references to other files."""

    VOID = ("meta", "br", "img", "line", "rect", "circle", "polyline", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "onerror"):
                self.loaded.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def read_tags(page: str) -> TagReader:
    reader = TagReader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_report_is_one_file_that_loads_nothing() -> None:
    page = html.render(make_run())
    assert read_tags(page).loaded == []
    # References within the page (#) and the names of XML namespaces load nothing.
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page)


def test_report_contains_verdict_metrics_faults_and_charts() -> None:
    page = html.render(make_run())
    for part in (
        "Trusted",
        # Accuracy and recovery time.
        "95.0%",
        "1.68 s",
        "kill b",
        # Measured rates of both directions.
        "7.8–7.9 mbit",
        "testbed run recorded.yaml",
        "svg",
        "timeline",
    ):
        assert part in page


def with_evil_texts(event: Event) -> Event:
    fields = dict(event.fields)
    for key in ("span", "message", "target"):
        if key in fields:
            fields[key] = EVIL
    return Event(event.time, event.device, event.event, fields)


def test_texts_of_users_are_escaped_everywhere() -> None:
    events = [with_evil_texts(event) for event in recorded.make_events()]
    run = make_run(events=events, status="failed", error=EVIL)
    trial = recorded.make_trial(description=EVIL, expect={})
    run = replace(
        run,
        trial=replace(trial, point={EVIL: EVIL}),
        manifest={**run.manifest, "command": EVIL},
    )
    reader = read_tags(html.render(run))
    # The page's own scripts.
    assert reader.tags.count("script") == 3
    assert "img" not in reader.tags


@pytest.mark.parametrize("status", ["failed", "interrupted", "timed out"])
def test_run_without_events_has_report(status: str) -> None:
    run = make_run(events=[], links=[], fidelity={}, status=status, error="no engine")
    page = html.render(run)
    assert "no engine" in page
    assert "Not trusted" in page
    read_tags(page)


def test_inference_has_latency_curve_and_no_loss_curve() -> None:
    events = []
    for number in range(1, 9):
        fields = {"request": number, "latency": 0.5}
        events.append(Event(float(number), "a", "request", fields))
    page = html.render(make_run(events=events, runtime="simulate"))
    assert "<h2>Latency</h2>" in page
    assert "<h2>Loss</h2>" not in page


def test_timeline_has_views_of_whole_run_two_steps_and_fault() -> None:
    chart = timeline(make_run())
    whole_run, two_steps, kill = chart["views"]
    assert whole_run["name"] == "whole run"
    assert two_steps["name"] == "two steps"
    assert kill["name"] == "kill b"
    fault, recovery = chart["windows"]
    assert fault["label"] == "kill b"
    # The recorded fault strikes at 2.32 s.
    assert fault["start"] == 2.32
    assert fault["end"] == 3.3
    assert recovery["label"] == "recovering"
    # The recovery begins with the detection of the fault.
    assert recovery["start"] == 3.0
    assert recovery["end"] == 4.0
    # Six steps of three computations, two computations of the failed step, 13 sends with their receptions, and one
    # outage.
    assert len(chart["bars"]) == 6 * 3 + 2 + 13 * 2 + 1
    # JavaScript cannot read NaN.
    json.dumps(chart, allow_nan=False)


def test_long_timeline_merges_bars_except_around_faults() -> None:
    duration = 0.0004
    events = []
    for index in range(MOST_BARS + 10):
        start = index * 0.0005
        span = {"span": "forward", "batch": index, "start": start, "duration": duration}
        events.append(Event(start + duration, "a", "compute", span))
    fault = {"action": "pause", "target": "b", "intended": 10.0}
    events.append(Event(10.0, "testbed", "fault", {**fault, "phase": "strike"}))
    events.append(Event(10.1, "testbed", "fault", {**fault, "phase": "undo"}))
    run = make_run(events=sorted(events, key=lambda event: event.time))
    chart = timeline(run)
    assert chart["joined"]
    assert len(chart["bars"]) < MOST_BARS / 5
    # The third value of a bar is its start.
    before_fault = [bar for bar in chart["bars"] if 9.5 < bar[2] < 9.6]
    # 0.1 s have 200 spans of 0.5 ms.
    assert len(before_fault) == pytest.approx(200, abs=2)


def test_map_shows_devices_and_links_above_lowest_prr() -> None:
    positions = {"a": (0.0, 0.0), "b": (50.0, 50.0), "c": (49.0, 49.0)}
    reception_ratios = {("a", "b"): 0.95, ("b", "a"): 0.5, ("b", "c"): 0.0}
    chart = DeviceMap(positions, reception_ratios, {"a": "unit 0"}, (50, 50))
    page = inline(chart, "Map")
    read_tags(page)
    for text in (">a<", ">unit 0<", ">b<", ">PRR from 90%<", ">PRR from 40%<"):
        assert text in page
    # The legend lists only classes of links that are drawn.
    for text in ("PRR from 70%", "PRR below"):
        assert text not in page


def test_thinning_keeps_extremes() -> None:
    peak = (4321.0, 9.0)
    points = [(float(index), 0.0) for index in range(10_000)]
    points[4321] = peak
    thinned = thin(points, 200)
    assert len(thinned) <= 200
    assert peak in thinned
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]
    assert thin([(0.0, float("nan")), (1.0, 2.0)]) == [(1.0, 2.0)]


def test_chart_without_points_is_drawn() -> None:
    plot = LinePlot([Line("loss", [], "blue")], x_range=(0.0, 0.0), y=Axis("loss"))
    assert "<svg" in inline(plot, "Loss")
