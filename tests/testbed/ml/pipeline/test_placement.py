"""Tests of the state that a configuration resumes from, the sources of its units, replicas, and lineages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.placement import (
    BEGINNING,
    Lineage,
    Point,
    Replicas,
    restore_complete,
)
from testbed.wire.message import decode, encode

OLD = StagePartition(("a", "b", "c"), (0, 2, 4, 6))
NEW = StagePartition(("a", "c"), (0, 3, 6))
"""The partition after the loss of b."""
LINEAGE = Lineage().branch(0, 1)


def place_with(inventory, lineage=LINEAGE, *, seeded=True):
    """Choose the state for the new partition; an inventory has (configuration, step, units) by device."""
    return restore_complete(lineage, inventory, OLD, NEW, seeded=seeded, steps=100)


def test_newest_complete_state_is_chosen():
    inventory = {
        "a": [(1, 10, range(6)), (1, 20, [0, 1])],
        "c": [(1, 20, [2, 3, 4, 5]), (1, 30, [4, 5])],
    }
    plan = place_with(inventory)
    assert plan.point == Point(1, 20)
    assert plan.needs["a"].fetch == {"c": (2,)}
    assert plan.needs["c"].fetch == {}
    assert plan.needs["c"].local == (3, 4, 5)


def test_undone_state_is_not_chosen():
    inventory = {"a": [(1, 20, range(6)), (1, 10, range(6))]}
    assert place_with(inventory, LINEAGE.branch(10, 2)).point == Point(1, 10)


def test_initial_state_is_chosen_if_all_other_states_are_incomplete():
    # Unit 3 is missing after step 20.
    plan = place_with({"a": [(1, 20, [0, 1, 2])], "c": [(1, 20, [4, 5])]})
    assert plan.point == BEGINNING
    # All devices draw their units from the seed.
    assert plan.needs == {}


def test_given_initial_weights_come_from_coordinator():
    plan = place_with({"a": [(0, 0, range(6))], "c": []}, seeded=False)
    assert plan.point == BEGINNING
    assert plan.needs["c"].fetch == {"a": (3, 4, 5)}
    with pytest.raises(ValueError, match="no device has the initial state"):
        place_with({"a": [], "c": []}, seeded=False)


def test_coordinator_gathers_all_units_after_last_batch():
    inventory = {
        "a": [(1, 100, [0, 1])],
        "b": [(1, 100, [2, 3])],
        "c": [(1, 100, [2, 3, 4, 5])],
    }
    plan = place_with(inventory)
    assert plan.needs["a"].local == (0, 1)
    assert plan.needs["a"].fetch == {"b": (2, 3), "c": (4, 5)}


@st.composite
def random_inventories(draw):
    """Draw the units of the coordinator a, and of some other devices, at several points."""
    points = st.sampled_from([(1, 10), (1, 20), (2, 30), (2, 40), (1, 30)])
    units = st.sets(st.integers(0, 5))
    inventory = {}
    for name in draw(st.sets(st.sampled_from("abc"))) | {"a"}:
        inventory[name] = []
        for configuration, step in draw(st.sets(points)):
            inventory[name].append((configuration, step, draw(units)))
    return inventory


def units_at_point(inventory, point):
    """Return the units of each device at a point."""
    units_by_device = {}
    for name, entries in inventory.items():
        units_by_device[name] = set()
        for configuration, step, units in entries:
            if Point(configuration, step) == point:
                units_by_device[name] |= units
    return units_by_device


@given(random_inventories())
def test_all_units_of_all_stages_come_from_one_state(inventory):
    lineage = LINEAGE.branch(20, 2)
    plan = place_with(inventory, lineage)
    if not plan.needs:
        assert plan.point == BEGINNING
        return
    assert plan.point in lineage
    available = units_at_point(inventory, plan.point)
    for device, need in plan.needs.items():
        all_units = list(need.local)
        for source, units in need.fetch.items():
            assert set(units) <= available[source]
            all_units += units
        assert sorted(all_units) == list(NEW.of(device))
        assert set(need.local) <= available.get(device, set())


def make_state(*units):
    """Return a state with a tensor of 16 bytes for each unit."""
    return {f"{unit}.0.weight": torch.full((2, 2), float(unit)) for unit in units}


def test_replicas_of_one_point_are_joined():
    replicas = Replicas()
    point = Point(3, 10)
    replicas.put(point, make_state(1, 2), [1, 2])
    replicas.put(point, make_state(4), [4])
    assert replicas.units(point) == {1, 2, 4}
    assert set(replicas.state(point, [2, 4])) == {"2.0.weight", "4.0.weight"}
    assert replicas.inventory() == [(3, 10, [1, 2, 4])]
    assert replicas.bytes() == 3 * 16


def test_units_without_weights_are_replicated():
    replicas = Replicas()
    replicas.put(Point(1, 5), {}, [0])
    assert replicas.units(Point(1, 5)) == {0}


def test_keep_frees_older_points_but_not_those_being_replicated():
    replicas = Replicas()
    for point in (Point(1, 10), Point(1, 20), Point(2, 30), Point(2, 40), Point(2, 50)):
        replicas.put(point, make_state(0), [0])
    replicas.free_except([Point(1, 20), Point(2, 40)])
    # Point(2, 50) is newer, so its replication may be under way.
    assert replicas.points() == [Point(1, 20), Point(2, 40), Point(2, 50)]
    replicas.free_except([Point(2, 40)], keeps_newer=False)
    assert replicas.points() == [Point(2, 40)]


def test_dumped_replicas_can_be_loaded():
    replicas = Replicas()
    replicas.put(Point(7, 10), make_state(0, 3), [0, 3])
    replicas.put(Point(9, 20), {}, [1])
    dumped = bytearray(encode(replicas.dump(), "source"))
    loaded = Replicas()
    loaded.load(decode(dumped).message)
    assert loaded.inventory() == replicas.inventory()
    weight = loaded.state(Point(7, 10), [3])["3.0.weight"]
    assert torch.equal(weight, torch.full((2, 2), 3.0))


def test_lineage_contains_only_points_that_were_not_undone():
    lineage = Lineage().branch(0, 1).branch(12, 5).branch(8, 9)
    # Configuration 1 from 0 on, 5 from 12 on; then back to 8, which configuration 1 had made.
    assert lineage.branches == ((1, 0), (9, 8))
    for point in (BEGINNING, Point(1, 4), Point(1, 8), Point(9, 9), Point(9, 100)):
        assert point in lineage
    for point in (Point(1, 9), Point(5, 14), Point(9, 8), Point(2, 3)):
        assert point not in lineage
    assert lineage.point(8) == Point(1, 8)
    assert lineage.point(9) == Point(9, 9)
    assert lineage.point(0) == BEGINNING


@given(st.lists(st.integers(0, 30), max_size=12))
def test_each_step_of_lineage_belongs_to_one_configuration(jumps):
    lineage = Lineage()
    reached = 0
    for configuration, jump in enumerate(jumps, 1):
        # A configuration resumes at most from the last state that exists, and trains some batches.
        step = min(jump, reached)
        lineage = lineage.branch(step, configuration)
        reached = step + jump % 7
    configurations = range(1, len(jumps) + 1)
    for step in range(1, reached + 1):
        makers = [made for made in configurations if Point(made, step) in lineage]
        if makers:
            assert len(makers) == 1
            assert lineage.point(step).configuration in makers


def test_valid_units_exclude_undone_points():
    lineage = Lineage().branch(0, 1).branch(10, 2)
    inventory = {"a": [(1, 10, [0, 1]), (1, 20, [0])], "b": [(2, 20, [2])], "c": []}
    assert lineage.valid_units(inventory) == {
        "a": {10: [0, 1]},
        "b": {20: [2]},
        "c": {},
    }
