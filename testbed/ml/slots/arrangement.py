"""Algorithm 1: a network divided into groups of layers, then each layer's neurons over the group's devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from testbed.common.errors import InputError
from testbed.ml.models.slices import NONE, Channels

Allocation = Literal["vertical", "hybrid", "horizontal"]
"""Groups of one layer each, as equation (1) has them, or one group of all layers."""
Holders = Mapping[str, Channels]
"""The neurons of one layer, by device."""


@dataclass(frozen=True)
class NeuronAssignment:
    """The devices of all neurons. The paper's super neuron SN[w, h] consists of the neurons of the h-th device of group
    w.

    The number of groups is the paper's P.
    """

    groups: tuple[range, ...]
    """Adjacent layers, from the input layer, layer 0, on."""
    sizes: tuple[int, ...]
    """Neurons of each layer."""
    layers: tuple[Holders, ...]
    """All layers of a group have the same devices, in the same order."""
    version: int = 0
    """Neurons may move while a run goes on: each change makes the next version."""

    def group(self, device: str) -> int | None:
        """Return the group of a device; None for a device without neurons."""
        return next(
            (
                index
                for index in range(len(self.groups))
                if device in self.members(index)
            ),
            None,
        )

    def members(self, group: int) -> tuple[str, ...]:
        """Return the devices of a group."""
        return self.holders(self.groups[group].start)

    def holders(self, layer: int) -> tuple[str, ...]:
        """Return the devices with neurons of a layer."""
        return tuple(self.layers[layer])

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """All members, group after group."""
        return tuple(
            name for group in range(len(self.groups)) for name in self.members(group)
        )

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer; empty for layers of other groups."""
        return self.layers[layer].get(device, NONE)

    @property
    def output(self) -> int:
        """The last layer."""
        return len(self.sizes) - 1

    @property
    def passes(self) -> list[tuple[int, int]]:
        """For each pass of a batch, the sending and the receiving layer.

        Outputs go forward; losses go backward, except to the input layer, which has no weights; results are shared
        within the output layer.
        """
        layers = range(1, len(self.sizes))
        return (
            [(layer - 1, layer) for layer in layers]
            + [(layer, layer - 1) for layer in layers[1:]]
            + [(self.output, self.output)]
        )

    def senders(self, receiver: str) -> tuple[str, ...]:
        """Return the other devices casting to a device."""
        sending = {
            source for source, target in self.passes if receiver in self.layers[target]
        }
        senders = {name for layer in sending for name in self.layers[layer]} - {
            receiver
        }
        return tuple(name for name in self.devices if name in senders)

    def largest_message(self, device: str, values: Sequence[int]) -> int:
        """Return M_pkt of equation (4): the maximum number of values per sample a device sends at once.

        The values are its own outputs of a layer, or losses for all of the previous layer. ``values`` has, for each
        layer, the number of values per neuron and sample.
        """
        held = [layer for layer, holders in enumerate(self.layers) if device in holders]
        outputs = [len(self.of(device, layer)) * values[layer] for layer in held]
        return max(
            outputs
            + [self.sizes[layer - 1] * values[layer - 1] for layer in held if layer > 1]
        )


def partition(
    neurons: Sequence[int],
    devices: Sequence[str],
    allocation: Allocation | int = "hybrid",
) -> NeuronAssignment:
    """Divide layers, given by their numbers of neurons from the input layer on, into one super neuron per device.

    A number as ``allocation`` is the paper's M_layers, the maximum number of layers per group. Raises `InputError` for
    fewer devices than groups or fewer neurons than devices.
    """
    groups = layer_groups(len(neurons), len(devices), allocation)
    if len(groups) > len(devices):
        text = f"makes {len(groups)} groups of layers for {len(devices)} devices: use larger groups"
        raise InputError(text, ("method", "layers"))
    layers: list[Holders] = []
    first = 0
    for group, count in zip(groups, devices_of(groups, len(devices)), strict=True):
        members, first = devices[first : first + count], first + count
        for layer in group:
            size = neurons[layer]
            if size < count:
                text = f"layer {layer} has {size} neurons for {count} devices: use fewer devices"
                raise InputError(text, ("method", "allocation"))
            ends = [size * place // count for place in range(count + 1)]
            layers.append(
                {
                    name: range(*each)
                    for name, each in zip(members, pairwise(ends), strict=True)
                }
            )
    return NeuronAssignment(tuple(groups), tuple(neurons), tuple(layers))


def layer_groups(
    layers: int, devices: int, allocation: Allocation | int
) -> list[range]:
    """Return the layers of each group (lines 3 and 4).

    Equation (1) gives every group two devices if possible, and at most as many groups as layers; if the number of
    layers does not divide, the last groups, at the output, have one layer more. With a given maximum, groups are filled
    from the output backwards, and the first group takes the rest.
    """
    if isinstance(allocation, int):
        ends = range(layers, 0, -allocation)
        return [range(max(0, end - allocation), end) for end in reversed(ends)]
    count = {
        "vertical": min(layers, devices),
        "hybrid": min(layers, max(1, devices // 2)),
        "horizontal": 1,
    }[allocation]
    size, left = divmod(layers, count)
    starts = [0]
    for group in range(count):
        starts.append(starts[-1] + size + (group >= count - left))
    return [range(start, stop) for start, stop in pairwise(starts)]


def devices_of(groups: Sequence[range], devices: int) -> list[int]:
    """Return the number of devices of each group: proportional to its layers, at least one, and using all devices.

    Rounding follows line 6 if the result uses all devices; otherwise the remaining devices go to the groups with the
    largest deficit, starting at the input.
    """
    layers = sum(len(group) for group in groups)
    wanted = [devices * len(group) / layers for group in groups]
    counts = [max(1, int(share)) for share in wanted]
    while sum(counts) < devices:
        counts[
            max(range(len(groups)), key=lambda group: wanted[group] - counts[group])
        ] += 1
    while sum(counts) > devices:
        shared = [group for group in range(len(groups)) if counts[group] > 1]
        counts[max(shared, key=lambda group: counts[group] - wanted[group])] -= 1
    return counts
