"""Comparison of message counts between both clocks: every hidden loss of a run in containers is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.log import EventLog
from testbed.trace.outcome import Outcome
from tests.helpers.message_counts import count_differences, lost_in_containers

CAST = Event(0.1, "a", "cast", {"peers": ["b"], "message": "outputs", "bytes": 4000})
HEARD_CAST = Event(
    0.2, "b", "receive", {"peer": "a", "message": "outputs", "bytes": 4000, "cast": 0}
)
SENT = Event(0.3, "a", "send", {"peer": "b", "message": "gradient", "bytes": 900})
RECEIVED = Event(
    0.3, "b", "receive", {"peer": "a", "message": "gradient", "bytes": 900}
)
RECEIVED_LONGER = Event(
    0.3, "b", "receive", {"peer": "a", "message": "gradient", "bytes": 1900}
)


def make_outcome(*events: Event, queues: Mapping[str, Any] | None = None) -> Outcome:
    return Outcome(
        runtime="emulate",
        status="finished",
        events=EventLog(events),
        fidelity={"queues": queues or {}},
    )


COMPLETE = make_outcome(CAST, HEARD_CAST, SENT, RECEIVED)


def test_equal_runs_do_not_differ() -> None:
    assert count_differences(COMPLETE, COMPLETE) == []


@pytest.mark.parametrize(
    ("events", "difference"),
    [
        (
            (CAST, SENT, RECEIVED),
            "received casts ('a', 'b', 'outputs'): 0 in containers, 1 simulated",
        ),
        (
            (CAST, HEARD_CAST, SENT),
            "received messages ('a', 'b', 'gradient'): 0 in containers, 1 simulated",
        ),
        (
            (CAST, HEARD_CAST, SENT, RECEIVED_LONGER),
            "received messages ('a', 'b', 'gradient'): 1900 bytes in containers, 900 simulated",
        ),
    ],
    ids=["lost cast", "lost message", "longer message"],
)
def test_lost_casts_and_changed_messages_are_named(
    events: tuple[Event, ...], difference: str
) -> None:
    assert count_differences(make_outcome(*events), COMPLETE) == [difference]


@pytest.mark.parametrize(
    "excluded", [["b"], ["gradient", "outputs"]], ids=["device", "messages"]
)
def test_excluded_devices_and_messages_are_not_compared(excluded: list[str]) -> None:
    # For example, the time of a kill determines the number of messages of its device.
    assert count_differences(make_outcome(), COMPLETE, excluded=excluded) == []


def test_sent_messages_and_unread_datagrams_are_losses() -> None:
    # Up to three messages may be in transit as a run ends, and eight are not.
    queues = {"b": {"unread": 7}}
    losses = lost_in_containers(make_outcome(*[SENT] * 9, RECEIVED, queues=queues))
    assert losses == [
        "('a', 'b', 'gradient'): 9 sent, 1 received",
        "b: its socket dropped 7 datagrams",
    ]
