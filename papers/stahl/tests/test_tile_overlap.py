"""Tiles that reuse overlapping values of neighbouring tiles."""

from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distributed_tiles import compute_layer, cut, early_layers, window

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
from testbed_stahl.tiles import redundant_multiplications, waits_for_neighbours
from tests.helpers.graphs import plan_settings, yolov2
from tests.helpers.inferences import CNN, distributed_scenario, run_inference
from tests.helpers.runs import fields_of

REUSE = {"tile_overlap": "reuse"}
YOLO = yolov2()


@dataclass(frozen=True)
class Kernels:
    """A layer with integer weights, whose sums are exact in any order."""

    layer: GraphLayer
    values: torch.Tensor | None

    def tile(self, inputs: torch.Tensor, around: tuple[int, ...]) -> torch.Tensor:
        return torch.stack(
            [
                compute_layer(self.layer, self.values, sample, around)
                for sample in inputs
            ]
        )


def make_devices(count: int) -> list[DeviceSpec]:
    return [DeviceSpec(f"d{index}", 1e9, 1e12) for index in range(count)]


def flow_of(layers, rows, columns, devices=1, options=REUSE):
    request = plan_settings(
        "lop", tiled_layers=len(layers), tile_grid=(rows, columns), **options
    )
    return best_candidate(
        Graph("n", tuple(layers)), make_devices(devices), request
    ).flow


def draw_kernels(layer: GraphLayer, draws: torch.Generator) -> Kernels:
    if not layer.weights:
        return Kernels(layer, None)
    shape = layer.sequence[0].weight_shape(layer.input)
    return Kernels(layer, torch.randint(-2, 3, shape, generator=draws).double())


@settings(max_examples=40, deadline=None)
@given(early_layers(), st.data())
def test_tiles_with_reuse_equal_undivided_layers_exactly(
    layers: list[GraphLayer], data: st.DataObject
) -> None:
    _, height, width = layers[-1].output
    rows = data.draw(st.integers(1, min(5, height)))
    columns = data.draw(st.integers(1, min(5, width)))
    flow = flow_of(layers, rows, columns)
    draws = torch.Generator().manual_seed(1)
    kernels = [draw_kernels(layer, draws) for layer in layers]
    image = torch.randint(-4, 5, (1, *layers[0].input), generator=draws).double()
    expected = image
    for kernel in kernels:
        padding = window(kernel.layer).padding
        expected = kernel.tile(expected, (padding,) * 4)
    ledger, lent = Ledger("a", 1e12), {}
    tiles = list(enumerate(flow.plan.tiles))
    # Late tiles borrow from early ones, which must be computed first.
    tiles.sort(key=lambda item: waits_for_neighbours(item[1].row, item[1].column))
    for number, tile in tiles:
        borrowed = {
            lender: tensor
            for (lender, borrower), tensor in lent.items()
            if borrower == number
        }
        part = cut(image[0], tile.regions[0])[None]
        output, overlaps = compute_tile(flow, number, kernels, part, borrowed, ledger)
        assert torch.equal(output[0], cut(expected[0], tile.regions[-1]))
        lent |= {(number, borrower): tensor for borrower, tensor in overlaps.items()}
    assert lent.keys() == flow.overlaps.keys()
    assert ledger.activations == 8 * sum(tensor.numel() for tensor in lent.values())


@settings(max_examples=40, deadline=None)
@given(early_layers(), st.data())
def test_pixels_of_tile_come_from_exactly_one_tile(
    layers: list[GraphLayer], data: st.DataObject
) -> None:
    _, height, width = layers[-1].output
    flow = flow_of(
        layers,
        data.draw(st.integers(1, min(5, height))),
        data.draw(st.integers(1, min(5, width))),
    )
    for number, tile in enumerate(flow.plan.tiles):
        regions = zip(tile.regions[1:], flow.computed_regions[number], strict=True)
        for layer, (region, computed) in enumerate(regions):
            counts = torch.zeros(1, *layers[layer].output[1:])
            cut(counts, computed).add_(1)
            for overlap in chain.from_iterable(flow.overlaps.values()):
                if (overlap.borrower, overlap.layer) == (number, layer):
                    cut(counts, overlap.region).add_(1)
                    lent = flow.computed_regions[overlap.lender][layer]
                    assert is_inside(overlap.region, lent)
            assert counts.sum() == region.pixels
            needed = cut(counts, region)
            assert torch.equal(needed, torch.ones_like(needed))


def is_inside(inner: Region, outer: Region) -> bool:
    has_rows = outer.top <= inner.top and inner.bottom <= outer.bottom
    has_columns = outer.left <= inner.left and inner.right <= outer.right
    return has_rows and has_columns


def test_reuse_saves_computation_and_traffic_for_yolov2() -> None:
    # With 16 layers and 3x4 tiles, redundant multiplications fall from two thirds of the network to a tenth.
    shares, traffic = [], []
    for options in (
        {"exchange": "direct"},
        {"exchange": "direct", "tile_overlap": "reuse"},
        {"tile_overlap": "reuse"},
    ):
        flow = best_candidate(
            YOLO,
            make_devices(6),
            plan_settings("lop", tiled_layers=16, tile_grid=(3, 4), **options),
        ).flow
        redundant = redundant_multiplications(YOLO.layers[:16], flow.computed_regions)
        shares.append(redundant / YOLO.multiplications)
        traffic.append(sent_elements(tile_transfers(flow)))
    assert shares[1] == shares[2] < shares[0] / 6
    # Overlaps that pass the source are sent twice.
    assert traffic[1] < traffic[2] < traffic[0]
    # Hand-computed: for two 3x3 layers on 8x8 pixels in a 1x2 grid, the second tile borrows two columns of the map
    # between the layers.
    layers = [
        GraphLayer(f"c{index}", YOLO.layers[0].sequence, (32, 8, 8), (index - 1,))
        for index in range(2)
    ]
    flow = flow_of(layers, 1, 2, devices=2)
    ((pair, (overlap,)),) = flow.overlaps.items()
    assert (pair, overlap.layer, overlap.region) == ((0, 1), 0, (0, 8, 3, 5))
    assert [region.pixels for region in flow.computed_regions[1]] == [8 * 3, 8 * 4]
    assert flow.plan.tiles[1].regions[0] == (0, 8, 4, 8)


@pytest.mark.parametrize("exchange", ["via-source", "direct"])
@pytest.mark.parametrize("grid", [[1, 4], [3, 3], [4, 4]])
def test_run_with_reuse_is_correct_within_planned_memory(exchange, grid) -> None:
    method = {
        "tiled_layers": 4,
        "tile_grid": grid,
        "exchange": exchange,
        "tile_overlap": "reuse",
        "in_flight": 2,
    }
    inference = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 3})
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-6
    measured = metrics(inference.outcome, inference.experiment, inference.plan)[
        "devices"
    ]
    for name, bound in zip(
        inference.flow.plan.devices, memory_needs(inference.flow), strict=True
    ):
        assert measured[name]["weights"] + measured[name]["activations"] <= bound
    sent = [
        event
        for event in fields_of(inference.outcome, "send")
        if event["message"] in ("tile", "overlap", "tiled")
    ]
    assert len(sent) == 3 * len(tile_transfers(inference.flow))
    computed = sum(
        event["flops"]
        for event in fields_of(inference.outcome, "compute")
        if event.get("micro") == 0
    )
    assert computed == 3 * 2 * 2 * sum(
        sum(row)
        for row in count_multiplications(inference.flow)[: inference.flow.tiled_count]
    )


def test_request_survives_loss_of_device_between_tiles() -> None:
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
    inference = run_inference(
        distributed_scenario(2, method, {"model": CNN, "requests": 3}, faults=[kill])
    )
    assert inference.outcome.status == "finished", inference.outcome.error
    assert inference.error < 1e-6


def test_predicted_latency_matches_run_with_reuse() -> None:
    method = {"tiled_layers": 4, "tile_grid": [2, 3], "tile_overlap": "reuse"}
    keys = {
        "network": {"link": {"rate": "20mbit", "delay": "2ms"}},
        "speed": "200mflops",
    }
    inference = run_inference(
        distributed_scenario(
            2,
            method,
            {"model": {"name": "cnn", "channels": [16, 16, 16]}, "requests": 3},
            **keys,
        )
    )
    latency = fields_of(inference.outcome, "request")[-1]["latency"]
    predicted = predict_latency(
        make_phases(
            inference.flow, inference.experiment.devices, inference.experiment.links
        )
    )
    assert latency == pytest.approx(predicted, rel=0.15)
    assert sent_elements(all_transfers(inference.flow)) > sent_elements(
        tile_transfers(inference.flow)
    )
