"""What a configuration goes on from, and who fetches what for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.kits.pipeline.placement import BEGINNING, Lineage, Point, place
from testbed.partition.redistribution import StagePartition

OLD = StagePartition(("a", "b", "c"), (0, 2, 4, 6))
NEW = StagePartition(("a", "c"), (0, 3, 6))
LINEAGE = Lineage().branch(0, 1)


def placed(inventory, lineage=LINEAGE, new=NEW, seeded=True, steps=100):
    return place(lineage, inventory, OLD, new, seeded, steps)


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
    with pytest.raises(ValueError, match="began with"):
        placed({"a": [], "c": []}, seeded=False)


def test_after_the_last_batch_the_central_node_gathers_everything():
    inventory = {"a": [(1, 100, [0, 1])], "b": [(1, 100, [2, 3])], "c": [(1, 100, [2, 3, 4, 5])]}
    found = placed(inventory)
    assert found.needs["a"].local == (0, 1)
    assert found.needs["a"].fetch == {"b": (2, 3), "c": (4, 5)}


@given(st.data())
def test_every_stage_has_its_units_from_one_state(data):
    """Whatever is where: each unit of each stage is local or fetched from who has it, all of one whole state."""
    points = st.sampled_from([(1, 10), (1, 20), (2, 30), (2, 40), (1, 30)])
    inventory = {
        name: [(*point, data.draw(st.sets(st.integers(0, 5)))) for point in data.draw(st.sets(points))]
        for name in data.draw(st.sets(st.sampled_from("abc"))) | {"a"}
    }
    lineage = LINEAGE.branch(20, 2)
    found = placed(inventory, lineage)
    if not found.needs:
        assert found.point == BEGINNING
        return
    assert found.point in lineage
    having = {
        name: {unit for made, step, units in held if Point(made, step) == found.point for unit in units}
        for name, held in inventory.items()
    }
    for device, need in found.needs.items():
        fetched = [unit for units in need.fetch.values() for unit in units]
        assert sorted([*need.local, *fetched]) == list(NEW.of(device))
        assert set(need.local) <= having.get(device, set())
        assert all(set(units) <= having[source] for source, units in need.fetch.items())
