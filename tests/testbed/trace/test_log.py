"""The event log on disk: queries by name, time and column, file lines and memory use."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import pytest

from testbed.trace.events import Event
from testbed.trace.log import CHUNK, EventLog


def random_events(count: int) -> Iterator[Event]:
    """Yield events of four names with different fields, in order of time."""
    draw = random.Random(1)
    time = 0.0
    for index in range(count):
        time += draw.random()
        name, fields = (
            ("send", {"peer": "d1", "bytes": index, "start": time}),
            ("compute", {"span": "forward", "start": time, "peers": ["a", "b"]}),
            ("step", {"loss": time / 3, "step": None}),
            ("stood", {}),
        )[index % 4]
        # Files have nine digits.
        yield Event(round(time, 9), f"d{index % 3}", name, fields)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    # Two full chunks, which are stored, and a partial one in memory.
    return list(random_events(2 * CHUNK + 100))


@pytest.fixture(scope="module")
def log(events: list[Event]) -> EventLog:
    return EventLog(events)


def test_log_contains_appended_events_in_order(
    events: list[Event], log: EventLog
) -> None:
    assert list(log) == events
    assert len(log) == len(events)
    assert [log[0], log[CHUNK], log[-1]] == [events[0], events[CHUNK], events[-1]]
    assert log.devices == {"d0", "d1", "d2"}
    assert log.latest == events[-1].time


@pytest.mark.parametrize(
    "window", [(-1.0, 1e9), (100.0, 3000.0), (1e9, 2e9), (0.0, 50.0)]
)
def test_selection_by_name_and_time(
    events: list[Event], log: EventLog, window: tuple[float, float]
) -> None:
    begin, end = window
    expected = [
        event
        for event in events
        if event.event in ("send", "step") and begin < event.time <= end
    ]
    selection = log.of("send", "step").within(begin, end)
    assert list(selection) == expected
    assert len(selection) == len(expected)
    assert bool(selection) == bool(expected)
    if expected:
        assert (selection[0], selection[-1]) == (expected[0], expected[-1])


def test_selection_of_unknown_name_is_empty(log: EventLog) -> None:
    assert not log.of("nothing")


def test_rows_have_none_for_missing_fields(events: list[Event], log: EventLog) -> None:
    rows = log.of("send", "compute").rows("event", "time", "device", "bytes", "peers")
    expected = []
    for event in events:
        if event.event in ("send", "compute"):
            fields = (event.fields.get("bytes"), event.fields.get("peers"))
            expected.append((event.event, event.time, event.device, *fields))
    assert list(rows) == expected


def delayed_time(event: Event) -> float:
    """Return a time up to 20 s after an event, reproducibly."""
    return event.time + random.Random(event.time).random() * 20


def test_delayed_events_can_be_read_in_order(events: list[Event]) -> None:
    delayed = sorted(events, key=delayed_time)
    assert delayed != events
    log = EventLog(delayed)
    assert list(log.ordered()) == events
    rows = log.of("send").sorted_by(lambda row: row[0], "start", "bytes")
    expected = [event.fields["bytes"] for event in events if event.event == "send"]
    assert [size for _, size in rows] == expected


def test_numpy_numbers_are_stored_as_plain_numbers() -> None:
    # A file would contain plain numbers as well.
    log = EventLog()
    for index in range(CHUNK):
        log.append(Event(float(index), "a", "step", {"loss": np.float64(index / 7)}))
    losses = [loss for (loss,) in log.rows("loss")]
    assert losses == [index / 7 for index in range(CHUNK)]


def test_values_of_any_column_are_restored_exactly() -> None:
    # Columns of one type are stored as arrays, equal values once, and mixed columns as objects.
    columns = {
        "equal": lambda _: "one",
        "floats": lambda index: index / 7,
        "small": lambda index: index,
        "large": lambda index: index << 40,
        "negative": lambda index: -index,
        "mixed": lambda index: (1, 1.0, True, None)[index % 4],
        "nan": lambda _: math.nan,
        "texts": lambda index: f"text {index % 5}",
    }
    rows = []
    log = EventLog()
    for index in range(CHUNK + 1):
        row = tuple(make_value(index) for make_value in columns.values())
        rows.append(row)
        log.add(("all", tuple(columns)), (float(index), "d1", *row))
    # Compared as text, since nan is not equal to itself and 1 equals True.
    assert list(map(repr, log.rows(*columns))) == list(map(repr, rows))


def test_many_events_use_little_memory() -> None:
    count = 18 * CHUNK
    tracemalloc.start()
    log = EventLog(random_events(count))
    sends = sum(1 for _ in log.of("send").rows("bytes"))
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sends == count / 4
    # 33 bytes an event; a tuple and its fields would use more than 300 bytes.
    assert current < 6 * CHUNK * 100
    assert peak < 12 * CHUNK * 100


UNUSUAL_EVENTS = [
    Event(1 / 3, "a", "odd %s", {"x": math.nan, "50 %": 1, 'the "key"': "é"}),
    Event(2 / 3, "a", "odd %s", {"x": 1e-7, "50 %": 2, 'the "key"': 'say "no"'}),
    Event(1.0, "b", "mixed", {"x": 1}),
    Event(2.0, "b", "mixed", {"x": 1.5}),
    Event(3.0, "b", "mixed", {"x": True}),
    Event(4.0, "b", "mixed", {"x": {"of": [math.inf, None]}}),
    Event(5.0, "b", "number", {"x": np.float64(0.1)}),
    Event(6.0, "b", "nothing"),
]


@pytest.mark.parametrize("count", [0, CHUNK, 2 * CHUNK + 100])
def test_lines_of_log_equal_lines_of_events(count: int) -> None:
    events = [*random_events(count), *UNUSUAL_EVENTS]
    log, written = EventLog(), list[str]()
    log.follow(written.append)
    for event in events:
        log.append(event)
    # Followers get whole chunks, and the rest when the log is closed.
    lines_before_close = sum(text.count("\n") for text in written)
    assert lines_before_close == len(events) // CHUNK * CHUNK
    log.close()
    expected = "".join(event.to_json() + "\n" for event in events)
    assert "".join(written) == expected
    assert "".join(log.lines()) == expected


def test_rounded_log_has_times_of_written_lines(events: list[Event]) -> None:
    exact = [event._replace(time=event.time + 1e-10) for event in events]
    log = EventLog(exact)
    rounded = log.rounded()
    for event, rounded_event in zip(exact, rounded, strict=True):
        assert rounded_event == Event.from_json(event.to_json())
    assert rounded.devices == log.devices
    assert rounded.latest == round(log.latest, 9)
    # The original log is unchanged.
    assert list(log) == exact


@pytest.mark.parametrize("until", [-1.0, 0.5, CHUNK * 0.75, math.inf])
def test_columns_equal_rows(until: float) -> None:
    log = EventLog(random_events(2 * CHUNK + 5)).within(-math.inf, until)
    names = ("time", "device", "none")
    rows_of_columns = []
    for event_name, columns in log.columns(*names):
        for row in zip(*columns, strict=False):
            rows_of_columns.append((event_name, *row))
    # Columns are grouped by event name, rows are in order of time.
    rows_of_columns.sort(key=itemgetter(1))
    assert rows_of_columns == list(log.rows("event", *names))
