"""Lateness on the critical paths of hand-made steps: device a computes, b answers, and a finishes."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest

from testbed.experiment import Experiment
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.trace.critical import CriticalPaths, PathTime
from testbed.trace.events import TESTBED, Event, link_fields
from testbed.trace.outcome import Outcome
from testbed.trace.pace import busiest_share
from testbed.trace.record import RunView
from testbed.trace.requests import busiest_seconds
from testbed.wire.framing import WINDOW, wire_bytes
from tests.testbed.trace.records import in_order

RATE = 1e6
DELAY = 0.01
SENDING = wire_bytes(1000) * 8 / RATE
"""Seconds that a message of the tests occupies its link."""
TRANSFER = DELAY + SENDING
"""Seconds from the send of a message to its arrival."""


def make_experiment(**device: Any) -> Experiment:
    """Return an experiment of three devices; the arguments are keys of device a."""
    scenario = {
        "name": "critical",
        "devices": {"a": device, "b": {}, "c": {}},
        "network": {"link": {"rate": "1mbit", "delay": "10ms"}},
        "workload": {
            "task": "infer",
            "model": {"name": "mlp"},
            "method": {"name": "exchange"},
        },
    }
    return trials(Scenario.model_validate(scenario))[0].experiment


def compute(device: str, start: float, end: float, late: float = 0.0) -> Event:
    fields = {"start": start, "duration": end - start, "deficit": 0.0, "late": late}
    return Event(end, device, "compute", fields)


def send_and_receive(
    source: str,
    target: str,
    start: float,
    arrival: float,
    acknowledged: float,
    size: int = 1000,
    queued: float = 0.0,
) -> list[Event]:
    """Return the two events of a message between two devices."""
    sent = {
        "peer": target,
        "message": "m",
        "bytes": size,
        "start": start,
        "duration": acknowledged - start,
        "queued": queued,
        "encode": 0.0,
    }
    received = {
        "peer": source,
        "message": "m",
        "bytes": size,
        "start": arrival,
        "duration": 0.0,
    }
    return [
        Event(acknowledged, source, "send", sent),
        Event(arrival, target, "receive", received),
    ]


def message(
    source: str, target: str, start: float, late: float = 0.0, queued: float = 0.0
) -> list[Event]:
    """Return the events of a message of 1,000 bytes on a link of the experiment."""
    arrival = start + queued + TRANSFER + late
    return send_and_receive(
        source, target, start, arrival, arrival + DELAY, queued=queued
    )


def link_change(source: str, target: str, link: Link, time: float = 0.0) -> Event:
    return Event(time, TESTBED, "link", link_fields(source, target, link))


def make_step(
    late_work: float = 0.0, late_message: float = 0.0
) -> tuple[list[Event], float]:
    """Return the events of one step from 0 on, and the end of the step.

    The work of b and the answer to a may be late. Work for c, on which a does not wait, is late in any case.
    """
    arrived = 1.0 + TRANSFER
    answered = arrived + 0.5 + late_work
    returned = answered + TRANSFER + late_message
    events = [
        compute("a", 0.0, 1.0),
        *message("a", "b", 1.0),
        *message("a", "c", 1.0),
        compute("c", arrived, arrived + 0.3, late=0.2),
        compute("b", arrived, answered, late_work),
        *message("b", "a", answered, late_message),
        compute("a", returned, returned + 0.2),
    ]
    return events, returned + 0.2


def lateness_of_step(events: list[Event], end: float, **device: Any) -> PathTime:
    paths = CriticalPaths(events, make_experiment(**device), packet_lateness=0.001)
    return paths.lateness("a", (0.0, end))


def test_punctual_step_has_no_lateness() -> None:
    assert astuple(lateness_of_step(*make_step())) == pytest.approx((0, 0), abs=1e-9)


def test_lateness_on_critical_path_counts() -> None:
    lateness = lateness_of_step(*make_step(late_work=0.07, late_message=0.03))
    assert lateness.computing == pytest.approx(0.07)
    assert lateness.messaging == pytest.approx(0.03)


def test_path_ends_at_beginning_of_interval() -> None:
    events, end = make_step(late_work=0.07, late_message=0.03)
    paths = CriticalPaths(events, make_experiment())
    # The last 0.2 s are the computation of a; before them the message arrived.
    assert paths.lateness("a", (end - 0.2, end)) == PathTime()
    late_message = PathTime(messaging=pytest.approx(0.03))
    assert paths.lateness("a", (end - 0.24, end)) == late_message
    assert paths.lateness("nobody", (0.0, end)) == PathTime()


def test_waiting_behind_earlier_message_is_not_lateness() -> None:
    first = message("a", "b", 1.0)
    second = message("a", "b", 1.0, queued=SENDING)
    paths = CriticalPaths([*first, *second], make_experiment())
    lateness = paths.lateness("b", (0.5, 2.0))
    assert astuple(lateness) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_lateness_of_concurrent_messages_is_attributed_to_each_message() -> None:
    # On a link of 0.3 s all four leave before the first arrives; the third is 50 ms late, and the fourth follows it.
    long_delay = 0.3
    events = [link_change("a", "b", Link(RATE, long_delay))]
    lateness_of_messages = [0.0, 0.0, 0.05, 0.05]
    for number, late in enumerate(lateness_of_messages):
        extra = long_delay - DELAY + late
        events += message("a", "b", 1.0, late=extra, queued=number * SENDING)
    paths = CriticalPaths(events, make_experiment())
    lateness = []
    for event in events:
        if event.event == "receive":
            just_before = event.time - 0.001
            path = paths.lateness("b", (just_before, event.time))
            lateness.append(path.messaging)
    assert lateness == pytest.approx(lateness_of_messages)


def test_waiting_for_window_is_not_lateness() -> None:
    # The first message fills the window; the second leaves when it is acknowledged, after a round trip of 2 s.
    events = [
        link_change("a", "b", Link(None, 1.0)),
        *send_and_receive("a", "b", 1.0, 2.0, 3.0, size=WINDOW),
        *send_and_receive("a", "b", 1.0, 4.0, 5.0, size=WINDOW, queued=2.0),
    ]
    lateness = CriticalPaths(events, make_experiment()).lateness("b", (3.9, 4.0))
    assert lateness.messaging == pytest.approx(0.0)


def test_acknowledgements_at_one_instant_free_window_together() -> None:
    # Two large messages together exceed the window, so that the small one waits for both acknowledgements at 3 s.
    events = [
        link_change("a", "b", Link(None, 1.0)),
        *send_and_receive("a", "b", 1.0, 2.0, 3.0, size=2_000_000),
        *send_and_receive("a", "b", 1.0, 2.0, 3.0, size=WINDOW),
        *send_and_receive("a", "b", 1.0, 4.0, 5.0, size=1_000, queued=2.0),
    ]
    paths = CriticalPaths(events, make_experiment())
    assert paths.lateness("b", (3.9, 4.0)).messaging == pytest.approx(0.0)


@pytest.mark.parametrize(
    "effect", [{"loss": 0.1}, {"jitter": 0.001}, {"reorder": 0.1}], ids=str
)
def test_delay_on_random_link_is_not_lateness(effect: dict[str, float]) -> None:
    events, end = make_step(late_message=0.3)
    link = replace(Link(RATE, DELAY), **effect)  # type: ignore[arg-type]
    lateness = lateness_of_step([link_change("b", "a", link), *events], end)
    # Only the mean lateness of packets counts.
    assert lateness.messaging == pytest.approx(0.001)


def test_lateness_uses_link_properties_at_time_of_message() -> None:
    events, end = make_step(late_message=0.3)
    # From 1.2 s the link is slower by as much as the message is late.
    slower = link_change("b", "a", Link(RATE, DELAY + 0.3), time=1.2)
    lateness = lateness_of_step([slower, *events], end)
    assert lateness.messaging == pytest.approx(0.0, abs=1e-9)


def test_delay_on_shared_uplink_is_not_lateness() -> None:
    events, end = make_step(late_message=0.3)
    # The mean lateness of packets, of the messages in both directions.
    lateness = lateness_of_step(events, end, uplink="2mbit")
    assert lateness.messaging == pytest.approx(0.002)


def test_computations_without_duration_do_not_end_path() -> None:
    instantaneous = [compute("a", 1.0, 1.0)] * 3
    arrived = 1.0 + TRANSFER
    events = [
        compute("a", 0.0, 1.0),
        *instantaneous,
        *message("a", "b", 1.0),
        compute("b", arrived, arrived + 1.0),
    ]
    spent = CriticalPaths(events, make_experiment()).spent("b", (0.0, arrived + 1.0))
    # A second on each device.
    assert spent.computing == pytest.approx(2.0)
    assert spent.messaging == pytest.approx(TRANSFER)


def test_work_of_other_processor_is_not_on_path() -> None:
    # a sends to b, whose second processor works for c; a waits for its own answer only.
    arrived = 1.0 + TRANSFER
    answered = arrived + 0.5
    returned = answered + TRANSFER
    events = [
        compute("a", 0.0, 1.0),
        *message("a", "b", 1.0),
        # For c, late each time: these end before the work for a begins, before it ends, and after it.
        compute("b", 0.2, arrived - 0.001, late=0.3),
        compute("b", arrived + 0.1, answered - 0.001, late=0.2),
        compute("b", answered - 0.1, returned + 0.01, late=0.4),
        compute("b", arrived, answered, late=0.01),
        *message("b", "a", answered),
    ]
    paths = CriticalPaths(events, make_experiment())
    lateness = paths.lateness("a", (0.0, returned))
    assert lateness.computing == pytest.approx(0.01)
    assert lateness.messaging == pytest.approx(0.0)
    # 1 s on a and 0.5 s on b.
    assert paths.spent("a", (0.0, returned)).computing == pytest.approx(1.5)


def test_busy_time_of_device_is_mean_of_processors() -> None:
    # Of two processors one works for 3 s, the other for 1 s.
    computations = [compute("a", 0.0, 3.0), compute("a", 1.0, 2.0)]
    steps = [
        Event(2.0, "a", "step", {"step": 2, "samples": 1}),
        Event(4.0, "a", "step", {"step": 4, "samples": 1}),
    ]
    events = in_order(computations, steps)
    one_processor = make_experiment()
    two_processors = make_experiment(processors=2)
    assert busiest_seconds(events, one_processor, (0.0, 4.0)) == 4.0
    assert busiest_seconds(events, two_processors, (0.0, 4.0)) == 2.0
    plan = Plan(method="single", coordinator="a", assignments=())
    outcome = Outcome("simulate", "finished", events)
    record = RunView(outcome, two_processors, plan)
    # The undisturbed step lasts from 2 to 4 s, with 1 s of work for two processors.
    assert busiest_share(record) == pytest.approx(0.25)


def test_message_with_late_clock_reading_is_matched_with_correct_send() -> None:
    first, second = message("a", "b", 0.0), message("a", "b", 5.0)
    # The sender read its clock so late that the message seems to leave after its arrival.
    second[0].fields["queued"] = TRANSFER + 0.004
    events = [*first, *second, compute("b", 5.0 + TRANSFER, 6.0)]
    lateness = CriticalPaths(events, make_experiment()).lateness("b", (4.0, 6.0))
    # Matched with the first send, the message would be 5 s late.
    assert lateness.computing + lateness.messaging < 0.01
