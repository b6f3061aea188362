"""The dataflow of a plan: computations, outputs, inputs and transfers of every device for one inference.

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
from testbed.ml.models.slices import NO_CHANNELS, Slice
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
"""``outputs``: some output channels from the whole input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the whole layer. ``channels``: some channels of a layer that treats each channel by itself."""

Homes = Mapping[int, tuple[Range, ...]]
"""By value (a layer's output, or `INPUT`) and device: the elements that the device makes."""


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
    """Return whether a layer only renames outputs of other layers, such as a route layer of YOLOv2."""
    # Through the source, outputs are collected and joined there instead.
    return way == "direct" and layer.is_route


def by_chunks(layer: GraphLayer, task: LayerTask) -> bool:
    """Return whether a device computes its part in chunks and sends each chunk immediately."""
    if task.work == "whole":
        return layer.splits
    return task.work in ("outputs", "sums")


def tasks_of(
    graph: Graph, plan: DistributedPlan, way: Way, index: int, homes: Homes
) -> tuple[LayerTask, ...]:
    """Return the task of each device in an untiled layer; ``homes`` has the elements made by each device."""
    layer = graph.layers[index]
    decided = plan.layers[index]
    if decided.scheme in ("lop", "fuse1"):
        return _output_tasks(layer, decided)
    if decided.scheme in ("lip", "fuse2"):
        merged = _merged_ranges(graph, plan, way, index)
        return _input_tasks(layer, decided, merged)
    if way == "direct":
        local_tasks = _without_exchange(layer, len(plan.devices), homes)
        if local_tasks:
            return local_tasks
    tasks = [IDLE] * len(plan.devices)
    owner = plan.source if decided.owner is None else decided.owner
    tasks[owner] = _whole_task(layer)
    return tuple(tasks)


def _output_tasks(layer: GraphLayer, decided: LayerPlan) -> tuple[LayerTask, ...]:
    """Return the tasks of LOP: some output channels from all of the input."""
    whole_input = Range(0, layer.inputs)
    tasks = []
    for made in decided.outputs:
        task = IDLE
        if made.size:
            task = LayerTask("outputs", whole_input, made)
        tasks.append(task)
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
    if layer.is_route:
        # Readers take the joined parts from the devices that made them.
        return (IDLE,) * devices
    if layer.division == "moves":
        # Every device that reads the output moves the pixels itself; `make_dataflow` removes the other tasks.
        return (_whole_task(layer),) * devices
    # Values of several sources, such as those of a sum, may be on different devices.
    if not layer.is_channelwise or len(layer.sources) > 1:
        return ()
    input_homes = homes.get(layer.sources[0], ())
    if not any(home.size for home in input_homes):
        return ()
    pixels = layer.inputs // layer.output[0]
    tasks = []
    for home in input_homes:
        channels = Range(home.first // pixels, home.last // pixels)
        task = IDLE
        if home.size:
            task = LayerTask("channels", home, channels)
        tasks.append(task)
    return tuple(tasks)


def _whole_task(layer: GraphLayer) -> LayerTask:
    whole_input = Range(0, layer.inputs)
    all_channels = Range(0, layer.output[0])
    return LayerTask("whole", whole_input, all_channels)


def _merged_ranges(
    graph: Graph, plan: DistributedPlan, way: Way, index: int
) -> tuple[Range, ...]:
    """Return the range of output channels merged by each device."""
    channels = graph.layers[index].output[0]
    # Through the source, and for the result, which nobody else reads, the source merges everything.
    if way != "direct" or not graph.readers[index]:
        return _at_source(plan, channels)
    sizes = [taken.size for taken in plan.layers[index].inputs]
    return divide(channels, proportional_shares(sizes))


class Origin(NamedTuple):
    """Origin of one part of a layer's input."""

    value: int
    """The layer that made the part, or `INPUT`."""
    part: Range
    """Elements of the output of ``value``."""
    at: int
    """Position of the part's first element in the input of the reading layer."""


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
    """By value and device: the elements that the device itself makes. The only value of tiled layers is the output of
    the last tiled layer, which the source collects."""
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
        reuses = self.settings.options.tile_overlap == "reuse"
        computed = []
        for number, tile in enumerate(self.plan.tiles):
            if tiling is None or not reuses:
                # The regions needed of all inputs but the image.
                computed.append(tile.regions[1:])
            else:
                computed.append(computed_regions(tiling, number))
        return tuple(computed)

    @cached_property
    def overlaps(self) -> Mapping[tuple[int, int], tuple[Overlap, ...]]:
        """Regions reused between tiles, by lender and borrower; each pair is sent as one message."""
        tiling = self.plan.tiling
        if tiling is None or self.settings.options.tile_overlap != "reuse":
            return {}
        by_pair: dict[tuple[int, int], tuple[Overlap, ...]] = {}
        for each in find_overlaps(tiling):
            pair = each.lender, each.borrower
            earlier = by_pair.get(pair, ())
            by_pair[pair] = (*earlier, each)
        return by_pair

    def values(self, overlap: Overlap) -> int:
        """Return the number of elements of one sample in an overlap."""
        channels = self.graph.layers[overlap.layer].output[0]
        return channels * overlap.region.pixels

    def origins(self, index: int, taken: Range) -> tuple[Origin, ...]:
        """Return the origins of a range of a layer's input, in element order."""
        key = (index, taken)
        # The origins of an input are asked for in each request.
        if key not in self._origin_cache:
            origins = self._trace_origins(index, taken)
            self._origin_cache[key] = tuple(origins)
        return self._origin_cache[key]

    @cached_property
    def _origin_cache(self) -> dict[tuple[int, Range], tuple[Origin, ...]]:
        return {}

    def _trace_origins(self, index: int, taken: Range) -> Iterator[Origin]:
        # A layer with several sources reads their outputs one after the other; ``at`` is the first element of each.
        at = 0
        for source in self.graph.layers[index].sources:
            whole = Range(at, at + self.graph.outputs_of(source))
            part = intersection(whole, taken)
            at = whole.last
            if not part.size:
                continue
            of_source = shifted(part, -whole.first)
            if not self._is_alias(source):
                yield Origin(source, of_source, part.first)
                continue
            for origin in self.origins(source, of_source):
                yield origin._replace(at=origin.at + whole.first)

    def _is_alias(self, value: int) -> bool:
        if value == INPUT:
            return False
        return is_alias(self.graph.layers[value], self.way)

    def result(self) -> tuple[Origin, ...]:
        """Return the origins of the network's output."""
        index = len(self.graph.layers) - 1
        layer = self.graph.layers[index]
        if is_alias(layer, self.way):
            return self.origins(index, Range(0, layer.inputs))
        whole = Range(0, layer.outputs)
        return (Origin(index, whole, 0),)

    def chunks(self, index: int, made: Range) -> tuple[Range, ...]:
        """Divide the output channels of a layer into nearly equal ranges, each sent once computed.

        The ranges depend on the size of a full request only, so all devices choose the same ranges without
        communication.
        """
        if not made.size:
            return ()
        options = self.settings.options
        pixels = self.graph.layers[index].pixels
        elements = made.size * pixels * self.settings.samples
        count = 1
        if not options.layerwise:
            # As many chunks as have the minimum size, and each with a channel at least.
            most = BYTES_PER_VALUE * elements // options.min_chunk_bytes
            count = min(options.chunks, made.size, most)
            count = max(1, count)
        parts = divide_evenly(made.size, count)
        return tuple(shifted(part, made.first) for part in parts)

    def pieces(self, value: int, device: int) -> Pieces:
        """Return the ranges of elements of a value produced by a device, in order of production."""
        key = (value, device)
        if key not in self._piece_cache:
            self._piece_cache[key] = self._find_pieces(value, device)
        return self._piece_cache[key]

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
        """Yield the receivers of a device's part of a value, with the elements that each receiver needs."""
        source = self.plan.source
        if self.way != "via-source" or device == source:
            yield from self.forwarded(value, device, made)
        else:
            # The source alone receives, for itself and for all to which it forwards.
            wanted = intersection(made, self._for_source(value, device))
            if wanted.size:
                yield source, wanted

    def forwarded(
        self, value: int, origin: int, made: Range
    ) -> Iterator[tuple[int, Range]]:
        """Yield the receivers of a part that the device ``origin`` has made, with the elements that each needs.

        If all traffic passes through the source, these are the receivers to which the source forwards the part.
        """
        source = self.plan.source
        for receiver, pieces in self._missing_parts(value, origin):
            # The source has received the part already.
            if self.way == "via-source" and receiver == source and origin != source:
                continue
            for piece in pieces:
                part = intersection(piece, made)
                if part.size:
                    yield receiver, part

    def lacks(self, value: int, device: int) -> Pieces:
        """Return the elements of a value needed by a device from other devices."""
        wanted = self.wants[value][device]
        own = self.homes[value][device]
        return difference(wanted, own)

    def collected(self, value: int) -> int:
        """Return the number of elements of a value collected by the source from other devices."""
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
        """Return the range of a value that the source collects from a device, for itself and for others."""
        own = self.wants[value][self.plan.source]
        needed = [*own]
        for _, pieces in self._missing_parts(value, maker):
            needed += pieces
        # One range, so that each piece travels as one message.
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
    """Determine the tasks of every device, and the elements needed from other devices."""
    way: Way = settings.options.exchange
    if all(layer.scheme == "whole" for layer in plan.layers):
        # Sequential mapping, and the single device: nothing is to be collected or merged.
        way = "row"
    tasks, homes = _assign_tasks(graph, plan, way)
    # Without tasks: only graph and plan are needed to follow inputs to their origins.
    draft = Dataflow(graph, plan, settings, way, (), {}, {}, {})
    needs = _Needs(homes, len(plan.devices))
    needs.add(draft.result(), plan.source, len(graph.layers))
    # From the last layer backwards: the readers of an output are known before its makers are asked.
    for index in range(len(graph.layers) - 1, plan.tiled - 1, -1):
        if way == "direct" and graph.layers[index].division == "moves":
            # Only devices that need the moved pixels move them.
            tasks[index] = needs.without_unread(index, tasks[index])
            homes[index] = _made_pieces(graph.layers[index], tasks[index])
        for device, task in enumerate(tasks[index]):
            origins = draft.origins(index, task.takes)
            needs.add(origins, device, index)
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
    all_idle = (IDLE,) * len(plan.devices)
    tasks: list[tuple[LayerTask, ...]] = [all_idle] * plan.tiled
    # The first value of the divided layers: the map of all tiles, or the image.
    if plan.tiled:
        value = plan.tiled - 1
        size = graph.layers[value].outputs
    else:
        value = INPUT
        size = graph.layers[0].inputs
    homes = {value: _at_source(plan, size)}
    for index in range(plan.tiled, len(graph.layers)):
        tasks.append(tasks_of(graph, plan, way, index, homes))
        homes[index] = _made_pieces(graph.layers[index], tasks[index])
    return tasks, homes


class _Needs:
    """The elements of each value read by each device, and the last layer that reads the value there."""

    def __init__(self, values: Iterable[int], devices: int) -> None:
        self.wants: dict[int, list[Pieces]] = {}
        self.last: dict[int, list[int]] = {}
        for value in values:
            self.wants[value] = [()] * devices
            # Less than any layer and than the image: nobody reads the value.
            self.last[value] = [INPUT - 1] * devices

    def add(self, origins: Iterable[Origin], device: int, reader: int) -> None:
        """Add the elements read by the layer ``reader`` on a device."""
        for value, part, _ in origins:
            wanted, last = self.wants[value], self.last[value]
            wanted[device] = union(wanted[device], (part,))
            last[device] = max(last[device], reader)

    def without_unread(
        self, index: int, tasks: Sequence[LayerTask]
    ) -> tuple[LayerTask, ...]:
        """Keep the tasks of a layer on devices whose later tasks read the output."""
        kept = []
        for task, wanted in zip(tasks, self.wants[index], strict=True):
            kept.append(task if wanted else IDLE)
        return tuple(kept)


def _freeze_pieces(rows: Mapping[int, Sequence[T]]) -> dict[int, tuple[T, ...]]:
    frozen = {}
    for value, row in rows.items():
        frozen[value] = tuple(row)
    return frozen


def _at_source(plan: DistributedPlan, size: int) -> tuple[Range, ...]:
    """Return the range of each device if the source alone has all ``size`` elements or channels."""
    ranges = [Range(0, 0)] * len(plan.devices)
    ranges[plan.source] = Range(0, size)
    return tuple(ranges)


def _made_pieces(layer: GraphLayer, tasks: Sequence[LayerTask]) -> tuple[Range, ...]:
    """Return the elements of a layer's output made by each device."""
    made = []
    for task in tasks:
        made.append(scaled(task.makes, layer.pixels))
    return tuple(made)


def stored_slices(flow: Dataflow, device: int) -> dict[int, Slice]:
    """Return the slices of the weights stored by a device, by layer.

    A device with a tile stores complete tiled layers: a tile needs all weights for its share of the pixels.
    """
    owners = {tile.device for tile in flow.plan.tiles}
    computes_tiles = device in owners or flow.settings.options.tile_stealing
    slices: dict[int, Slice] = {}
    for index, layer in enumerate(flow.graph.layers):
        if index < flow.tiled and computes_tiles:
            slices[index] = layer.whole_slice
            continue
        part = _slice_of(layer, flow.tasks[index][device])
        if part is not None:
            slices[index] = part
    return slices


def _slice_of(layer: GraphLayer, task: LayerTask) -> Slice | None:
    """Return the slice of a layer's weights for a task; None for no task."""
    makes = as_range(task.makes)
    match task.work:
        case "whole":
            return layer.whole_slice
        case "outputs":
            # LOP: the filters of some output channels (Section 4.4).
            return Slice(makes, layer.whole_slice.columns, makes)
        case "sums":
            # LIP: of every filter the channels of some inputs; biases belong to the merged channels.
            pixels = layer.inputs // layer.input_channels
            columns = range(task.takes.first // pixels, task.takes.last // pixels)
            return Slice(layer.whole_slice.rows, columns, makes)
        case "channels":
            return Slice(NO_CHANNELS, NO_CHANNELS, makes)
        case _:
            return None


def stored_layers(flow: Dataflow, device: int) -> list[tuple[GraphLayer, Slice]]:
    """Return the slices stored by a device together with their layers."""
    slices = stored_slices(flow, device)
    return [(flow.graph.layers[index], part) for index, part in slices.items()]


def as_range(part: Range) -> range:
    """Convert a range of a plan to a Python range.

    >>> as_range(Range(2, 5))
    range(2, 5)
    """
    return range(part.first, part.last)
