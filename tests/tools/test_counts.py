"""Counts of both clocks: each loss that a run in containers can hide is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.log import EventLog
from testbed.trace.outcome import Outcome
from tests.helpers.message_counts import count_differences, lost_in_containers

CAST = Event(0.1, "a", "cast", {"peers": ["b"], "message": "outputs", "bytes": 4000})
HEARD = Event(
    0.2, "b", "receive", {"peer": "a", "message": "outputs", "bytes": 4000, "cast": 0}
)
SENT = Event(0.3, "a", "send", {"peer": "b", "message": "gradient", "bytes": 900})
RECEIVED = Event(
    0.3, "b", "receive", {"peer": "a", "message": "gradient", "bytes": 900}
)
LONGER = Event(0.3, "b", "receive", {"peer": "a", "message": "gradient", "bytes": 1900})


def outcome(*events: Event, queues: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome(
        runtime="emulate",
        status="finished",
        events=EventLog(events),
        fidelity={"queues": queues or {}},
    )


WHOLE = outcome(CAST, HEARD, SENT, RECEIVED)


def test_equal_runs_do_not_differ() -> None:
    assert count_differences(WHOLE, WHOLE) == []


@pytest.mark.parametrize(
    ("events", "difference"),
    [
        (
            (CAST, SENT, RECEIVED),
            "heard ('a', 'b', 'outputs'): 0 in containers, 1 simulated",
        ),
        (
            (CAST, HEARD, SENT),
            "received ('a', 'b', 'gradient'): 0 in containers, 1 simulated",
        ),
        (
            (CAST, HEARD, SENT, LONGER),
            "received ('a', 'b', 'gradient'): 1900 bytes in containers, 900 simulated",
        ),
    ],
)
def test_lost_cast_and_other_message_are_named(
    events: tuple[Event, ...], difference: str
) -> None:
    assert count_differences(outcome(*events), WHOLE) == [difference]


def test_devices_and_kinds_that_depend_on_an_instant_are_left_out() -> None:
    nothing = outcome()
    assert count_differences(nothing, WHOLE, excluded=["b"]) == []
    assert count_differences(nothing, WHOLE, excluded=["gradient", "outputs"]) == []


def test_messages_without_their_reception_and_unread_datagrams_are_losses() -> None:
    found = lost_in_containers(
        outcome(*[SENT] * 9, RECEIVED, queues={"b": {"unread": 7}})
    )
    assert found == [
        "('a', 'b', 'gradient'): 9 sent, 1 received",
        "b: its socket dropped 7 datagrams",
    ]
