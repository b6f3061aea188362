"""Tiles that reuse what their neighbours have: exactly the undivided network, nothing in vain, as predicted."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distributed_tiles import compute, cut, early, window

from testbed.hardware import DeviceSpec
from testbed.ml.models.graph import Graph, GraphLayer
from testbed.trace.metrics import metrics
from testbed_stahl.candidates import best_candidate
from testbed_stahl.communication import (
    all_transfers,
    make_phases,
    predict_latency,
    sent_elements,
    tile_transfers,
)
from testbed_stahl.demands import count_multiplications, memory_needs
from testbed_stahl.plan import Region
from testbed_stahl.request_work import Ledger
from testbed_stahl.tile_work import compute_tile
from testbed_stahl.tiles import is_late, redundant_multiplications
from tests.helpers.graphs import plan_settings, yolov2
from tests.helpers.inferences import CNN, distributed_scenario, run_inference
from tests.helpers.runs import fields_of

REUSE = {"tile_overlap": "reuse"}
YOLO = yolov2()


@dataclass(frozen=True)
class Kernels:
    """A layer with integers for weights: its sums are exact in whichever order."""

    layer: GraphLayer
    values: torch.Tensor | None

    def tile(self, inputs: torch.Tensor, around: tuple[int, ...]) -> torch.Tensor:
        return torch.stack(
            [compute(self.layer, self.values, each, around) for each in inputs]
        )


def crew(count: int) -> list[DeviceSpec]:
    return [DeviceSpec(f"d{index}", 1e9, 1e12) for index in range(count)]


def flow_of(layers, rows, columns, devices=1, options=REUSE):
    request = plan_settings(
        "lop", tiled_layers=len(layers), tile_grid=(rows, columns), **options
    )
    return best_candidate(Graph("n", tuple(layers)), crew(devices), request).flow


@settings(max_examples=40, deadline=None)
@given(early(), st.data())
def test_the_map_is_that_of_the_undivided_layers_to_the_bit(
    layers: list[GraphLayer], data: st.DataObject
) -> None:
    _, height, width = layers[-1].output
    rows, columns = (
        data.draw(st.integers(1, min(5, height))),
        data.draw(st.integers(1, min(5, width))),
    )
    flow = flow_of(layers, rows, columns)
    draws = torch.Generator().manual_seed(1)
    kernels = [
        Kernels(
            each,
            torch.randint(
                -2, 3, each.sequence[0].weight_shape(each.input), generator=draws
            ).double(),
        )
        if each.weights
        else Kernels(each, None)
        for each in layers
    ]
    image = torch.randint(-4, 5, (1, *layers[0].input), generator=draws).double()
    whole = image
    for each in kernels:
        whole = each.tile(whole, (window(each.layer).padding,) * 4)
    ledger, lent = Ledger("a", 1e12), {}
    tiles = list(enumerate(flow.plan.tiles))
    for number, tile in sorted(
        tiles, key=lambda each: is_late(each[1].row, each[1].column)
    ):
        taken = {
            one: tensor for (one, other), tensor in lent.items() if other == number
        }
        part = cut(image[0], tile.regions[0])[None]
        made, found = compute_tile(flow, number, kernels, part, taken, ledger)
        assert torch.equal(made[0], cut(whole[0], tile.regions[-1]))
        lent |= {(number, borrower): tensor for borrower, tensor in found.items()}
    assert lent.keys() == flow.overlaps.keys()
    assert ledger.activations == 8 * sum(tensor.numel() for tensor in lent.values())


@settings(max_examples=40, deadline=None)
@given(early(), st.data())
def test_a_tile_has_each_pixel_once_from_itself_or_one_neighbour(
    layers: list[GraphLayer], data: st.DataObject
) -> None:
    _, height, width = layers[-1].output
    flow = flow_of(
        layers,
        data.draw(st.integers(1, min(5, height))),
        data.draw(st.integers(1, min(5, width))),
    )
    for number, tile in enumerate(flow.plan.tiles):
        for layer, (region, made) in enumerate(
            zip(tile.regions[1:], flow.computed[number], strict=True)
        ):
            found = torch.zeros(1, *layers[layer].output[1:])
            taken = [each for parts in flow.overlaps.values() for each in parts]
            mine = [
                each for each in taken if (each.borrower, each.layer) == (number, layer)
            ]
            for part in [made, *(each.region for each in mine)]:
                cut(found, part).add_(1)
            assert found.sum() == region.pixels
            assert torch.equal(cut(found, region), torch.ones_like(cut(found, region)))
            for each in mine:
                assert _inside(each.region, flow.computed[each.lender][layer])


def _inside(one: Region, other: Region) -> bool:
    rows = other.top <= one.top and one.bottom <= other.bottom
    return rows and other.left <= one.left and one.right <= other.right


def test_what_yolov2_saves_on_six_devices() -> None:
    """At 16 layers and 3x4 tiles: two thirds more multiplications become a tenth, and fewer elements are sent."""
    figures = []
    for options in (
        {"exchange": "direct"},
        {"exchange": "direct", "tile_overlap": "reuse"},
        {"tile_overlap": "reuse"},
    ):
        flow = best_candidate(
            YOLO,
            crew(6),
            plan_settings("lop", tiled_layers=16, tile_grid=(3, 4), **options),
        ).flow
        redundant = (
            redundant_multiplications(YOLO.layers[:16], flow.computed)
            / YOLO.multiplications
        )
        figures.append((redundant, sent_elements(tile_transfers(flow))))
    (plain, all_), (direct, saved), (through, less) = figures
    assert direct == through < plain / 6
    assert saved < less < all_
    # By hand: a 1x2 grid over one 3x3 after another, 8x8 pixels; the second tile takes two columns of the map between.
    layers = [
        GraphLayer(f"c{index}", YOLO.layers[0].sequence, (32, 8, 8), (index - 1,))
        for index in range(2)
    ]
    flow = flow_of(layers, 1, 2, devices=2)
    ((pair, (taken,)),) = flow.overlaps.items()
    assert (pair, taken.layer, taken.region) == ((0, 1), 0, (0, 8, 3, 5))
    assert [made.pixels for made in flow.computed[1]] == [8 * 3, 8 * 4]
    assert flow.plan.tiles[1].regions[0] == (0, 8, 4, 8)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("grid", [[1, 4], [3, 3], [4, 4]])
def test_runs_give_what_the_whole_network_gives_within_the_memory_that_is_planned(
    exchange, grid
) -> None:
    method = {
        "tiled_layers": 4,
        "tile_grid": grid,
        "exchange": exchange,
        "tile_overlap": "reuse",
        "in_flight": 2,
    }
    found = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 3})
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert found.error < 1e-6
    held = metrics(found.outcome, found.experiment, found.plan)["devices"]
    for name, bound in zip(
        found.flow.plan.devices, memory_needs(found.flow), strict=True
    ):
        assert held[name]["weights"] + held[name]["activations"] <= bound
    sent = [
        event
        for event in fields_of(found.outcome, "send")
        if event["message"] in ("tile", "overlap", "tiled")
    ]
    assert len(sent) == 3 * len(tile_transfers(found.flow))
    computed = sum(
        event["flops"]
        for event in fields_of(found.outcome, "compute")
        if event.get("micro") == 0
    )
    assert computed == 3 * 2 * 2 * sum(
        sum(row) for row in count_multiplications(found.flow)[: found.flow.tiled]
    )


def test_a_device_that_dies_between_tiles_is_done_without() -> None:
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "forward", "batch": 1},
    }
    method = {
        "tiled_layers": 4,
        "tile_grid": [3, 3],
        "tile_overlap": "reuse",
        "stall_timeout": "500ms",
        "rejoin_timeout": "1s",
    }
    found = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 3}, faults=[kill])
    )
    assert found.outcome.status == "finished", found.outcome.error
    assert found.error < 1e-6


def test_the_time_is_predicted() -> None:
    method = {"tiled_layers": 4, "tile_grid": [2, 3], "tile_overlap": "reuse"}
    keys = {
        "network": {"link": {"rate": "20mbit", "delay": "2ms"}},
        "speed": "200mflops",
    }
    found = run_inference(
        distributed_scenario(
            2,
            method,
            {"model": {"name": "cnn", "channels": [16, 16, 16]}, "requests": 3},
            **keys,
        )
    )
    latency = fields_of(found.outcome, "request")[-1]["latency"]
    predicted = predict_latency(
        make_phases(found.flow, found.experiment.devices, found.experiment.links)
    )
    assert latency == pytest.approx(predicted, rel=0.15)
    assert sent_elements(all_transfers(found.flow)) > sent_elements(
        tile_transfers(found.flow)
    )
