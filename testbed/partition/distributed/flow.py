"""From a plan to what every device does and sends in one inference; pure, and the same on every device.

What a layer takes and makes is counted in elements of one sample, flattened channel after channel: a range of
channels is then a range of elements, and a fully connected layer reads a convolution's output without ado.

Two ways of exchanging what the schemes need. Both move the same elements for LOP and for fused pairs, M (N - 1) for
each output M that everybody needs (equations (7) and (9) with the reuse of the own part), but over other links:

- ``source``: as in the paper, everything passes the source. It collects and merges, pools and routes, and spreads.
- ``direct``: whoever has a part sends it to those that need it. The sums of LIP and of a fused pair's second layer are
  merged in ranges, one on each device, so that no device's link carries more than its share; pooling is done where the
  channels are, and routing is nothing but knowing what to ask for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from testbed.models.chain import BYTES_PER_VALUE
from testbed.partition.distributed.network import IMAGE, Layer, Network
from testbed.partition.distributed.pieces import Pieces, both, common, size, without
from testbed.partition.distributed.plan import DistributedPlan, LayerPlan, Range
from testbed.partition.distributed.resources import while_tiling

Exchange = Literal["direct", "source"]
Way = Literal["direct", "source", "row"]
"""``row``: every layer is whole, and goes from its owner to the next one's; nothing passes the source for that."""
Work = Literal["none", "outputs", "sums", "whole", "channels"]
"""``outputs``: some output channels from all of the input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the layer as it is. ``channels``: a layer that treats each channel by itself, on some of them."""

NOTHING = Range(0, 0)


@dataclass(frozen=True)
class Role:
    """What one device does of one layer."""

    work: Work = "none"
    takes: Range = NOTHING
    """Elements of the layer's input that it computes from."""
    makes: Range = NOTHING
    """Output channels that it ends up with; for ``sums`` those that it merges, of everybody's sums."""


class Origin(NamedTuple):
    """Where a part of a layer's input comes from."""

    value: int
    """The layer that made it, or `IMAGE`."""
    part: Range
    """Elements of that value."""
    at: int
    """First element of the layer's input that it becomes."""


class Transfer(NamedTuple):
    """Elements of one sample that go from one device to another on account of one layer's output."""

    sender: int
    receiver: int
    value: int
    elements: int


def pixels(layer: Layer) -> int:
    """Return the elements of one output channel."""
    return math.prod(layer.output[1:])


def proportional(total: int, shares: Sequence[float]) -> tuple[Range, ...]:
    """Divide ``total`` into ranges in the order of the shares, each within one of what its share would be."""
    whole = sum(shares)
    ends = [round(total * reached / whole) for reached in accumulate(shares, initial=0.0)]
    return tuple(Range(first, last) for first, last in pairwise(ends))


@dataclass(frozen=True)
class Flow:
    """A plan in terms of roles; `flow` makes it."""

    network: Network
    plan: DistributedPlan
    way: Way
    roles: tuple[tuple[Role, ...], ...]
    """By layer and device; the layers that are tiled have none."""
    wants: Mapping[int, tuple[Pieces, ...]]
    """By value and device: the elements that the device computes from at some time, or hands out as the result."""

    @property
    def tiled(self) -> int:
        """How many of the first layers are done by tiles."""
        return len(self.plan.tiling.tiles[0].regions) - 1 if self.plan.tiling else 0

    @cached_property
    def homes(self) -> Mapping[int, tuple[Range, ...]]:
        """Return by value and device the elements that the device itself makes."""
        found = {IMAGE: self._at_source(self.network.layers[0].inputs)}
        for index, roles in enumerate(self.roles):
            layer = self.network.layers[index]
            if index < self.tiled:
                if index == self.tiled - 1:
                    found[index] = self._at_source(layer.outputs)
                continue
            found[index] = tuple(scaled(role.makes, pixels(layer)) for role in roles)
        return found

    def _at_source(self, elements: int) -> tuple[Range, ...]:
        return tuple(
            Range(0, elements if device == self.plan.source else 0) for device in range(len(self.plan.devices))
        )

    def origins(self, index: int, taken: Range) -> tuple[Origin, ...]:
        """Return where a range of a layer's input comes from, in its order."""
        found, at = [], 0
        for source in self.network.layers[index].sources:
            there = Range(at, at + self.network.outputs_of(source))
            part = common(there, taken)
            if part.size and source != IMAGE and is_alias(self.network.layers[source], self.way):
                inner = self.origins(source, shifted(part, -at))
                found += [origin._replace(at=origin.at + at) for origin in inner]
            elif part.size:
                found.append(Origin(source, shifted(part, -at), part.first))
            at = there.last
        return tuple(found)

    def result(self) -> tuple[Origin, ...]:
        """Return what the network's output consists of."""
        last = len(self.network.layers) - 1
        if is_alias(self.network.layers[last], self.way):
            return self.origins(last, Range(0, self.network.layers[last].inputs))
        return (Origin(last, Range(0, self.network.layers[last].outputs), 0),)

    def last_reader(self, value: int, device: int) -> int:
        """Return the last layer for which a device needs a value; beyond all layers where it is the result."""
        if device == self.plan.source and any(origin.value == value for origin in self.result()):
            return len(self.network.layers)
        reading = (
            index
            for index in range(self.tiled, len(self.network.layers))
            if any(origin.value == value for origin in self.origins(index, self.roles[index][device].takes))
        )
        return max(reading, default=-1)

    def receivers(self, value: int, device: int, made: Range) -> Iterator[tuple[int, Range]]:
        """Yield whom a device sends what it has made of a value, and which part."""
        source = self.plan.source
        if self.way != "source" or device == source:
            yield from self.forwarded(value, device, made)
        else:
            wanted = common(made, hull([self.wants[value][source], *(part for _, part in self._needed(value, device))]))
            if wanted.size:
                yield source, wanted

    def forwarded(self, value: int, origin: int, made: Range) -> Iterator[tuple[int, Range]]:
        """Yield who needs what ``origin`` has made of a value; where all passes the source, the source sends it on."""
        for receiver, pieces in self._needed(value, origin):
            if self.way == "source" and receiver == self.plan.source != origin:
                continue
            for piece in pieces:
                part = common(piece, made)
                if part.size:
                    yield receiver, part

    def _needed(self, value: int, maker: int) -> Iterator[tuple[int, Pieces]]:
        """Yield in a circle from ``maker`` on who lacks what of a value: each begins with another's link."""
        count = len(self.plan.devices)
        for step in range(1, count):
            receiver = (maker + step) % count
            yield receiver, without(self.wants[value][receiver], self.homes[value][receiver])

    def transfers(self) -> tuple[Transfer, ...]:
        """Return everything that one inference sends, in elements of one sample."""
        found: list[Transfer] = []
        source = self.plan.source
        for tile in self.plan.tiling.tiles if self.plan.tiling else ():
            if tile.device != source:
                first, last = self.network.layers[0], self.network.layers[self.tiled - 1]
                found.append(Transfer(source, tile.device, IMAGE, first.input[0] * tile.regions[0].pixels))
                found.append(Transfer(tile.device, source, self.tiled - 1, last.output[0] * tile.regions[-1].pixels))
        for value, homes in self.homes.items():
            for maker, home in enumerate(homes):
                if not home.size:
                    continue
                found += [Transfer(maker, to, value, part.size) for to, part in self.receivers(value, maker, home)]
                if self.way == "source" and maker != source:
                    found += [Transfer(source, to, value, part.size) for to, part in self.forwarded(value, maker, home)]
        for index, roles in enumerate(self.roles):
            if all(role.work != "sums" for role in roles):
                continue
            for merger, merging in enumerate(roles):
                found += [
                    Transfer(device, merger, index, merging.makes.size * pixels(self.network.layers[index]))
                    for device, role in enumerate(roles)
                    if device != merger and role.takes.size and merging.makes.size
                ]
        return tuple(found)

    @property
    def communication(self) -> int:
        """C: elements of one sample that go over the network."""
        return sum(transfer.elements for transfer in self.transfers())

    def multiplications(self, index: int, device: int) -> float:
        """Return R of what a device does of a layer."""
        layer, role = self.network.layers[index], self.roles[index][device]
        if role.work == "outputs":
            return layer.multiplications * role.makes.size / layer.output_channels
        if role.work == "sums":
            return layer.multiplications * role.takes.size / layer.inputs
        return float(layer.multiplications) if role.work == "whole" else 0.0

    def activations(self, device: int) -> int:
        """Return the most elements of one sample that a device holds at once, by the layer it works on.

        What it will still need of earlier values, as received or made by itself; the layer's own output; the sums
        that all have sent to it, where it merges.
        """
        last = {value: self.last_reader(value, device) for value in self.wants}
        most = 0
        for index in range(self.tiled, len(self.roles)):
            role = self.roles[index][device]
            kept = 0
            for value, pieces in self.wants.items():
                if value < index <= last[value] and value in self.homes:
                    kept += size(both(pieces[device], (self.homes[value][device],)))
            made = role.makes.size * pixels(self.network.layers[index])
            if role.work == "sums":
                made *= 1 + sum(other.takes.size > 0 for other in self.roles[index])
            elif role.work == "outputs":
                made *= 2
            most = max(most, kept + made)
        return max(most, while_tiling(self.network, self.plan, device)) if self.plan.tiling else most

    @property
    def held(self) -> tuple[int, ...]:
        """Return each device's `parameters`."""
        return tuple(self.parameters(device) for device in range(len(self.plan.devices)))

    def memory(self, samples: int = 1, in_flight: int = 1) -> tuple[float, ...]:
        """Return the bytes each device needs: parameters once, activations for each request under way."""
        live = (self.activations(device) for device in range(len(self.plan.devices)))
        return tuple(
            float(BYTES_PER_VALUE * (stored + in_flight * samples * each))
            for stored, each in zip(self.held, live, strict=True)
        )

    def parameters(self, device: int) -> int:
        """Return the values that a device keeps: its weights, and what belongs to the channels it finishes."""
        total = 0
        for index, layer in enumerate(self.network.layers):
            role = self.roles[index][device]
            if index < self.tiled:
                owned = any(tile.device == device for tile in self.plan.tiling.tiles) if self.plan.tiling else False
                total += layer.parameters if owned else 0
            elif role.work == "whole":
                total += layer.parameters
            elif role.work == "outputs":
                total += layer.weights * role.makes.size // layer.output_channels + layer.channelwise * role.makes.size
            elif role.work == "sums" or role.makes.size:
                total += layer.weights * role.takes.size // layer.inputs + layer.channelwise * role.makes.size
        return total


def flow(network: Network, plan: DistributedPlan, exchange: Exchange = "direct") -> Flow:
    """Work out every device's roles, and what it wants of what the others make."""
    devices = range(len(plan.devices))
    way: Way = "row" if all(layer.scheme == "whole" for layer in plan.layers) else exchange
    draft = Flow(network, plan, way, (), {})
    roles: list[tuple[Role, ...]] = []
    for index, layer in enumerate(network.layers):
        if index < draft.tiled:
            roles.append((Role(),) * len(devices))
            continue
        homes = replace(draft, roles=tuple(roles)).homes
        roles.append(_roles(network, plan, way, index, layer, homes))
    forward = replace(draft, roles=tuple(roles))

    wants: dict[int, list[Pieces]] = {}
    for value in range(IMAGE, len(network.layers)):
        wants[value] = [() for _ in devices]
    for origin in forward.result():
        wants[origin.value][plan.source] = both(wants[origin.value][plan.source], (origin.part,))
    for index in range(len(network.layers) - 1, draft.tiled - 1, -1):
        if way == "direct" and network.layers[index].kind == "reorg":
            # Everybody moves the pixels for himself, but only who reads them.
            roles[index] = tuple(role if wants[index][device] else Role() for device, role in enumerate(roles[index]))
        for device in devices:
            for origin in forward.origins(index, roles[index][device].takes):
                wants[origin.value][device] = both(wants[origin.value][device], (origin.part,))
    return replace(draft, roles=tuple(roles), wants={value: tuple(pieces) for value, pieces in wants.items()})


def is_alias(layer: Layer, way: Way) -> bool:
    """Say whether a layer only names what others have made."""
    return way == "direct" and layer.kind == "route"


def _roles(
    network: Network,
    plan: DistributedPlan,
    way: Way,
    index: int,
    layer: Layer,
    homes: Mapping[int, tuple[Range, ...]],
) -> tuple[Role, ...]:
    decided: LayerPlan = plan.layers[index]
    everything = Range(0, layer.inputs)
    if decided.scheme in ("lop", "fuse1"):
        return tuple(Role("outputs", everything, made) if made.size else Role() for made in decided.outputs)
    if decided.scheme in ("lip", "fuse2"):
        merging = _merging(network, plan, way, index)
        each = layer.inputs // layer.input_channels
        return tuple(
            Role("sums", scaled(taken, each), made) for taken, made in zip(decided.inputs, merging, strict=True)
        )
    whole = Role("whole", everything, Range(0, layer.output[0]))
    if is_alias(layer, way):
        return (Role(),) * len(plan.devices)
    if way == "direct" and layer.kind == "reorg":
        return (whole,) * len(plan.devices)
    (first, *more) = layer.sources
    if way == "direct" and layer.kind == "pool" and not more and first in homes:
        channel = layer.inputs // layer.output[0]
        return tuple(
            Role("channels", home, Range(home.first // channel, home.last // channel)) if home.size else Role()
            for home in homes[first]
        )
    owner = plan.source if decided.owner is None else decided.owner
    return tuple(whole if device == owner else Role() for device in range(len(plan.devices)))


def _merging(network: Network, plan: DistributedPlan, way: Way, index: int) -> tuple[Range, ...]:
    """Return which output channels of a layer's sums each device merges."""
    channels = network.layers[index].output[0]
    if way == "direct" and network.readers[index]:
        return proportional(channels, [taken.size for taken in plan.layers[index].inputs])
    return tuple(Range(0, channels if device == plan.source else 0) for device in range(len(plan.devices)))


def chunks(made: Range, count: int, elements: int, least: int) -> tuple[Range, ...]:
    """Divide output channels into about equal ranges that are sent as soon as each is computed.

    At most ``count``, and fewer where one would have less than ``least`` of the ``elements`` that each channel has.
    """
    wanted = max(1, min(count, made.size, made.size * elements // max(1, least)))
    return tuple(shifted(part, made.first) for part in proportional(made.size, [1.0] * wanted)) if made.size else ()


def scaled(part: Range, factor: int) -> Range:
    """Return a range of channels as elements."""
    return Range(part.first * factor, part.last * factor)


def shifted(part: Range, by: int) -> Range:
    """Return a range so much further on."""
    return Range(part.first + by, part.last + by)


def hull(groups: Sequence[Pieces]) -> Range:
    """Return the least range that holds all pieces."""
    every = [piece for group in groups for piece in group]
    if not every:
        return NOTHING
    return Range(min(piece.first for piece in every), max(piece.last for piece in every))


__all__ = ["Exchange", "Flow", "Origin", "Role", "Transfer", "chunks", "flow", "size"]
