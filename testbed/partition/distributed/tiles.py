"""Fused tile partitioning (FTP) of the early layers, after Zhao et al., "DeepThings", as Stahl et al. use it.

The output of the last early layer is cut by a grid; each tile is traced back to what it needs of every layer's input,
its halo included. A device that computes a tile needs nothing of the others from the image to the tile's output;
what it pays for that is what neighbouring tiles compute twice. Rows and columns are independent, so all is traced
along one axis at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import InputError
from testbed.partition.distributed.network import Layer, Network
from testbed.partition.distributed.plan import Range, Region, Tile, Tiling
from testbed.partition.distributed.shares import divide, equal


def early_layers(network: Network) -> int:
    """Return how many of the first layers are better tiled than divided by channels.

    Feature-dominated layers have more elements entering and leaving than weights. The cut is where the sum of
    (features - weights) over the layers with weights before it is largest; pooling right after it is tiled too.
    Layer 16 of YOLOv2 at 608x608, as in Stahl et al., Section 5.
    """
    best, total, cut = 0, 0, 0
    for index in range(len(network.layers)):
        if not _tiles(network, index):
            break
        layer = network.layers[index]
        if layer.weights == 0:
            if cut == index and _closes(network, index + 1):
                cut = index + 1
            continue
        total += layer.inputs + layer.outputs - layer.weights
        if total > best and _closes(network, index + 1):
            best, cut = total, index + 1
    return cut


def check_early(network: Network, count: int) -> None:
    """Raise `InputError` where so many first layers cannot be tiled, naming the nearest smaller number that can."""
    if count == 0 or (
        count <= len(network.layers)
        and all(_tiles(network, index) for index in range(count))
        and _closes(network, count)
    ):
        return
    able = [
        fewer
        for fewer in range(min(count, len(network.layers)) + 1)
        if all(_tiles(network, index) for index in range(fewer)) and _closes(network, fewer)
    ]
    raise InputError(
        f"method.early: the first {count} layers of {network.name} cannot be tiled together, which takes convolutions "
        f"and pooling in a row, of which only the last one's output is used further on: use {max(able)}"
    )


def _tiles(network: Network, index: int) -> bool:
    """Whether a layer works on pixels near each other, and only on what the layer before it made."""
    layer = network.layers[index]
    return layer.kind in ("conv", "pool") and layer.sources == (index - 1,)


def _closes(network: Network, count: int) -> bool:
    """Whether nothing after the first ``count`` layers needs what is inside them."""
    return all(max(network.readers[index], default=0) < count for index in range(count - 1))


def needed(layer: Layer, out: Range, size: int) -> Range:
    """Return which of ``size`` pixels along one axis a layer needs for pixels ``out`` of its output."""
    first = out.first * layer.stride - layer.padding
    last = (out.last - 1) * layer.stride - layer.padding + layer.kernel
    return Range(max(0, first), min(size, last))


def padding(layer: Layer, out: Region) -> tuple[int, int, int, int]:
    """Return how many pixels of padding a tile has left, right, top and bottom at a layer: torch's order.

    ``out`` is the region of the layer's output. Only tiles at the map's border have any.
    """
    _, height, width = layer.input

    def beyond(first: int, last: int, size: int) -> tuple[int, int]:
        before = first * layer.stride - layer.padding
        after = (last - 1) * layer.stride - layer.padding + layer.kernel
        return max(0, -before), max(0, after - size)

    return (*beyond(out.left, out.right, width), *beyond(out.top, out.bottom, height))


def tile(layers: Sequence[Layer], rows: int, columns: int, speeds: Sequence[float], source: int) -> Tiling:
    """Cut early layers into a grid and give the tiles to devices.

    Each tile, the one with most multiplications first, goes to the device that would be done with it first; of
    equals to the source, which needs no network for it.

    Raises:
        InputError: for a grid that is finer than the output it cuts.
    """
    _, height, width = layers[-1].output
    for name, parts, size in (("rows", rows, height), ("columns", columns, width)):
        if not 1 <= parts <= size:
            raise InputError(
                f"method.grid: a map of {height}x{width} pixels cannot be cut into {parts} {name}: use 1 to {size}"
            )
    down = [_traced(layers, out, 1) for out in divide(height, equal(rows))]
    across = [_traced(layers, out, 2) for out in divide(width, equal(columns))]
    tiles = [
        Tile.model_construct(
            row=row,
            column=column,
            device=source,
            regions=tuple(Region(*high, *wide) for high, wide in zip(highs, wides, strict=True)),
        )
        for row, highs in enumerate(down)
        for column, wides in enumerate(across)
    ]
    work = [sum(multiplications(layers, each)) for each in tiles]
    loads = [0.0] * len(speeds)
    owners = {}
    for index in sorted(range(len(tiles)), key=lambda index: (-work[index], index)):
        device = min(
            range(len(speeds)), key=lambda device: ((loads[device] + work[index]) / speeds[device], device != source)
        )
        loads[device] += work[index]
        owners[index] = device
    owned = tuple(each.model_copy(update={"device": owners[index]}) for index, each in enumerate(tiles))
    return Tiling.model_construct(rows=rows, columns=columns, tiles=owned)


def _traced(layers: Sequence[Layer], out: Range, axis: int) -> list[Range]:
    """Return what is needed along one axis of every layer's input, and at the end ``out`` itself."""
    found = [out]
    for layer in reversed(layers):
        found.append(needed(layer, found[-1], layer.input[axis]))
    return found[::-1]


def multiplications(layers: Sequence[Layer], tile: Tile) -> list[int]:
    """Return the multiplications of each layer in one tile."""
    return [
        layer.multiplications * region.pixels // (layer.output[1] * layer.output[2])
        for layer, region in zip(layers, tile.regions[1:], strict=True)
    ]


def redundant_multiplications(layers: Sequence[Layer], tiling: Tiling) -> int:
    """Return what the tiles multiply more than the layers in one piece: the price of the halo."""
    tiled = sum(sum(multiplications(layers, each)) for each in tiling.tiles)
    return tiled - sum(layer.multiplications for layer in layers)


def tiled_time(layers: Sequence[Layer], tiling: Tiling, speeds: Sequence[float]) -> float:
    """Return when the last device is done with its tiles, in multiplications per unit of speed."""
    loads = [0] * len(speeds)
    for each in tiling.tiles:
        loads[each.device] += sum(multiplications(layers, each))
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


def best_tiling(layers: Sequence[Layer], speeds: Sequence[float], source: int) -> Tiling:
    """Return the grid of at most twice as many tiles as devices that is computed soonest; of equals the coarsest."""
    _, height, width = layers[-1].output
    limit = 2 * len(speeds)
    grids = [
        (rows, columns)
        for rows in range(1, min(limit, height) + 1)
        for columns in range(1, min(limit // rows, width) + 1)
    ]
    tilings = [tile(layers, rows, columns, speeds, source) for rows, columns in grids]
    return min(tilings, key=lambda tiling: (tiled_time(layers, tiling, speeds), len(tiling.tiles)))
