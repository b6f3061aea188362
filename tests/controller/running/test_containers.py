"""Faults on a lab, in front of an engine, a shaper and agents that only remember."""

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
from testbed_controller.running.control import answer, flap
from testbed_controller.running.machines import HALTED, DockerFaultTarget
from tests.helpers.recording_lab import RecordingLab


def containers(lab: RecordingLab) -> DockerFaultTarget:
    return DockerFaultTarget(cast(Lab, lab))


def do(
    lab: RecordingLab, handle: str = "it", phase: FaultPhase = "strike", **given: Any
) -> StateDiff:
    return apply_step(
        FaultOperation(ActionPart.model_validate(given).action, handle, phase),
        containers(lab),
    )


def take_back(lab: RecordingLab, handle: str = "it", **given: Any) -> StateDiff:
    return do(lab, handle, "undo", **given)


def in_force(lab: RecordingLab) -> list[str]:
    return list(containers(lab).current.in_force)


def test_throttle_is_sent_to_the_agent_and_reverted(lab: RecordingLab) -> None:
    part: dict[str, Any] = {"throttle": {"device": "b", "speed": "250mflops"}}
    assert do(lab, **part) == StateDiff(speeds={"b": 0.25})
    assert do(lab, handle="more", throttle={"device": "b", "slowdown": 2}).speeds == {
        "b": 0.125
    }
    assert take_back(lab, handle="more", **part).speeds == {"b": 0.25}
    assert do(lab, unthrottle="b").speeds == {"b": 1.0}
    assert lab.agents["b"].factors == [0.25, 0.125, 0.25, 1.0]
    assert lab.agents["a"].factors == []
    assert in_force(lab) == []


def test_booted_or_resumed_device_receives_the_active_faults(
    lab: RecordingLab,
) -> None:
    do(lab, kill="b")
    assert do(lab, throttle={"device": "b", "slowdown": 2}).speeds == {"b": 0.5}
    assert lab.agents["b"].factors == []
    do(lab, handle="worse", degrade={"device": "b", "delay": "50ms"})
    do(lab, restart="b")
    assert lab.agents["b"].factors == [0.5]
    assert lab.booted_with["a", "b"].delay == 0.05
    do(lab, pause="b")
    do(lab, unthrottle="b")
    assert lab.agents["b"].factors == [0.5, HALTED]


def test_resumed_device_has_its_own_speed_again(
    lab: RecordingLab,
) -> None:
    do(lab, throttle={"device": "b", "slowdown": 2})
    do(lab, pause="b")
    do(lab, unthrottle="b")
    do(lab, resume="b")
    assert lab.agents["b"].factors == [0.5, HALTED, 1.0]


def test_a_flap_takes_links_down_and_up(lab: RecordingLab) -> None:
    part: dict[str, Any] = {
        "flap": {"between": ["a", "b"], "down": "100ms", "up": "1s"}
    }
    assert set(do(lab, **part).links) == {("a", "b"), ("b", "a")}
    assert not lab.shaped["a", "b"].up
    assert lab.shaped["a", "c"].up
    take_back(lab, **part)
    assert lab.shaped == lab.experiment.links


def flapping(
    lab: RecordingLab, seconds: float | None = None, **keys: Any
) -> Generator[tuple[int, float]]:
    part = {"between": ["a", "b"], "down": "20ms", "up": "30ms", **keys}
    asked = flap(lambda request: answer(request, containers(lab)), part, seconds)
    return cast(Generator[tuple[int, float]], asked)


def test_flapping_ends_with_the_links_up(lab: RecordingLab) -> None:
    up = [lab.shaped["a", "b"].up for _ in flapping(lab, times=2)]
    assert up == [False, True, False, True]
    turns = list(flapping(lab, times=3))
    assert [number for number, _ in turns] == [1, 1, 2, 2, 3, 3]
    assert turns[-1][1] < 0.5
    assert len(list(flapping(lab, 0.06))) == 4


def test_interrupted_flapping_leaves_the_links_up(lab: RecordingLab) -> None:
    endless = flapping(lab)
    assert next(endless)[0] == 1
    assert not lab.shaped["a", "b"].up
    endless.close()
    assert lab.shaped == lab.experiment.links
    assert in_force(lab) == []


def test_faults_apply_on_top_of_a_trace(lab: RecordingLab) -> None:
    do(lab, partition=[["a"], ["b", "c"]])
    changes = [
        Change(
            1.0,
            "link a->b rate",
            "1mbit",
            (("a", "b"),),
            LinkPart.model_validate({"rate": "1mbit"}),
        ),
        Change(
            1.0,
            "link a->b delay",
            "8ms",
            (("a", "b"),),
            LinkPart.model_validate({"delay": "8ms"}),
        ),
        Change(
            1.0, "device c slowdown", "4", speed=ThrottlePart(device="c", slowdown=4)
        ),
    ]
    assert apply_step(Changes(changes), containers(lab)) == StateDiff(
        links={("a", "b"): Link(1e6, 0.008, up=False)}, speeds={"c": 0.25}
    )
    do(lab, handle="hot", throttle={"device": "c", "slowdown": 2})
    assert lab.agents["c"].factors == [0.25, 0.125]
    do(lab, heal="all")
    assert lab.shaped["a", "b"] == Link(1e6, 0.008)
    assert in_force(lab) == ["hot"], "healing is of links"
    do(lab, unthrottle="c")
    assert lab.agents["c"].factors[-1] == 0.25


def test_receivers_get_their_broadcast_loss(lab: RecordingLab) -> None:
    do(lab, degrade={"from": "a", "to": "b", "message_loss": "20%"})
    assert lab.agents["b"].losses == [{"a": 0.2}]
    assert lab.agents["c"].losses == []


def test_both_ends_of_a_link_receive_its_round_trip_time(lab: RecordingLab) -> None:
    few_packets = 2 * 8 * 1514 * 8 / 10e6
    own = pytest.approx(0.01 + few_packets)
    do(lab, degrade={"from": "a", "to": "b", "delay": "2s"})
    slow = pytest.approx(2.005 + few_packets)
    assert (lab.agents["a"].slowness, lab.agents["b"].slowness) == (
        [{"b": slow}],
        [{"a": slow}],
    )
    assert lab.agents["c"].slowness == []
    do(lab, heal="all")
    assert (lab.agents["a"].slowness[1:], lab.agents["b"].slowness[1:]) == (
        [{"b": own}],
        [{"a": own}],
    )


def test_small_changes_of_time_outs_are_not_sent(
    lab: RecordingLab,
) -> None:
    for step in range(1, 11):
        delay = f"{step * 100}ms"
        change = Change(
            1.0,
            "link a->b delay",
            delay,
            (("a", "b"),),
            LinkPart.model_validate({"delay": delay}),
        )
        apply_step(Changes([change]), containers(lab))
    assert [seconds["b"] for seconds in lab.agents["a"].slowness] == pytest.approx(
        [0.5244, 1.0244], abs=1e-3
    )


def test_booted_device_uses_time_outs_of_the_current_links(
    lab: RecordingLab,
) -> None:
    do(lab, kill="b")
    do(lab, handle="slow", degrade={"device": "b", "delay": "1s"})
    told = len(lab.agents["b"].slowness)
    do(lab, restart="b")
    assert set(lab.agents["b"].slowness[told]) == {"a", "c"}


def test_obstruction_is_sent_to_receivers_as_broadcast_loss(
    lab: RecordingLab,
) -> None:
    radio = Radio(
        Propagation(0, -80, 2, 40, 8),
        dict.fromkeys("ac", (0.0, 0.0)) | {"b": (0.0, 100.0)},
        None,
        1,
    )
    lab.experiment = replace(lab.experiment, radio=radio)
    do(lab, obstruct={"from": "a", "to": "b", "path_loss_exponent": 2.2})
    assert lab.agents["b"].losses == [{"a": pytest.approx(0.69146, abs=1e-5)}]
    assert in_force(lab) == ["it"]
    do(lab, heal="all")
    assert lab.agents["b"].losses[1:] == [{"a": 0.0}]


def test_change_refused_by_the_shaper_is_not_stored(lab: RecordingLab) -> None:
    lab.refuses_links = True
    with pytest.raises(HostError):
        do(lab, degrade={"device": "a", "loss": "5%"})
    assert in_force(lab) == []


def test_handle_is_valid_once(lab: RecordingLab) -> None:
    do(lab, throttle={"device": "b", "slowdown": 2})
    with pytest.raises(ValueError, match="'it' is in force already"):
        do(lab, throttle={"device": "c", "slowdown": 2})


def test_device_is_switched_according_to_its_actual_state(lab: RecordingLab) -> None:
    assert do(lab, restart="b") == StateDiff()
    lab.devices["b"].state = "exited"  # out of memory, or by the engine's own command
    assert do(lab, kill="b") == StateDiff()
    assert do(lab, pause="b") == StateDiff()
    assert do(lab, restart="b") == StateDiff({"b": "up"})
    assert take_back(lab, kill="b") == StateDiff()
    assert lab.actions == ["start b"]


def test_run_admits_restarted_devices_by_its_own_function(lab: RecordingLab) -> None:
    admitted: list[str] = []
    lab.devices["b"].state = "exited"
    apply_step(
        FaultOperation(ActionPart(kill="b").action, "it", "undo"),
        DockerFaultTarget(cast(Lab, lab), admitted.append),
    )
    assert (admitted, lab.actions, lab.booted_with) == (["b"], ["start b"], {})


def test_every_action_in_force_is_read_as_it_was_written(lab: RecordingLab) -> None:
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
    for index, given in enumerate(actions):
        do(lab, str(index), **given)
    shown = containers(lab).current
    assert list(shown.in_force.values()) == [
        ActionPart.model_validate(given).action for given in actions
    ]
    for index, given in enumerate(actions):
        take_back(lab, str(index), **given)
    assert lab.shaped == lab.experiment.links
