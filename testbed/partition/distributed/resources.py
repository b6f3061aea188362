"""What a plan takes of each device: weights, multiplications, memory."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.models.chain import BYTES_PER_VALUE
from testbed.partition.distributed.network import Layer, Network
from testbed.partition.distributed.plan import DistributedPlan, LayerPlan, Tile
from testbed.partition.distributed.tiles import multiplications as tile_multiplications


def _part(layer: Layer, part: LayerPlan, device: int) -> tuple[int, int]:
    """Return a device's part of a layer that is split or whole, as numerator and denominator."""
    if part.scheme in ("lop", "fuse1"):
        return part.outputs[device].size, layer.output_channels
    if part.scheme in ("lip", "fuse2"):
        return part.inputs[device].size, layer.input_channels
    return int(part.owner == device), 1


def tiles_of(plan: DistributedPlan, device: int) -> list[Tile]:
    """Return a device's tiles."""
    return [tile for tile in plan.tiling.tiles if tile.device == device] if plan.tiling else []


def early(plan: DistributedPlan) -> int:
    """Return how many of the first layers are tiled."""
    return sum(part.scheme == "tiled" for part in plan.layers)


def weights(network: Network, plan: DistributedPlan) -> tuple[int, ...]:
    """Return F: the weights each device stores, in elements. Tiled layers are whole on each device with a tile."""
    found = []
    for device in range(len(plan.devices)):
        total = 0
        for layer, part in zip(network.layers, plan.layers, strict=True):
            if part.scheme == "tiled":
                total += layer.weights * bool(tiles_of(plan, device))
            else:
                some, of = _part(layer, part, device)
                total += layer.weights * some // of
        found.append(total)
    return tuple(found)


def parameters(network: Network, plan: DistributedPlan) -> tuple[int, ...]:
    """Return everything each device stores of the network, in elements.

    Channel-wise values lie where the activation is computed: with the output channels in LOP and FUSE1, at the
    source, which merges, in LIP and FUSE2.
    """
    found = []
    for device, stored in enumerate(weights(network, plan)):
        total = stored
        for layer, part in zip(network.layers, plan.layers, strict=True):
            if part.scheme in ("lop", "fuse1"):
                channels = part.outputs[device].size
            elif part.scheme in ("lip", "fuse2"):
                channels = layer.output_channels * (device == plan.source)
            elif part.scheme == "tiled":
                channels = layer.output_channels * bool(tiles_of(plan, device))
            else:
                channels = layer.output_channels * (device == part.owner)
            total += layer.channelwise * channels
        found.append(total)
    return tuple(found)


def split_weights(network: Network, plan: DistributedPlan, device: int) -> int:
    """Return the weights a device stores of layers that are split: what shrinks with its share."""
    found = 0
    for layer, part in zip(network.layers, plan.layers, strict=True):
        if part.scheme not in ("whole", "tiled"):
            some, of = _part(layer, part, device)
            found += layer.weights * some // of
    return found


def multiplications(network: Network, plan: DistributedPlan) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    count = early(plan)
    rows = [[0] * len(plan.devices) for _ in range(count)]
    for tile in plan.tiling.tiles if plan.tiling else ():
        for row, work in zip(rows, tile_multiplications(network.layers[:count], tile), strict=True):
            row[tile.device] += work
    for layer, part in zip(network.layers[count:], plan.layers[count:], strict=True):
        shares = [_part(layer, part, device) for device in range(len(plan.devices))]
        rows.append([layer.multiplications * some // of for some, of in shares])
    return tuple(map(tuple, rows))


def longest_path(network: Network, plan: DistributedPlan) -> int:
    """Return T: multiplications one after the other, where devices work at the same time between two exchanges."""
    rows, count = multiplications(network, plan), early(plan)
    tiled = max((sum(column) for column in zip(*rows[:count], strict=True)), default=0)
    return tiled + sum(max(row) for row in rows[count:])


def activations(network: Network, plan: DistributedPlan) -> tuple[int, ...]:
    """Return the most elements of inputs and outputs that each device holds at a time for one sample.

    At the source: the layer's input, what it collects or merges (while merging also the one partial sum that is
    being added), and outputs that later layers ask for. At a worker: what it needs of the input and what it computes.
    """
    peaks = [0] * len(plan.devices)
    owners = [plan.source if part.owner is None else part.owner for part in plan.layers]
    for index in range(len(network.layers)):
        for device in range(len(plan.devices)):
            working = _working(network, plan, index, device)
            kept = _kept(network, owners, index, device) if working or device == plan.source else 0
            peaks[device] = max(peaks[device], working + kept)
    return tuple(peaks)


def _kept(network: Network, owners: Sequence[int], index: int, device: int) -> int:
    """Elements of earlier outputs that a later layer asks this device for, the layer's own input not among them."""
    return sum(
        network.layers[earlier].outputs
        for earlier in range(index)
        if owners[earlier] == device
        and earlier not in network.layers[index].sources
        and max(network.readers[earlier], default=-1) > index
    )


def _working(network: Network, plan: DistributedPlan, index: int, device: int) -> int:
    """Elements of a layer's input and output on one device."""
    layer, part = network.layers[index], plan.layers[index]
    if part.scheme == "tiled":
        return while_tiling(network, plan, device) if index == 0 else 0
    some, of = _part(layer, part, device)
    source = device == plan.source
    if part.scheme == "whole":
        return (layer.inputs + layer.outputs) * some
    if part.scheme == "lop":
        own = layer.outputs if source else layer.outputs * some // of
        return (layer.inputs if some or source else 0) + own
    if part.scheme == "fuse1":
        return (layer.inputs if some or source else 0) + layer.outputs * some // of
    entering = layer.inputs if source and part.scheme == "lip" else layer.inputs * some // of
    merging = layer.outputs if source and len(plan.devices) > 1 else 0
    return entering + (layer.outputs if some or source else 0) + merging


def while_tiling(network: Network, plan: DistributedPlan, device: int) -> int:
    """Return the most elements that a device holds in the tiled layers.

    All its tiles' inputs, and the widest layer of one tile; at the source the image and what it collects, too.
    """
    layers = network.layers[: early(plan)]
    tiles = tiles_of(plan, device)
    widest = max(
        (
            layer.input[0] * entering.pixels + layer.output[0] * leaving.pixels
            for tile in tiles
            for layer, entering, leaving in zip(layers, tile.regions, tile.regions[1:], strict=False)
        ),
        default=0,
    )
    if device == plan.source:
        return layers[0].inputs + layers[-1].outputs + widest
    return widest + sum(layers[0].input[0] * tile.regions[0].pixels for tile in tiles)


def memory(network: Network, plan: DistributedPlan, samples: int = 1, in_flight: int = 1) -> tuple[float, ...]:
    """Return the bytes each device needs: parameters once, activations for each request under way.

    Left out, as in `testbed.partition.memory`: interpreter, torch, scratch space of kernels, messages under way.
    """
    return tuple(
        float(BYTES_PER_VALUE * (stored + in_flight * samples * live))
        for stored, live in zip(parameters(network, plan), activations(network, plan), strict=True)
    )
