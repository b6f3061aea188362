"""Which part of each layer's weights a device stores, and with it of what the layer multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.methods.distributed.partition.flow import Flow
from testbed.methods.distributed.partition.network import Layer
from testbed.methods.distributed.partition.pieces import NOTHING
from testbed.methods.distributed.partition.plan import Range


@dataclass(frozen=True)
class Slice:
    """Of one layer: output channels and input channels of its weights, channels of what follows."""

    layer: int
    """Index in the network."""
    rows: Range
    columns: Range
    channels: Range

    def of(self, values: int, layer: Layer) -> int:
        """Return how many of the layer's values, all weights or all multiplications, are in the slice."""
        return values * self.rows.size * self.columns.size // (layer.output_channels * layer.input_channels)


def slices(flow: Flow, device: int) -> tuple[Slice, ...]:
    """Return what a device stores, layer by layer. Tiled layers are whole on each device with a tile."""
    found = []
    tiles = any(tile.device == device for tile in flow.plan.tiles)
    for index, layer in enumerate(flow.network.layers):
        role = flow.roles[index][device]
        every, entering = Range(0, layer.output_channels), Range(0, layer.input_channels)
        if role.work == "whole" or (index < flow.tiled and tiles):
            found.append(Slice(index, every, entering, every))
        elif role.work == "outputs":
            found.append(Slice(index, role.makes, entering, role.makes))
        elif role.work == "sums":
            each = layer.inputs // layer.input_channels
            found.append(Slice(index, every, Range(role.takes.first // each, role.takes.last // each), role.makes))
        elif role.work == "channels":
            found.append(Slice(index, NOTHING, NOTHING, role.makes))
    return tuple(found)
