"""Fused tile partitioning (FTP) of the early layers, after Zhao et al., "DeepThings", as Stahl et al. use it.

The output of the last early layer is cut by a grid; each tile is traced back to what it needs of every layer's input,
its halo included. A device that computes a tile needs nothing of the others from the image to the tile's output;
what it pays for that is what neighbouring tiles compute twice. Rows and columns are independent, so all is traced
along one axis at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from testbed.errors import InputError
from testbed.methods.distributed.partition.distributed_plan import Region, Tile, Tiling
from testbed.methods.distributed.partition.ranges import Range
from testbed.methods.distributed.partition.shares import evenly
from testbed.models.graph import GraphLayer


def needed(layer: GraphLayer, out: Range, size: int) -> Range:
    """Return which of ``size`` pixels along one axis a layer needs for pixels ``out`` of its output."""
    seen = _seen(layer, out.first, out.last)
    return Range(max(0, seen.first), min(size, seen.last))


def _seen(layer: GraphLayer, first: int, last: int) -> Range:
    """Return the pixels along one axis, padding included, that a layer looks at for some pixels of its output."""
    window = layer.window
    assert window is not None
    return Range(first * window.stride - window.padding, (last - 1) * window.stride - window.padding + window.kernel)


def padding(layer: GraphLayer, out: Region) -> tuple[int, int, int, int]:
    """Return how many pixels of padding a tile has left, right, top and bottom at a layer: torch's order.

    ``out`` is the region of the layer's output. Only tiles at the map's border have any.
    """
    _, height, width = layer.input

    def beyond(first: int, last: int, size: int) -> tuple[int, int]:
        seen = _seen(layer, first, last)
        return max(0, -seen.first), max(0, seen.last - size)

    return (*beyond(out.left, out.right, width), *beyond(out.top, out.bottom, height))


@dataclass(frozen=True)
class _Grid:
    """Early layers cut into rows and columns, before anybody owns a tile."""

    layers: Sequence[GraphLayer]
    rows: int
    columns: int

    @cached_property
    def _down(self) -> list[list[Range]]:
        return [_traced(self.layers, out, 1) for out in evenly(self.layers[-1].output[1], self.rows)]

    @cached_property
    def _across(self) -> list[list[Range]]:
        return [_traced(self.layers, out, 2) for out in evenly(self.layers[-1].output[2], self.columns)]

    @cached_property
    def work(self) -> list[int]:
        """Multiplications of each tile, row by row."""
        per_pixel = [layer.multiplications // (layer.output[1] * layer.output[2]) for layer in self.layers]
        found = []
        for highs in self._down:
            per_column = [each * high.size for each, high in zip(per_pixel, highs[1:], strict=True)]
            for wides in self._across:
                found.append(sum(each * wide.size for each, wide in zip(per_column, wides[1:], strict=True)))
        return found

    def least_time(self, speeds: Sequence[float]) -> float:
        """Return a time that no assignment of the tiles can beat, in multiplications per unit of speed."""
        return max(max(self.work) / max(speeds), sum(self.work) / sum(speeds))

    def owners(self, speeds: Sequence[float], source: int) -> tuple[list[int], float]:
        """Give each tile to a device; return the owners, and when the last device is done."""
        loads = [0] * len(speeds)
        owners = [source] * len(self.work)
        for index in sorted(range(len(owners)), key=lambda index: -self.work[index]):
            more = self.work[index]
            ends = [(load + more) / speed for load, speed in zip(loads, speeds, strict=True)]
            soonest = min(ends)
            device = source if ends[source] == soonest else ends.index(soonest)
            loads[device] += more
            owners[index] = device
        return owners, max(load / speed for load, speed in zip(loads, speeds, strict=True))

    def tiling(self, owners: Sequence[int]) -> Tiling:
        """Return the tiles with their regions."""
        cells = product(enumerate(self._down), enumerate(self._across))
        return Tiling(
            rows=self.rows,
            columns=self.columns,
            tiles=tuple(
                Tile(
                    row=row,
                    column=column,
                    device=owner,
                    regions=tuple(Region(*high, *wide) for high, wide in zip(highs, wides, strict=True)),
                )
                for owner, ((row, highs), (column, wides)) in zip(owners, cells, strict=True)
            ),
        )


def tile(layers: Sequence[GraphLayer], rows: int, columns: int, speeds: Sequence[float], source: int) -> Tiling:
    """Cut early layers into a grid and give the tiles to devices.

    Each tile, the one with most multiplications first, goes to the device that would be done with it first; of
    equals to the source, which needs no graph for it.

    Raises:
        InputError: for a grid that is finer than the output it cuts.
    """
    _, height, width = layers[-1].output
    for name, parts, size in (("rows", rows, height), ("columns", columns, width)):
        if not 1 <= parts <= size:
            raise InputError(
                f"a map of {height}x{width} pixels cannot be cut into {parts} {name}: use 1 to {size}",
                ("method", "grid"),
            )
    grid = _Grid(layers, rows, columns)
    return grid.tiling(grid.owners(speeds, source)[0])


def best_tiling(layers: Sequence[GraphLayer], speeds: Sequence[float], source: int) -> Tiling:
    """Return a grid with about one or two tiles for each device that is computed soonest; of equals the coarsest."""
    _, height, width = layers[-1].output
    count = len(speeds)
    cuts = {
        (rows, min(columns, width))
        for rows in range(1, min(count, height) + 1)
        for columns in (max(1, count // rows), -(-count // rows), 2 * count // rows)
    }
    grids = [_Grid(layers, *each) for each in sorted(cuts)]
    best: tuple[float, int, list[int], _Grid] | None = None
    for bound, grid in sorted(((grid.least_time(speeds), grid) for grid in grids), key=lambda each: each[0]):
        if best is not None and bound > best[0]:
            break
        owners, time = grid.owners(speeds, source)
        if best is None or (time, len(owners)) < best[:2]:
            best = (time, len(owners), owners, grid)
    assert best is not None
    return best[3].tiling(best[2])


def _traced(layers: Sequence[GraphLayer], out: Range, axis: int) -> list[Range]:
    """Return what is needed along one axis of every layer's input, and at the end ``out`` itself."""
    found = [out]
    for layer in reversed(layers):
        found.append(needed(layer, found[-1], layer.input[axis]))
    return found[::-1]


def multiplications(layers: Sequence[GraphLayer], tile: Tile) -> list[int]:
    """Return the multiplications of each layer in one tile."""
    return [
        layer.multiplications * region.pixels // (layer.output[1] * layer.output[2])
        for layer, region in zip(layers, tile.regions[1:], strict=True)
    ]


def redundant_multiplications(layers: Sequence[GraphLayer], tiling: Tiling) -> int:
    """Return what the tiles multiply more than the layers in one piece: the price of the halo."""
    tiled = sum(sum(multiplications(layers, each)) for each in tiling.tiles)
    return tiled - sum(layer.multiplications for layer in layers)
