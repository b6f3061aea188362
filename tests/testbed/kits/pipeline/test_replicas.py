"""Replicas by point and unit, and which points still count."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.kits.pipeline.placement import BEGINNING, Lineage, Point
from testbed.kits.pipeline.replicas import Replicas
from testbed.wire.message import decode, encode


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
    assert torch.equal(again.state(Point(7, 10), [3])["3.0.weight"], torch.full((2, 2), 3.0))


def test_what_was_undone_is_void():
    lineage = Lineage().branch(0, 1).branch(12, 5).branch(8, 9)
    # Configuration 1 from 0 on, 5 from 12 on; then back to 8, which configuration 1 had made.
    assert lineage.begun == ((1, 0), (9, 8))
    assert all(point in lineage for point in (BEGINNING, Point(1, 4), Point(1, 8), Point(9, 9), Point(9, 100)))
    assert not any(point in lineage for point in (Point(1, 9), Point(5, 14), Point(9, 8), Point(2, 3)))
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
        makers = [made for made in range(1, len(jumps) + 1) if Point(made, step) in lineage]
        if step <= reached and makers:
            assert lineage.point(step).configuration in makers
            assert len(makers) == 1


def test_inventories_leave_out_the_void():
    lineage = Lineage().branch(0, 1).branch(10, 2)
    inventory = {"a": [(1, 10, [0, 1]), (1, 20, [0])], "b": [(2, 20, [2])], "c": []}
    assert lineage.held(inventory) == {"a": {10: [0, 1]}, "b": {20: [2]}, "c": {}}
