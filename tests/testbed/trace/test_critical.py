"""What the host added to a step, on hand-made events: the source computes, a worker answers, the source finishes."""

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

RATE = 1e6
TAKES = 0.01 + wire_bytes(1000) * 8 / RATE


def experiment(**devices: Any) -> Experiment:
    scenario = {
        "name": "critical",
        "devices": {"a": devices, "b": {}, "c": {}},
        "network": {"link": {"rate": "1mbit", "delay": "10ms"}},
        "workload": {
            "task": "infer",
            "model": {"name": "mlp"},
            "method": {"name": "exchange"},
        },
    }
    return trials(Scenario.model_validate(scenario))[0].experiment


def compute(device: str, start: float, end: float, late: float = 0.0) -> Event:
    return Event(
        end,
        device,
        "compute",
        {"start": start, "duration": end - start, "deficit": 0.0, "late": late},
    )


def message(
    source: str, target: str, called: float, late: float = 0.0, queued: float = 0.0
) -> list[Event]:
    arrived = called + queued + TAKES + late
    here = {
        "peer": target,
        "message": "m",
        "bytes": 1000,
        "start": called,
        "queued": queued,
        "encode": 0.0,
    }
    there = {
        "peer": source,
        "message": "m",
        "bytes": 1000,
        "start": arrived,
        "duration": 0.0,
    }
    ended = arrived + 0.01
    return [
        Event(ended, source, "send", {**here, "duration": ended - called}),
        Event(arrived, target, "receive", there),
    ]


def step(
    late_work: float = 0.0, late_message: float = 0.0
) -> tuple[list[Event], float]:
    """Return the events of one step from 0 on, and its end."""
    arrived = 1.0 + TAKES
    back = arrived + 0.5 + late_work
    returned = back + TAKES + late_message
    events = [
        compute("a", 0.0, 1.0),
        *message("a", "b", 1.0),
        # Nobody waits for what c does, however late.
        *message("a", "c", 1.0),
        compute("c", arrived, arrived + 0.3, late=0.2),
        compute("b", arrived, back, late_work),
        *message("b", "a", back, late_message),
        compute("a", returned, returned + 0.2),
    ]
    return events, returned + 0.2


def added(events: list[Event], end: float, **devices: Any) -> PathTime:
    return CriticalPaths(events, experiment(**devices), packet_lateness=0.001).lateness(
        "a", (0.0, end)
    )


def test_a_step_on_time_is_not_late() -> None:
    assert astuple(added(*step())) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_lateness_on_the_path_counts() -> None:
    late = added(*step(late_work=0.07, late_message=0.03))
    assert late.computing == pytest.approx(0.07)
    assert late.messaging == pytest.approx(0.03)


def test_a_path_ends_where_its_window_begins() -> None:
    events, end = step(late_work=0.07, late_message=0.03)
    paths = CriticalPaths(events, experiment())
    assert paths.lateness("a", (end - 0.2, end)) == PathTime()
    assert paths.lateness("a", (end - 0.24, end)) == PathTime(
        messaging=pytest.approx(0.03)
    )
    assert paths.lateness("nobody", (0.0, end)) == PathTime()


def test_waiting_behind_another_message_is_the_links_doing() -> None:
    first, second = message("a", "b", 1.0), message("a", "b", 1.0, queued=TAKES - 0.01)
    late = CriticalPaths([*first, *second], experiment()).lateness("b", (0.5, 2.0))
    assert astuple(late) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_each_of_several_messages_under_way_is_told_from_the_others() -> None:
    # On a link of 0.3 s all four leave before the first is there; the third is 50 ms late, the fourth on its heels.
    busy = TAKES - 0.01
    slow = Event(0.0, TESTBED, "link", link_fields("a", "b", Link(RATE, 0.3)))
    events = [slow]
    for number, late in enumerate([0.0, 0.0, 0.05, 0.05]):
        events += message("a", "b", 1.0, late=0.29 + late, queued=number * busy)
    paths = CriticalPaths(events, experiment())
    received = [event.time for event in events if event.event == "receive"]
    found = [
        paths.lateness("b", (instant - 0.001, instant)).messaging
        for instant in received
    ]
    assert found == pytest.approx([0.0, 0.0, 0.05, 0.05])


def test_waiting_for_room_in_the_window_is_not_the_hosts_doing() -> None:
    here = {"peer": "b", "message": "m", "bytes": WINDOW, "encode": 0.0}
    slow = Event(0.0, TESTBED, "link", link_fields("a", "b", Link(None, 1.0)))
    sends = [
        Event(3.0, "a", "send", {**here, "start": 1.0, "queued": 0.0, "duration": 2.0})
    ]
    sends += [
        Event(5.0, "a", "send", {**here, "start": 1.0, "queued": 2.0, "duration": 4.0})
    ]
    there = [
        Event(
            2.0 * n,
            "b",
            "receive",
            {**here, "peer": "a", "start": 2.0 * n, "duration": 0.0},
        )
        for n in (1, 2)
    ]
    late = CriticalPaths([slow, *sends, *there], experiment()).lateness("b", (3.9, 4.0))
    assert late.messaging == pytest.approx(0.0)


def test_acknowledgements_at_one_instant_make_room_together() -> None:
    """Two large messages and a small one are sent at once, on a link without a rate; the large ones fill the window."""
    unlimited = Event(0.0, TESTBED, "link", link_fields("a", "b", Link(None, 1.0)))
    sends, receptions = [], []
    for size, queued in ((2_000_000, 0.0), (WINDOW, 0.0), (1_000, 2.0)):
        common = {"message": "m", "bytes": size}
        times = {"start": 1.0, "queued": queued, "encode": 0.0}
        acknowledged = 3.0 + queued
        sends.append(
            Event(
                acknowledged,
                "a",
                "send",
                {**common, **times, "peer": "b", "duration": acknowledged - 1.0},
            )
        )
        arrived = 2.0 + queued
        there = {"peer": "a", "start": arrived, "duration": 0.0}
        receptions.append(Event(arrived, "b", "receive", {**common, **there}))
    events = [unlimited, *sends, *receptions]
    paths = CriticalPaths(events, experiment())
    # The small message waits for both acknowledgements, so the host is not late.
    assert paths.lateness("b", (3.9, 4.0)).messaging == pytest.approx(0.0)


@pytest.mark.parametrize("figure", [{"loss": 0.1}, {"jitter": 0.001}, {"reorder": 0.1}])
def test_what_a_link_does_at_random_is_not_the_hosts_doing(
    figure: dict[str, float],
) -> None:
    events, end = step(late_message=0.3)
    changes = [
        Event(
            0.0,
            TESTBED,
            "link",
            link_fields("b", "a", replace(Link(RATE, 0.01), **figure)),
        ),  # type: ignore[arg-type]
    ]
    assert added([*changes, *events], end).messaging == pytest.approx(0.001), (
        "what packets are late by on the average"
    )


def test_links_are_taken_as_they_were() -> None:
    events, end = step(late_message=0.3)
    slower = Event(1.2, TESTBED, "link", link_fields("b", "a", Link(RATE, 0.31)))
    assert added([slower, *events], end).messaging == pytest.approx(0.0, abs=1e-9)
    assert added(events, end, uplink="2mbit").messaging == pytest.approx(0.002), (
        "a shared uplink, both ways"
    )


def test_work_that_takes_no_time_does_not_end_the_way_back() -> None:
    events = [
        compute("a", 0.0, 1.0),
        compute("a", 1.0, 1.0),
        compute("a", 1.0, 1.0),
        compute("a", 1.0, 1.0),
    ]
    events += [*message("a", "b", 1.0), compute("b", 1.0 + TAKES, 2.0 + TAKES)]
    spent = CriticalPaths(events, experiment()).spent("b", (0.0, 2.0 + TAKES))
    assert (spent.computing, spent.messaging) == pytest.approx((2.0, TAKES))


def test_what_another_processor_does_meanwhile_is_on_no_path() -> None:
    """a sends to b, whose two processors also work for c; a waits for its own answer alone."""
    arrived = 1.0 + TAKES
    answered = arrived + 0.5
    back = answered + TAKES
    events = [
        compute("a", 0.0, 1.0),
        *message("a", "b", 1.0),
        # For c: over before and after what a waits for, late each time.
        compute("b", 0.2, arrived - 0.001, late=0.3),
        compute("b", arrived + 0.1, answered - 0.001, late=0.2),
        compute("b", arrived, answered, late=0.01),
        compute("b", answered - 0.1, back + 0.01, late=0.4),
        *message("b", "a", answered),
    ]
    paths = CriticalPaths(events, experiment())
    assert paths.lateness("a", (0.0, back)) == PathTime(
        computing=pytest.approx(0.01), messaging=pytest.approx(0.0)
    )
    assert paths.spent("a", (0.0, back)).computing == pytest.approx(1.5)


def test_a_device_is_as_busy_as_its_processors_together() -> None:
    """Of two processors one works for 3 s of 4, the other for 1 s."""
    events = [
        *(
            Event(end, "a", "compute", {"start": start, "duration": end - start})
            for start, end in ((0.0, 3.0), (1.0, 2.0))
        ),
        *(
            Event(time, "a", "step", {"step": int(time), "samples": 1})
            for time in (2.0, 4.0)
        ),
    ]
    one, two = experiment(), experiment(processors=2)
    assert (
        busiest_seconds(events, one, (0.0, 4.0)),
        busiest_seconds(events, two, (0.0, 4.0)),
    ) == (
        4.0,
        2.0,
    )
    record = RunView(
        Outcome("simulate", "finished", events),
        two,
        Plan(method="single", coordinator="a", assignments=()),
    )
    assert busiest_share(record) == pytest.approx(0.25)  # the step from 2 s on


def test_a_message_whose_sender_reads_its_clock_too_late_is_not_taken_for_the_one_before() -> (
    None
):
    first, second = message("a", "b", 0.0), message("a", "b", 5.0)
    second[0].fields["queued"] = TAKES + 0.004  # as if it had left after it arrived
    events = [*first, *second, compute("b", 5.0 + TAKES, 6.0)]
    assert (
        sum(astuple(CriticalPaths(events, experiment()).lateness("b", (4.0, 6.0))))
        < 0.01
    )
