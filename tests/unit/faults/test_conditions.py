"""What partitions and degradations do to links."""

from itertools import permutations

import pytest

from testbed.faults.network_state import NetworkState
from testbed.faults.parts import DegradePart, FlapPart
from testbed.network.link import Link
from testbed.network.parts import LinkPart

BASE = Link(rate=50e6, delay=0.005, loss=0.0)
MESH = NetworkState(dict.fromkeys(permutations("abcd", 2), BASE), first="a")


def degrade(**keys):
    return DegradePart.model_validate(keys)


def test_partition_cuts_between_groups_and_those_not_named():
    cut = MESH.partition([["a", "b"], ["c"]], "x")
    up = {pair for pair in MESH.links if cut.effective(pair).up}
    assert up == {("a", "b"), ("b", "a")}
    assert set(cut.changed(MESH)) == set(MESH.links) - up


def test_single_group_is_cut_from_the_rest():
    cut = MESH.partition([["a"]], "x")
    assert {pair for pair in MESH.links if not cut.effective(pair).up} == {p for p in MESH.links if "a" in p}


def test_degradation_replaces_only_what_it_gives():
    worse = MESH.degrade(degrade(**{"from": "a", "to": "b", "rate": "1mbit"}), "x")
    assert worse.effective(("a", "b")) == Link(rate=1e6, delay=0.005)
    assert worse.effective(("b", "a")) == BASE
    assert worse.changed(MESH) == {("a", "b"): Link(rate=1e6, delay=0.005)}


def test_degradation_of_pair_and_of_device():
    assert set(MESH.degrade(degrade(between=["a", "b"], loss="1%"), "x").changed(MESH)) == {("a", "b"), ("b", "a")}
    assert set(MESH.degrade(degrade(device="c", loss="1%"), "x").changed(MESH)) == {p for p in MESH.links if "c" in p}


def test_latest_degradation_wins_by_key_and_undo_uncovers_the_earlier():
    first = MESH.degrade(degrade(device="a", rate="1mbit", delay="50ms"), "one")
    both = first.degrade(degrade(between=["a", "b"], rate="2mbit"), "two")
    assert both.effective(("a", "b")) == Link(rate=2e6, delay=0.05)
    assert both.undo("two") == first
    assert both.undo("one").effective(("a", "b")) == Link(rate=2e6, delay=0.005)
    assert both.undo("one").undo("two") == MESH


def test_preset_has_a_direction():
    worse = MESH.degrade(degrade(between=["a", "b"], preset="4g"), "x")
    assert worse.effective(("a", "b")).rate == 25e6
    assert worse.effective(("b", "a")).rate == 10e6


def test_overlapping_partitions_and_heal():
    cut = MESH.partition([["a"]], "one").partition([["a", "b"]], "two")
    left = cut.undo("one")
    assert left.effective(("a", "b")).up
    assert not left.effective(("a", "c")).up
    healed = cut.degrade(degrade(device="d", delay="1s"), "three").heal()
    assert healed == MESH
    assert healed.undo("one") == MESH
    assert set(healed.changed(cut)) == {p for p in MESH.links if not cut.effective(p).up}


def test_handle_is_used_once_at_a_time():
    with pytest.raises(ValueError, match="undo it first"):
        MESH.partition([["a"]], "x").partition([["b"]], "x")


def test_change_that_changes_nothing_touches_no_pair():
    assert MESH.degrade(degrade(device="a", delay="5ms"), "x").changed(MESH) == {}
    with pytest.raises(KeyError):
        MESH.effective(("a", "z"))


def flap(**keys):
    return FlapPart.model_validate({"down": "1s", "up": "1s", **keys})


def test_outage_takes_links_down_until_it_is_undone():
    down = MESH.cut(flap(between=["a", "b"]), "x")
    assert {pair for pair in MESH.links if not down.effective(pair).up} == {("a", "b"), ("b", "a")}
    assert down.undo("x").changed(down) == {("a", "b"): BASE, ("b", "a"): BASE}
    assert set(MESH.cut(flap(device="d"), "x").changed(MESH)) == {p for p in MESH.links if "d" in p}


def test_trace_stands_below_impairments():
    slow = MESH.set([("a", "b")], LinkPart.model_validate({"rate": "1mbit"}))
    assert slow.changed(MESH) == {("a", "b"): Link(1e6, 0.005)}
    both = slow.degrade(degrade(between=["a", "b"], delay="1s"), "x")
    assert both.effective(("a", "b")) == Link(1e6, 1.0)
    slower = both.set([("a", "b"), ("b", "a")], LinkPart.model_validate({"rate": "2mbit", "loss": "1%"}))
    assert slower.changed(both) == {("a", "b"): Link(2e6, 1.0, loss=0.01), ("b", "a"): Link(2e6, 1.0, loss=0.01)}
    assert slower.heal().effective(("a", "b")) == Link(2e6, 0.005, loss=0.01)
    assert slower.set([("a", "b")], LinkPart()).changed(slower) == {}
