"""The trace for Perfetto: slices of devices, arrows of messages, faults and counters."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from testbed.trace.events import TESTBED, Event
from testbed.trace.gantt import Bar, bars
from testbed.trace.intervals import lanes
from testbed_controller.results import perfetto
from testbed_controller.results.perfetto import deliveries
from tests.helpers import recorded

END = 8.6
"""End of the recorded run in seconds."""
MESSAGES = 13
"""Messages of the recorded run: two in each of six complete steps, and one in the failed step."""
SLICE, COUNTER, ARROW_START, ARROW_END = "X", "C", "s", "f"
"""Phases of Chrome's trace format."""
Record = dict[str, Any]


def write_trace(events: Sequence[Event], end: float, title: str = "testbed") -> Any:
    file = io.StringIO()
    perfetto.write(file, events, end, title)
    # JSON has neither NaN nor infinity, although Python reads them.
    return json.loads(file.getvalue(), parse_constant=pytest.fail)


def recorded_trace() -> list[Record]:
    trace = write_trace(recorded.make_events(), END, "recorded")
    return list(trace["traceEvents"])


def recorded_bars() -> list[Bar]:
    return list(bars(recorded.make_events(), END))


def of_phase(records: Sequence[Record], phase: str) -> list[Record]:
    return [record for record in records if record["ph"] == phase]


@pytest.mark.parametrize("loss", [float("inf"), float("-inf"), float("nan")])
def test_loss_that_is_not_finite_has_no_counter(loss: float) -> None:
    step = Event(1.0, "a", "step", {"step": 0, "loss": loss, "samples": 8})
    trace = write_trace([step], 2.0)
    assert of_phase(trace["traceEvents"], COUNTER) == []


def test_every_device_is_process_with_track_per_activity() -> None:
    processes = {}
    tracks = defaultdict(set)
    for record in recorded_trace():
        if record["name"] == "process_name":
            processes[record["pid"]] = record["args"]["name"]
        elif record["name"] == "thread_name":
            tracks[record["pid"]].add(record["args"]["name"])
    assert processes == {1: "recorded: faults and progress", 2: "a", 3: "b"}
    assert tracks[3] == {"compute", "send", "receive", "down"}
    assert {"faults", "recoveries"} <= tracks[1]


def test_slices_on_track_do_not_overlap() -> None:
    tracks = defaultdict(list)
    for record in of_phase(recorded_trace(), SLICE):
        assert record["dur"] >= 0
        tracks[record["pid"], record["tid"]].append(record)
    for slices in tracks.values():
        slices.sort(key=lambda record: record["ts"])
        for left, right in itertools.pairwise(slices):
            # In microseconds, with a tolerance for rounding.
            assert left["ts"] + left["dur"] <= right["ts"] + 1e-3


def is_in_slice(arrow_end: Record, drawn: Record) -> bool:
    if (drawn["pid"], drawn["tid"]) != (arrow_end["pid"], arrow_end["tid"]):
        return False
    return bool(drawn["ts"] <= arrow_end["ts"] <= drawn["ts"] + drawn["dur"])


def test_each_message_has_an_arrow_between_two_slices() -> None:
    records = recorded_trace()
    arrows: dict[int, dict[str, Record]] = defaultdict(dict)
    for phase in (ARROW_START, ARROW_END):
        for record in of_phase(records, phase):
            arrows[record["id"]][phase] = record
    assert len(arrows) == MESSAGES
    slices = of_phase(records, SLICE)
    for arrow in arrows.values():
        start = arrow[ARROW_START]
        end = arrow[ARROW_END]
        assert start["ts"] <= end["ts"]
        # Perfetto ignores arrows without a slice at each end.
        assert any(is_in_slice(start, drawn) for drawn in slices)
        assert any(is_in_slice(end, drawn) for drawn in slices)


def test_send_without_reception_has_no_arrow() -> None:
    charted = []
    for bar in recorded_bars():
        # The first message is received from 0.21 s, and the second from 0.71 s.
        if bar.kind == "receive" and bar.start < 0.5:
            continue
        charted.append(bar)
    pairs = list(deliveries(charted))
    assert len(pairs) == MESSAGES - 1
    # No send is paired with the reception of a later message.
    for send, reception in pairs:
        assert reception.end <= send.end + 0.01


def test_trace_has_fault_windows_and_loss_counter() -> None:
    # Process 1 has the events of the whole run.
    records = [record for record in recorded_trace() if record["pid"] == 1]
    windows = set()
    for record in of_phase(records, SLICE):
        windows.add((record["name"], record["ts"], record["dur"]))
    # The fault strikes at 2.32 s, and the run resumes at 4 s.
    assert ("kill b", 2.32e6, 1.68e6) in windows
    counters = [record["name"] for record in of_phase(records, COUNTER)]
    # Steps 0 and 1, then 1 to 4 after the fault.
    assert counters.count("loss") == 6


def test_interrupted_span_ends_at_strike() -> None:
    (bar,) = (bar for bar in recorded_bars() if bar.interrupted)
    assert bar.device == "b"
    assert bar.start == 2.3
    assert bar.end == 2.32


def test_overlapping_spans_are_drawn_in_different_lanes() -> None:
    spans = []
    for bar in recorded_bars():
        if bar.device == "a" and bar.kind == "compute":
            spans.append((bar.start, bar.end))
    spans.sort()
    assert set(lanes(spans)) == {0}
    # The first span twice.
    assert set(lanes([spans[0], *spans])) == {0, 1}


def test_run_without_events_has_trace() -> None:
    assert write_trace([], 0.0)["traceEvents"]


def test_computations_on_several_processors_are_interrupted_only_by_faults() -> None:
    def event(time: float, name: str, **fields: object) -> Event:
        return Event(time, "a", name, {"span": "forward", **fields})

    def completed(micro: int, start: float, end: float) -> list[Event]:
        timing = {"start": start, "duration": end - start}
        return [
            event(start, "begin", micro=micro),
            event(end, "compute", micro=micro, **timing),
        ]

    kill = {"action": "kill", "target": "a", "phase": "strike", "intended": 4.5}
    events = [
        # These two overlap.
        *completed(micro=0, start=0.0, end=2.0),
        *completed(micro=1, start=1.0, end=3.0),
        # These two are interrupted.
        event(4.0, "begin", micro=2),
        event(4.2, "begin", micro=3),
        Event(4.5, TESTBED, "fault", kill),
    ]
    events.sort(key=lambda event: event.time)
    computations = []
    for bar in bars(events, 6.0):
        if bar.kind == "compute":
            computations.append((bar.start, bar.end, bar.interrupted))
    assert computations == [
        (0.0, 2.0, False),
        (1.0, 3.0, False),
        (4.0, 4.5, True),
        (4.2, 4.5, True),
    ]


def test_trace_too_long_for_browser_is_shortened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(perfetto, "MOST_BARS", 2)
    trace = write_trace(recorded.make_events(), 10.0)
    slices = of_phase(trace["traceEvents"], SLICE)
    # Process 1 has no bars of devices.
    assert sum(record["pid"] > 1 for record in slices) == 2
    assert trace["otherData"]["left_out"] > 0
