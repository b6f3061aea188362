"""Dataflow of distributed inference: transfers, slices and tiles against brute force."""

from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.hardware import DeviceSpec
from testbed.ml.models.chain import chain
from testbed.ml.models.graph import graph_of
from testbed.ml.models.layers import (
    BatchNorm2d,
    Conv2d,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
)
from testbed.ml.models.sliced import SlicedLayer, cut_tensors
from testbed.ml.models.slices import NO_CHANNELS, Slice
from testbed_stahl.candidates import best_candidate
from testbed_stahl.communication import all_transfers, sent_elements, tile_transfers
from testbed_stahl.plan import (
    Range,
    difference,
    divide,
    intersection,
    total_size,
    union,
)
from testbed_stahl.request_work import Ledger
from testbed_stahl.tile_work import compute_tile
from tests.helpers.graphs import plan_settings, random_chains, yolov2

SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)
SCHEMES = st.sampled_from(["lop", "lip", "fuse", "optimal", "sequential", "single"])


def make_devices(speeds):
    return [DeviceSpec(f"d{index}", speed, 1e12) for index, speed in enumerate(speeds)]


def count_traffic_through_source(graph, plan):
    """Count the elements sent through the source, one at a time."""
    source, count, total = plan.source, len(plan.devices), 0
    values = [*range(plan.tiled_count - 1, len(graph.layers))]
    computed = {
        value: np.zeros((count, graph.outputs_of(value)), bool) for value in values
    }
    needed = {
        value: np.zeros((count, graph.outputs_of(value)), bool) for value in values
    }
    computed[values[0]][source] = needed[values[-1]][source] = True
    for index in values[1:]:
        layer, part = graph.layers[index], plan.layers[index]
        taken = np.zeros((count, layer.inputs), bool)
        for device in range(count):
            if part.outputs:
                taken[device] = part.outputs[device].size > 0
                computed[index].reshape(count, layer.output[0], -1)[
                    device, slice(*part.outputs[device])
                ] = True
            elif part.inputs:
                taken.reshape(count, layer.input_channels, -1)[
                    device, slice(*part.inputs[device])
                ] = True
                computed[index][source] = True
                total += layer.outputs * (
                    device != source and part.inputs[device].size > 0
                )
            else:
                owner = source if part.owner is None else part.owner
                taken[device] = computed[index][device] = device == owner
        ends = [0, *accumulate(map(graph.outputs_of, layer.sources))]
        for value, (first, last) in zip(layer.sources, pairwise(ends), strict=True):
            needed[value] |= taken[:, first:last]
    is_sequential = all(part.scheme == "whole" for part in plan.layers)
    for value in values:
        missing = needed[value] & ~computed[value]
        if is_sequential:
            total += missing.sum()
        else:
            # Workers send what any device misses to the source, which sends each worker what it misses.
            workers = [device for device in range(count) if device != source]
            collected = computed[value][workers] & missing.any(axis=0)
            total += missing[workers].sum() + collected.sum()
    return total


@settings(deadline=None, max_examples=150)
@given(random_chains(), SPEEDS, SCHEMES, st.data())
def test_traffic_through_source_matches_brute_force(graph, speeds, scheme, data):
    source = data.draw(st.integers(0, len(speeds) - 1))
    flow = best_candidate(
        graph,
        make_devices(speeds),
        plan_settings(scheme=scheme, source=source, tiled_layers=0),
    ).flow
    assert sent_elements(all_transfers(flow)) == count_traffic_through_source(
        graph, flow.plan
    )


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
def test_traffic_of_yolov2_is_missing_elements_plus_tiles(scheme):
    graph = yolov2(224)
    flow = best_candidate(
        graph,
        make_devices([1.0, 2.5, 1.0, 4.0]),
        plan_settings(scheme, tiled_layers=16, source=2),
    ).flow
    later = count_traffic_through_source(graph, flow.plan)
    assert sent_elements(all_transfers(flow)) == later + sent_elements(
        tile_transfers(flow)
    )


@settings(deadline=None, max_examples=150)
@given(random_chains(), SPEEDS, SCHEMES)
def test_values_are_computed_once_and_reach_devices_that_need_them(
    graph, speeds, scheme
):
    for exchange in ("via-source", "direct"):
        flow = best_candidate(
            graph,
            make_devices(speeds),
            plan_settings(scheme=scheme, tiled_layers=0, exchange=exchange),
        ).flow
        for value, made_ranges in flow.made_ranges.items():
            if value < 0 or not flow.graph.layers[value].is_route:
                assert sum(
                    made_range.size for made_range in made_ranges
                ) == graph.outputs_of(value)
            for device, wanted_pieces in enumerate(flow.needed_pieces[value]):
                available = [made_ranges[device], *parts_received(flow, value, device)]
                for piece in wanted_pieces:
                    assert not subtract_all(piece, available)


def parts_received(flow, value, device):
    """Return the parts of a value sent to the device, directly or through the source."""
    parts = []
    for sender, made_range in enumerate(flow.made_ranges[value]):
        if made_range.size == 0:
            continue
        transfers = [
            *flow.receivers(value, sender, made_range),
            *flow.forwarded(value, sender, made_range),
        ]
        parts.extend(part for receiver, part in transfers if receiver == device)
    return parts


def subtract_all(piece, parts):
    left = (piece,)
    for part in parts:
        left = difference(left, part)
    return left


def non_empty_ranges(channels, shares):
    """Divide channels by shares and return the non-empty ranges."""
    return [range(*part) for part in divide(channels, shares) if part.size]


RANGES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(
    lambda ends: Range(min(ends), max(ends))
)


def numbers_of(ranges):
    return set().union(*(range(*piece) for piece in ranges))


@given(st.lists(RANGES, max_size=6), RANGES)
def test_range_operations_match_set_operations(ranges, removed):
    pieces = union((), tuple(ranges))
    numbers = numbers_of(ranges)
    assert numbers_of(pieces) == numbers
    assert total_size(pieces) == len(numbers)
    remaining = difference(pieces, removed)
    assert numbers_of(remaining) == numbers - numbers_of([removed])
    for piece in ranges:
        common = numbers_of([piece]) & numbers_of([removed])
        assert numbers_of([intersection(piece, removed)]) == common


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(1, 2), st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
)  # fmt: skip
def test_output_parts_and_input_sums_equal_whole_layer(
    input_channels, output_channels, kernel, stride, norm, shares
):
    layers = [
        Conv2d(output_channels, kernel, stride, kernel // 2),
        *[BatchNorm2d()] * norm,
        LeakyReLU(0.1),
    ]
    model = chain(
        "two",
        (input_channels, 7, 5),
        3,
        [("conv", layers), ("out", [Flatten(), Linear(3)])],
    )
    graph = graph_of(model)
    layer, module = graph.layers[0], model.build(0, 1, 4).eval()
    for name, tensor in module.state_dict().items():
        if not name.endswith("tracked"):
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    inputs = torch.randn(2, input_channels, 7, 5)
    with torch.no_grad():
        whole = module(inputs).flatten(1)
    state, flat = module.state_dict(), inputs.flatten(1)
    exact = [Fraction(share, sum(shares)) for share in shares]
    every, all_inputs = range(output_channels), range(input_channels)
    outputs = []
    for channels in non_empty_ranges(output_channels, exact):
        part = Slice(channels, all_inputs, channels)
        sliced = SlicedLayer(layer, part, cut_tensors(layer, part, state))
        outputs.append(sliced.run(flat))
    assert is_close(torch.cat(outputs, dim=1), whole)
    sums = []
    for channels in non_empty_ranges(input_channels, exact):
        part = Slice(every, channels, NO_CHANNELS)
        sliced = SlicedLayer(layer, part, cut_tensors(layer, part, state))
        # A channel of 7x5 pixels has 35 values.
        inputs_of_part = flat[:, channels.start * 35 : channels.stop * 35]
        sums.append(sliced.sums(inputs_of_part))
    undivided = SlicedLayer(layer, layer.whole_slice, state)
    assert is_close(undivided.finish(torch.stack(sums).sum(0)), whole)
    chunks = [
        range(output_channels)[first : first + 2]
        for first in range(0, output_channels, 2)
    ]
    chunked = SlicedLayer(layer, layer.whole_slice, state)
    assert is_close(
        torch.cat(
            [
                chunked.finish(chunked.sums(flat, None, channels), channels)
                for channels in chunks
            ],
            dim=1,
        ),
        whole,
    )


def is_close(actual, expected):
    return bool(
        (actual - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1e-6)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(9, 16), st.integers(8, 13))
def test_tiles_with_halo_equal_whole_map(rows, columns, height, width):
    layers = [
        ("conv1", [Conv2d(4, 3, padding=1), BatchNorm2d(), LeakyReLU(0.1)]),
        ("pool", [MaxPool2d()]),
        ("conv2", [Conv2d(3, 3, padding=1), LeakyReLU(0.1)]),
        ("out", [Flatten(), Linear(2)]),
    ]
    model = chain("tiled", (2, height, width), 2, layers)
    graph, module = graph_of(model), model.build(0, 3, 6).eval()
    inputs = torch.randn(2, 2, height, width)
    with torch.no_grad():
        whole = module(inputs)
    early = graph.layers[:3]
    parts = [
        SlicedLayer(layer, layer.whole_slice, module.state_dict()) for layer in early
    ]
    ledger, output = Ledger("d0", 1e9), torch.full_like(whole, float("nan"))
    grid = (min(rows, whole.shape[2]), min(columns, whole.shape[3]))
    flow = best_candidate(
        graph, make_devices([1.0]), plan_settings("lop", tiled_layers=3, tile_grid=grid)
    ).flow
    for number, tile in enumerate(flow.plan.tiles):
        first, last = tile.regions[0], tile.regions[-1]
        region = inputs[:, :, first.top : first.bottom, first.left : first.right]
        output[:, :, last.top : last.bottom, last.left : last.right] = compute_tile(
            flow, number, parts, region, {}, ledger
        )[0]
    assert is_close(output, whole)
    assert ledger.activations == 0 < ledger.peak
