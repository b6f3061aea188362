"""Tests of Algorithm 1 of FTPipeHD: all small cases of old partition, new partition and failures, and the listing."""

from collections.abc import Iterator
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.methods.pipedream import take_over
from testbed.ml.partition.redistribution import (
    Need,
    StagePartition,
    UnitsLostError,
    missing_units,
    needs,
)
from tests.helpers.replicas import (
    chain_replicas,
    moved_units,
    own_units,
    redistribution,
    without_devices,
)
from tests.testbed.ml.partition.chains import all_cuts

NAMES = ("centre", "one", "two", "three", "four")


def partitions(units: int, devices: tuple[str, ...]) -> Iterator[StagePartition]:
    for cuts in all_cuts(units, len(devices)):
        yield StagePartition(devices, cuts)


def failures(devices: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every set of devices except the coordinator: any of the sets may fail together."""
    for count in range(len(devices)):
        yield from combinations(devices[1:], count)


def small_cases(
    max_units: int, max_devices: int
) -> Iterator[tuple[StagePartition, StagePartition, tuple[str, ...]]]:
    """Yield every old partition, new partition over the remaining devices, and set of lost devices."""
    for units in range(1, max_units + 1):
        for count in range(1, min(units, max_devices) + 1):
            devices = NAMES[:count]
            for lost in failures(devices):
                remaining = tuple(name for name in devices if name not in lost)
                for old in partitions(units, devices):
                    for new in partitions(units, remaining):
                        yield old, new, lost


def expected_source(old: StagePartition, unit: int, lost: tuple[str, ...]) -> str:
    """Return the device of a unit, else the keeper of its chain replica, else the coordinator."""
    holder = old.holder(unit)
    if holder not in lost:
        return holder
    keeper = old.successor(holder)
    if keeper not in lost:
        return keeper
    return "centre"


def number_of_small_cases() -> int:
    """Return the number of cases with at most 7 units and 5 devices, by binomials."""
    total = 0
    for units in range(1, 8):
        for count in range(1, min(units, 5) + 1):
            for lost in range(count):
                # Old cuts, lost devices other than the coordinator, and cuts over the remaining devices.
                old = comb(units - 1, count - 1)
                new = comb(units - 1, count - lost - 1)
                total += old * comb(count - 1, lost) * new
    return total


def check_need(
    old: StagePartition,
    new: StagePartition,
    lost: tuple[str, ...],
    device: str,
    need: Need,
) -> None:
    """Compare a device's units with its new stage, and their sources with Algorithm 1."""
    all_units = list(need.local)
    for source, units in need.fetch.items():
        assert list(units) == sorted(units)
        for unit in units:
            assert source == expected_source(old, unit, lost)
        all_units += units
    assert sorted(all_units) == list(new.of(device))
    assert device not in need.fetch
    assert not set(need.fetch) & set(lost)
    # Units that a device has in both partitions are never fetched.
    unchanged = set(old.of(device)) & set(new.of(device))
    assert unchanged <= set(need.local)


def test_every_device_gets_exactly_its_new_units_after_any_failure() -> None:
    cases = 0
    for old, new, lost in small_cases(7, 5):
        cases += 1
        plan = redistribution(old, new, lost)
        assert set(plan) == set(new.devices)
        for device, need in plan.items():
            check_need(old, new, lost, device, need)
    assert cases == number_of_small_cases()


def algorithm_1(
    p_new: list[int], p_cur: list[int], i_fail: int, i_cur: int, i_new: int
) -> tuple[dict, list[int]]:
    """Return M_need and L_local by the paper's listing and names; points are inclusive ends of stages."""
    n = len(p_cur) - 1  # the last index

    def ends(points: list[int], index: int) -> tuple[int, int]:
        begin = points[index - 1] + 1 if index else 0
        return begin, points[index]

    def stage_of(layer: int) -> int:
        return next(index for index in range(n + 1) if layer <= p_cur[index])

    start_cur, end_cur = ends(p_cur, i_cur)
    start_new, end_new = ends(p_new, i_new)
    local = []
    need: dict[int, list[int]] = {}
    for layer in range(start_new, end_new + 1):
        if start_cur <= layer <= end_cur:
            local.append(layer)
            continue
        target = stage_of(layer)
        # Stages behind the failed one move up; the replica of the last stage is at the coordinator.
        if target > i_fail:
            target -= 1
        elif target == i_fail == n:
            target = 0
        need.setdefault(target, []).append(layer)
    return need, local


def check_listing(
    old: StagePartition, new: StagePartition, failed: str, device: str, plan_need: Need
) -> None:
    """Compare the sources of a device's units with the listing, which identifies stages by their index."""
    need, local = algorithm_1(
        [cut - 1 for cut in new.cuts[1:]],
        [cut - 1 for cut in old.cuts[1:]],
        old.devices.index(failed),
        old.devices.index(device),
        new.devices.index(device),
    )
    sources = {}
    for target, layers in need.items():
        sources |= dict.fromkeys(layers, new.devices[target])
    assert set(local) <= set(plan_need.local)
    for source, units in plan_need.fetch.items():
        assert {sources[unit] for unit in units} == {source}
    # The listing fetches units even if their source is the device itself; the plan has them as local.
    from_itself = {layer for layer in sources if sources[layer] == device}
    assert set(plan_need.local) - set(local) == from_itself


def test_single_failure_matches_listing_of_algorithm_1() -> None:
    for old, new, lost in small_cases(6, 4):
        if len(lost) != 1:
            continue
        plan = redistribution(old, new, lost, global_replication=False)
        for device in new.devices:
            check_listing(old, new, lost[0], device, plan[device])


@given(st.data())
def test_repartition_without_failure_moves_only_missing_units(
    data: st.DataObject,
) -> None:
    units = data.draw(st.integers(1, 12))
    count = data.draw(st.integers(1, min(units, 5)))
    any_partition = st.sampled_from(list(partitions(units, NAMES[:count])))
    old = data.draw(any_partition)
    new = data.draw(any_partition)
    # Without a failure every device still has its units.
    moves = moved_units(redistribution(old, new))
    unchanged = 0
    for device in old.devices:
        unchanged += len(set(old.of(device)) & set(new.of(device)))
    assert len(moves) == units - unchanged
    for source, target, unit in moves:
        assert unit in old.of(source)
        assert unit in new.of(target)
    assert not moved_units(redistribution(old, old))


def test_replica_of_same_state_is_not_fetched_if_local_units_come_first() -> None:
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    new = StagePartition(NAMES[:3], (0, 1, 4, 6))
    move = ("centre", "one", 1)
    assert moved_units(needs(old, new, own_units(old))) == [move]
    assert moved_units(needs(old, new, chain_replicas(old), local_first=True)) == []
    assert moved_units(needs(old, new, chain_replicas(old))) == [move]


def test_replica_of_last_stage_is_at_coordinator() -> None:
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    new = StagePartition(NAMES[:2], (0, 3, 6))
    # Unit 3 stays at `one`; units 4 and 5 were those of the lost stage.
    plan = redistribution(old, new, ["two"], global_replication=False)
    assert plan["one"].fetch == {"centre": (4, 5)}
    assert plan["centre"].local == (0, 1)
    assert plan["centre"].fetch == {"one": (2,)}


def test_device_returning_without_state_fetches_its_units_from_next_stage() -> None:
    old = StagePartition(NAMES[:3], (0, 2, 4, 6))
    plan = redistribution(old, old, ["one"], global_replication=False)
    assert plan["one"].local == ()
    assert plan["one"].fetch == {"two": (2, 3)}
    assert plan["two"].fetch == plan["centre"].fetch == {}


def test_joining_device_fetches_all_its_units() -> None:
    old = StagePartition(NAMES[:2], (0, 2, 4))
    plan = redistribution(old, StagePartition(NAMES[:3], (0, 1, 2, 4)))
    assert plan["two"].fetch == {"one": (2, 3)}
    assert plan["one"].fetch == {"centre": (1,)}


def test_loss_of_two_neighbours_needs_global_replica() -> None:
    old = StagePartition(NAMES[:4], (0, 1, 2, 3, 4))
    new = StagePartition(("centre", "three"), (0, 2, 4))
    lost = ["one", "two"]
    # The chain replica of unit 1 was at `two`, which is lost with `one`.
    with pytest.raises(UnitsLostError, match="no device has the units 1 of") as caught:
        redistribution(old, new, lost, global_replication=False)
    assert caught.value.units == {1}
    assert missing_units(without_devices(chain_replicas(old), lost), 4) == {1}
    plan = redistribution(old, new, lost)
    assert plan["centre"].local == (0, 1)
    assert plan["three"].local == (2, 3)


def test_respipe_gives_units_of_lost_stages_to_next_stage() -> None:
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
    with pytest.raises(ValueError, match="all devices are lost"):
        take_over(old, NAMES)


def test_respipe_moves_units_only_after_loss_of_last_stage() -> None:
    for old, _, lost in small_cases(6, 4):
        if len(lost) != 1:
            continue
        new = take_over(old, lost)
        moves = moved_units(redistribution(old, new, lost, global_replication=False))
        # The replica of the last stage is at the coordinator, from which the stage before fetches the units.
        is_last = lost[0] == old.devices[-1] and len(old.devices) > 2
        expected = list(old.of(lost[0])) if is_last else []
        assert [unit for _, _, unit in moves] == expected


@pytest.mark.parametrize(
    ("devices", "cuts"),
    [
        pytest.param((), (0,), id="no-device"),
        pytest.param(("a", "a"), (0, 1, 2), id="repeated-device"),
        pytest.param(("a", "b"), (0, 2), id="too-few-cuts"),
        pytest.param(("a", "b"), (0, 2, 2), id="empty-stage"),
    ],
)
def test_invalid_stage_partition_is_rejected(
    devices: tuple[str, ...], cuts: tuple[int, ...]
) -> None:
    with pytest.raises(
        ValueError, match=r"partition needs one or more|cuts of . devices must be"
    ):
        StagePartition(devices, cuts)
