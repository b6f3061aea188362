"""Effects of fault actions on devices, links and speeds of a system state."""

from itertools import permutations
from typing import Any

import pytest

from testbed.faults.conditions import StateDiff, SystemState
from testbed.faults.parts import ACTIONS, ActionPart, repair_action
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.network.radio import Propagation, Radio

BASE = Link(rate=50e6, delay=0.005, loss=0.0)
DEVICES = [DeviceSpec(name, 1e9, 1e9) for name in "abcd"]
MESH = SystemState.of(DEVICES, dict.fromkeys(permutations("abcd", 2), BASE))
BOTH_DIRECTIONS = (("a", "b"), ("b", "a"))
HALF_SPEED = {"device": "a", "slowdown": 2}

RADIO = Radio(
    Propagation(
        transmit_power=16,
        sensitivity=-82,
        path_loss_exponent=3.2,
        reference_loss=46.68,
        shadowing=8,
    ),
    {"a": (0, 0), "b": (20, 0), "c": (0, 10), "d": (25, 25)},
    packets=None,
    seed=1,
)
RADIO_MESH = SystemState.of(
    DEVICES,
    {
        pair: Link(rate=250e3, message_loss=1 - RADIO.reception_ratio(pair))
        for pair in MESH.links
    },
    RADIO,
)


def apply_action(now: SystemState, handle: str = "x", **keys: Any) -> SystemState:
    return ActionPart.model_validate(keys).action.apply(now, handle)


def undo_action(now: SystemState, handle: str = "x", **keys: Any) -> SystemState:
    return ActionPart.model_validate(keys).action.undo(now, handle)


def changed_links(
    now: SystemState, earlier: SystemState = MESH
) -> dict[tuple[str, str], Link]:
    return now.diff_since(earlier).links


def links_down(now: SystemState) -> set[tuple[str, str]]:
    return {pair for pair in now.links if not now.link(pair).up}


def links_of(device: str) -> set[tuple[str, str]]:
    return {pair for pair in MESH.links if device in pair}


def message_loss(now: SystemState, sender: str, receiver: str) -> float:
    return now.link((sender, receiver)).message_loss


def test_partition_cuts_links_between_groups():
    # Device d is in neither group, so that it forms a group of its own.
    cut = apply_action(MESH, partition=[["a", "b"], ["c"]])
    assert set(MESH.links) - links_down(cut) == {*BOTH_DIRECTIONS}
    assert set(changed_links(cut)) == links_down(cut)


def test_single_group_is_cut_from_the_rest():
    assert links_down(apply_action(MESH, partition=[["a"]])) == links_of("a")


def test_degradation_replaces_only_given_properties():
    degraded = apply_action(MESH, degrade={"from": "a", "to": "b", "rate": "1mbit"})
    assert changed_links(degraded) == {("a", "b"): Link(rate=1e6, delay=0.005)}
    assert degraded.link(("b", "a")) == BASE


def test_degradation_applies_to_pair_or_to_all_links_of_device():
    of_pair = apply_action(MESH, degrade={"between": ["a", "b"], "loss": "1%"})
    assert set(changed_links(of_pair)) == {*BOTH_DIRECTIONS}
    of_device = apply_action(MESH, degrade={"device": "c", "loss": "1%"})
    assert set(changed_links(of_device)) == links_of("c")


def test_latest_degradation_overrides_earlier_one_until_undone():
    first = apply_action(
        MESH, "one", degrade={"device": "a", "rate": "1mbit", "delay": "50ms"}
    )
    both = apply_action(first, "two", degrade={"between": ["a", "b"], "rate": "2mbit"})
    # The second degradation sets the rate alone; the delay is still that of the first.
    assert both.link(("a", "b")) == Link(rate=2e6, delay=0.05)
    assert both.without_actions(["two"]) == first
    assert both.without_actions(["one"]).link(("a", "b")) == Link(rate=2e6, delay=0.005)
    assert both.without_actions(["one", "two"]) == MESH


def test_obstruction_raises_exponent_of_links_of_device():
    obstruction = {"device": "b", "path_loss_exponent": 6}
    obstructed = apply_action(RADIO_MESH, obstruct=obstruction)
    assert set(changed_links(obstructed, RADIO_MESH)) == links_of("b")
    # The received power is 16 - (46.68 + 60 log10(20)) + 82 = -26.74 dB relative to the sensitivity, which is 3.34
    # deviations of 8 dB.
    assert message_loss(obstructed, "a", "b") == pytest.approx(0.99958, abs=1e-5)
    assert obstructed.link(("a", "b")).rate == 250e3
    assert undo_action(obstructed, obstruct=obstruction) == RADIO_MESH
    assert apply_action(obstructed, heal="all") == RADIO_MESH


def test_highest_exponent_of_several_obstructions_applies():
    first = apply_action(
        RADIO_MESH, "one", obstruct={"between": ["a", "b"], "path_loss_exponent": 6}
    )
    both = apply_action(first, "two", obstruct={"device": "a", "path_loss_exponent": 4})
    loss_at_6 = 1 - RADIO.reception_ratio(("a", "b"), 6)
    loss_at_4 = 1 - RADIO.reception_ratio(("a", "c"), 4)
    assert message_loss(both, "a", "b") == loss_at_6
    assert message_loss(both, "a", "c") == loss_at_4
    assert message_loss(both, "c", "a") == loss_at_4


def test_obstruction_never_improves_link():
    # All casts from and to device a are lost.
    without_reception = apply_action(
        RADIO_MESH, "one", degrade={"device": "a", "message_loss": "100%"}
    )
    obstructed = apply_action(
        without_reception, "two", obstruct={"device": "a", "path_loss_exponent": 4}
    )
    assert message_loss(obstructed, "a", "c") == 1


def test_preset_has_different_rates_in_both_directions():
    degraded = apply_action(MESH, degrade={"between": ["a", "b"], "preset": "4g"})
    # Device a is the first of the scenario: links from it get the preset's down rate.
    assert degraded.link(("a", "b")).rate == 25e6
    assert degraded.link(("b", "a")).rate == 10e6


def test_heal_undoes_overlapping_partitions_but_no_throttle():
    # Both partitions cut the links between a and c; the first alone cuts those between a and b.
    first = apply_action(MESH, "one", partition=[["a"]])
    cut = apply_action(first, "two", partition=[["a", "b"]])
    second_only = cut.without_actions(["one"])
    assert second_only.link(("a", "b")).up
    assert not second_only.link(("a", "c")).up
    degraded = apply_action(cut, "three", degrade={"device": "d", "delay": "1s"})
    throttled = apply_action(degraded, "four", throttle=HALF_SPEED)
    healed = apply_action(throttled, heal="all")
    assert list(healed.in_force) == ["four"]
    assert healed.without_actions(["four"]) == MESH
    # The end of a partition that was healed earlier has no effect.
    assert undo_action(healed, "one", partition=[["a"]]) == healed
    assert set(changed_links(healed, cut)) == links_down(cut)


def test_handle_in_use_is_refused():
    cut = apply_action(MESH, partition=[["a"]])
    with pytest.raises(ValueError, match="undo it first"):
        apply_action(cut, throttle=HALF_SPEED)


def test_action_without_effect_yields_empty_diff():
    # The links of this mesh have a delay of 5 ms already.
    degraded = apply_action(MESH, degrade={"device": "a", "delay": "5ms"})
    assert degraded.diff_since(MESH) == StateDiff()


def test_unknown_link_raises_key_error():
    with pytest.raises(KeyError):
        MESH.link(("a", "z"))


def test_flap_takes_links_down_until_undone():
    flap = {"between": ["a", "b"], "down": "1s", "up": "1s"}
    flapped = apply_action(MESH, flap=flap)
    assert links_down(flapped) == {*BOTH_DIRECTIONS}
    restored = undo_action(flapped, flap=flap)
    assert changed_links(restored, flapped) == dict.fromkeys(BOTH_DIRECTIONS, BASE)
    of_device = apply_action(MESH, flap={"device": "d", "down": "1s", "up": "1s"})
    assert links_down(of_device) == links_of("d")


def test_faults_apply_on_top_of_set_links():
    slow = MESH.with_links({("a", "b"): Link(1e6, 0.005)})
    assert changed_links(slow) == {("a", "b"): Link(1e6, 0.005)}
    degraded = apply_action(slow, degrade={"between": ["a", "b"], "delay": "1s"})
    assert degraded.link(("a", "b")) == Link(1e6, 1.0)
    lossy = Link(2e6, 0.005, loss=0.01)
    set_again = degraded.with_links(dict.fromkeys(BOTH_DIRECTIONS, lossy))
    # The degradation overrides the delay of the new properties only.
    lossy_with_delay = Link(2e6, 1.0, loss=0.01)
    expected = dict.fromkeys(BOTH_DIRECTIONS, lossy_with_delay)
    assert changed_links(set_again, degraded) == expected
    assert apply_action(set_again, heal="all").link(("a", "b")) == lossy
    unchanged = set_again.with_links({("a", "b"): lossy})
    assert unchanged.diff_since(set_again) == StateDiff()


def test_throttles_combine_and_are_removed_by_handle():
    half = apply_action(MESH, "x", throttle=HALF_SPEED)
    assert half.diff_since(MESH) == StateDiff(speeds={"a": 0.5})
    # A speed replaces the share of full speed (100 MFLOP/s of 1 GFLOP/s), a slowdown divides the share.
    fixed = apply_action(half, "y", throttle={"device": "a", "speed": "100mflops"})
    slower = apply_action(fixed, "z", throttle={"device": "a", "slowdown": 4})
    assert (fixed.speed_factor("a"), slower.speed_factor("a")) == (0.1, 0.025)
    assert slower.speed("a") == pytest.approx(25e6)
    assert slower.speed("b") == 1e9
    # 1 / 2 / 4 of the full speed remain without the fixed speed.
    assert slower.without_actions(["y"]).speed_factor("a") == 0.125
    assert slower.without_actions(["x"]).diff_since(slower) == StateDiff()
    restored = apply_action(slower, unthrottle="a")
    assert restored.diff_since(slower) == StateDiff(speeds={"a": 1.0})
    assert apply_action(slower, unthrottle="b") == slower


def test_throttles_apply_on_top_of_set_speed():
    traced = MESH.set_speed("a", 0.5)
    throttled = apply_action(traced, throttle=HALF_SPEED)
    assert traced.diff_since(MESH) == StateDiff(speeds={"a": 0.5})
    assert throttled.speed_factor("a") == 0.25
    faster = throttled.set_speed("a", 1.5)
    assert faster.without_actions(["x"]).speed_factor("a") == 1.5
    fixed = apply_action(throttled, "y", throttle={"device": "a", "speed": "1gflops"})
    # A throttle to a fixed speed hides the speed set below it.
    hidden = fixed.set_speed("a", 0.1)
    assert hidden.diff_since(throttled) == StateDiff(speeds={"a": 1.0})


def test_killed_device_ignores_pause_and_resume_until_restarted():
    killed = apply_action(MESH, kill="b")
    assert killed.diff_since(MESH) == StateDiff({"b": "down"})
    for action in ("pause", "resume", "kill"):
        assert apply_action(killed, **{action: "b"}) == killed
    assert apply_action(killed, restart="b") == MESH
    assert undo_action(killed, kill="b") == MESH


def test_paused_device_can_be_killed_or_resumed_but_not_restarted():
    paused = apply_action(MESH, pause="b")
    assert paused.devices["b"] == "paused"
    assert apply_action(paused, restart="b") == paused
    assert apply_action(paused, kill="b") == apply_action(MESH, kill="b")
    assert apply_action(paused, resume="b") == MESH
    assert undo_action(paused, pause="b") == MESH


def test_repairs_are_derived_from_recorded_names():
    assert repair_action("kill", "b") is None
    assert repair_action("no such action", "b") is None
    repairs = {}
    for name in ACTIONS:
        repair = repair_action(name, "all" if name == "heal" else "b")
        if repair is not None:
            repairs[name] = repair
    mended = set()
    for name, repair in repairs.items():
        for other in ACTIONS:
            if repair.mends(ACTIONS[other], "b"):
                mended.add((name, other))
    assert mended == {
        ("restart", "kill"),
        ("join", "kill"),
        ("join", "retire"),
        ("resume", "pause"),
        ("heal", "partition"),
        ("heal", "degrade"),
        ("heal", "obstruct"),
        ("heal", "flap"),
        ("unthrottle", "throttle"),
    }
    # All repairs above name device b, and c is another device.
    assert not any(repair.mends(ACTIONS["kill"], "c") for repair in repairs.values())
