"""What a plan takes of each device: F, the weights it stores, and T, the multiplications one after the other."""

from __future__ import annotations

from testbed.methods.distributed.partition import tiles
from testbed.methods.distributed.partition.flow import Flow
from testbed.methods.distributed.partition.slices import Slice, slices


def weights(flow: Flow, device: int) -> int:
    """Return F: the elements of weights that a device stores, no biases among them."""
    return sum(_weights(flow, held) for held in slices(flow, device))


def divided_weights(flow: Flow, device: int) -> int:
    """Return the weights a device stores of layers that are divided by channels: what shrinks with its share."""
    return sum(
        _weights(flow, held)
        for held in slices(flow, device)
        if flow.roles[held.layer][device].work in ("outputs", "sums")
    )


def _weights(flow: Flow, held: Slice) -> int:
    layer = flow.network.layers[held.layer]
    return held.of(layer.weights, layer)


def parameters(flow: Flow, device: int) -> int:
    """Return all values that a device stores: its weights, and what belongs to the channels it finishes."""
    layers = flow.network.layers
    channelwise = (layers[held.layer].channelwise * held.channels.size for held in slices(flow, device))
    return weights(flow, device) + sum(channelwise)


def multiplications(flow: Flow) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    layers = flow.network.layers
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile in flow.plan.tiles:
        for row, work in zip(rows, tiles.multiplications(layers[: flow.tiled], tile), strict=False):
            row[tile.device] += work
    for device in flow.devices:
        for held in slices(flow, device):
            if held.layer >= flow.tiled:
                layer = layers[held.layer]
                rows[held.layer][device] = held.of(layer.multiplications, layer)
    return tuple(map(tuple, rows))


def longest_path(flow: Flow) -> int:
    """Return T: multiplications one after the other, where devices work at the same time between two exchanges."""
    rows = multiplications(flow)
    early = max((sum(column) for column in zip(*rows[: flow.tiled], strict=True)), default=0)
    return early + sum(max(row) for row in rows[flow.tiled :])
