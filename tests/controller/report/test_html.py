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
from testbed_controller.results.declared import declared_by
from testbed_controller.results.recorder import manifest
from testbed_controller.results.run import Run
from tests.helpers import recorded

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>'


def run(**changes: Any) -> Run:
    trial, plan, outcome = (
        recorded.make_trial(),
        recorded.make_plan(),
        recorded.make_outcome(**changes),
    )
    facts = manifest(trial, outcome, "testbed run recorded.yaml")
    return Run(
        Path("somewhere"),
        trial,
        plan,
        outcome,
        facts,
        metrics(outcome, trial.experiment, plan),
        declared_by(trial),
    )


class _Tags(HTMLParser):
    """Checks that tags are balanced and collects what could load something from outside."""

    VOID = ("meta", "br", "img", "line", "rect", "circle", "polyline", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [
            value or "" for key, value in attrs if key in ("src", "href", "onerror")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def parsed(page: str) -> _Tags:
    reader = _Tags()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_report_is_one_file_that_loads_nothing() -> None:
    page = html.render(run())
    assert parsed(page).outside == []
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page)


def test_the_report_holds_what_a_reader_looks_for() -> None:
    page = html.render(run())
    for part in (
        "Trusted",
        "95.0%",
        "1.68 s",
        "kill b",
        "7.8–7.9 mbit",
        "testbed run recorded.yaml",
        "svg",
        "timeline",
    ):
        assert part in page


def test_what_users_write_is_escaped_everywhere() -> None:
    events = [
        Event(
            event.time,
            event.device,
            event.event,
            {
                **event.fields,
                **{
                    key: EVIL
                    for key in ("span", "message", "target")
                    if key in event.fields
                },
            },
        )
        for event in recorded.make_events()
    ]
    one = run(events=events, status="failed", error=EVIL)
    trial = recorded.make_trial(description=EVIL, expect={})
    one = replace(
        one,
        trial=replace(trial, point={EVIL: EVIL}),
        manifest={**one.manifest, "command": EVIL},
    )
    reader = parsed(html.render(one))
    assert reader.tags.count("script") == 3
    assert "img" not in reader.tags


@pytest.mark.parametrize("status", ["failed", "interrupted", "timed out"])
def test_a_run_that_failed_early_has_a_report(status: str) -> None:
    page = html.render(
        run(events=[], links=[], fidelity={}, status=status, error="no engine")
    )
    assert "no engine" in page
    assert "Not trusted" in page
    parsed(page)


def test_an_inference_run_has_a_latency_curve() -> None:
    events = [
        Event(float(number), "a", "request", {"request": number, "latency": 0.5})
        for number in range(1, 9)
    ]
    page = html.render(run(events=events, runtime="simulate"))
    assert "<h2>Latency</h2>" in page
    assert "<h2>Loss</h2>" not in page


def test_the_timeline_offers_the_whole_run_two_steps_and_the_fault() -> None:
    one = run()
    chart = timeline(one)
    assert [view["name"] for view in chart["views"]] == [
        "whole run",
        "two steps",
        "kill b",
    ]
    assert [
        (window["label"], window["start"], window["end"]) for window in chart["windows"]
    ] == [
        ("kill b", 2.32, 3.3),
        ("recovering", 3.0, 4.0),
    ]
    assert len(chart["bars"]) == 6 * 3 + 2 + 13 * 2 + 1
    json.dumps(chart, allow_nan=False)


def test_a_long_run_is_embedded_joined_but_whole_where_it_matters() -> None:
    many = [
        Event(
            start + 0.0004,
            "a",
            "compute",
            {"span": "forward", "batch": index, "start": start, "duration": 0.0004},
        )
        for index, start in enumerate(
            number * 0.0005 for number in range(MOST_BARS + 10)
        )
    ]
    fault = {"action": "pause", "target": "b", "intended": 10.0}
    many.append(Event(10.0, "testbed", "fault", {**fault, "phase": "strike"}))
    many.append(Event(10.1, "testbed", "fault", {**fault, "phase": "undo"}))
    one = run(events=sorted(many, key=lambda event: event.time))
    chart = timeline(one)
    assert chart["joined"]
    assert len(chart["bars"]) < MOST_BARS / 5
    near = [bar for bar in chart["bars"] if 9.5 < bar[2] < 9.6]
    assert len(near) == pytest.approx(200, abs=2), "around the fault every bar is kept"


def test_the_map_has_devices_and_only_links_that_are_heard() -> None:
    positions = {"a": (0.0, 0.0), "b": (50.0, 50.0), "c": (49.0, 49.0)}
    ratios = {("a", "b"): 0.95, ("b", "a"): 0.5, ("b", "c"): 0.0}
    page = inline(DeviceMap(positions, ratios, {"a": "unit 0"}, (50, 50)), "Map")
    parsed(page)
    for word in (">a<", ">unit 0<", ">b<", ">PRR from 90%<", ">PRR from 40%<"):
        assert word in page
    for word in ("PRR from 70%", "PRR below"):
        assert word not in page


def test_thinning_keeps_the_extremes() -> None:
    points = [(float(index), 0.0) for index in range(10_000)]
    points[4321] = (4321.0, 9.0)
    kept = thin(points, 200)
    assert len(kept) <= 200
    assert (4321.0, 9.0) in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin([(0.0, float("nan")), (1.0, 2.0)]) == [(1.0, 2.0)]


def test_a_chart_of_nothing_is_drawn() -> None:
    assert "<svg" in inline(
        LinePlot([Line("loss", [], "blue")], x_range=(0.0, 0.0), y=Axis("loss")), "Loss"
    )
