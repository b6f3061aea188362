"""Algorithm 1: a network cut into super neurons, into groups of layers, then each layer's neurons over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from testbed.common.errors import InputError

Allocation = Literal["vertical", "hybrid", "horizontal"]
"""Groups of one layer each, as equation (1) has them, or one group of all layers."""


@dataclass(frozen=True)
class SuperNeuron:
    """What one device holds: some neurons of each layer of a group of adjacent layers."""

    group: int
    place: int
    """Among the super neurons of its group."""
    layers: range
    neurons: tuple[range, ...]
    """Of each of the layers."""

    def of(self, layer: int) -> range:
        """Return its neurons of a layer; none of a layer that is not its own."""
        return self.neurons[layer - self.layers.start] if layer in self.layers else range(0)


@dataclass(frozen=True)
class Partition:
    """A network in super neurons, one a device, in the order of groups and of places in them."""

    neurons: tuple[int, ...]
    """Of each layer, the input layer first."""
    super_neurons: tuple[SuperNeuron, ...]

    @property
    def groups(self) -> tuple[range, ...]:
        """The layers of each group, from the input layer on."""
        return tuple(dict.fromkeys(each.layers for each in self.super_neurons))

    def members(self, group: int) -> tuple[int, ...]:
        """Return the indices of the super neurons of a group."""
        return tuple(index for index, each in enumerate(self.super_neurons) if each.group == group)

    def holders(self, layer: int) -> tuple[int, ...]:
        """Return the indices of the super neurons that have neurons of a layer."""
        return tuple(index for index, each in enumerate(self.super_neurons) if layer in each.layers)

    def largest_message(self, part: SuperNeuron, values: Sequence[int]) -> int:
        """Return M_pkt of equation (4): the most values of a sample that a super neuron sends at once.

        Its own outputs of a layer, or losses for all of the layer before. ``values``: of each layer, those of a neuron.
        """
        outputs = [len(part.of(layer)) * values[layer] for layer in part.layers]
        return max(outputs + [self.neurons[layer - 1] * values[layer - 1] for layer in part.layers if layer > 1])


def partition(neurons: Sequence[int], devices: int, allocation: Allocation | int = "hybrid") -> Partition:
    """Divide layers, whose numbers of neurons are given from the input layer on, into one super neuron a device.

    A number as ``allocation`` is the paper's M_layers, the most layers of a group. Raises `InputError` where there are
    not enough devices for the groups or not enough neurons for the devices.
    """
    groups = layer_groups(len(neurons), devices, allocation)
    if len(groups) > devices:
        raise InputError(
            f"makes {len(groups)} groups of layers for {devices} devices: use larger groups", ("method", "layers")
        )
    found = []
    for group, (layers, count) in enumerate(zip(groups, devices_of(groups, devices), strict=True)):
        for layer in layers:
            if neurons[layer] < count:
                text = f"layer {layer} has {neurons[layer]} neurons for {count} devices: use fewer devices"
                raise InputError(text, ("method", "allocation"))
        found += [
            SuperNeuron(group, place, layers, tuple(_share(neurons[layer], count, place) for layer in layers))
            for place in range(count)
        ]
    return Partition(tuple(neurons), tuple(found))


def layer_groups(layers: int, devices: int, allocation: Allocation | int) -> list[range]:
    """Return the layers of each group (lines 3 and 4).

    Equation (1) gives every group two devices where it can, and at most as many groups as layers; a number of layers
    that does not divide leaves the last groups, at the output, one layer more. With a largest group given, groups are
    filled from the output on, and the first one takes what is left.
    """
    if isinstance(allocation, int):
        ends = range(layers, 0, -allocation)
        return [range(max(0, end - allocation), end) for end in reversed(ends)]
    count = {"vertical": min(layers, devices), "hybrid": min(layers, max(1, devices // 2)), "horizontal": 1}[allocation]
    size, left = divmod(layers, count)
    starts = [0]
    for group in range(count):
        starts.append(starts[-1] + size + (group >= count - left))
    return [range(start, stop) for start, stop in pairwise(starts)]


def devices_of(groups: Sequence[range], devices: int) -> list[int]:
    """Return how many devices each group has: in proportion to its layers, at least one, and all of them together.

    As line 6 rounds, wherever that uses up the devices; else those left go where most is lacking, from the input on.
    """
    layers = sum(len(group) for group in groups)
    wanted = [devices * len(group) / layers for group in groups]
    counts = [max(1, int(share)) for share in wanted]
    while sum(counts) < devices:
        counts[max(range(len(groups)), key=lambda group: wanted[group] - counts[group])] += 1
    while sum(counts) > devices:
        shared = [group for group in range(len(groups)) if counts[group] > 1]
        counts[max(shared, key=lambda group: counts[group] - wanted[group])] -= 1
    return counts


def _share(neurons: int, devices: int, place: int) -> range:
    """Return one device's neurons of a layer: equally many but for one more, in the order of places."""
    return range(neurons * place // devices, neurons * (place + 1) // devices)
