"""What a plan takes of each device: F, the weights it stores, and T, the multiplications one after the other."""

from __future__ import annotations

from testbed.device import Cost
from testbed.methods.distributed.partition import tiles
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.layer_tasks import by_chunks
from testbed.methods.distributed.partition.storage import layers_stored, stored
from testbed.models.chain import forward_of


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


def costs(flow: Dataflow) -> list[list[Cost]]:
    """Return what a request is charged: one row a layer, one column a device; the merging of sums is left out."""
    layers, samples = flow.graph.layers, flow.execution.samples
    rows = [[Cost()] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, cost in zip(rows, tiles.costs(layers[: flow.tiled], made, samples), strict=False):
            row[tile.device] += cost
    for index in range(flow.tiled, len(layers)):
        rows[index] = [forward_of(_one(flow, index, device), samples) for device in flow.devices]
    return rows


def _one(flow: Dataflow, index: int, device: int) -> Cost:
    """Return what a device is charged for its part of a layer and one sample."""
    layer, tasks = flow.graph.layers[index], flow.tasks[index]
    task = tasks[device]
    if task.work == "none":
        return Cost()
    # Chunk by chunk, each from all that is read; of sums, those of all who merge some.
    makes = [each.makes for each in tasks] if task.work == "sums" else [task.makes]
    products = [
        layer.product_cost(task.takes.size, chunk.size)
        for made in makes
        for chunk in (flow.chunks(index, made) if by_chunks(layer, task) else (made,))
    ]
    return sum(products, layer.finish_cost(task.makes.size))


def longest_path(flow: Dataflow) -> int:
    """Return T: multiplications one after the other, where devices work at the same time between two exchanges."""
    rows = multiplications(flow)
    early = max((sum(column) for column in zip(*rows[: flow.tiled], strict=True)), default=0)
    return early + sum(max(row) for row in rows[flow.tiled :])
