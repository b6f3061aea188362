"""Tests of Algorithm 1 of EdgePipe: groups of layers, and the neurons of each device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.slots.arrangement import group_device_counts, layer_groups
from tests.testbed.ml.slots.networks import EVALUATED, FIGURE_2, SHAPES, partition


def lengths(groups):
    return [len(group) for group in groups]


def test_six_layers_on_six_devices_match_example_of_paper():
    assignment = partition(FIGURE_2, 6)
    # The paper's groups are layers 1 and 2, 3 and 4, 5 and 6.
    assert list(assignment.groups) == [range(2), range(2, 4), range(4, 6)]
    assert [len(assignment.members(group)) for group in range(3)] == [2, 2, 2]
    device_4 = "d3"
    assert assignment.members(1).index(device_4) == 1
    # The second device of a group of two has the upper half of each layer of 8 neurons.
    none = range(0)
    upper_half = range(4, 8)
    neurons = [assignment.neurons_of(device_4, layer) for layer in range(6)]
    assert neurons == [none, none, upper_half, upper_half, none, none]
    assert assignment.neurons_of("d0", 0) == range(5)
    assert assignment.neurons_of("d0", 1) == range(4)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_hybrid_allocation_is_horizontal_for_up_to_3_devices(devices):
    hybrid = layer_groups(6, devices, "hybrid")
    assert hybrid == layer_groups(6, devices, "horizontal")
    assert hybrid == [range(6)]


@pytest.mark.parametrize("devices", [12, 13, 14, 30])
def test_hybrid_allocation_is_vertical_for_twice_as_many_devices_as_layers(devices):
    hybrid = layer_groups(6, devices, "hybrid")
    assert hybrid == layer_groups(6, devices, "vertical")
    assert lengths(hybrid) == [1] * 6


@pytest.mark.parametrize(
    ("layers", "devices", "layer_counts", "device_counts"),
    [
        (6, 4, [3, 3], [2, 2]),
        (6, 5, [3, 3], [3, 2]),
        (6, 8, [1, 1, 2, 2], [1, 1, 3, 3]),
        (7, 6, [2, 2, 3], [2, 2, 2]),
        (5, 4, [2, 3], [2, 2]),
        (8, 6, [2, 3, 3], [2, 2, 2]),
    ],
)
def test_remaining_layers_are_added_to_last_groups(
    layers, devices, layer_counts, device_counts
):
    groups = layer_groups(layers, devices, "hybrid")
    assert lengths(groups) == layer_counts
    assert group_device_counts(groups, devices) == device_counts


@pytest.mark.parametrize(
    ("max_layers", "layer_counts"),
    [
        (1, [1] * 6),
        (2, [2, 2, 2]),
        (3, [3, 3]),
        (4, [2, 4]),
        (5, [1, 5]),
        (6, [6]),
        (9, [6]),
    ],
)
def test_groups_of_limited_size_are_filled_from_output_layer(max_layers, layer_counts):
    # The first group has the remaining layers.
    assert lengths(layer_groups(6, 6, max_layers)) == layer_counts


@given(*SHAPES, st.sampled_from(["vertical", "hybrid", "horizontal"]))
def test_each_neuron_is_on_one_device_and_no_device_is_empty(
    layers, devices, allocation
):
    neurons = tuple(20 + layer for layer in range(layers))
    assignment = partition(neurons, devices, allocation)
    assert len(assignment.devices) == devices
    for layer, count in enumerate(neurons):
        assigned = []
        sizes = []
        for name in assignment.devices:
            part = assignment.neurons_of(name, layer)
            assigned += part
            if part:
                sizes.append(len(part))
        assert sorted(assigned) == list(range(count))
        assert max(sizes) - min(sizes) <= 1
        assert all(assignment.layers[layer].values())


@given(*SHAPES)
def test_device_counts_are_rounded_as_in_line_6_if_rounding_uses_all_devices(
    layers, devices
):
    groups = layer_groups(layers, devices, "hybrid")
    # Line 6 of Algorithm 1 rounds halves up; Python's `round` would round them to even.
    rounded = [int(devices / layers * len(group) + 0.5) for group in groups]
    counts = group_device_counts(groups, devices)
    assert sum(counts) == devices
    assert min(counts) >= 1
    if sum(rounded) == devices:
        assert counts == rounded


def test_layer_with_fewer_neurons_than_devices_is_rejected():
    with pytest.raises(
        InputError, match="layer 5 has 2 neurons for 6 devices: use fewer devices"
    ):
        partition((784, 128, 128, 128, 128, 2), 6, "horizontal")


def test_more_groups_than_devices_are_rejected():
    with pytest.raises(
        InputError, match="makes 6 groups of layers for 4 devices: use larger groups"
    ):
        partition(EVALUATED, 4, 1)
