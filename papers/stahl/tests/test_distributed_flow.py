"""What every device does and sends, against brute force."""

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
from testbed.ml.models.slices import NONE, Slice
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


def crew(speeds):
    return [DeviceSpec(f"d{index}", speed, 1e12) for index, speed in enumerate(speeds)]


def sent_through_the_source(graph, plan):
    """Count, element by element, what those who lack something are sent, and what the source collects for that."""
    source, count, total = plan.source, len(plan.devices), 0
    values = [*range(plan.tiled - 1, len(graph.layers))]
    made = {value: np.zeros((count, graph.outputs_of(value)), bool) for value in values}
    need = {value: np.zeros((count, graph.outputs_of(value)), bool) for value in values}
    made[values[0]][source] = need[values[-1]][source] = True
    for index in values[1:]:
        layer, part = graph.layers[index], plan.layers[index]
        taken = np.zeros((count, layer.inputs), bool)
        for device in range(count):
            if part.outputs:
                taken[device] = part.outputs[device].size > 0
                made[index].reshape(count, layer.output[0], -1)[
                    device, slice(*part.outputs[device])
                ] = True
            elif part.inputs:
                taken.reshape(count, layer.input_channels, -1)[
                    device, slice(*part.inputs[device])
                ] = True
                made[index][source] = True
                total += layer.outputs * (
                    device != source and part.inputs[device].size > 0
                )
            else:
                taken[device] = made[index][device] = device == (
                    source if part.owner is None else part.owner
                )
        ends = [0, *accumulate(graph.outputs_of(each) for each in layer.sources)]
        for each, (first, last) in zip(layer.sources, pairwise(ends), strict=True):
            need[each] |= taken[:, first:last]
    in_a_row = all(part.scheme == "whole" for part in plan.layers)
    for value in values:
        lacking = need[value] & ~made[value]
        if in_a_row:
            total += lacking.sum()
        else:
            workers = [device for device in range(count) if device != source]
            total += (
                lacking[workers].sum()
                + (made[value][workers] & lacking.any(axis=0)).sum()
            )
    return total


@settings(deadline=None, max_examples=150)
@given(random_chains(), SPEEDS, SCHEMES, st.data())
def test_what_goes_through_the_source_is_what_is_lacking_element_by_element(
    graph, speeds, scheme, data
):
    source = data.draw(st.integers(0, len(speeds) - 1))
    found = best_candidate(
        graph, crew(speeds), plan_settings(scheme=scheme, source=source, tiled_layers=0)
    ).flow
    assert sent_elements(all_transfers(found)) == sent_through_the_source(
        graph, found.plan
    )


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
def test_yolov2_takes_what_is_lacking_and_its_tiles(scheme):
    graph = yolov2(224)
    found = best_candidate(
        graph,
        crew([1.0, 2.5, 1.0, 4.0]),
        plan_settings(scheme, tiled_layers=16, source=2),
    ).flow
    later = sent_through_the_source(graph, found.plan)
    assert sent_elements(all_transfers(found)) == later + sent_elements(
        tile_transfers(found)
    )


@settings(deadline=None, max_examples=150)
@given(random_chains(), SPEEDS, SCHEMES)
def test_everything_is_made_once_and_whoever_lacks_something_is_sent_it(
    graph, speeds, scheme
):
    for exchange in ("via-source", "direct"):
        found = best_candidate(
            graph,
            crew(speeds),
            plan_settings(scheme=scheme, tiled_layers=0, exchange=exchange),
        ).flow
        for value, homes in found.homes.items():
            if value < 0 or not found.graph.layers[value].joins:
                assert sum(home.size for home in homes) == graph.outputs_of(value)
            for device, wanted in enumerate(found.wants[value]):
                here = [homes[device]]
                for maker, home in enumerate(homes):
                    for to, part in (
                        *found.receivers(value, maker, home),
                        *found.forwarded(value, maker, home),
                    ):
                        here += [part] * (to == device and home.size > 0)
                assert all(not without_all(piece, here) for piece in wanted)


def without_all(piece, parts):
    left = (piece,)
    for part in parts:
        left = difference(left, part)
    return left


RANGES = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(
    lambda ends: Range(min(ends), max(ends))
)


@given(st.lists(RANGES, max_size=6), RANGES)
def test_pieces_are_sets_of_numbers(ranges, gone):
    pieces = union((), tuple(ranges))
    numbers = {number for each in ranges for number in range(*each)}
    assert {number for piece in pieces for number in range(*piece)} == numbers
    assert total_size(pieces) == len(numbers)
    assert {
        number for piece in difference(pieces, gone) for number in range(*piece)
    } == numbers - {*range(*gone)}
    assert all(
        {*range(*intersection(each, gone))} == {*range(*each)} & {*range(*gone)}
        for each in ranges
    )


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(1, 2), st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
)  # fmt: skip
def test_parts_by_output_and_sums_by_input_are_the_whole_layer(
    entering, leaving, kernel, stride, norm, shares
):
    layers = [
        Conv2d(leaving, kernel, stride, kernel // 2),
        *[BatchNorm2d()] * norm,
        LeakyReLU(0.1),
    ]
    model = chain(
        "two", (entering, 7, 5), 3, [("conv", layers), ("out", [Flatten(), Linear(3)])]
    )
    graph = graph_of(model)
    layer, module = graph.layers[0], model.build(0, 1, 4).eval()
    for name, tensor in module.state_dict().items():
        if not name.endswith("tracked"):
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    inputs = torch.randn(2, entering, 7, 5)
    with torch.no_grad():
        whole = module(inputs).flatten(1)
    state, flat = module.state_dict(), inputs.flatten(1)
    exact = [Fraction(share, sum(shares)) for share in shares]
    every, all_inputs = range(leaving), range(entering)
    outputs = []
    for made in (range(*part) for part in divide(leaving, exact) if part.size):
        part = Slice(made, all_inputs, made)
        outputs.append(
            SlicedLayer(layer, part, cut_tensors(layer, part, state)).run(flat)
        )
    assert close(torch.cat(outputs, dim=1), whole)
    sums = []
    for taken in (range(*part) for part in divide(entering, exact) if part.size):
        part = Slice(every, taken, NONE)
        sums.append(
            SlicedLayer(layer, part, cut_tensors(layer, part, state)).sums(
                flat[:, taken.start * 35 : taken.stop * 35]
            )
        )
    assert close(
        SlicedLayer(layer, layer.whole, state).finish(torch.stack(sums).sum(0)), whole
    )
    chunks = [range(leaving)[first : first + 2] for first in range(0, leaving, 2)]
    chunked = SlicedLayer(layer, layer.whole, state)
    assert close(
        torch.cat(
            [chunked.finish(chunked.sums(flat, None, each), each) for each in chunks],
            dim=1,
        ),
        whole,
    )


def close(found, wanted):
    return bool(
        (found - wanted).abs().max() <= 1e-4 * wanted.abs().max().clamp(min=1e-6)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(9, 16), st.integers(8, 13))
def test_tiles_with_their_halo_are_the_whole_map(rows, columns, height, width):
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
    parts = [SlicedLayer(layer, layer.whole, module.state_dict()) for layer in early]
    ledger, found = Ledger("d0", 1e9), torch.full_like(whole, float("nan"))
    grid = (min(rows, whole.shape[2]), min(columns, whole.shape[3]))
    flow = best_candidate(
        graph, crew([1.0]), plan_settings("lop", tiled_layers=3, tile_grid=grid)
    ).flow
    for number, each in enumerate(flow.plan.tiles):
        first, last = each.regions[0], each.regions[-1]
        region = inputs[:, :, first.top : first.bottom, first.left : first.right]
        found[:, :, last.top : last.bottom, last.left : last.right] = compute_tile(
            flow, number, parts, region, {}, ledger
        )[0]
    assert close(found, whole)
    assert ledger.activations == 0 < ledger.peak
