"""Which slice of each layer's weights a device stores, and with it of what the layer multiplies."""

from __future__ import annotations

from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.ranges import Range
from testbed.models.graph import GraphLayer
from testbed.models.slices import NONE, Slice


def stored(flow: Dataflow, device: int) -> dict[int, Slice]:
    """Return what a device stores, by layer in their order. Tiled layers are whole on each device with a tile."""
    found: dict[int, Slice] = {}
    tiles = flow.execution.stealing or any(tile.device == device for tile in flow.plan.tiles)
    for index, layer in enumerate(flow.graph.layers):
        task, whole = flow.tasks[index][device], layer.whole
        makes = as_range(task.makes)
        if task.work == "whole" or (index < flow.tiled and tiles):
            found[index] = whole
        elif task.work == "outputs":
            found[index] = Slice(makes, whole.columns, makes)
        elif task.work == "sums":
            each = layer.inputs // layer.input_channels
            columns = range(task.takes.first // each, task.takes.last // each)
            found[index] = Slice(whole.rows, columns, makes)
        elif task.work == "channels":
            found[index] = Slice(NONE, NONE, makes)
    return found


def layers_stored(flow: Dataflow, device: int) -> list[tuple[GraphLayer, Slice]]:
    """Return the same with the layers themselves."""
    return [(flow.graph.layers[index], part) for index, part in stored(flow, device).items()]


def as_range(part: Range) -> range:
    """Return a part of a plan as a slice has it."""
    return range(part.first, part.last)
