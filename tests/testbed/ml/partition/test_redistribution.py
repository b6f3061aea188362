"""Algorithm 1: every small case of old partition, new partition and failures, and the paper's own index arithmetic."""

from collections.abc import Iterator
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.methods.pipedream import take_over
from testbed.ml.partition.redistribution import (
    StagePartition,
    UnitsLostError,
    missing_units,
    needs,
)
from tests.helpers.replicated import (
    chain_replicas,
    moved_units,
    own_units,
    redistribution,
    without_devices,
)

NAMES = ("centre", "one", "two", "three", "four")


def partitions(units: int, devices: tuple[str, ...]) -> Iterator[StagePartition]:
    for inner in combinations(range(1, units), len(devices) - 1):
        yield StagePartition(devices, (0, *inner, units))


def failures(devices: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Everything that may fail together: anybody but the central node."""
    for count in range(len(devices)):
        yield from combinations(devices[1:], count)


def small_cases(
    most_units: int, most_devices: int
) -> Iterator[tuple[StagePartition, StagePartition, tuple[str, ...]]]:
    for units in range(1, most_units + 1):
        for count in range(1, min(units, most_devices) + 1):
            for lost in failures(NAMES[:count]):
                left = tuple(name for name in NAMES[:count] if name not in lost)
                for old in partitions(units, NAMES[:count]):
                    for new in partitions(units, left):
                        yield old, new, lost


def test_whatever_fails_every_device_finds_exactly_its_new_units() -> None:
    seen = 0
    for old, new, lost in small_cases(7, 5):
        plan = redistribution(old, new, lost)
        seen += 1
        assert set(plan) == set(new.devices)
        for device, need in plan.items():
            fetched = [unit for units in need.fetch.values() for unit in units]
            assert sorted([*need.local, *fetched]) == list(new.of(device))
            assert device not in need.fetch
            assert not set(need.fetch) & set(lost)
            assert set(old.of(device)) & set(new.of(device)) <= set(need.local)
            for source, units in need.fetch.items():
                assert list(units) == sorted(units)
                for unit in units:
                    holder = old.holder(unit)
                    backup = old.successor(holder)
                    expected = (
                        holder
                        if holder not in lost
                        else backup
                        if backup not in lost
                        else "centre"
                    )
                    assert source == expected
    assert seen == sum(
        comb(units - 1, count - 1)
        * comb(count - 1, gone)
        * comb(units - 1, count - gone - 1)
        for units in range(1, 8)
        for count in range(1, min(units, 5) + 1)
        for gone in range(count)
    )


def algorithm_1(
    p_new: list[int], p_cur: list[int], i_fail: int, i_cur: int, i_new: int
) -> tuple[dict, list[int]]:
    """The paper's listing, in its terms; partition points are where each stage ends, inclusively."""
    n = len(p_cur) - 1  # the last index

    def ends(points: list[int], index: int) -> tuple[int, int]:
        return (points[index - 1] + 1 if index else 0), points[index]

    start_cur, end_cur = ends(p_cur, i_cur)
    start_new, end_new = ends(p_new, i_new)
    needed = [
        layer
        for layer in range(start_new, end_new + 1)
        if not start_cur <= layer <= end_cur
    ]
    local = [layer for layer in range(start_new, end_new + 1) if layer not in needed]
    need: dict[int, list[int]] = {}
    for layer in needed:
        target = next(
            index
            for index in range(n + 1)
            if ends(p_cur, index)[0] <= layer <= ends(p_cur, index)[1]
        )
        if target > i_fail:
            target -= 1
        elif target == i_fail == n:
            target = 0
        need.setdefault(target, []).append(layer)
    return need, local


def test_one_failure_is_the_listing_of_the_paper() -> None:
    """But for units whose source is the device itself, which the listing has fetched as well."""
    for old, new, lost in small_cases(6, 4):
        if len(lost) != 1:
            continue
        failed = old.devices.index(lost[0])
        plan = redistribution(old, new, lost, everything=False)
        for index, device in enumerate(new.devices):
            ends = [cut - 1 for cut in new.cuts[1:]], [cut - 1 for cut in old.cuts[1:]]
            need, local = algorithm_1(*ends, failed, old.devices.index(device), index)
            assert set(local) <= set(plan[device].local)
            sources = {
                layer: new.devices[target]
                for target, layers in need.items()
                for layer in layers
            }
            for source, units in plan[device].fetch.items():
                assert {sources[unit] for unit in units} == {source}
            assert {unit for unit in plan[device].local if unit not in local} == {
                layer for layer, source in sources.items() if source == device
            }


@given(st.data())
def test_a_repartition_moves_what_is_missing_and_nothing_else(
    data: st.DataObject,
) -> None:
    units = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, min(units, 5)))
    old, new = (
        data.draw(st.sampled_from(list(partitions(units, NAMES[:count]))))
        for _ in range(2)
    )
    plan = redistribution(old, new)
    stays = sum(
        len(set(old.of(device)) & set(new.of(device))) for device in old.devices
    )
    assert len(moved_units(plan)) == units - stays
    assert all(
        unit in old.of(source) and unit in new.of(target)
        for source, target, unit in moved_units(plan)
    )
    assert not moved_units(redistribution(old, old))


def test_after_a_replication_of_the_same_state_a_replica_need_not_be_fetched_again() -> (
    None
):
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    new = StagePartition(NAMES[:3], (0, 1, 4, 6))
    assert moved_units(needs(old, new, own_units(old))) == [("centre", "one", 1)]
    assert moved_units(needs(old, new, chain_replicas(old), local_first=True)) == []
    assert moved_units(needs(old, new, chain_replicas(old))) == [("centre", "one", 1)]


def test_the_last_ones_backup_is_at_the_central_node() -> None:
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    plan = redistribution(
        old, StagePartition(NAMES[:2], (0, 3, 6)), ["two"], everything=False
    )
    assert plan["one"].fetch == {"centre": (4, 5)}
    assert plan["centre"].local == (0, 1)
    assert plan["centre"].fetch == {"one": (2,)}


def test_one_that_came_back_empty_fetches_its_units_from_its_neighbour() -> None:
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    plan = redistribution(old, old, ["one"], everything=False)
    assert plan["one"].local == ()
    assert plan["one"].fetch == {"two": (2, 3)}
    assert plan["two"].fetch == plan["centre"].fetch == {}


def test_a_device_that_joins_fetches_everything() -> None:
    old = StagePartition(NAMES[:2], (0, 2, 4))
    plan = redistribution(old, StagePartition(NAMES[:3], (0, 1, 2, 4)))
    assert plan["two"].fetch == {"one": (2, 3)}
    assert plan["one"].fetch == {"centre": (1,)}


def test_two_neighbours_lost_need_the_central_nodes_replica() -> None:
    old = StagePartition(NAMES[:4], (0, 1, 2, 3, 4))
    new = StagePartition(("centre", "three"), (0, 2, 4))
    with pytest.raises(UnitsLostError, match="no device has the units 1 of") as caught:
        redistribution(old, new, ["one", "two"], everything=False)
    assert (
        caught.value.units
        == {1}
        == missing_units(without_devices(chain_replicas(old), ["one", "two"]), 4)
    )
    plan = redistribution(old, new, ["one", "two"])
    assert plan["centre"].local == (0, 1)
    assert plan["three"].local == (2, 3)


def test_respipe_hands_everything_to_the_next() -> None:
    old = StagePartition(NAMES[:4], (0, 1, 3, 4, 6))
    assert take_over(old, ["one"]) == StagePartition(
        ("centre", "two", "three"), (0, 1, 4, 6)
    )
    assert take_over(old, ["one", "two"]) == StagePartition(
        ("centre", "three"), (0, 1, 6)
    )
    assert take_over(old, ["three"]) == StagePartition(
        ("centre", "one", "two"), (0, 1, 3, 6)
    )
    assert take_over(old, NAMES[1:4]) == StagePartition(("centre",), (0, 6))
    with pytest.raises(ValueError, match="no device is left"):
        take_over(old, NAMES)
    # Its point: a single failure moves nothing, unless the last one's replica has to come from the central node.
    for each, _, lost in small_cases(6, 4):
        if len(lost) == 1:
            moves = moved_units(
                redistribution(each, take_over(each, lost), lost, everything=False)
            )
            last = lost[0] == each.devices[-1] and len(each.devices) > 2
            assert [unit for _, _, unit in moves] == (
                list(each.of(lost[0])) if last else []
            )


@pytest.mark.parametrize(
    ("devices", "cuts"),
    [
        ((), (0,)),
        (("a", "a"), (0, 1, 2)),
        (("a", "b"), (0, 2)),
        (("a", "b"), (0, 2, 2)),
    ],
)
def test_what_is_no_partition(devices: tuple[str, ...], cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"partition is over|does not cut"):
        StagePartition(devices, cuts)
