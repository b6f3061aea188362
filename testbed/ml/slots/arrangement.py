"""EdgePipe's Algorithm 1: a network divided into groups of layers, then the neurons of each layer among devices.

Every device belongs to one group, and has neurons of all layers of this group. These neurons are its super neuron.
Sections and equations are those of the EdgePipe paper; its index w of a group counts from 1, ours from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from testbed.common.errors import InputError
from testbed.ml.models.slices import NO_CHANNELS, Channels

Allocation = Literal["vertical", "hybrid", "horizontal"]
"""Groups of layers. ``vertical``: one layer each; ``hybrid``: by equation (1); ``horizontal``: all layers in one."""
Holders = Mapping[str, Channels]
"""Device -> its neurons of one layer."""


@dataclass(frozen=True)
class NeuronAssignment:
    """The device of every neuron.

    The paper's super neuron SN[w, h] is the set of all neurons on the h-th device of group w; the number of groups is
    the paper's P.

    >>> assignment = partition_neurons([4, 4, 2, 2], ["a", "b", "c", "d"])
    >>> assignment.members(0), assignment.neurons_of("b", 1), assignment.group_of("d")
    (('a', 'b'), range(2, 4), 1)
    """

    groups: tuple[range, ...]
    """Adjacent layers of each group, beginning with layer 0, the input layer."""
    sizes: tuple[int, ...]
    """Number of neurons of each layer."""
    layers: tuple[Holders, ...]
    """For each layer, the neurons of its devices. All layers of a group have the same devices, in the same order."""
    version: int = 0
    """Number of changes since the plan: neurons may move during a run."""

    def group_of(self, device: str) -> int | None:
        """Return the group of a device; None for a device without neurons."""
        for index in range(len(self.groups)):
            if device in self.members(index):
                return index
        return None

    def members(self, group: int) -> tuple[str, ...]:
        """Return the devices of a group."""
        return self.holders(self.groups[group].start)

    def holders(self, layer: int) -> tuple[str, ...]:
        """Return the devices with neurons of a layer."""
        return tuple(self.layers[layer])

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """All devices with neurons, group after group."""
        devices: list[str] = []
        for group in range(len(self.groups)):
            devices += self.members(group)
        return tuple(devices)

    def neurons_of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer; empty for layers of other groups."""
        return self.layers[layer].get(device, NO_CHANNELS)

    @property
    def output_layer(self) -> int:
        """The last layer."""
        return len(self.sizes) - 1

    @property
    def layer_passes(self) -> list[tuple[int, int]]:
        """(sending layer, receiving layer) of each pass of a batch.

        Outputs go forward; losses go backward, except to the input layer, which has no weights; results are shared
        within the output layer.
        """
        forward = []
        for layer in range(1, len(self.sizes)):
            forward.append((layer - 1, layer))
        backward = []
        for layer in range(2, len(self.sizes)):
            backward.append((layer, layer - 1))
        # The cross-entropy of a sample needs the outputs of all classes, which several devices may compute.
        sharing = (self.output_layer, self.output_layer)
        return [*forward, *backward, sharing]

    def senders(self, receiver: str) -> tuple[str, ...]:
        """Return the devices whose casts a device needs, in the order of `devices`.

        >>> partition_neurons([4, 4, 4, 4], ["a", "b", "c", "d"], "vertical").senders("b")
        ('a', 'c')
        """
        senders: set[str] = set()
        for source, target in self.layer_passes:
            if receiver in self.layers[target]:
                senders.update(self.layers[source])
        senders.discard(receiver)
        return tuple(name for name in self.devices if name in senders)

    def largest_message(self, device: str, values: Sequence[int]) -> int:
        """Return M_pkt of equation (4): the maximum number of values per sample sent by a device at once.

        The values are outputs of the device's neurons, or losses for all neurons of the previous layer. ``values`` has,
        for each layer, the number of values per neuron and sample.

        >>> partition_neurons([784, 128, 10], ["a", "b"], "horizontal").largest_message("a", values=[1, 1, 1])
        392
        """
        lengths = []
        for layer, holders in enumerate(self.layers):
            if device not in holders:
                continue
            lengths.append(len(holders[device]) * values[layer])
            if layer > 1:
                # Each device has a part of the losses of every neuron of the previous layer.
                previous = layer - 1
                lengths.append(self.sizes[previous] * values[previous])
        return max(lengths)


def partition_neurons(
    neurons: Sequence[int],
    devices: Sequence[str],
    allocation: Allocation | int = "hybrid",
) -> NeuronAssignment:
    """Divide layers, given by their numbers of neurons from the input layer on, into one super neuron per device.

    A number as ``allocation`` is the paper's M_layers, the maximum number of layers per group. Raises `InputError` for
    fewer devices than groups or fewer neurons than devices.

    >>> assignment = partition_neurons([10, 8, 8, 10], ["a", "b", "c", "d"])
    >>> assignment.groups
    (range(0, 2), range(2, 4))
    >>> assignment.layers[2]
    {'c': range(0, 4), 'd': range(4, 8)}
    """
    groups = layer_groups(len(neurons), len(devices), allocation)
    # A group without a device could not compute its layers.
    if len(groups) > len(devices):
        text = f"makes {len(groups)} groups of layers for {len(devices)} devices: use larger groups"
        raise InputError(text, ("method", "layers_per_group"))
    counts = group_device_counts(groups, len(devices))
    layers: list[Holders] = []
    first = 0
    for group, count in zip(groups, counts, strict=True):
        members = devices[first : first + count]
        first += count
        for layer in group:
            layers.append(_split_layer(layer, neurons[layer], members))
    return NeuronAssignment(tuple(groups), tuple(neurons), tuple(layers))


def _split_layer(layer: int, size: int, members: Sequence[str]) -> Holders:
    """Return the neurons of a layer in nearly equal ranges, one per member."""
    count = len(members)
    if size < count:
        text = (
            f"layer {layer} has {size} neurons for {count} devices: use fewer devices"
        )
        raise InputError(text, ("method", "allocation"))
    holders = {}
    for index, name in enumerate(members):
        # Rounded down, so that the ranges differ by one neuron at most.
        start = size * index // count
        stop = size * (index + 1) // count
        holders[name] = range(start, stop)
    return holders


def layer_groups(
    layers: int, devices: int, allocation: Allocation | int
) -> list[range]:
    """Return the layers of each group (lines 3 and 4 of Algorithm 1).

    Equation (1) gives every group two devices if possible, and at most as many groups as layers. If the layers cannot
    be divided evenly, the last groups, at the output, have one layer more. With a number as ``allocation``, the maximum
    number of layers per group, groups are filled from the output backwards, and the first group gets the rest.

    >>> layer_groups(6, 6, "hybrid")
    [range(0, 2), range(2, 4), range(4, 6)]
    >>> layer_groups(6, 6, 4)
    [range(0, 2), range(2, 6)]
    """
    groups: list[range] = []
    if isinstance(allocation, int):
        # Line 4 fills groups from the output layer backwards.
        ends = range(layers, 0, -allocation)
        for end in reversed(ends):
            start = max(0, end - allocation)
            groups.append(range(start, end))
        return groups
    if allocation == "vertical":
        count = min(layers, devices)
    elif allocation == "hybrid":
        # Equation (1): two devices for each group, since one lost cast of a single device loses the whole layer.
        count = min(layers, max(1, devices // 2))
    else:
        count = 1
    size, remainder = divmod(layers, count)
    start = 0
    for group in range(count):
        stop = start + size
        if group >= count - remainder:
            stop += 1
        groups.append(range(start, stop))
        start = stop
    return groups


def group_device_counts(groups: Sequence[range], devices: int) -> list[int]:
    """Return the number of devices of each group, in proportion to the group's layers and at least one.

    Rounding follows line 6 of Algorithm 1 if its result uses all devices; otherwise the remaining devices go to the
    groups with the largest deficit, beginning at the input layer.

    >>> group_device_counts([range(0, 2), range(2, 6)], 6)
    [2, 4]
    """
    layers = sum(map(len, groups))
    exact_counts = [devices * len(group) / layers for group in groups]
    # Rounded down here, and the largest remainders up below: this is line 6, if its result uses all devices. A group
    # without a device could not compute its layers.
    counts = [max(1, int(exact)) for exact in exact_counts]

    def deficit(group: int) -> float:
        """Return by how many devices the group falls short of the exact number; negative for a surplus."""
        return exact_counts[group] - counts[group]

    # Of groups with equal deficits, `max` and `min` return the first one, nearest to the input.
    while sum(counts) < devices:
        neediest = max(range(len(groups)), key=deficit)
        counts[neediest] += 1
    # With many small groups, the minimum of one device for each may exceed the number of devices.
    while sum(counts) > devices:
        reducible = [group for group, count in enumerate(counts) if count > 1]
        best_supplied = min(reducible, key=deficit)
        counts[best_supplied] -= 1
    return counts
