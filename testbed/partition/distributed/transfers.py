"""What goes over the network in one inference, message by message, and what that weighs on the wire.

Everything passes through the source, as in Stahl et al., Section 5: it sends each worker what of a layer's input the
worker needs and does not hold, and collects what the workers computed. So the elements add up to the formulas of
`testbed.partition.distributed.communication`, up to the rounding of shares to whole channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from testbed.models.chain import BYTES_PER_VALUE
from testbed.network.framing import wire_bytes
from testbed.partition.distributed.network import IMAGE, Network
from testbed.partition.distributed.plan import DistributedPlan, LayerPlan, Range
from testbed.partition.pipeline import ENVELOPE


@dataclass(frozen=True)
class Transfer:
    """One message, for one sample."""

    layer: int
    """Whose input or output it carries; `IMAGE` for the network's input on its way to a layer's owner."""
    what: Literal["input", "output", "partial", "tile-input", "tile-output"]
    """``partial``: sums over some input channels, of all outputs."""
    sender: int
    receiver: int
    elements: int
    ranges: tuple[Range, ...] = ()
    """Channels, of the layer's input or output."""
    tile: int | None = None
    """Index into the tiles of the plan's tiling."""

    def content(self, samples: int = 1) -> int:
        """Return the bytes of the message, its header included, for a batch of samples."""
        return samples * BYTES_PER_VALUE * self.elements + ENVELOPE

    def wire_bytes(self, samples: int = 1) -> float:
        """Return the bytes on the wire for a batch of samples."""
        return wire_bytes(self.content(samples))


def transfers(network: Network, plan: DistributedPlan) -> tuple[Transfer, ...]:
    """Return the messages of one inference, in an order in which they can be sent."""
    return tuple(_transfers(network, plan))


def elements(found: Sequence[Transfer]) -> int:
    """Return the elements of all messages."""
    return sum(transfer.elements for transfer in found)


def bytes_on_wire(found: Sequence[Transfer], samples: int = 1) -> float:
    """Return the bytes on the wire of all messages."""
    return sum(transfer.wire_bytes(samples) for transfer in found)


def without(whole: Range, part: Range) -> tuple[Range, ...]:
    """Return what is left of one range without another that lies in it."""
    if not part.size:
        return (whole,) if whole.size else ()
    return tuple(each for each in (Range(whole.first, part.first), Range(part.last, whole.last)) if each.size)


def held(network: Network, plan: DistributedPlan, index: int, device: int) -> Range:
    """Return which channels of a layer's input a worker holds since it computed them itself."""
    if not network.follows(index) or plan.layers[index - 1].scheme != "lop":
        return Range(0, 0)
    factor = network.layers[index].input_channels // network.layers[index - 1].output_channels
    first, last = plan.layers[index - 1].outputs[device]
    return Range(first * factor, last * factor)


def _transfers(network: Network, plan: DistributedPlan) -> Iterator[Transfer]:
    have = {IMAGE: {plan.source}}
    for index, (layer, part) in enumerate(zip(network.layers, plan.layers, strict=True)):
        owner = plan.source if part.owner is None else part.owner
        if part.scheme != "fuse2":
            for origin in layer.sources:
                yield from _bring(network, have, origin, owner)
        if part.scheme == "tiled":
            yield from _tiles(network, plan, index)
        elif part.scheme != "whole":
            for device in range(len(plan.devices)):
                if device != plan.source:
                    yield from _inputs(network, plan, index, device)
            yield from _outputs(network, plan, index)
        have[index] = {owner}
    yield from _bring(network, have, len(network.layers) - 1, plan.source)


def _bring(network: Network, have: dict[int, set[int]], origin: int, device: int) -> Iterator[Transfer]:
    """Move a whole output to a device that does not have it yet."""
    if device in have[origin]:
        return
    shape = network.layers[0].input if origin == IMAGE else network.layers[origin].output
    yield Transfer(origin, "output", min(have[origin]), device, network.outputs_of(origin), (Range(0, shape[0]),))
    have[origin].add(device)


def _tiles(network: Network, plan: DistributedPlan, index: int) -> Iterator[Transfer]:
    """Send tiles out before the first layer and collect them after the last."""
    assert plan.tiling is not None
    count = len(plan.tiling.tiles[0].regions) - 1
    for number, tile in enumerate(plan.tiling.tiles):
        if tile.device == plan.source:
            continue
        if index == 0:
            size = network.layers[0].input[0] * tile.regions[0].pixels
            yield Transfer(index, "tile-input", plan.source, tile.device, size, tile=number)
        if index == count - 1:
            size = network.layers[index].output[0] * tile.regions[-1].pixels
            yield Transfer(index, "tile-output", tile.device, plan.source, size, tile=number)


def _inputs(network: Network, plan: DistributedPlan, index: int, device: int) -> Iterator[Transfer]:
    """Send a worker what it needs of a layer's input and does not hold."""
    layer, part = network.layers[index], plan.layers[index]
    needs = _needs(part, device, layer.input_channels)
    missing = without(needs, held(network, plan, index, device)) if needs.size else ()
    if missing:
        size = sum(each.size for each in missing) * (layer.inputs // layer.input_channels)
        yield Transfer(index, "input", plan.source, device, size, missing)


def _needs(part: LayerPlan, device: int, channels: int) -> Range:
    if part.scheme == "fuse2":
        return Range(0, 0)
    if part.scheme == "lip":
        return part.inputs[device]
    return Range(0, channels if part.outputs[device].size else 0)


def _outputs(network: Network, plan: DistributedPlan, index: int) -> Iterator[Transfer]:
    """Collect what the workers computed; of a FUSE1 nothing."""
    layer, part = network.layers[index], plan.layers[index]
    for device in range(len(plan.devices)):
        if device == plan.source:
            continue
        if part.scheme == "lop" and part.outputs[device].size:
            found = part.outputs[device]
            size = found.size * math.prod(layer.output[1:])
            yield Transfer(index, "output", device, plan.source, size, (found,))
        elif part.scheme in ("lip", "fuse2") and part.inputs[device].size:
            whole = Range(0, layer.output_channels)
            yield Transfer(index, "partial", device, plan.source, layer.outputs, (whole,))
