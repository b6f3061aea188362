"""When replicas are made, what training resumes from, which case a failure is, and what is learnt of the devices."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.partition.redistribution import StagePartition, needs
from testbed.ml.pipeline.placement import (
    FailureCase,
    classify_failure,
    resume_point,
    units_at,
)
from testbed_ftpipehd.method import (
    AdaptivePartitioner,
    FTPipeHDOptions,
    estimate_capacities,
    is_worthwhile,
)
from tests.helpers.replicas import chain_replicas, gathered_units, without_devices

ROW = StagePartition(("centre", "one", "two", "three"), (0, 2, 4, 6, 8))


def test_the_papers_schedule() -> None:
    options = FTPipeHDOptions()
    assert [done for done in range(301) if options.chain_due(done)] == [
        50,
        100,
        150,
        200,
        250,
        300,
    ]
    assert [done for done in range(301) if options.global_due(done)] == [100, 200, 300]
    assert not FTPipeHDOptions(
        chain_replication_interval=0, global_replication_interval=0
    ).chain_due(50)
    assert looked_for(options) == [10, 100, 200, 300]
    assert looked_for(FTPipeHDOptions(repartition_first=0, repartition_every=0)) == []


def looked_for(options: FTPipeHDOptions) -> list[int]:
    """Return after how many batches a better partition is looked for."""
    partitioner = AdaptivePartitioner(SimpleNamespace(options=options))  # type: ignore[arg-type]
    return [done for done in range(301) if partitioner.due(done)]


def inventory(states: dict[int, dict[str, set[int]]]) -> dict[str, dict[int, set[int]]]:
    return {
        device: {done: held[device] for done, held in states.items() if device in held}
        for device in ROW.devices
    }


def test_what_training_resumes_from() -> None:
    initial = {"centre": set(range(8))}
    whole = inventory({0: initial, 100: gathered_units(ROW), 150: chain_replicas(ROW)})

    def after(*lost: str) -> int | None:
        return resume_point(
            {device: held for device, held in whole.items() if device not in lost}, 8
        )

    assert after() == after("one") == after("three") == after("one", "three") == 150
    # Neighbours hold each other's replica: then the central node's, which is older.
    assert (
        after("one", "two")
        == after("two", "three")
        == after("one", "two", "three")
        == 100
    )
    # A replication that was cut off is no state to resume from, but one that lacks nothing is.
    partial = {
        device: set(units)
        for device, units in chain_replicas(ROW).items()
        if device != "three"
    }
    partial["centre"] -= {6, 7}
    cut_off = {
        device: {**held, 200: partial.get(device, set())}
        for device, held in whole.items()
    }
    assert resume_point(cut_off, 8) == 150
    partial["centre"] |= {6, 7}
    assert (
        resume_point(
            {
                device: {**held, 200: partial.get(device, set())}
                for device, held in whole.items()
            },
            8,
        )
        == 200
    )
    assert resume_point({}, 8) is None
    assert resume_point(inventory({0: initial}), 8) == 0
    assert units_at(whole, 0) == initial


def test_a_state_older_than_the_partition_is_found_under_the_one_that_replicated_it() -> (
    None
):
    """Replicated after 200 batches, repartitioned after 210, a death after 230."""
    now = StagePartition(("centre", "one", "three"), (0, 1, 3, 8))
    plan = needs(
        ROW, now, without_devices(chain_replicas(ROW), ["two"]), local_first=True
    )
    assert plan["three"].local == (4, 5, 6, 7)
    assert plan["three"].fetch == {"one": (3,)}
    assert plan["one"].local == (1, 2)
    assert plan["centre"].local == (0,)


def test_the_three_cases() -> None:
    stages = {"one": 0.5, "two": 0.6, "three": 0.7}
    assert classify_failure(stages, stages) == FailureCase("restart", (), ())
    assert classify_failure(stages, {**stages, "spare": 3.0}) == FailureCase(
        "restart", (), ()
    )
    empty = classify_failure(stages, {**stages, "two": 9.0})
    assert empty == FailureCase("refill", (), ("two",))
    assert empty.lost == ("two",)
    assert classify_failure(stages, {"one": 0.5, "three": 0.7}) == FailureCase(
        "redistribute", ("two",), ()
    )
    both = classify_failure(stages, {"one": 8.0})
    assert both == FailureCase("redistribute", ("two", "three"), ("one",))
    assert both.lost == ("two", "three", "one")
    assert (
        classify_failure(stages, {"one": 8.0, "two": 9.0, "three": 0.7}).case
        == "redistribute"
    )
    assert classify_failure({}, {}).case == "restart"


def test_capacities_follow_from_what_is_observed() -> None:
    execution = (1.0, 2.0, 3.0, 4.0)
    assert estimate_capacities(execution, (0, 2, 3, 4), (3.0, 6.0, 40.0)) == (
        1.0,
        2.0,
        10.0,
    )
    assert estimate_capacities(execution, (0, 2, 3, 4), (None, None, 2.0)) == (
        1.0,
        1.0,
        0.5,
    )
    with pytest.raises(ValueError, match="zip"):
        estimate_capacities(execution, (0, 2, 4), (3.0,))


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=8),
    st.lists(st.floats(0.05, 20), min_size=2, max_size=2),
)
def test_estimates_recover_the_capacities_that_made_the_times(
    execution: list[float], true: list[float]
) -> None:
    cuts = (0, 1, 2, len(execution))
    observed = [
        capacity * sum(execution[first:last])
        for capacity, first, last in zip((1.0, *true), cuts[:-1], cuts[1:], strict=True)
    ]
    assert estimate_capacities(execution, cuts, observed) == pytest.approx((1.0, *true))


def test_what_is_worth_a_change() -> None:
    assert is_worthwhile(2.0, 1.9)
    assert not is_worthwhile(2.0, 1.99)
    assert not is_worthwhile(1.0, 1.0)
