"""Faults in a running lab, with a fake engine, shaper and agents."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, cast

import pytest

from testbed.common.errors import HostError
from testbed.faults.conditions import StateDiff, apply_step
from testbed.faults.device_actions import ThrottlePart
from testbed.faults.parts import ActionPart
from testbed.faults.script import Change, Changes, FaultOperation, FaultPhase
from testbed.network.link import Link
from testbed.network.parts import LinkPart
from testbed.network.radio import Propagation, Radio
from testbed_controller.lab.lab import Lab
from testbed_controller.running.control import answer_request, flap
from testbed_controller.running.machines import HALTED, DockerFaultTarget
from tests.helpers.recording_lab import RecordingLab

PACKETS_SECONDS = 2 * 8 * 1514 * 8 / 10e6
"""Time of eight full frames in each direction, at the 10 Mbit/s of the lab's links."""


def fault_target(lab: RecordingLab) -> DockerFaultTarget:
    return DockerFaultTarget(cast(Lab, lab))


def strike(
    lab: RecordingLab, handle: str = "it", phase: FaultPhase = "strike", **part: Any
) -> StateDiff:
    """Apply an action, given as in a scenario."""
    action = ActionPart.model_validate(part).action
    return apply_step(FaultOperation(action, handle, phase), fault_target(lab))


def undo(lab: RecordingLab, handle: str = "it", **part: Any) -> StateDiff:
    return strike(lab, handle, "undo", **part)


def active_handles(lab: RecordingLab) -> list[str]:
    return list(fault_target(lab).current.in_force)


def change_link(**properties: str) -> Change:
    """Return a change of one property of the link from a to b, as in a link trace."""
    ((name, value),) = properties.items()
    part = LinkPart.model_validate(properties)
    return Change(1.0, f"link a->b {name}", value, (("a", "b"),), part)


def test_throttle_is_sent_to_the_agent_and_reverted(lab: RecordingLab) -> None:
    # 250 Mflop/s are a quarter of the device's 1 Gflop/s.
    throttle: dict[str, Any] = {"throttle": {"device": "b", "speed": "250mflops"}}
    assert strike(lab, **throttle) == StateDiff(speeds={"b": 0.25})
    second = strike(lab, handle="more", throttle={"device": "b", "slowdown": 2})
    assert second.speeds == {"b": 0.125}
    assert undo(lab, handle="more", **throttle).speeds == {"b": 0.25}
    assert strike(lab, unthrottle="b").speeds == {"b": 1.0}
    assert lab.agents["b"].factors == [0.25, 0.125, 0.25, 1.0]
    assert lab.agents["a"].factors == []
    assert active_handles(lab) == []


def test_booted_or_resumed_device_receives_the_active_faults(
    lab: RecordingLab,
) -> None:
    strike(lab, kill="b")
    throttle = {"device": "b", "slowdown": 2}
    assert strike(lab, throttle=throttle).speeds == {"b": 0.5}
    assert lab.agents["b"].factors == []
    strike(lab, handle="worse", degrade={"device": "b", "delay": "50ms"})
    strike(lab, restart="b")
    assert lab.agents["b"].factors == [0.5]
    assert lab.booted_with["a", "b"].delay == 0.05
    strike(lab, pause="b")
    # A paused agent cannot receive its new speed.
    strike(lab, unthrottle="b")
    assert lab.agents["b"].factors == [0.5, HALTED]


def test_resumed_device_has_original_speed(lab: RecordingLab) -> None:
    strike(lab, throttle={"device": "b", "slowdown": 2})
    strike(lab, pause="b")
    strike(lab, unthrottle="b")
    strike(lab, resume="b")
    assert lab.agents["b"].factors == [0.5, HALTED, 1.0]


def test_flap_takes_links_down_and_up(lab: RecordingLab) -> None:
    part: dict[str, Any] = {
        "flap": {"between": ["a", "b"], "down": "100ms", "up": "1s"}
    }
    assert set(strike(lab, **part).links) == {("a", "b"), ("b", "a")}
    assert not lab.shaped["a", "b"].up
    assert lab.shaped["a", "c"].up
    # The end of a flap reverts the last interruption.
    undo(lab, **part)
    assert lab.shaped == lab.experiment.links


def flap_by_hand(
    lab: RecordingLab, seconds: float | None = None, **keys: Any
) -> Generator[tuple[int, float]]:
    """Take the links between a and b down for 20 ms and up for 30 ms, in turns."""
    part = {"between": ["a", "b"], "down": "20ms", "up": "30ms", **keys}
    turns = flap(
        lambda request: answer_request(request, fault_target(lab)), part, seconds
    )
    return cast(Generator[tuple[int, float]], turns)


def test_flapping_ends_with_the_links_up(lab: RecordingLab) -> None:
    up = [lab.shaped["a", "b"].up for _ in flap_by_hand(lab, times=2)]
    assert up == [False, True, False, True]
    turns = list(flap_by_hand(lab, times=3))
    assert [number for number, _ in turns] == [1, 1, 2, 2, 3, 3]
    _, lateness = turns[-1]
    assert lateness < 0.5
    # The second turn begins at 50 ms, within the duration of 60 ms, and ends with the links up.
    assert len(list(flap_by_hand(lab, 0.06))) == 4


def test_interrupted_flapping_leaves_the_links_up(lab: RecordingLab) -> None:
    turns = flap_by_hand(lab)
    assert next(turns)[0] == 1
    assert not lab.shaped["a", "b"].up
    turns.close()
    assert lab.shaped == lab.experiment.links
    assert active_handles(lab) == []


def test_faults_apply_on_top_of_a_trace(lab: RecordingLab) -> None:
    strike(lab, partition=[["a"], ["b", "c"]])
    slow_device = ThrottlePart(device="c", slowdown=4)
    changes = [
        change_link(rate="1mbit"),
        change_link(delay="8ms"),
        Change(1.0, "device c slowdown", "4", speed=slow_device),
    ]
    assert apply_step(Changes(changes), fault_target(lab)) == StateDiff(
        links={("a", "b"): Link(1e6, 0.008, up=False)}, speeds={"c": 0.25}
    )
    strike(lab, handle="hot", throttle={"device": "c", "slowdown": 2})
    # Slowdowns multiply: 4 of the trace, and 2 of the fault.
    assert lab.agents["c"].factors == [0.25, 0.125]
    # `heal` reverts faults of links only.
    strike(lab, heal="all")
    assert lab.shaped["a", "b"] == Link(1e6, 0.008)
    assert active_handles(lab) == ["hot"]
    strike(lab, unthrottle="c")
    assert lab.agents["c"].factors[-1] == 0.25


def test_receivers_get_broadcast_loss(lab: RecordingLab) -> None:
    strike(lab, degrade={"from": "a", "to": "b", "message_loss": "20%"})
    assert lab.agents["b"].losses == [{"a": 0.2}]
    assert lab.agents["c"].losses == []


def test_both_ends_of_link_receive_round_trip_time(lab: RecordingLab) -> None:
    # Links of the scenario have a delay of 5 ms in each direction.
    original = pytest.approx(2 * 0.005 + PACKETS_SECONDS)
    degraded = pytest.approx(2.0 + 0.005 + PACKETS_SECONDS)
    strike(lab, degrade={"from": "a", "to": "b", "delay": "2s"})
    assert lab.agents["a"].slowness == [{"b": degraded}]
    assert lab.agents["b"].slowness == [{"a": degraded}]
    assert lab.agents["c"].slowness == []
    strike(lab, heal="all")
    assert lab.agents["a"].slowness[1:] == [{"b": original}]
    assert lab.agents["b"].slowness[1:] == [{"a": original}]


def test_small_changes_of_time_outs_are_not_sent(lab: RecordingLab) -> None:
    for step in range(1, 11):
        change = change_link(delay=f"{step * 100}ms")
        apply_step(Changes([change]), fault_target(lab))
    # Only round trips beyond the next multiple of 0.5 s are sent: delays of 0.5 s and 1 s with 0.0244 s for the way
    # back and the packets.
    slowness = [seconds["b"] for seconds in lab.agents["a"].slowness]
    assert slowness == pytest.approx([0.5244, 1.0244], abs=1e-3)


def test_booted_device_uses_time_outs_of_the_current_links(
    lab: RecordingLab,
) -> None:
    strike(lab, kill="b")
    strike(lab, handle="slow", degrade={"device": "b", "delay": "1s"})
    count_before = len(lab.agents["b"].slowness)
    # A device that is down receives no time-outs, so its start sends those of all its links.
    strike(lab, restart="b")
    assert set(lab.agents["b"].slowness[count_before]) == {"a", "c"}


def test_obstruction_is_sent_to_receivers_as_broadcast_loss(
    lab: RecordingLab,
) -> None:
    places = {"a": (0.0, 0.0), "b": (0.0, 100.0), "c": (0.0, 0.0)}
    radio = Radio(Propagation(0, -80, 2, 40, 8), places, None, 1)
    lab.experiment = replace(lab.experiment, radio=radio)
    strike(lab, obstruct={"from": "a", "to": "b", "path_loss_exponent": 2.2})
    # A path loss of 40 + 22 * log10(100) = 84 dB is 4 dB too much; with a fading of 8 dB, Phi(4 / 8) of packets fail.
    assert lab.agents["b"].losses == [{"a": pytest.approx(0.69146, abs=1e-5)}]
    assert active_handles(lab) == ["it"]
    strike(lab, heal="all")
    assert lab.agents["b"].losses[1:] == [{"a": 0.0}]


def test_change_refused_by_the_shaper_is_not_stored(lab: RecordingLab) -> None:
    # A stored change would be sent to devices that boot later.
    lab.refuses_links = True
    with pytest.raises(HostError):
        strike(lab, degrade={"device": "a", "loss": "5%"})
    assert active_handles(lab) == []


def test_handle_is_valid_once(lab: RecordingLab) -> None:
    strike(lab, throttle={"device": "b", "slowdown": 2})
    with pytest.raises(ValueError, match="'it' is already active"):
        strike(lab, throttle={"device": "c", "slowdown": 2})


def test_device_is_switched_according_to_actual_state(lab: RecordingLab) -> None:
    assert strike(lab, restart="b") == StateDiff()
    # The container exited without a fault, for example out of memory or by a command of the engine.
    lab.devices["b"].state = "exited"
    assert strike(lab, kill="b") == StateDiff()
    assert strike(lab, pause="b") == StateDiff()
    assert strike(lab, restart="b") == StateDiff({"b": "up"})
    assert undo(lab, kill="b") == StateDiff()
    assert lab.actions == ["start b"]


def test_restarted_device_is_admitted_by_given_function(lab: RecordingLab) -> None:
    # Without this function, the target itself would shape the links of the device (`booted_with`).
    admitted: list[str] = []
    lab.devices["b"].state = "exited"
    apply_step(
        FaultOperation(ActionPart(kill="b").action, "it", "undo"),
        DockerFaultTarget(cast(Lab, lab), admitted.append),
    )
    assert admitted == ["b"]
    assert lab.actions == ["start b"]
    assert lab.booted_with == {}


def test_stored_actions_equal_the_applied_actions(lab: RecordingLab) -> None:
    actions: list[dict[str, Any]] = [
        {"partition": [["a"], ["b", "c"]]},
        {
            "degrade": {
                "from": "a",
                "to": "b",
                "preset": "4g",
                "bursts": {"p": "1%", "r": "20%"},
            }
        },
        {"flap": {"device": "c", "down": "1s", "up": "2s"}},
        {"throttle": {"device": "b", "slowdown": 3}},
    ]
    for index, part in enumerate(actions):
        strike(lab, str(index), **part)
    stored = fault_target(lab).current
    applied = [ActionPart.model_validate(part).action for part in actions]
    assert list(stored.in_force.values()) == applied
    for index, part in enumerate(actions):
        undo(lab, str(index), **part)
    assert lab.shaped == lab.experiment.links
