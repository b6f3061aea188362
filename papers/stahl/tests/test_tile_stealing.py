"""Idle devices take tiles that wait for others, where that is sooner; what comes out is the same."""

import pytest
from test_tile_overlap import crew, flow_of

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models.graph import graph_of
from testbed.trace.metrics import metrics
from testbed_stahl.demands import memory_needs
from testbed_stahl.method import DECLARED
from testbed_stahl.tile_work import tile_queue
from tests.helpers.inferences import CNN, distributed_scenario, run_inference
from tests.helpers.runs import fields_of

LAYERS = graph_of(create("cnn", {"channels": [4, 4, 4]}, (1, 16, 16), 10)).layers[:3]
SLOW = {"throttle": {"device": "worker1", "slowdown": 20}, "at": "0s"}


def queue(rows, columns, devices=2, overlap="compute"):
    flow = flow_of(
        LAYERS, rows, columns, devices, {"tile_overlap": overlap, "tile_stealing": True}
    )
    return flow, tile_queue(flow, [each.speed for each in crew(devices)])


def test_a_device_has_its_own_tiles_first_and_one_at_a_time() -> None:
    flow, found = queue(2, 2)
    found.add(7)
    for device in (0, 1):
        request, number = found.take(device, 0.0)
        assert (request, flow.plan.tiles[number].device) == (7, device)
        assert found.take(device, 0.0) is None


def test_who_is_done_takes_what_waits_for_a_slower_one_and_leaves_what_that_does_sooner() -> (
    None
):
    flow, found = queue(2, 2)
    found.add(0)
    first = found.take(0, 0.0), found.take(1, 0.0)
    found.done(0, 1.0)
    second = found.take(0, 1.0)
    found.done(0, 2.0)
    # The other has had its first tile for two seconds, which take this one a second each.
    (_, stolen) = found.take(0, 2.0)
    assert flow.plan.tiles[stolen].device == 1
    found.done(1, 2.5)
    assert found.take(1, 2.5) is None
    assert {first[0][1], first[1][1], second[1], stolen} == {0, 1, 2, 3}
    _, other = queue(1, 2)
    other.add(0)
    other.take(1, 0.0)
    other.done(1, 9.0)
    # It took nine seconds for one, so it leaves the other to the device whose it is.
    assert other.take(1, 9.0) is None
    assert other.take(0, 9.0) is not None


def test_a_tile_waits_for_those_that_it_takes_from_and_other_requests_go_on() -> None:
    _, found = queue(1, 2, overlap="reuse")
    found.add(0)
    assert found.take(0, 0.0) == (0, 0)
    assert found.take(1, 0.0) is None
    found.add(1)
    assert found.take(1, 0.0) == (1, 0)
    found.done(0, 1.0)
    assert found.take(0, 1.0) == (0, 1)


@pytest.mark.parametrize("overlap", ["compute", "reuse"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_slow_device_loses_tiles_and_nothing_else_changes(overlap, in_flight) -> None:
    method = {
        "tiled_layers": 4,
        "tile_grid": [4, 4],
        "tile_overlap": overlap,
        "tile_stealing": True,
        "in_flight": in_flight,
    }
    found = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 4}, faults=[SLOW])
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert found.error < 1e-6
    figures = metrics(found.outcome, found.experiment, found.plan, DECLARED)
    given = fields_of(found.outcome, "tile")
    assert sorted((each["request"], each["tile"]) for each in given) == [
        (n, k) for n in range(4) for k in range(16)
    ]
    assert (
        figures["tiles_stolen"]
        == sum(each["owner"] != each["by"] for each in given)
        > 0
    )
    kept, own = (
        sum(each[key] == "worker1" for each in given) for key in ("by", "owner")
    )
    assert kept < own / 2
    for name, bound in zip(
        found.flow.plan.devices, memory_needs(found.flow), strict=True
    ):
        assert (
            figures["devices"][name]["weights"]
            + figures["devices"][name]["activations"]
            <= bound
        )
    alone = run_inference(
        distributed_scenario(
            2,
            {**method, "tile_stealing": False},
            {"model": CNN, "requests": 4},
            faults=[SLOW],
        )
    )
    assert "tiles_stolen" not in metrics(
        alone.outcome, alone.experiment, alone.plan, DECLARED
    )
    ends = [each.outcome.events[-1].time for each in (found, alone)]
    assert ends[0] < ends[1]


def test_a_thief_that_dies_is_done_without() -> None:
    kill = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "forward", "batch": 1},
    }
    method = {
        "tiled_layers": 4,
        "tile_grid": [4, 4],
        "tile_overlap": "reuse",
        "tile_stealing": True,
    }
    method |= {"stall_timeout": "500ms", "rejoin_timeout": "1s"}
    found = run_inference(
        distributed_scenario(
            2, method, {"model": CNN, "requests": 3}, faults=[SLOW, kill]
        )
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert found.error < 1e-6


def test_without_tiles_there_is_nothing_to_steal_or_to_reuse() -> None:
    for key, value in (("tile_stealing", True), ("tile_overlap", "reuse")):
        with pytest.raises(InputError, match=f"method.{key}: no layer of mlp is tiled"):
            run_inference(distributed_scenario(2, {"tiled_layers": 0, key: value}))
