"""What a configuration goes on from, and who fetches what for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.placement import BEGINNING, Lineage, Point, Replicas, place
from testbed.wire.message import decode, encode

OLD = StagePartition(("a", "b", "c"), (0, 2, 4, 6))
NEW = StagePartition(("a", "c"), (0, 3, 6))
LINEAGE = Lineage().branch(0, 1)


def placed(inventory, lineage=LINEAGE, new=NEW, seeded=True, steps=100):
    return place(lineage, inventory, OLD, new, seeded=seeded, steps=steps)


def test_the_newest_whole_state_is_gone_on_from():
    inventory = {
        "a": [(1, 10, range(6)), (1, 20, [0, 1])],
        "c": [(1, 20, [2, 3, 4, 5]), (1, 30, [4, 5])],
    }
    found = placed(inventory)
    assert found.point == Point(1, 20)
    assert found.needs["a"].fetch == {"c": (2,)}
    assert found.needs["c"].fetch == {}
    assert found.needs["c"].local == (3, 4, 5)


def test_what_was_undone_is_not_gone_on_from():
    inventory = {"a": [(1, 20, range(6)), (1, 10, range(6))]}
    assert placed(inventory, LINEAGE.branch(10, 2)).point == Point(1, 10)


def test_a_state_that_is_not_whole_is_passed_over_and_the_seed_is_always_there():
    found = placed({"a": [(1, 20, [0, 1, 2])], "c": [(1, 20, [4, 5])]})
    assert found.point == BEGINNING
    assert found.needs == {}
    assert "a" not in found.needs


def test_given_weights_come_from_the_central_node():
    found = placed({"a": [(0, 0, range(6))], "c": []}, seeded=False)
    assert found.point == BEGINNING
    assert found.needs["c"].fetch == {"a": (3, 4, 5)}
    with pytest.raises(ValueError, match="no device has the initial state"):
        placed({"a": [], "c": []}, seeded=False)


def test_after_the_last_batch_the_central_node_gathers_everything():
    inventory = {
        "a": [(1, 100, [0, 1])],
        "b": [(1, 100, [2, 3])],
        "c": [(1, 100, [2, 3, 4, 5])],
    }
    found = placed(inventory)
    assert found.needs["a"].local == (0, 1)
    assert found.needs["a"].fetch == {"b": (2, 3), "c": (4, 5)}


@given(st.data())
def test_every_stage_has_its_units_from_one_state(data):
    """Whatever is where: each unit of each stage is local or fetched from who has it, all of one whole state."""
    points = st.sampled_from([(1, 10), (1, 20), (2, 30), (2, 40), (1, 30)])
    inventory = {
        name: [
            (*point, data.draw(st.sets(st.integers(0, 5))))
            for point in data.draw(st.sets(points))
        ]
        for name in data.draw(st.sets(st.sampled_from("abc"))) | {"a"}
    }
    lineage = LINEAGE.branch(20, 2)
    found = placed(inventory, lineage)
    if not found.needs:
        assert found.point == BEGINNING
        return
    assert found.point in lineage
    having = {
        name: {
            unit
            for made, step, units in held
            if Point(made, step) == found.point
            for unit in units
        }
        for name, held in inventory.items()
    }
    for device, need in found.needs.items():
        fetched = [unit for units in need.fetch.values() for unit in units]
        assert sorted([*need.local, *fetched]) == list(NEW.of(device))
        assert set(need.local) <= having.get(device, set())
        assert all(set(units) <= having[source] for source, units in need.fetch.items())


def state(*units):
    return {f"{unit}.0.weight": torch.full((2, 2), float(unit)) for unit in units}


def test_units_come_from_several_and_go_together():
    replicas = Replicas()
    replicas.put(Point(3, 10), state(1, 2), [1, 2])
    replicas.put(Point(3, 10), state(4), [4])
    assert replicas.units(Point(3, 10)) == {1, 2, 4}
    assert set(replicas.state(Point(3, 10), [2, 4])) == {"2.0.weight", "4.0.weight"}
    assert replicas.inventory() == [(3, 10, [1, 2, 4])]
    assert replicas.bytes() == 3 * 16


def test_units_without_weights_are_held_too():
    replicas = Replicas()
    replicas.put(Point(1, 5), {}, [0])
    assert replicas.units(Point(1, 5)) == {0}


def test_keeping_frees_what_is_older_and_spares_what_is_under_way():
    replicas = Replicas()
    for point in (Point(1, 10), Point(1, 20), Point(2, 30), Point(2, 40), Point(2, 50)):
        replicas.put(point, state(0), [0])
    replicas.keep([Point(1, 20), Point(2, 40)])
    assert replicas.points() == [Point(1, 20), Point(2, 40), Point(2, 50)]
    replicas.keep([Point(2, 40)], later=False)
    assert replicas.points() == [Point(2, 40)]


def test_the_disk_gives_back_what_it_got():
    replicas, again = Replicas(), Replicas()
    replicas.put(Point(7, 10), state(0, 3), [0, 3])
    replicas.put(Point(9, 20), {}, [1])
    again.load(decode(bytearray(encode(replicas.dump(), "source"))).message)
    assert again.inventory() == replicas.inventory()
    assert torch.equal(
        again.state(Point(7, 10), [3])["3.0.weight"], torch.full((2, 2), 3.0)
    )


def test_what_was_undone_is_void():
    lineage = Lineage().branch(0, 1).branch(12, 5).branch(8, 9)
    # Configuration 1 from 0 on, 5 from 12 on; then back to 8, which configuration 1 had made.
    assert lineage.begun == ((1, 0), (9, 8))
    assert all(
        point in lineage
        for point in (BEGINNING, Point(1, 4), Point(1, 8), Point(9, 9), Point(9, 100))
    )
    assert not any(
        point in lineage
        for point in (Point(1, 9), Point(5, 14), Point(9, 8), Point(2, 3))
    )
    assert lineage.point(8) == Point(1, 8)
    assert lineage.point(9) == Point(9, 9)
    assert lineage.point(0) == BEGINNING


@given(st.lists(st.integers(0, 30), max_size=12))
def test_each_step_is_of_one_configuration(jumps):
    """However a run went back and forth, each state up to where it stands was made exactly once."""
    lineage, reached = Lineage(), 0
    for configuration, jump in enumerate(jumps, 1):
        step = min(jump, reached)  # nobody goes on from what was never made
        lineage = lineage.branch(step, configuration)
        reached = step + jump % 7
    for step in range(1, reached + 1):
        makers = [
            made for made in range(1, len(jumps) + 1) if Point(made, step) in lineage
        ]
        if step <= reached and makers:
            assert lineage.point(step).configuration in makers
            assert len(makers) == 1


def test_inventories_leave_out_the_void():
    lineage = Lineage().branch(0, 1).branch(10, 2)
    inventory = {"a": [(1, 10, [0, 1]), (1, 20, [0])], "b": [(2, 20, [2])], "c": []}
    assert lineage.valid_units(inventory) == {
        "a": {10: [0, 1]},
        "b": {20: [2]},
        "c": {},
    }
