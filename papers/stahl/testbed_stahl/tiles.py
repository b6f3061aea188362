"""Fused tile partitioning (FTP) of the early layers, after Zhao et al., "DeepThings", as used by Stahl et al.

The early layers are the first layers of a network, and a map is the output of one of them. A grid cuts the output of
the last early layer. Each tile is traced back to its region of every layer's input, including a margin that overlaps
its neighbours (the halo). A device computes a tile from the image to the output without data from other devices. In
exchange, neighbouring tiles compute their overlaps twice unless they reuse data. Rows and columns are independent, so
regions are traced along one axis at a time.

Beyond the paper, overlaps may be reused as in "DeepThings". Tiles are coloured like a chessboard. Tiles of the first
colour are computed first, halos included. All neighbours of a tile of the second colour have the first colour: the tile
waits for them, reuses their regions of every map between the early layers, and computes only the rest. The source sends
its region of the image in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import NamedTuple

from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.ml.models.chain import forward_of
from testbed.ml.models.graph import Graph, GraphLayer
from testbed.ml.models.shapes import INPUT
from testbed_stahl.plan import NOTHING, Range, Region, Tile, Tiling, divide_evenly


class Overlap(NamedTuple):
    """A region of one map reused by a tile from a neighbour; tiles are indices of the plan."""

    lender: int
    borrower: int
    layer: int
    """Index of the layer that makes the map."""
    region: Region


def waits_for_neighbours(row: int, column: int) -> bool:
    """Return whether a tile waits for its neighbours, as every second tile of a chessboard does.

    >>> waits_for_neighbours(0, 0), waits_for_neighbours(0, 1), waits_for_neighbours(1, 1)
    (False, True, False)
    """
    return (row + column) % 2 == 1


def remaining_range(needed: Range, before: Range | None, after: Range | None) -> Range:
    """Return the part of a range along one axis covered by neither neighbour.

    ``before`` and ``after`` are the ranges of the neighbours; None at the border.

    >>> remaining_range(Range(2, 9), before=Range(0, 4), after=None)
    Range(first=4, last=9)
    """
    first, last = needed
    if before is not None:
        first = max(first, before.last)
        # If the neighbour covers the whole range, an empty range at its end remains.
        first = min(first, needed.last)
    if after is not None:
        last = min(last, after.first)
        last = max(first, last)
    return Range(first, last)


def computed_regions(tiling: Tiling, number: int) -> tuple[Region, ...]:
    """Return the region of each early layer's output computed by a tile if overlaps are reused."""
    tile = tiling.tiles[number]
    if not waits_for_neighbours(tile.row, tile.column):
        return tile.regions[1:]
    above, below, left, right = _neighbour_tiles(tiling, tile)
    regions = []
    # The first region is that of the image, which the source sends in full; the last one is the tile's own result.
    for level, region in enumerate(tile.regions[1:-1], 1):
        rows = remaining_range(
            _row_range(region),
            before=_rows_of(above, level),
            after=_rows_of(below, level),
        )
        columns = remaining_range(
            _column_range(region),
            before=_columns_of(left, level),
            after=_columns_of(right, level),
        )
        regions.append(Region(*rows, *columns))
    return (*regions, tile.regions[-1])


def find_overlaps(tiling: Tiling) -> tuple[Overlap, ...]:
    """Return all overlaps reused by tiles, layer by layer for each pair of tiles.

    The neighbours above and below cover all columns of a tile; the left and right neighbours cover the remaining rows.
    """
    overlaps = []
    for number, tile in enumerate(tiling.tiles):
        if not waits_for_neighbours(tile.row, tile.column):
            continue
        own_regions = computed_regions(tiling, number)[:-1]
        for side, neighbour in enumerate(_neighbour_tiles(tiling, tile)):
            if neighbour is None:
                continue
            lender = tiling.tiles.index(neighbour)
            regions = zip(tile.regions[1:-1], own_regions, strict=True)
            for layer, (whole, own) in enumerate(regions):
                region = _reused_region(whole, own, side)
                if region.pixels:
                    overlaps.append(Overlap(lender, number, layer, region))
    return tuple(overlaps)


def _reused_region(whole: Region, own: Region, side: int) -> Region:
    """Return the part of a region that a neighbour lends: above, below, left or right of the computed part.

    ``side`` counts in the order of `_neighbour_tiles`.
    """
    match side:
        case 0:
            return whole._replace(bottom=own.top)
        case 1:
            return whole._replace(top=own.bottom)
        case 2:
            return own._replace(left=whole.left, right=own.left)
        case _:
            return own._replace(left=own.right, right=whole.right)


def _neighbour_tiles(tiling: Tiling, tile: Tile) -> tuple[Tile | None, ...]:
    """Return the tiles above, below, left and right of a tile; None beyond the border."""

    def tile_at(row: int, column: int) -> Tile | None:
        if row not in range(tiling.rows) or column not in range(tiling.columns):
            return None
        return tiling.tiles[row * tiling.columns + column]

    row = tile.row
    column = tile.column
    return (
        tile_at(row - 1, column),
        tile_at(row + 1, column),
        tile_at(row, column - 1),
        tile_at(row, column + 1),
    )


def _rows_of(tile: Tile | None, level: int) -> Range | None:
    return None if tile is None else _row_range(tile.regions[level])


def _columns_of(tile: Tile | None, level: int) -> Range | None:
    return None if tile is None else _column_range(tile.regions[level])


def _row_range(region: Region) -> Range:
    return Range(region.top, region.bottom)


def _column_range(region: Region) -> Range:
    return Range(region.left, region.right)


def feature_dominated_layers(graph: Graph) -> int:
    """Return the number of first layers to be tiled instead of divided by channels.

    In feature-dominated layers, inputs and outputs have more elements than the weights. The cut maximizes the sum of
    (features - weights) over the layers with weights before the cut; a pooling directly after the cut is tiled too. For
    YOLOv2 at 608x608 the result is layer 16, as in Stahl et al., Section 5.
    """
    best_total = 0
    total = 0
    cut = 0
    for index in range(len(graph.layers)):
        if not _is_tileable(graph, index):
            break
        layer = graph.layers[index]
        if layer.weights == 0:
            # A layer without weights, a pooling, does not change the sum; it is tiled if it follows the cut directly.
            if cut == index and _closes_stack(graph, index + 1):
                cut = index + 1
            continue
        total += layer.inputs + layer.outputs - layer.weights
        if total > best_total and _closes_stack(graph, index + 1):
            best_total = total
            cut = index + 1
    return cut


def check_tileable(graph: Graph, count: int) -> None:
    """Raise `InputError` naming the nearest valid number if the first ``count`` layers cannot be tiled."""
    if count <= len(graph.layers) and _can_tile(graph, count):
        return
    # Zero layers can always be tiled.
    nearest = min(count, len(graph.layers))
    while not _can_tile(graph, nearest):
        nearest -= 1
    raise InputError(
        f"the first {count} layers of {graph.name} cannot be tiled together, which takes successive convolutions and "
        "pooling layers, with less padding than their kernels, of which later layers read the last one's output "
        f"alone: use {nearest}",
        ("method", "tiled_layers"),
    )


def _can_tile(graph: Graph, count: int) -> bool:
    """Return whether the first ``count`` layers can be tiled."""
    if count == 0:
        return True
    for index in range(count):
        if not _is_tileable(graph, index):
            return False
    return _closes_stack(graph, count)


def _is_tileable(graph: Graph, index: int) -> bool:
    """Return whether a layer works on neighbouring pixels of the previous layer's output only."""
    layer = graph.layers[index]
    if layer.window is None:
        return False
    if layer.sources != (index - 1,):
        return False
    # With a padding as large as the kernel, a border tile might see no pixel of the map.
    return layer.window.padding < layer.window.kernel


def _closes_stack(graph: Graph, count: int) -> bool:
    """Return whether no later layer reads a value inside the first ``count`` layers, or the image."""
    # Only the output of the last tiled layer is collected, so the other values are not available later.
    inside = range(INPUT, count - 1)
    for layer in graph.layers[count:]:
        for source in layer.sources:
            if source in inside:
                return False
    return True


def needed_range(layer: GraphLayer, out: Range, size: int) -> Range:
    """Return the range of input pixels along one axis needed for the output pixels ``out``; the input has ``size``."""
    if not out.size:
        return NOTHING
    seen = _padded_range(layer, out.first, out.last)
    first = max(0, seen.first)
    last = min(size, seen.last)
    return Range(first, last)


def _padded_range(layer: GraphLayer, first: int, last: int) -> Range:
    """Return the input range along one axis read for a range of output pixels, including pixels of the padding."""
    window = layer.window
    assert window is not None
    # The kernel of output pixel p begins at input pixel p * stride - padding.
    begin = first * window.stride - window.padding
    end = (last - 1) * window.stride - window.padding + window.kernel
    return Range(begin, end)


def tile_padding(layer: GraphLayer, out: Region) -> tuple[int, int, int, int]:
    """Return the padding in pixels of a tile at a layer as (left, right, top, bottom), torch's order.

    ``out`` is the region of the layer's output. Only tiles at the border of the map are padded.
    """
    _, height, width = layer.input

    def outside(first: int, last: int, size: int) -> tuple[int, int]:
        """Return the number of pixels before and after the map along one axis."""
        seen = _padded_range(layer, first, last)
        before = max(0, -seen.first)
        after = max(0, seen.last - size)
        return before, after

    horizontal = outside(out.left, out.right, width)
    vertical = outside(out.top, out.bottom, height)
    return (*horizontal, *vertical)


class _AxisTiles(NamedTuple):
    """The ranges of a row or a column of tiles along one axis."""

    needed: list[Range]
    """The needed range of every layer's input, then the range of the last layer's output."""
    computed: list[Range]
    """The computed range of every layer's output."""


@dataclass(frozen=True)
class _Grid:
    """Early layers cut into rows and columns, before tiles are assigned to devices."""

    layers: Sequence[GraphLayer]
    rows: int
    columns: int
    reuse: bool = False
    """Whether tiles reuse overlaps."""

    @cached_property
    def _row_lines(self) -> list[tuple[_AxisTiles, _AxisTiles]]:
        """For each row of tiles, (ranges of tiles that do not wait, ranges of tiles that wait for their neighbours)."""
        return self._axis_lines(self.rows, 1)

    @cached_property
    def _column_lines(self) -> list[tuple[_AxisTiles, _AxisTiles]]:
        return self._axis_lines(self.columns, 2)

    def _axis_lines(self, count: int, axis: int) -> list[tuple[_AxisTiles, _AxisTiles]]:
        """Cut one axis of the last output into ``count`` lines, and trace each back; axis 1 is the height, 2 the width.

        Each line is a pair as in `_row_lines`.
        """
        traced = []
        size = self.layers[-1].output[axis]
        for out in divide_evenly(size, count):
            traced.append(_trace_axis(self.layers, out, axis))
        lines = []
        for index, needs in enumerate(traced):
            independent = _AxisTiles(needs, needs[1:])
            waiting = independent
            if self.reuse:
                before = traced[index - 1] if index else None
                after = traced[index + 1] if index + 1 < count else None
                waiting = _trace_between(self.layers, needs[-1], axis, before, after)
            lines.append((independent, waiting))
        return lines

    @cached_property
    def work(self) -> list[int]:
        """Number of multiplications of each tile, row by row."""
        per_pixel = []
        for layer in self.layers:
            pixels = layer.output[1] * layer.output[2]
            per_pixel.append(layer.multiplications // pixels)
        work = []
        for row, row_lines in enumerate(self._row_lines):
            for column, column_lines in enumerate(self._column_lines):
                # As an index: False is 0, True is 1.
                waits = waits_for_neighbours(row, column)
                heights = row_lines[waits].computed
                widths = column_lines[waits].computed
                products = 0
                layers = zip(per_pixel, heights, widths, strict=True)
                for products_per_pixel, rows, columns in layers:
                    products += products_per_pixel * rows.size * columns.size
                work.append(products)
        return work

    def least_time(self, speeds: Sequence[float]) -> float:
        """Return a lower bound on the time of any assignment, in multiplications per unit of speed."""
        # One device, at best the fastest, computes the largest tile; all devices together compute all tiles.
        largest = max(self.work) / max(speeds)
        everything = sum(self.work) / sum(speeds)
        return max(largest, everything)

    def owners(self, speeds: Sequence[float], source: int) -> tuple[list[int], float]:
        """Assign each tile to a device; return the owners and the finish time of the last device."""
        loads = [0] * len(speeds)
        owners = [source] * len(self.work)
        # Larger tiles first, so that small ones fill the differences between the devices in the end.
        for index in sorted(range(len(owners)), key=self._assignment_rank):
            tile_work = self.work[index]
            finish_times = []
            for load, speed in zip(loads, speeds, strict=True):
                finish_times.append((load + tile_work) / speed)
            earliest = min(finish_times)
            device = finish_times.index(earliest)
            # On ties the source gets the tile, since it needs no transfer.
            if finish_times[source] == earliest:
                device = source
            loads[device] += tile_work
            owners[index] = device
        last_finish = 0.0
        for load, speed in zip(loads, speeds, strict=True):
            last_finish = max(last_finish, load / speed)
        return owners, last_finish

    def _assignment_rank(self, index: int) -> tuple[bool, int]:
        """Return the sort key of a tile: tiles that wait come last, larger ones first."""
        row, column = divmod(index, self.columns)
        waits = self.reuse and waits_for_neighbours(row, column)
        return waits, -self.work[index]

    def tiling(self, owners: Sequence[int]) -> Tiling:
        """Return the tiles with their regions."""
        cells = product(range(self.rows), range(self.columns))
        tiles = []
        for owner, (row, column) in zip(owners, cells, strict=True):
            regions = self._regions(row, column)
            tile = Tile(row=row, column=column, device=owner, regions=regions)
            tiles.append(tile)
        return Tiling(
            rows=self.rows,
            columns=self.columns,
            tiles=tuple(tiles),
        )

    def _regions(self, row: int, column: int) -> tuple[Region, ...]:
        """Return the regions that a tile needs of each layer's input, and its region of the last output."""
        # As an index: False is 0, True is 1.
        waits = waits_for_neighbours(row, column)
        heights = self._row_lines[row][waits].needed
        widths = self._column_lines[column][waits].needed
        regions = []
        for rows, columns in zip(heights, widths, strict=True):
            regions.append(Region(*rows, *columns))
        return tuple(regions)


def make_tiling(
    layers: Sequence[GraphLayer],
    rows: int,
    columns: int,
    speeds: Sequence[float],
    source: int,
    reuse: bool = False,
) -> Tiling:
    """Cut early layers into a grid of tiles, and assign the tiles to devices by their ``speeds``.

    Each tile, in descending order of multiplications, goes to the device that finishes it earliest; ties go to the
    source, which needs no transfer. Raises `InputError` for a grid finer than the output.
    """
    _, height, width = layers[-1].output
    axes = (("rows", rows, height), ("columns", columns, width))
    for name, parts, size in axes:
        if not 1 <= parts <= size:
            raise InputError(
                f"a map of {height}x{width} pixels cannot be cut into {parts} {name}: use 1 to {size}",
                ("method", "tile_grid"),
            )
    grid = _Grid(layers, rows, columns, reuse)
    return grid.tiling(grid.owners(speeds, source)[0])


def best_tiling(
    layers: Sequence[GraphLayer],
    speeds: Sequence[float],
    source: int,
    reuse: bool = False,
) -> Tiling:
    """Return the fastest grid with about one or two tiles for each device; the coarsest one on ties."""
    bounded_grids = []
    for rows, columns in _grid_sizes(layers, len(speeds)):
        grid = _Grid(layers, rows, columns, reuse)
        bounded_grids.append((grid.least_time(speeds), grid))
    bounded_grids.sort(key=lambda pair: pair[0])
    best_rank = (inf, 0)
    best: tuple[_Grid, list[int]] | None = None
    # In the order of the lower bounds of their times, so that the search can end early.
    for bound, grid in bounded_grids:
        # Neither this grid nor a later one can be faster than the best grid so far.
        if bound > best_rank[0]:
            break
        owners, time = grid.owners(speeds, source)
        rank = (time, len(owners))
        if rank < best_rank:
            best_rank = rank
            best = grid, owners
    assert best is not None
    best_grid, best_owners = best
    return best_grid.tiling(best_owners)


def _grid_sizes(layers: Sequence[GraphLayer], devices: int) -> list[tuple[int, int]]:
    """Return the rows and columns of grids with about one or two tiles per device."""
    _, height, width = layers[-1].output
    sizes = set()
    for rows in range(1, min(devices, height) + 1):
        rounded_down = max(1, devices // rows)
        rounded_up = ceil(devices / rows)
        twice = 2 * devices // rows
        for columns in (rounded_down, rounded_up, twice):
            sizes.add((rows, min(columns, width)))
    return sorted(sizes)


def _trace_axis(layers: Sequence[GraphLayer], out: Range, axis: int) -> list[Range]:
    """Return the range needed along one axis of every layer's input, followed by ``out``."""
    ranges = [out]
    for layer in reversed(layers):
        size = layer.input[axis]
        ranges.append(needed_range(layer, ranges[-1], size))
    return ranges[::-1]


def _trace_between(
    layers: Sequence[GraphLayer],
    out: Range,
    axis: int,
    before: list[Range] | None,
    after: list[Range] | None,
) -> _AxisTiles:
    """Return the ranges that tiles need and compute along one axis if they reuse the neighbours' ranges of each map."""
    # From the last layer backwards, and reversed in the end.
    needed = [out]
    computed = [out]
    for index in reversed(range(len(layers))):
        layer = layers[index]
        size = layer.input[axis]
        needed.append(needed_range(layer, computed[-1], size))
        # The input of layer 0 is the image, which the source sends in full.
        if index > 0:
            lent_before = None if before is None else before[index]
            lent_after = None if after is None else after[index]
            computed.append(remaining_range(needed[-1], lent_before, lent_after))
    return _AxisTiles(needed[::-1], computed[::-1])


def tile_multiplications(
    layers: Sequence[GraphLayer], made: Sequence[Region]
) -> list[int]:
    """Return the multiplications of each layer in a tile computing the regions ``made`` of the layers' outputs."""
    products = []
    for layer, region in zip(layers, made, strict=True):
        pixels = layer.output[1] * layer.output[2]
        products.append(layer.multiplications * region.pixels // pixels)
    return products


def tile_costs(
    layers: Sequence[GraphLayer], made: Sequence[Region], samples: int
) -> list[Cost]:
    """Return the cost of each layer in a tile computing the regions ``made``, for ``samples`` samples."""
    by_layer = []
    for layer, region in zip(layers, made, strict=True):
        _, height, width = layer.output
        share = region.pixels / (height * width)
        whole = layer.cost(layer.inputs, layer.output_channels)
        # A tile reads all weights of a layer, whatever its share of the pixels.
        part = whole.scaled(flops=share, accessed=share, weights=1)
        by_layer.append(forward_of(part, samples))
    return by_layer


def redundant_multiplications(
    layers: Sequence[GraphLayer], made: Sequence[Sequence[Region]]
) -> int:
    """Return the multiplications beyond an undivided computation; ``made`` has the computed regions of each tile."""
    redundant = -sum(layer.multiplications for layer in layers)
    for regions in made:
        redundant += sum(tile_multiplications(layers, regions))
    return redundant
