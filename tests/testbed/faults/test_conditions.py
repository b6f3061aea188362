"""What actions do to devices, links and speeds, without any runtime."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.faults.conditions import StateDiff, SystemState, apply_step
from testbed.faults.parts import ACTIONS, ActionPart, repair_action
from testbed.faults.script import FaultOperation
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.network.radio import Propagation, Radio

BASE = Link(rate=50e6, delay=0.005, loss=0.0)
DEVICES = [DeviceSpec(name, 1e9, 1e9) for name in "abcd"]
MESH = SystemState.of(DEVICES, dict.fromkeys(permutations("abcd", 2), BASE))


def apply(now: SystemState, handle: str = "x", **given: Any) -> SystemState:
    return ActionPart.model_validate(given).action.apply(now, handle)


def undo(now: SystemState, handle: str = "x", **given: Any) -> SystemState:
    return ActionPart.model_validate(given).action.undo(now, handle)


def links(now: SystemState, since: SystemState = MESH) -> dict[tuple[str, str], Link]:
    return now.diff_since(since).links


def down(now: SystemState) -> set[tuple[str, str]]:
    return {pair for pair in now.links if not now.link(pair).up}


def test_partition_cuts_links_between_groups():
    cut = apply(MESH, partition=[["a", "b"], ["c"]])
    assert set(MESH.links) - down(cut) == {("a", "b"), ("b", "a")}
    assert set(links(cut)) == down(cut)


def test_single_group_is_cut_from_the_rest():
    assert down(apply(MESH, partition=[["a"]])) == {
        pair for pair in MESH.links if "a" in pair
    }


def test_degradation_replaces_only_given_properties():
    worse = apply(MESH, degrade={"from": "a", "to": "b", "rate": "1mbit"})
    assert links(worse) == {("a", "b"): Link(rate=1e6, delay=0.005)}
    assert worse.link(("b", "a")) == BASE


def test_degradation_of_pair_and_of_device():
    assert set(links(apply(MESH, degrade={"between": ["a", "b"], "loss": "1%"}))) == {
        ("a", "b"),
        ("b", "a"),
    }
    of_device = apply(MESH, degrade={"device": "c", "loss": "1%"})
    assert set(links(of_device)) == {pair for pair in MESH.links if "c" in pair}


def test_latest_degradation_wins_by_key_and_undo_uncovers_the_earlier():
    first = apply(
        MESH, "one", degrade={"device": "a", "rate": "1mbit", "delay": "50ms"}
    )
    both = apply(first, "two", degrade={"between": ["a", "b"], "rate": "2mbit"})
    assert both.link(("a", "b")) == Link(rate=2e6, delay=0.05)
    assert both.without_actions(["two"]) == first
    assert both.without_actions(["one"]).link(("a", "b")) == Link(rate=2e6, delay=0.005)
    assert both.without_actions(["one", "two"]) == MESH


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
OVER_THE_AIR = SystemState.of(
    DEVICES,
    {
        pair: Link(rate=250e3, message_loss=1 - RADIO.reception_ratio(pair))
        for pair in MESH.links
    },
    RADIO,
)


def lost(now: SystemState, a: str, b: str) -> float:
    return now.link((a, b)).message_loss


def test_an_obstruction_around_a_device_raises_the_exponent_of_its_links_alone():
    hidden = apply(OVER_THE_AIR, obstruct={"device": "b", "path_loss_exponent": 6})
    assert set(links(hidden, OVER_THE_AIR)) == {
        pair for pair in MESH.links if "b" in pair
    }
    # 16 - (46.68 + 60 log10(20)) + 82 = -26.74 dB, 3.34 deviations of 8 dB below what is received.
    assert lost(hidden, "a", "b") == pytest.approx(0.99958, abs=1e-5)
    assert hidden.link(("a", "b")).rate == 250e3
    assert (
        undo(hidden, obstruct={"device": "b", "path_loss_exponent": 6}) == OVER_THE_AIR
    )
    assert apply(hidden, heal="all") == OVER_THE_AIR


def test_of_several_obstructions_the_highest_exponent_counts_and_none_makes_a_link_better():
    both = apply(
        OVER_THE_AIR, "one", obstruct={"between": ["a", "b"], "path_loss_exponent": 6}
    )
    both = apply(both, "two", obstruct={"device": "a", "path_loss_exponent": 4})
    assert lost(both, "a", "b") == 1 - RADIO.reception_ratio(("a", "b"), 6)
    assert (
        lost(both, "a", "c")
        == lost(both, "c", "a")
        == 1 - RADIO.reception_ratio(("a", "c"), 4)
    )
    deaf = apply(OVER_THE_AIR, "one", degrade={"device": "a", "message_loss": "100%"})
    assert (
        lost(
            apply(deaf, "two", obstruct={"device": "a", "path_loss_exponent": 4}),
            "a",
            "c",
        )
        == 1
    )


def test_preset_has_a_direction():
    worse = apply(MESH, degrade={"between": ["a", "b"], "preset": "4g"})
    assert worse.link(("a", "b")).rate == 25e6
    assert worse.link(("b", "a")).rate == 10e6


def test_overlapping_partitions_and_heal():
    cut = apply(apply(MESH, "one", partition=[["a"]]), "two", partition=[["a", "b"]])
    left = cut.without_actions(["one"])
    assert left.link(("a", "b")).up
    assert not left.link(("a", "c")).up
    worse = apply(
        apply(cut, "three", degrade={"device": "d", "delay": "1s"}),
        "four",
        throttle=SLOW,
    )
    healed = apply(worse, heal="all")
    assert list(healed.in_force) == ["four"]
    assert healed.without_actions(["four"]) == MESH
    assert undo(healed, "one", partition=[["a"]]) == healed
    assert set(links(healed, cut)) == down(cut)


SLOW = {"device": "a", "slowdown": 2}


def test_handle_is_used_once_at_a_time():
    with pytest.raises(ValueError, match="undo it first"):
        apply(apply(MESH, partition=[["a"]]), throttle=SLOW)


def test_change_that_changes_nothing_touches_no_pair():
    assert (
        apply(MESH, degrade={"device": "a", "delay": "5ms"}).diff_since(MESH)
        == StateDiff()
    )
    with pytest.raises(KeyError):
        MESH.link(("a", "z"))


def test_flap_takes_links_down_until_undone():
    flap = {"between": ["a", "b"], "down": "1s", "up": "1s"}
    flapped = apply(MESH, flap=flap)
    assert down(flapped) == {("a", "b"), ("b", "a")}
    assert links(undo(flapped, flap=flap), flapped) == {
        ("a", "b"): BASE,
        ("b", "a"): BASE,
    }
    of_device = apply(MESH, flap={"device": "d", "down": "1s", "up": "1s"})
    assert down(of_device) == {pair for pair in MESH.links if "d" in pair}


def test_faults_apply_on_top_of_set_links():
    slow = MESH.with_links({("a", "b"): Link(1e6, 0.005)})
    assert links(slow) == {("a", "b"): Link(1e6, 0.005)}
    both = apply(slow, degrade={"between": ["a", "b"], "delay": "1s"})
    assert both.link(("a", "b")) == Link(1e6, 1.0)
    slower = both.with_links(
        dict.fromkeys([("a", "b"), ("b", "a")], Link(2e6, 0.005, loss=0.01))
    )
    assert links(slower, both) == dict.fromkeys(
        [("a", "b"), ("b", "a")], Link(2e6, 1.0, loss=0.01)
    )
    assert apply(slower, heal="all").link(("a", "b")) == Link(2e6, 0.005, loss=0.01)
    assert (
        slower.with_links({("a", "b"): Link(2e6, 0.005, loss=0.01)}).diff_since(slower)
        == StateDiff()
    )


def test_throttles_pile_up_and_go_by_their_handles():
    half = apply(MESH, "x", throttle=SLOW)
    assert half.diff_since(MESH) == StateDiff(speeds={"a": 0.5})
    fixed = apply(half, "y", throttle={"device": "a", "speed": "100mflops"})
    slower = apply(fixed, "z", throttle={"device": "a", "slowdown": 4})
    assert (fixed.speed_factor("a"), slower.speed_factor("a")) == (0.1, 0.025)
    assert slower.speed("a") == pytest.approx(25e6)
    assert slower.speed("b") == 1e9
    assert slower.without_actions(["y"]).speed_factor("a") == 0.125
    assert slower.without_actions(["x"]).diff_since(slower) == StateDiff()
    assert apply(slower, unthrottle="a").diff_since(slower) == StateDiff(
        speeds={"a": 1.0}
    )
    assert apply(slower, unthrottle="b") == slower


def test_throttles_apply_on_top_of_a_set_speed():
    traced = MESH.set_speed("a", 0.5)
    both = apply(traced, throttle=SLOW)
    assert traced.diff_since(MESH) == StateDiff(speeds={"a": 0.5})
    assert both.speed_factor("a") == 0.25
    assert both.set_speed("a", 1.5).without_actions(["x"]).speed_factor("a") == 1.5
    fixed = apply(both, "y", throttle={"device": "a", "speed": "1gflops"})
    assert fixed.set_speed("a", 0.1).diff_since(both) == StateDiff(speeds={"a": 1.0})


def test_devices_stop_pause_and_restart():
    off = apply(MESH, kill="b")
    assert off.diff_since(MESH) == StateDiff({"b": "down"})
    assert (
        apply(off, pause="b") == apply(off, resume="b") == apply(off, kill="b") == off
    )
    assert apply(off, restart="b") == undo(off, kill="b") == MESH
    still = apply(MESH, pause="b")
    assert still.devices["b"] == "paused"
    assert apply(still, restart="b") == still
    assert apply(still, kill="b") == off
    assert apply(still, resume="b") == undo(still, pause="b") == MESH


def test_repairs_follow_from_recorded_names():
    assert repair_action("kill", "b") is None
    assert repair_action("no such action", "b") is None
    table = {
        name: repair_action(name, "b" if name != "heal" else "all") for name in ACTIONS
    }
    found = {
        (name, other)
        for name, each in table.items()
        if each
        for other in ACTIONS
        if each.mends(ACTIONS[other], "b")
    }
    assert found == {
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
    assert not any(each.mends(ACTIONS["kill"], "c") for each in table.values() if each)


names = st.sampled_from("abcd")
link_sets = st.one_of(
    names.map(lambda name: {"device": name}),
    st.permutations("abcd").map(lambda order: {"between": order[:2]}),
    st.permutations("abcd").map(lambda order: {"from": order[0], "to": order[1]}),
)
figures = st.sampled_from(
    [
        {"rate": "1mbit"},
        {"delay": "50ms"},
        {"loss": "1%", "rate": "2mbit"},
        {"preset": "4g"},
    ]
)
breaking = st.one_of(
    names.map(lambda name: {"kill": name}),
    names.map(lambda name: {"pause": name}),
    st.lists(names, min_size=1, max_size=3, unique=True).map(
        lambda group: {"partition": [group]}
    ),
    st.builds(lambda where, what: {"degrade": {**where, **what}}, link_sets, figures),
    link_sets.map(lambda where: {"flap": {**where, "down": "1s", "up": "1s"}}),
    names.map(lambda name: {"throttle": {"device": name, "slowdown": 3}}),
    names.map(lambda name: {"throttle": {"device": name, "speed": "10mflops"}}),
)
mending_actions = st.one_of(
    st.just({"heal": "all"}),
    names.map(lambda name: {"restart": name}),
    names.map(lambda name: {"retire": name}),
    names.map(lambda name: {"join": name}),
    names.map(lambda name: {"resume": name}),
    names.map(lambda name: {"unthrottle": name}),
)


@st.composite
def scripts(draw):
    """Return (phase, index, action) in an order in which each action that breaks is undone once, some time after."""
    actions = draw(st.lists(st.one_of(breaking, mending_actions), max_size=12))
    steps = []
    for index, given_ in enumerate(actions):
        action = ActionPart.model_validate(given_).action
        if not action.undoes:
            steps.append(
                (draw(st.floats(index, 20)), FaultOperation(action, f"{index}", "undo"))
            )
        steps.append((index, FaultOperation(action, f"{index}")))
    return [
        operation
        for _, operation in sorted(
            steps, key=lambda step: (step[0], step[1].phase == "undo")
        )
    ]


@settings(max_examples=200, deadline=None)
@given(scripts())
def test_undoing_everything_restores_the_initial_state(script):
    now = MESH
    for operation in script:
        now = operation.apply(now)
    assert now == MESH
    assert now.diff_since(MESH) == StateDiff()


class Remembered:
    """Machines that only remember what they were told."""

    def __init__(self) -> None:
        self.shown = MESH
        self.devices = dict(MESH.devices)
        self.links = dict(MESH.links)
        self.factors = dict.fromkeys("abcd", 1.0)
        self.locked = False

    def states(self):
        return dict(self.devices)

    def lock(self):
        return self

    def __enter__(self):
        self.locked = True

    def __exit__(self, *_):
        self.locked = False

    def show(self, now, changed):
        assert self.locked
        self.shown = now
        self.links |= changed.links
        self.factors |= changed.speeds

    def switch(self, device, before, after):
        assert not self.locked
        assert self.devices[device] in before
        self.devices[device] = after

    def kill(self, device):
        self.switch(device, ("up", "paused"), "down")

    def retire(self, device):
        self.switch(device, ("up",), "retired")

    def restart(self, device):
        self.switch(device, ("down", "retired"), "up")

    def pause(self, device):
        self.switch(device, ("up",), "paused")

    def resume(self, device):
        self.switch(device, ("paused",), "up")


@settings(max_examples=200, deadline=None)
@given(scripts(), st.integers(0, 24))
def test_machines_follow_the_state_of_the_script(script, length):
    machines, now = Remembered(), MESH
    for operation in script[:length]:
        apply_step(operation, machines)
        now = operation.apply(now)
        assert machines.devices == now.devices
        assert machines.links == {pair: now.link(pair) for pair in now.links}
        assert machines.factors == {
            name: now.speed_factor(name) for name in now.devices
        }
