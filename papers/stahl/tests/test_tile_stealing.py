"""Tile stealing: idle devices compute waiting tiles of slower devices."""

import pytest
from test_tile_overlap import flow_of, make_devices

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models.graph import graph_of
from testbed.trace.metrics import metrics
from testbed_stahl.demands import memory_needs
from testbed_stahl.method import DECLARED
from testbed_stahl.tile_work import make_tile_queue
from tests.helpers.inferences import CNN, distributed_scenario, run_inference
from tests.helpers.runs import fields_of

LAYERS = graph_of(create("cnn", {"channels": [4, 4, 4]}, (1, 16, 16), 10)).layers[:3]
SLOW = {"throttle": {"device": "worker1", "slowdown": 20}, "at": "0s"}


def make_queue(rows, columns, devices=2, overlap="compute"):
    flow = flow_of(
        LAYERS, rows, columns, devices, {"tile_overlap": overlap, "tile_stealing": True}
    )
    return flow, make_tile_queue(
        flow, [device.speed for device in make_devices(devices)]
    )


def test_device_takes_own_tiles_first_and_one_at_once() -> None:
    flow, queue = make_queue(2, 2)
    queue.add(7)
    for device in (0, 1):
        request, number = queue.take(device, 0.0)
        assert (request, flow.plan.tiles[number].device) == (7, device)
        assert queue.take(device, 0.0) is None


def test_idle_device_steals_tile_only_if_faster_than_owner() -> None:
    flow, queue = make_queue(2, 2)
    queue.add(0)
    first = queue.take(0, 0.0), queue.take(1, 0.0)
    queue.done(0, 1.0)
    second = queue.take(0, 1.0)
    queue.done(0, 2.0)
    # Device 1 has computed its first tile for two seconds; device 0 needs one second for a tile.
    (_, stolen) = queue.take(0, 2.0)
    assert flow.plan.tiles[stolen].device == 1
    queue.done(1, 2.5)
    assert queue.take(1, 2.5) is None
    assert {first[0][1], first[1][1], second[1], stolen} == {0, 1, 2, 3}
    _, slow_queue = make_queue(1, 2)
    slow_queue.add(0)
    slow_queue.take(1, 0.0)
    slow_queue.done(1, 9.0)
    # A device that needs nine seconds for a tile leaves the other tile to its owner.
    assert slow_queue.take(1, 9.0) is None
    assert slow_queue.take(0, 9.0) is not None


def test_tile_waits_for_lenders_while_other_requests_continue() -> None:
    _, queue = make_queue(1, 2, overlap="reuse")
    queue.add(0)
    assert queue.take(0, 0.0) == (0, 0)
    assert queue.take(1, 0.0) is None
    queue.add(1)
    assert queue.take(1, 0.0) == (1, 0)
    queue.done(0, 1.0)
    assert queue.take(0, 1.0) == (0, 1)


@pytest.mark.parametrize("overlap", ["compute", "reuse"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_tiles_are_stolen_from_slow_device_without_other_effects(
    overlap, in_flight
) -> None:
    method = {
        "tiled_layers": 4,
        "tile_grid": [4, 4],
        "tile_overlap": overlap,
        "tile_stealing": True,
        "in_flight": in_flight,
    }
    inference = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 4}, faults=[SLOW])
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-6
    values = metrics(inference.outcome, inference.experiment, inference.plan, DECLARED)
    tile_events = fields_of(inference.outcome, "tile")
    assert sorted((event["request"], event["tile"]) for event in tile_events) == [
        (n, k) for n in range(4) for k in range(16)
    ]
    stolen = [event for event in tile_events if event["owner"] != event["by"]]
    assert values["tiles_stolen"] == len(stolen) > 0
    computed, owned = (
        sum(event[key] == "worker1" for event in tile_events) for key in ("by", "owner")
    )
    assert computed < owned / 2
    for name, bound in zip(
        inference.flow.plan.devices, memory_needs(inference.flow), strict=True
    ):
        memory = values["devices"][name]
        assert memory["weights"] + memory["activations"] <= bound
    method["tile_stealing"] = False
    without = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 4}, faults=[SLOW])
    )
    assert "tiles_stolen" not in metrics(
        without.outcome, without.experiment, without.plan, DECLARED
    )
    # Stealing shortens the run.
    assert inference.outcome.events[-1].time < without.outcome.events[-1].time


def test_request_survives_loss_of_stealing_device() -> None:
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
    inference = run_inference(
        distributed_scenario(
            2, method, {"model": CNN, "requests": 3}, faults=[SLOW, kill]
        )
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-6


def test_stealing_or_reuse_without_tiles_is_rejected() -> None:
    for key, value in (("tile_stealing", True), ("tile_overlap", "reuse")):
        with pytest.raises(InputError, match=f"method.{key}: no layer of mlp is tiled"):
            run_inference(distributed_scenario(2, {"tiled_layers": 0, key: value}))
