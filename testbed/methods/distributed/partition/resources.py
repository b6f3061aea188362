"""What a plan takes of each device: F, the weights it stores, and T, the multiplications one after the other."""

from __future__ import annotations

from testbed.methods.distributed.partition import tiles
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.storage import layers_stored, stored


def weights(flow: Dataflow, device: int) -> int:
    """Return F: the elements of weights that a device stores, no biases among them."""
    return sum(layer.share(layer.weights, part) for layer, part in layers_stored(flow, device))


def divided_weights(flow: Dataflow, device: int) -> int:
    """Return the weights a device stores of layers that are divided by channels: what shrinks with its share."""
    layers = flow.graph.layers
    return sum(
        layers[index].share(layers[index].weights, part)
        for index, part in stored(flow, device).items()
        if flow.tasks[index][device].work in ("outputs", "sums")
    )


def parameters(flow: Dataflow, device: int) -> int:
    """Return all values that a device stores: its weights, and what belongs to the channels it finishes."""
    return sum(
        layer.share(layer.weights, part) + layer.channel_values * len(part.channels)
        for layer, part in layers_stored(flow, device)
    )


def multiplications(flow: Dataflow) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    layers = flow.graph.layers
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, work in zip(rows, tiles.multiplications(layers[: flow.tiled], made), strict=False):
            row[tile.device] += work
    for device in flow.devices:
        for index, part in stored(flow, device).items():
            if index >= flow.tiled:
                rows[index][device] = layers[index].share(layers[index].multiplications, part)
    return tuple(map(tuple, rows))


def longest_path(flow: Dataflow) -> int:
    """Return T: multiplications one after the other, where devices work at the same time between two exchanges."""
    rows = multiplications(flow)
    early = max((sum(column) for column in zip(*rows[: flow.tiled], strict=True)), default=0)
    return early + sum(max(row) for row in rows[flow.tiled :])
