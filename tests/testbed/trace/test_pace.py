"""Steps of several devices, the pace before and after recoveries and pauses, and how busy the busiest is."""

from typing import Any

import pytest

from testbed.trace.events import Event, EventType
from testbed.trace.metrics import metrics
from testbed.trace.metrics_spec import MetricsSpec
from testbed.wire.framing import wire_bytes
from tests.helpers import recorded

PAUSING = MetricsSpec(events=(EventType("pause", "nothing was trained", pause=True),))


def figures(events: list[Event], faulty: bool = False) -> dict[str, Any]:
    experiment = recorded.make_trial(**({} if faulty else {"faults": ()})).experiment
    outcome = recorded.make_outcome(events=sorted(events, key=lambda event: event.time))
    return metrics(outcome, experiment, recorded.make_plan(), PAUSING)


def test_the_pace_before_and_after_a_fault() -> None:
    found = figures(recorded.make_events(), faulty=True)
    assert found["step_time_before"] == pytest.approx(1.0)
    assert found["step_time_after"] == pytest.approx(1.0)
    assert found["step_time_mean_before"] == pytest.approx(1.0)
    assert found["step_time_mean_after"] == pytest.approx(1.0)
    assert "step_time_before" not in figures(recorded.make_events(faulty=False))
    assert "step_time_mean_before" not in figures(recorded.make_events(faulty=False))
    assert figures(recorded.make_events(faulty=False))[
        "step_time_after"
    ] == pytest.approx(1.0)


def test_means_weigh_alternating_steps_alike_and_begin_after_the_last_pause() -> None:
    # Ten slow steps, a pause, then steps of 1 s and 2 s in turn, of which a median is one or the other.
    lengths = [5.0] * 10 + [1.0, 2.0] * 4
    steps = []
    for number in range(len(lengths)):
        time = sum(lengths[: number + 1])
        fields = {"step": number, "loss": 1.0, "samples": 32}
        steps.append(Event(time, "a", "step", fields))
    pause = Event(50.0, "a", "pause", {"seconds": 0.5})
    strike = Event(
        58.5,
        "testbed",
        "fault",
        {"action": "kill", "target": "b", "phase": "strike", "intended": 58.5},
    )
    recovery = [
        Event(time, "a", "recovery", {"phase": phase, "step": 15, "missing": ["b"]})
        for time, phase in ((58.6, "detected"), (58.7, "resumed"))
    ]
    undisturbed = figures([*steps, pause])
    assert undisturbed["step_time_mean_after"] == pytest.approx(1.5)
    assert undisturbed["step_time_after"] in (1.0, 1.5, 2.0)
    struck = figures([*steps, pause, strike, *recovery], faulty=True)
    # Steps of 1, 2, 1, 2 and 1 s end before the fault.
    assert struck["step_time_mean_before"] == pytest.approx(7 / 5)


def test_a_pause_disturbs() -> None:
    pause = Event(2.9, "a", "pause", {"seconds": 0.5})
    found = figures([*recorded.make_events(faulty=False), pause])
    assert [row["steady"] for row in found["series"]["steps"]] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert found["step_time_after"] == pytest.approx(1.0)


def test_after_a_throttle_that_lasts_the_pace_is_that_of_what_came_of_it() -> None:
    strike = Event(
        1.5,
        "testbed",
        "fault",
        {"action": "throttle", "target": "b", "phase": "strike", "intended": 1.5},
    )
    pause = Event(2.0, "a", "pause", {"seconds": 0.1})
    found = figures([*recorded.make_events(faulty=False), strike, pause])
    assert found["step_time_after"] == pytest.approx(1.0)


def test_a_step_takes_the_time_since_the_one_before_it_on_the_same_device() -> None:
    steps = [
        Event(time, device, "step", {"step": number, "loss": 1.0, "samples": 32})
        for device, first, every in (("a", 0.5, 1.0), ("b", 0.75, 2.0))
        for number in range(4)
        for time in [first + every * (number + 1)]
    ]
    found = figures(steps)
    assert [(row["device"], row["seconds"]) for row in found["series"]["steps"]][
        :4
    ] == [
        ("a", 1.5),
        ("a", 1.0),
        ("b", 2.75),
        ("a", 1.0),
    ]
    assert (found["steps"], found["steps_repeated"], found["samples"]) == (8, 0, 8 * 32)
    assert found["steady_steps"] == 6, "all but the first of each device"
    assert found["step_time"] == pytest.approx(1.5)


def test_the_busiest_device_or_link() -> None:
    # Each second a computes 0.4 s, b 0.4 s, and each of the links carries 100 kB at 8 Mbit/s, 0.105 s.
    assert figures(recorded.make_events(faulty=False))[
        "busiest_share"
    ] == pytest.approx(0.4)
    sends = [
        Event(
            time,
            "a",
            "send",
            {
                "peer": "b",
                "message": "m",
                "bytes": 800_000,
                "start": time - 0.5,
                "duration": 0.5,
            },
        )
        for time in (1.9, 2.9, 3.9, 4.9)
    ]
    busy = (
        4 * (wire_bytes(100_000) + wire_bytes(800_000)) / 1e6
    )  # with headers, 5 % more than what is in the messages
    assert figures([*recorded.make_events(faulty=False), *sends])[
        "busiest_share"
    ] == pytest.approx(busy / 4)
    assert figures(recorded.make_events(faulty=True), faulty=True)[
        "busiest_share"
    ] == pytest.approx(0.4)
