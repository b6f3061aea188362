"""Tests of replication intervals, the point to resume from, cases of failures, and estimated capacities."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.partition.redistribution import StagePartition, needs
from testbed.ml.pipeline.placement import (
    FailureCase,
    classify_failure,
    newest_complete_step,
    units_after,
)
from testbed_ftpipehd.method import (
    AdaptivePartitioner,
    FTPipeHDOptions,
    estimate_capacities,
    is_worthwhile,
)
from tests.helpers.replicas import chain_replicas, gathered_units, without_devices

ROW = StagePartition(("centre", "one", "two", "three"), (0, 2, 4, 6, 8))
INITIAL = {"centre": set(range(8))}
Inventory = dict[str, dict[int, set[int]]]


def repartition_checks(options: FTPipeHDOptions) -> list[int]:
    """Return the numbers of batches, up to 300, after which a better partition is looked for."""
    partitioner = AdaptivePartitioner(SimpleNamespace(options=options))  # type: ignore[arg-type]
    return [done for done in range(301) if partitioner.is_repartition_due(done)]


def test_default_intervals_are_those_of_paper() -> None:
    options = FTPipeHDOptions()
    chain = [done for done in range(301) if options.is_chain_replication_due(done)]
    assert chain == [50, 100, 150, 200, 250, 300]
    assert [done for done in range(301) if options.is_global_replication_due(done)] == [
        100,
        200,
        300,
    ]
    assert repartition_checks(options) == [10, 100, 200, 300]


def test_interval_of_zero_disables_replication_and_repartition() -> None:
    without_replication = FTPipeHDOptions(
        chain_replication_interval=0, global_replication_interval=0
    )
    assert not without_replication.is_chain_replication_due(50)
    fixed = FTPipeHDOptions(repartition_first=0, repartition_every=0)
    assert repartition_checks(fixed) == []


def make_inventory(states: dict[int, dict[str, set[int]]]) -> Inventory:
    """Return the units by device and step, from the units by step and device."""
    inventory: Inventory = {device: {} for device in ROW.devices}
    for done, units_by_device in states.items():
        for device, units in units_by_device.items():
            inventory[device][done] = units
    return inventory


def test_training_resumes_from_newest_state_that_lost_devices_leave_complete() -> None:
    inventory = make_inventory(
        {0: INITIAL, 100: gathered_units(ROW), 150: chain_replicas(ROW)}
    )

    def resume_without(*lost: str) -> int | None:
        remaining = {
            device: steps for device, steps in inventory.items() if device not in lost
        }
        return newest_complete_step(remaining, 8)

    for lost in ((), ("one",), ("three",), ("one", "three")):
        assert resume_without(*lost) == 150
    # Neighbours hold each other's replicas, so only the older global replica remains.
    for lost in (("one", "two"), ("two", "three"), ("one", "two", "three")):
        assert resume_without(*lost) == 100
    assert newest_complete_step({}, 8) is None
    assert newest_complete_step(make_inventory({0: INITIAL}), 8) == 0
    assert units_after(inventory, 0) == INITIAL


def test_interrupted_replication_counts_only_if_no_unit_is_missing() -> None:
    states = {0: INITIAL, 150: chain_replicas(ROW)}
    interrupted = without_devices(chain_replicas(ROW), ["three"])
    # Units 6 and 7 are those of stage `three`, whose replicas go to the coordinator.
    without_replica = interrupted | {"centre": interrupted["centre"] - {6, 7}}
    assert (
        newest_complete_step(make_inventory({**states, 200: without_replica}), 8) == 150
    )
    assert newest_complete_step(make_inventory({**states, 200: interrupted}), 8) == 200


def test_state_before_repartition_is_fetched_by_old_partition() -> None:
    # Replicated after 200 batches, repartitioned after 210, and a device lost after 230.
    new = StagePartition(("centre", "one", "three"), (0, 1, 3, 8))
    replicas = without_devices(chain_replicas(ROW), ["two"])
    plan = needs(ROW, new, replicas, local_first=True)
    assert plan["three"].local == (4, 5, 6, 7)
    assert plan["three"].fetch == {"one": (3,)}
    assert plan["one"].local == (1, 2)
    assert plan["centre"].local == (0,)


def test_failure_is_restart_refill_or_redistribution() -> None:
    # Incarnations of the devices' programs: another number is a restart without memory.
    stages = {"one": 0.5, "two": 0.6, "three": 0.7}
    restart = FailureCase("restart", (), ())
    assert classify_failure(stages, stages) == restart
    assert classify_failure(stages, {**stages, "spare": 3.0}) == restart
    assert classify_failure({}, {}).case == "restart"
    refill = classify_failure(stages, {**stages, "two": 9.0})
    assert refill == FailureCase("refill", (), ("two",))
    assert refill.lost == ("two",)
    redistribute = classify_failure(stages, {"one": 0.5, "three": 0.7})
    assert redistribute == FailureCase("redistribute", ("two",), ())
    gone_and_empty = classify_failure(stages, {"one": 8.0})
    assert gone_and_empty == FailureCase("redistribute", ("two", "three"), ("one",))
    assert gone_and_empty.lost == ("two", "three", "one")
    two_empty = classify_failure(stages, {"one": 8.0, "two": 9.0, "three": 0.7})
    assert two_empty.case == "redistribute"


def test_capacities_are_ratios_of_observed_to_profiled_times() -> None:
    execution = (1.0, 2.0, 3.0, 4.0)
    cuts = (0, 2, 3, 4)
    # Stages of 3, 3 and 4 s on the coordinator.
    assert estimate_capacities(execution, cuts, (3.0, 6.0, 40.0)) == (1.0, 2.0, 10.0)
    # A stage without observation counts as fast as the coordinator.
    assert estimate_capacities(execution, cuts, (None, None, 2.0)) == (1.0, 1.0, 0.5)
    with pytest.raises(ValueError, match="zip"):
        estimate_capacities(execution, (0, 2, 4), (3.0,))


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=8),
    st.lists(st.floats(0.05, 20), min_size=2, max_size=2),
)
def test_estimated_capacities_equal_those_that_caused_observed_times(
    execution: list[float], of_workers: list[float]
) -> None:
    cuts = (0, 1, 2, len(execution))
    capacities = (1.0, *of_workers)
    observed = []
    for stage, capacity in enumerate(capacities):
        first, last = cuts[stage : stage + 2]
        observed.append(capacity * sum(execution[first:last]))
    estimated = estimate_capacities(execution, cuts, observed)
    assert estimated == pytest.approx(capacities)


def test_repartition_is_worthwhile_from_a_minimum_improvement() -> None:
    assert is_worthwhile(2.0, 1.9)
    assert not is_worthwhile(2.0, 1.99)
    assert not is_worthwhile(1.0, 1.0)
