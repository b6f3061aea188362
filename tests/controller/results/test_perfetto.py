from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from testbed.trace.events import TESTBED, Event
from testbed.trace.gantt import bars
from testbed.trace.intervals import lanes
from testbed_controller.results import perfetto
from testbed_controller.results.perfetto import deliveries
from tests.helpers import recorded


def trace(events: Sequence[Event], end: float, title: str = "testbed") -> Any:
    file = io.StringIO()
    perfetto.write(file, events, end, title)
    return json.loads(file.getvalue(), parse_constant=pytest.fail)


def records() -> list[dict[str, Any]]:
    content = trace(recorded.make_events(), 8.6, "recorded")
    return list(content["traceEvents"])


@pytest.mark.parametrize("loss", [float("inf"), float("-inf"), float("nan")])
def test_loss_that_is_not_finite_is_no_counter(loss: float) -> None:
    step = Event(1.0, "a", "step", {"step": 0, "loss": loss, "samples": 8})
    content = trace([step], 2.0)
    assert [each for each in content["traceEvents"] if each["ph"] == "C"] == []


def test_every_device_is_a_process_with_a_track_per_activity() -> None:
    names = {
        (record["pid"], record["tid"]): record["args"]["name"]
        for record in records()
        if record["name"] == "thread_name"
    }
    processes = {
        record["pid"]: record["args"]["name"]
        for record in records()
        if record["name"] == "process_name"
    }
    assert processes == {1: "recorded: faults and progress", 2: "a", 3: "b"}
    assert {name for (process, _), name in names.items() if process == 3} == {
        "compute",
        "send",
        "receive",
        "down",
    }
    assert {"faults", "recoveries"} <= {
        name for (process, _), name in names.items() if process == 1
    }


def test_slices_on_a_track_never_overlap() -> None:
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for record in records():
        if record["ph"] == "X":
            assert record["dur"] >= 0
            tracks[record["pid"], record["tid"]].append(record)
    for slices in tracks.values():
        slices.sort(key=lambda record: record["ts"])
        for left, right in itertools.pairwise(slices):
            assert left["ts"] + left["dur"] <= right["ts"] + 1e-3


def test_an_arrow_leads_from_each_send_into_its_reception() -> None:
    ends: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records():
        if record["ph"] in "sf":
            ends[record["id"]][record["ph"]] = record
    assert len(ends) == 13
    slices = [record for record in records() if record["ph"] == "X"]
    for pair in ends.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for end in pair.values():
            assert any(
                (one["pid"], one["tid"]) == (end["pid"], end["tid"])
                and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
                for one in slices
            )


def test_a_send_that_nobody_received_takes_no_other_reception() -> None:
    charted = [
        bar
        for bar in bars(recorded.make_events(), 8.6)
        if not (bar.kind == "receive" and bar.start < 0.5)
    ]
    assert all(
        received.end <= sent.end + 0.01 for sent, received in deliveries(charted)
    )
    assert sum(1 for _ in deliveries(charted)) == 12


def test_fault_windows_and_counters_are_there() -> None:
    found = [record for record in records() if record["pid"] == 1]
    assert ("kill b", 2.32e6, 1.68e6) in {
        (item["name"], item["ts"], item["dur"]) for item in found if item["ph"] == "X"
    }
    assert sum(item["ph"] == "C" and item["name"] == "loss" for item in found) == 6


def test_an_interrupted_span_ends_at_the_strike() -> None:
    cut = [bar for bar in bars(recorded.make_events(), 8.6) if bar.interrupted]
    assert [(bar.device, bar.start, bar.end) for bar in cut] == [("b", 2.3, 2.32)]


def test_overlapping_bars_take_further_lanes() -> None:
    some = [
        bar
        for bar in bars(recorded.make_events(), 8.6)
        if bar.device == "a" and bar.kind == "compute"
    ]
    stretches = sorted((bar.start, bar.end) for bar in some)
    assert set(lanes(stretches)) == {0}
    assert set(lanes([stretches[0], *stretches])) == {0, 1}


def test_an_empty_run_gives_a_trace() -> None:
    assert trace([], 0.0)["traceEvents"]


def test_work_on_several_processors_interrupts_nothing_but_by_a_fault() -> None:
    def event(time: float, name: str, **fields: object) -> Event:
        return Event(time, "a", name, {"span": "forward", **fields})

    def done(micro: int, start: float, end: float) -> list[Event]:
        return [
            event(start, "begin", micro=micro),
            event(end, "compute", micro=micro, start=start, duration=end - start),
        ]

    killed = Event(
        4.5,
        TESTBED,
        "fault",
        {"action": "kill", "target": "a", "phase": "strike", "intended": 4.5},
    )
    events = [
        *done(0, 0.0, 2.0),
        *done(1, 1.0, 3.0),
        event(4.0, "begin", micro=2),
        event(4.2, "begin", micro=3),
        killed,
    ]
    charted = [
        bar
        for bar in bars(sorted(events, key=lambda each: each.time), 6.0)
        if bar.kind == "compute"
    ]
    assert [(bar.start, bar.end, bar.interrupted) for bar in charted] == [
        (0.0, 2.0, False),
        (1.0, 3.0, False),
        (4.0, 4.5, True),
        (4.2, 4.5, True),
    ]


def test_a_run_too_long_for_a_browser_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MOST_BARS", 2)
    kept = trace(recorded.make_events(), 10.0)
    slices = [
        record
        for record in kept["traceEvents"]
        if record["ph"] == "X" and record["pid"] > 1
    ]
    assert len(slices) == 2
    assert kept["otherData"]["left_out"] > 0
