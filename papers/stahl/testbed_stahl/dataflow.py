"""Derive from a plan the computations, outputs, inputs and transfers of every device for one inference.

Devices execute this dataflow, and all predictions derive from it: computation and memory (`demands`), communication and
time (`communication`). The derivation is pure and yields the same result on every device.

Inputs and outputs of layers are counted in elements of one sample, flattened channel after channel. A range of channels
is therefore a range of elements, and a fully connected layer reads the output of a convolution without conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from testbed.ml.models.graph import Graph, GraphLayer
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed.ml.models.slices import NONE, Slice
from testbed_stahl.options import PlanSettings
from testbed_stahl.plan import (
    NOTHING,
    DistributedPlan,
    LayerPlan,
    Pieces,
    Range,
    Region,
    difference,
    divide,
    divide_evenly,
    hull,
    intersection,
    proportional_shares,
    scaled,
    shifted,
    union,
)
from testbed_stahl.tiles import Overlap, computed_regions, find_overlaps

T = TypeVar("T")

Way = Literal["direct", "via-source", "row"]
"""The option ``exchange``, or ``row``: every layer is whole, and its output goes directly to the next layer's owner."""
TaskKind = Literal["none", "outputs", "sums", "whole", "channels"]
"""``outputs``: some output channels from all of the input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the layer as it is. ``channels``: a layer that treats each channel by itself, on some of them."""


Homes = Mapping[int, tuple[Range, ...]]


@dataclass(frozen=True)
class LayerTask:
    """The share of one layer computed by one device."""

    work: TaskKind = "none"
    takes: Range = NOTHING
    """Elements of the layer's input that the device computes from."""
    makes: Range = NOTHING
    """Output channels that the device finishes; for ``sums`` the channels whose sums of all devices it merges."""


IDLE = LayerTask()


def is_alias(layer: GraphLayer, way: Way) -> bool:
    """Return whether a layer only renames outputs of other layers."""
    return way == "direct" and layer.joins


def by_chunks(layer: GraphLayer, task: LayerTask) -> bool:
    """Return whether a device computes its part in chunks and sends each chunk immediately."""
    return task.work in ("outputs", "sums") or (task.work == "whole" and layer.splits)


def tasks_of(
    graph: Graph, plan: DistributedPlan, way: Way, index: int, homes: Homes
) -> tuple[LayerTask, ...]:
    """Return the task of each device in an untiled layer; ``homes`` maps each value and device to its elements."""
    layer = graph.layers[index]
    decided = plan.layers[index]
    if decided.scheme in ("lop", "fuse1"):
        return _output_tasks(layer, decided)
    if decided.scheme in ("lip", "fuse2"):
        merged = _merged_ranges(graph, plan, way, index)
        return _input_tasks(layer, decided, merged)
    if way == "direct":
        local = _without_exchange(layer, len(plan.devices), homes)
        if local:
            return local
    tasks = [IDLE] * len(plan.devices)
    owner = plan.source if decided.owner is None else decided.owner
    tasks[owner] = _whole_task(layer)
    return tuple(tasks)


def _output_tasks(layer: GraphLayer, decided: LayerPlan) -> tuple[LayerTask, ...]:
    """Return the tasks of LOP: some output channels from all of the input."""
    whole_input = Range(0, layer.inputs)
    tasks = []
    for made in decided.outputs:
        tasks.append(LayerTask("outputs", whole_input, made) if made.size else IDLE)
    return tuple(tasks)


def _input_tasks(
    layer: GraphLayer, decided: LayerPlan, merged: Sequence[Range]
) -> tuple[LayerTask, ...]:
    """Return the tasks of LIP: sums of all outputs from a part of the input; ``merged`` is each device's output."""
    pixels = layer.inputs // layer.input_channels
    tasks = []
    for channels, made in zip(decided.inputs, merged, strict=True):
        tasks.append(LayerTask("sums", scaled(channels, pixels), made))
    return tuple(tasks)


def _without_exchange(
    layer: GraphLayer, devices: int, homes: Homes
) -> tuple[LayerTask, ...]:
    """Return the tasks in a layer applied locally to existing elements; empty for other layers."""
    if layer.joins:
        return (IDLE,) * devices
    if layer.division == "moves":
        return (_whole_task(layer),) * devices
    input_homes = homes.get(layer.sources[0], ())
    has_input = any(home.size for home in input_homes)
    if not layer.by_channel or len(layer.sources) > 1 or not has_input:
        return ()
    pixels = layer.inputs // layer.output[0]
    tasks = []
    for home in input_homes:
        channels = Range(home.first // pixels, home.last // pixels)
        tasks.append(LayerTask("channels", home, channels) if home.size else IDLE)
    return tuple(tasks)


def _whole_task(layer: GraphLayer) -> LayerTask:
    return LayerTask("whole", Range(0, layer.inputs), Range(0, layer.output[0]))


def _merged_ranges(
    graph: Graph, plan: DistributedPlan, way: Way, index: int
) -> tuple[Range, ...]:
    """Return the range of output channels merged by each device."""
    channels = graph.layers[index].output[0]
    if way == "direct" and graph.readers[index]:
        sizes = [taken.size for taken in plan.layers[index].inputs]
        return divide(channels, proportional_shares(sizes))
    return _at_source(plan, channels)


class Origin(NamedTuple):
    """Origin of one part of a layer's input."""

    value: int
    """The layer that made it, or `INPUT`."""
    part: Range
    """Elements of that value."""
    at: int
    """First element of the layer's input that the part becomes."""


@dataclass(frozen=True)
class Dataflow:
    """A plan as tasks and transfers; created by `make_dataflow`."""

    graph: Graph
    plan: DistributedPlan
    settings: PlanSettings
    way: Way
    tasks: tuple[tuple[LayerTask, ...], ...]
    """By layer and device; tiled layers have none."""
    homes: Homes
    """By value and device: the elements that the device itself makes. The only value of tiled layers is the last one's
    output, which the source collects."""
    wants: Mapping[int, tuple[Pieces, ...]]
    """By value and device: the elements that the device computes from, or returns as the result."""
    last: Mapping[int, tuple[int, ...]]
    """By value and device: the last layer for which the device needs the value; the number of layers for the result,
    and less than `INPUT` for a value that the device does not need."""

    @property
    def devices(self) -> range:
        """Indices of the devices."""
        return range(len(self.plan.devices))

    @property
    def tiled(self) -> int:
        """Number of leading layers computed by tiles."""
        return self.plan.tiled

    @cached_property
    def computed(self) -> tuple[tuple[Region, ...], ...]:
        """Region of each early layer's output computed by each tile."""
        tiling = self.plan.tiling
        if tiling is None or self.settings.options.tile_overlap == "compute":
            return tuple(tile.regions[1:] for tile in self.plan.tiles)
        return tuple(
            computed_regions(tiling, number) for number in range(len(tiling.tiles))
        )

    @cached_property
    def overlaps(self) -> Mapping[tuple[int, int], tuple[Overlap, ...]]:
        """Regions reused between tiles, by lender and borrower; each pair is sent as one message."""
        by_pair: dict[tuple[int, int], tuple[Overlap, ...]] = {}
        if (
            self.plan.tiling is not None
            and self.settings.options.tile_overlap == "reuse"
        ):
            for each in find_overlaps(self.plan.tiling):
                pair = each.lender, each.borrower
                by_pair[pair] = (*by_pair.get(pair, ()), each)
        return by_pair

    def values(self, overlap: Overlap) -> int:
        """Return the elements of one sample in an overlap."""
        return self.graph.layers[overlap.layer].output[0] * overlap.region.pixels

    def origins(self, index: int, taken: Range) -> tuple[Origin, ...]:
        """Return the origins of a range of a layer's input, in element order."""
        if (index, taken) not in self._origin_cache:
            self._origin_cache[index, taken] = tuple(self._trace_origins(index, taken))
        return self._origin_cache[index, taken]

    @cached_property
    def _origin_cache(self) -> dict[tuple[int, Range], tuple[Origin, ...]]:
        return {}

    def _trace_origins(self, index: int, taken: Range) -> Iterator[Origin]:
        at = 0
        for source in self.graph.layers[index].sources:
            whole = Range(at, at + self.graph.outputs_of(source))
            part = intersection(whole, taken)
            if part.size and self._is_alias(source):
                for origin in self.origins(source, shifted(part, -at)):
                    yield origin._replace(at=origin.at + at)
            elif part.size:
                yield Origin(source, shifted(part, -at), part.first)
            at = whole.last

    def _is_alias(self, value: int) -> bool:
        return value != INPUT and is_alias(self.graph.layers[value], self.way)

    def result(self) -> tuple[Origin, ...]:
        """Return the origins of the network's output."""
        last = len(self.graph.layers) - 1
        if is_alias(self.graph.layers[last], self.way):
            return self.origins(last, Range(0, self.graph.layers[last].inputs))
        return (Origin(last, Range(0, self.graph.layers[last].outputs), 0),)

    def chunks(self, index: int, made: Range) -> tuple[Range, ...]:
        """Divide the output channels of a layer into nearly equal ranges, each sent once computed.

        The ranges depend on the size of a full request only, so all devices choose the same ranges without
        communication.
        """
        if not made.size:
            return ()
        options = self.settings.options
        elements = made.size * self.graph.layers[index].pixels * self.settings.samples
        count = 1
        if not options.layerwise:
            most = BYTES_PER_VALUE * elements // options.min_chunk_bytes
            count = max(1, min(options.chunks, made.size, most))
        parts = divide_evenly(made.size, count)
        return tuple(shifted(part, made.first) for part in parts)

    def pieces(self, value: int, device: int) -> Pieces:
        """Return the ranges of elements a device produces of a value, in order of production."""
        if (value, device) not in self._piece_cache:
            self._piece_cache[value, device] = self._find_pieces(value, device)
        return self._piece_cache[value, device]

    @cached_property
    def _piece_cache(self) -> dict[tuple[int, int], Pieces]:
        return {}

    def _find_pieces(self, value: int, device: int) -> Pieces:
        if value >= self.tiled:
            layer = self.graph.layers[value]
            task = self.tasks[value][device]
            if by_chunks(layer, task):
                chunks = self.chunks(value, task.makes)
                return tuple(scaled(chunk, layer.pixels) for chunk in chunks)
        home = self.homes[value][device]
        return (home,) if home.size else ()

    def receivers(
        self, value: int, device: int, made: Range
    ) -> Iterator[tuple[int, Range]]:
        """Yield the receivers of a device's part of a value, with the elements each needs."""
        source = self.plan.source
        if self.way != "via-source" or device == source:
            yield from self.forwarded(value, device, made)
        else:
            wanted = intersection(made, self._for_source(value, device))
            if wanted.size:
                yield source, wanted

    def forwarded(
        self, value: int, origin: int, made: Range
    ) -> Iterator[tuple[int, Range]]:
        """Yield the receivers the source forwards a part of ``origin`` to, if all traffic passes through the source."""
        for receiver, pieces in self._missing_parts(value, origin):
            if self.way == "via-source" and receiver == self.plan.source != origin:
                continue
            for piece in pieces:
                part = intersection(piece, made)
                if part.size:
                    yield receiver, part

    def lacks(self, value: int, device: int) -> Pieces:
        """Return the elements of a value a device needs from other devices."""
        return difference(self.wants[value][device], self.homes[value][device])

    def collected(self, value: int) -> int:
        """Return the number of elements of a value collected by the source, for itself and for others."""
        source = self.plan.source
        total = 0
        for maker, home in enumerate(self.homes[value]):
            if maker == source or not home.size:
                continue
            for receiver, part in self.receivers(value, maker, home):
                if receiver == source:
                    total += part.size
        return total

    def _for_source(self, value: int, maker: int) -> Range:
        """Return the elements of another device's part collected by the source, for itself and for others."""
        needed = [*self.wants[value][self.plan.source]]
        for _, pieces in self._missing_parts(value, maker):
            needed += pieces
        return hull(needed)

    def _missing_parts(self, value: int, maker: int) -> Iterator[tuple[int, Pieces]]:
        """Yield each device and its missing elements of a value, in ring order after ``maker``."""
        # In another order all makers would send to the same device first, and its link would be the bottleneck.
        count = len(self.plan.devices)
        for step in range(1, count):
            receiver = (maker + step) % count
            yield receiver, self.lacks(value, receiver)


def make_dataflow(
    graph: Graph, plan: DistributedPlan, settings: PlanSettings
) -> Dataflow:
    """Determine the tasks of every device and the elements each needs from others."""
    way: Way = settings.options.exchange
    if all(layer.scheme == "whole" for layer in plan.layers):
        way = "row"
    tasks, homes = _assign_tasks(graph, plan, way)
    draft = Dataflow(graph, plan, settings, way, (), {}, {}, {})
    needs = _Needs(homes, len(plan.devices))
    needs.add(draft.result(), plan.source, len(graph.layers))
    for index in range(len(graph.layers) - 1, plan.tiled - 1, -1):
        if way == "direct" and graph.layers[index].division == "moves":
            # Only devices that need the moved pixels move them.
            tasks[index] = needs.without_unread(index, tasks[index])
            homes[index] = _made_pieces(graph.layers[index], tasks[index])
        for device, task in enumerate(tasks[index]):
            needs.add(draft.origins(index, task.takes), device, index)
    return replace(
        draft,
        tasks=tuple(tasks),
        homes=homes,
        wants=_freeze_pieces(needs.wants),
        last=_freeze_pieces(needs.last),
    )


def _assign_tasks(
    graph: Graph, plan: DistributedPlan, way: Way
) -> tuple[list[tuple[LayerTask, ...]], dict[int, tuple[Range, ...]]]:
    """Return the tasks by layer and device, and the elements of each value produced by each device."""
    tasks: list[tuple[LayerTask, ...]] = [(IDLE,) * len(plan.devices)] * plan.tiled
    if plan.tiled:
        homes = {plan.tiled - 1: _at_source(plan, graph.layers[plan.tiled - 1].outputs)}
    else:
        homes = {INPUT: _at_source(plan, graph.layers[0].inputs)}
    for index in range(plan.tiled, len(graph.layers)):
        tasks.append(tasks_of(graph, plan, way, index, homes))
        homes[index] = _made_pieces(graph.layers[index], tasks[index])
    return tasks, homes


class _Needs:
    """The elements of each value read by each device and the last layer reading them."""

    def __init__(self, values: Iterable[int], devices: int) -> None:
        self.wants: dict[int, list[Pieces]] = {}
        self.last: dict[int, list[int]] = {}
        for value in values:
            self.wants[value] = [()] * devices
            self.last[value] = [INPUT - 1] * devices

    def add(self, origins: Iterable[Origin], device: int, reader: int) -> None:
        """Add the elements read by a layer on a device."""
        for value, part, _ in origins:
            self.wants[value][device] = union(self.wants[value][device], (part,))
            self.last[value][device] = max(self.last[value][device], reader)

    def without_unread(
        self, index: int, tasks: Sequence[LayerTask]
    ) -> tuple[LayerTask, ...]:
        """Keep the tasks of a layer on devices whose later tasks read the output."""
        kept = []
        for task, wanted in zip(tasks, self.wants[index], strict=True):
            kept.append(task if wanted else IDLE)
        return tuple(kept)


def _freeze_pieces(rows: Mapping[int, Sequence[T]]) -> dict[int, tuple[T, ...]]:
    return {value: tuple(row) for value, row in rows.items()}


def _at_source(plan: DistributedPlan, size: int) -> tuple[Range, ...]:
    """Return the range of each device if the source alone has all ``size`` elements or channels."""
    ranges = [Range(0, 0)] * len(plan.devices)
    ranges[plan.source] = Range(0, size)
    return tuple(ranges)


def _made_pieces(layer: GraphLayer, tasks: Sequence[LayerTask]) -> tuple[Range, ...]:
    return tuple(scaled(task.makes, layer.pixels) for task in tasks)


def stored_slices(flow: Dataflow, device: int) -> dict[int, Slice]:
    """Return the slices stored by a device, in layer order. Each device with a tile stores complete tiled layers."""
    slices: dict[int, Slice] = {}
    owns_tile = any(tile.device == device for tile in flow.plan.tiles)
    computes_tiles = owns_tile or flow.settings.options.tile_stealing
    for index, layer in enumerate(flow.graph.layers):
        task = flow.tasks[index][device]
        whole = layer.whole
        makes = as_range(task.makes)
        if task.work == "whole" or (index < flow.tiled and computes_tiles):
            slices[index] = whole
        elif task.work == "outputs":
            slices[index] = Slice(makes, whole.columns, makes)
        elif task.work == "sums":
            pixels = layer.inputs // layer.input_channels
            columns = range(task.takes.first // pixels, task.takes.last // pixels)
            slices[index] = Slice(whole.rows, columns, makes)
        elif task.work == "channels":
            slices[index] = Slice(NONE, NONE, makes)
    return slices


def stored_layers(flow: Dataflow, device: int) -> list[tuple[GraphLayer, Slice]]:
    """Return the slices stored by a device together with their layers."""
    layers = flow.graph.layers
    return [
        (layers[index], part) for index, part in stored_slices(flow, device).items()
    ]


def as_range(part: Range) -> range:
    """Convert a range of a plan to a Python range.

    >>> as_range(Range(2, 5))
    range(2, 5)
    """
    return range(part.first, part.last)
