"""Events outside of memory are the ones that were appended, whichever way they are asked for."""

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


def some(number: int) -> Iterator[Event]:
    """Yield events of several forms, their times rising."""
    chance = random.Random(1)
    time = 0.0
    for index in range(number):
        time += chance.random()
        yield Event(
            round(time, 9),
            f"d{index % 3}",
            ("send", "compute", "step", "stood")[index % 4],
            (
                {"peer": "d1", "bytes": index, "start": time},
                {"span": "forward", "start": time, "peers": ["a", "b"]},
                {"loss": time / 3, "step": None},
                {},
            )[index % 4],
        )


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return list(some(2 * CHUNK + 100))


@pytest.fixture(scope="module")
def log(events: list[Event]) -> EventLog:
    return EventLog(events)


def test_all_are_there_in_their_order(events: list[Event], log: EventLog) -> None:
    assert list(log) == events
    assert len(log) == len(events)
    assert [log[0], log[CHUNK], log[-1]] == [events[0], events[CHUNK], events[-1]]
    assert log.devices == {"d0", "d1", "d2"}
    assert log.latest == events[-1].time


@pytest.mark.parametrize(
    "window", [(-1.0, 1e9), (100.0, 3000.0), (1e9, 2e9), (0.0, 50.0)]
)
def test_some_of_them_by_name_and_time(
    events: list[Event], log: EventLog, window: tuple[float, float]
) -> None:
    wanted = [
        each
        for each in events
        if each.event in ("send", "step") and window[0] < each.time <= window[1]
    ]
    found = log.of("send", "step").within(*window)
    assert list(found) == wanted
    assert len(found) == len(wanted)
    assert bool(found) == bool(wanted)
    if wanted:
        assert (found[0], found[-1]) == (wanted[0], wanted[-1])
    assert not log.of("nothing")


def test_rows_have_none_for_what_an_event_lacks(
    events: list[Event], log: EventLog
) -> None:
    rows = log.of("send", "compute").rows("event", "time", "device", "bytes", "peers")
    assert list(rows) == [
        (
            each.event,
            each.time,
            each.device,
            each.fields.get("bytes"),
            each.fields.get("peers"),
        )
        for each in events
        if each.event in ("send", "compute")
    ]


def test_what_came_late_is_put_in_order(events: list[Event]) -> None:
    late = sorted(
        events, key=lambda event: event.time + random.Random(event.time).random() * 20
    )
    assert late != events
    assert list(EventLog(late).ordered()) == events
    rows = EventLog(late).of("send").sorted_by(lambda row: row[0], "start", "bytes")
    assert [size for _, size in rows] == [
        each.fields["bytes"] for each in events if each.event == "send"
    ]


def test_numbers_of_other_kinds_are_kept_as_a_file_has_them() -> None:
    log = EventLog(
        Event(float(at), "a", "step", {"loss": np.float64(at / 7)})
        for at in range(CHUNK)
    )
    assert [loss for (loss,) in log.rows("loss")] == [at / 7 for at in range(CHUNK)]


def test_values_come_out_as_they_went_in_whatever_a_column_holds() -> None:
    columns = {
        "alike": lambda _: "one",
        "numbers": lambda index: index / 7,
        "counts": lambda index: index,
        "large": lambda index: index << 40,
        "below": lambda index: -index,
        "mixed": lambda index: (1, 1.0, True, None)[index % 4],
        "never": lambda _: math.nan,
        "texts": lambda index: f"text {index % 5}",
    }
    rows = [
        tuple(make(index) for make in columns.values()) for index in range(CHUNK + 1)
    ]
    log = EventLog()
    for index, row in enumerate(rows):
        log.add(("all", tuple(columns)), (float(index), "d1", *row))
    assert list(map(repr, log.rows(*columns))) == list(map(repr, rows))


def test_many_events_take_little_memory() -> None:
    tracemalloc.start()
    log = EventLog(some(18 * CHUNK))
    counted = sum(1 for _ in log.of("send").rows("bytes"))
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == 18 * CHUNK / 4
    assert held < 6 * CHUNK * 100  # a tuple and its fields take more than 300 bytes
    assert most < 12 * CHUNK * 100


AWKWARD = [
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
def test_its_lines_are_those_of_the_events(count: int) -> None:
    events = [*some(count), *AWKWARD]
    log, followed = EventLog(), list[str]()
    log.follow(followed.append)
    for event in events:
        log.append(event)
    assert sum(text.count("\n") for text in followed) == len(events) // CHUNK * CHUNK
    log.close()
    wanted = "".join(event.to_json() + "\n" for event in events)
    assert "".join(followed) == wanted
    assert "".join(log.lines()) == wanted


def test_rounded_it_has_the_times_of_its_lines(events: list[Event]) -> None:
    exact = [event._replace(time=event.time + 1e-10) for event in events]
    log = EventLog(exact)
    rounded = log.rounded()
    assert list(rounded) == [Event.from_json(event.to_json()) for event in exact]
    assert (rounded.devices, rounded.latest) == (log.devices, round(log.latest, 9))
    assert list(log) == exact


@pytest.mark.parametrize("until", [-1.0, 0.5, CHUNK * 0.75, math.inf])
def test_its_columns_are_its_rows_of_the_same_times(until: float) -> None:
    log = EventLog(some(2 * CHUNK + 5)).within(-math.inf, until)
    asked = ("time", "device", "none")
    taken = [
        (name, *row)
        for name, columns in log.columns(*asked)
        for row in zip(*columns, strict=False)
    ]
    assert sorted(taken, key=itemgetter(1)) == list(log.rows("event", *asked))
