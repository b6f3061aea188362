"""The dataflow of a plan: computations, outputs, inputs and transfers of every device for one inference.

Devices execute this dataflow, and all predictions derive from it: computation and memory (`demands`), communication and
time (`communication`). The derivation has no side effects and yields the same result on every device.

A value is the image (`INPUT`) or the output of a layer, named by the layer's index. Values are counted in elements of
one sample, flattened channel after channel. A range of channels is therefore a range of elements, and a fully connected
layer reads the output of a convolution without conversion. Several devices may each make a part of a value; a device
sends its part in pieces, as soon as each piece is computed.
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

Exchange = Literal["direct", "via-source", "row"]
"""The option ``exchange``, or ``row`` if every layer is computed by one device, which sends the output directly to the
device of the next layer."""
TaskKind = Literal["none", "outputs", "sums", "whole", "channels"]
"""``outputs``: some output channels from the whole input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the whole layer. ``channels``: some channels of a layer that treats each channel by itself."""

MadeRanges = Mapping[int, tuple[Range, ...]]
"""Value -> for each device the elements of the value that the device makes."""


@dataclass(frozen=True)
class LayerTask:
    """The share of one layer computed by one device."""

    work: TaskKind = "none"
    input_range: Range = NOTHING
    """Elements of the layer's input from which the device computes."""
    output_channels: Range = NOTHING
    """Output channels that the device finishes; for ``sums`` the channels for which it merges the sums of all devices.
    """


IDLE = LayerTask()


def is_alias(layer: GraphLayer, exchange: Exchange) -> bool:
    """Return whether a layer only joins outputs of other layers, without any computation or transfer."""
    # Through the source, outputs are collected and joined there instead.
    return exchange == "direct" and layer.is_route


def is_chunked(layer: GraphLayer, task: LayerTask) -> bool:
    """Return whether a device computes its part in chunks and sends each chunk immediately."""
    if task.work == "whole":
        return layer.splits
    return task.work in ("outputs", "sums")


def tasks_of(
    graph: Graph,
    plan: DistributedPlan,
    exchange: Exchange,
    index: int,
    made_ranges: MadeRanges,
) -> tuple[LayerTask, ...]:
    """Return the task of each device in an untiled layer; ``made_ranges`` covers all values before the layer."""
    layer = graph.layers[index]
    layer_plan = plan.layers[index]
    if layer_plan.scheme in ("lop", "fuse1"):
        return _output_tasks(layer, layer_plan)
    if layer_plan.scheme in ("lip", "fuse2"):
        merged = _merged_ranges(graph, plan, exchange, index)
        return _input_tasks(layer, layer_plan, merged)
    if exchange == "direct":
        local_tasks = _without_exchange(layer, len(plan.devices), made_ranges)
        if local_tasks:
            return local_tasks
    tasks = [IDLE] * len(plan.devices)
    owner = plan.source if layer_plan.owner is None else layer_plan.owner
    tasks[owner] = _whole_task(layer)
    return tuple(tasks)


def _output_tasks(layer: GraphLayer, layer_plan: LayerPlan) -> tuple[LayerTask, ...]:
    """Return the tasks of LOP: some output channels from all of the input."""
    whole_input = Range(0, layer.inputs)
    tasks = []
    for made in layer_plan.outputs:
        task = IDLE
        if made.size:
            task = LayerTask("outputs", whole_input, made)
        tasks.append(task)
    return tuple(tasks)


def _input_tasks(
    layer: GraphLayer, layer_plan: LayerPlan, merged: Sequence[Range]
) -> tuple[LayerTask, ...]:
    """Return the tasks of LIP: sums of all outputs from a part of the input; ``merged`` is each device's output."""
    pixels = layer.inputs // layer.input_channels
    tasks = []
    for channels, made in zip(layer_plan.inputs, merged, strict=True):
        tasks.append(LayerTask("sums", scaled(channels, pixels), made))
    return tuple(tasks)


def _without_exchange(
    layer: GraphLayer, devices: int, made_ranges: MadeRanges
) -> tuple[LayerTask, ...]:
    """Return the tasks in a layer applied locally to existing elements; empty for other layers."""
    if layer.is_route:
        # Readers take the joined parts from the devices that made them.
        return (IDLE,) * devices
    if layer.division == "moves":
        # Every device that reads the output moves the pixels itself; `make_dataflow` removes the other tasks.
        return (_whole_task(layer),) * devices
    # The inputs of a layer with several sources, such as a sum, may be on different devices.
    if not layer.is_channelwise or len(layer.sources) > 1:
        return ()
    input_homes = made_ranges.get(layer.sources[0], ())
    if not any(made_range.size for made_range in input_homes):
        return ()
    pixels = layer.inputs // layer.output[0]
    tasks = []
    for made_range in input_homes:
        channels = Range(made_range.first // pixels, made_range.last // pixels)
        task = IDLE
        if made_range.size:
            task = LayerTask("channels", made_range, channels)
        tasks.append(task)
    return tuple(tasks)


def _whole_task(layer: GraphLayer) -> LayerTask:
    whole_input = Range(0, layer.inputs)
    all_channels = Range(0, layer.output[0])
    return LayerTask("whole", whole_input, all_channels)


def _merged_ranges(
    graph: Graph, plan: DistributedPlan, exchange: Exchange, index: int
) -> tuple[Range, ...]:
    """Return the range of output channels merged by each device."""
    channels = graph.layers[index].output[0]
    # Through the source, and for the result, which nobody else reads, the source merges everything.
    if exchange != "direct" or not graph.readers[index]:
        return _at_source(plan, channels)
    sizes = [taken.size for taken in plan.layers[index].inputs]
    return divide(channels, proportional_shares(sizes))


class Origin(NamedTuple):
    """Origin of one part of a layer's input."""

    value: int
    """The value that contains the part."""
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
    exchange: Exchange
    tasks: tuple[tuple[LayerTask, ...], ...]
    """The task of each device in each layer; in tiled layers all tasks are idle."""
    made_ranges: MadeRanges
    """Value -> for each device the elements that the device itself makes. The only value of tiled layers is the output
    of the last one, which the source collects."""
    needed_pieces: Mapping[int, tuple[Pieces, ...]]
    """Value -> for each device the elements that the device reads for its tasks, or returns as the result."""
    last_readers: Mapping[int, tuple[int, ...]]
    """Value -> for each device the last layer that reads the value there: the number of layers if the value is the
    result, and less than `INPUT` if no layer reads the value."""

    @property
    def devices(self) -> range:
        """Indices of the devices."""
        return range(len(self.plan.devices))

    @property
    def tiled_count(self) -> int:
        """Number of the first layers, which are computed by tiles."""
        return self.plan.tiled_count

    @cached_property
    def computed_regions(self) -> tuple[tuple[Region, ...], ...]:
        """For each tile, the computed region of each tiled layer's output."""
        tiling = self.plan.tiling
        reuses = self.settings.options.tile_overlap == "reuse"
        computed = []
        for number, tile in enumerate(self.plan.tiles):
            if tiling is None or not reuses:
                # All that the tile needs of the maps between the layers, and its region of the last output.
                computed.append(tile.regions[1:])
            else:
                computed.append(computed_regions(tiling, number))
        return tuple(computed)

    @cached_property
    def overlaps(self) -> Mapping[tuple[int, int], tuple[Overlap, ...]]:
        """(lender, borrower) -> regions reused by the borrower from the lender, sent as one message."""
        tiling = self.plan.tiling
        if tiling is None or self.settings.options.tile_overlap != "reuse":
            return {}
        by_pair: dict[tuple[int, int], tuple[Overlap, ...]] = {}
        for overlap in find_overlaps(tiling):
            pair = (overlap.lender, overlap.borrower)
            earlier = by_pair.get(pair, ())
            by_pair[pair] = (*earlier, overlap)
        return by_pair

    def values(self, overlap: Overlap) -> int:
        """Return the number of elements of one sample in an overlap."""
        channels = self.graph.layers[overlap.layer].output[0]
        return channels * overlap.region.pixels

    def origins(self, index: int, taken: Range) -> tuple[Origin, ...]:
        """Return the origins of a range of a layer's input, in element order."""
        key = (index, taken)
        # Cached, since every request needs them.
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
            source_part = shifted(part, -whole.first)
            if not self._is_alias(source):
                yield Origin(source, source_part, part.first)
                continue
            for origin in self.origins(source, source_part):
                yield origin._replace(at=origin.at + whole.first)

    def _is_alias(self, value: int) -> bool:
        if value == INPUT:
            return False
        return is_alias(self.graph.layers[value], self.exchange)

    def result(self) -> tuple[Origin, ...]:
        """Return the origins of the network's output."""
        index = len(self.graph.layers) - 1
        layer = self.graph.layers[index]
        if is_alias(layer, self.exchange):
            return self.origins(index, Range(0, layer.inputs))
        whole = Range(0, layer.outputs)
        return (Origin(index, whole, 0),)

    def chunks(self, index: int, made: Range) -> tuple[Range, ...]:
        """Divide output channels of a layer into nearly equal ranges, each sent immediately after being computed.

        The ranges do not depend on the number of samples of a request, so all devices choose the same ranges without
        communication.
        """
        if not made.size:
            return ()
        options = self.settings.options
        pixels = self.graph.layers[index].pixels
        elements = made.size * pixels * self.settings.samples
        count = 1
        if not options.layerwise:
            # Each chunk has at least the minimum size and at least one channel.
            max_count = BYTES_PER_VALUE * elements // options.min_chunk_bytes
            count = min(options.chunks, made.size, max_count)
            count = max(1, count)
        parts = divide_evenly(made.size, count)
        return tuple(shifted(part, made.first) for part in parts)

    def pieces(self, value: int, device: int) -> Pieces:
        """Return the pieces in which a device makes its part of a value, in the order of computation."""
        key = (value, device)
        if key not in self._piece_cache:
            self._piece_cache[key] = self._find_pieces(value, device)
        return self._piece_cache[key]

    @cached_property
    def _piece_cache(self) -> dict[tuple[int, int], Pieces]:
        return {}

    def _find_pieces(self, value: int, device: int) -> Pieces:
        if value >= self.tiled_count:
            layer = self.graph.layers[value]
            task = self.tasks[value][device]
            if is_chunked(layer, task):
                chunks = self.chunks(value, task.output_channels)
                return tuple(scaled(chunk, layer.pixels) for chunk in chunks)
        made_range = self.made_ranges[value][device]
        return (made_range,) if made_range.size else ()

    def receivers(
        self, value: int, device: int, made: Range
    ) -> Iterator[tuple[int, Range]]:
        """Yield the receivers of a device's part of a value, with the elements that each receiver needs."""
        source = self.plan.source
        if self.exchange != "via-source" or device == source:
            yield from self.forwarded(value, device, made)
        else:
            # The source receives the part for itself and for all devices to which it forwards elements.
            part = intersection(made, self._needed_at_source(value, device))
            if part.size:
                yield source, part

    def forwarded(
        self, value: int, origin: int, made: Range
    ) -> Iterator[tuple[int, Range]]:
        """Yield the receivers of a part that the device ``origin`` has made, with the elements that each needs.

        If all traffic passes through the source, these are the receivers to which the source forwards the part.
        """
        source = self.plan.source
        for receiver, pieces in self._missing_parts(value, origin):
            # The source has received the part already.
            if (
                self.exchange == "via-source"
                and receiver == source
                and origin != source
            ):
                continue
            for piece in pieces:
                part = intersection(piece, made)
                if part.size:
                    yield receiver, part

    def missing_pieces(self, value: int, device: int) -> Pieces:
        """Return the elements of a value needed by a device from other devices."""
        needed = self.needed_pieces[value][device]
        own = self.made_ranges[value][device]
        return difference(needed, own)

    def collected(self, value: int) -> int:
        """Return the number of elements of a value collected by the source from other devices."""
        source = self.plan.source
        total = 0
        for maker, made_range in enumerate(self.made_ranges[value]):
            if maker == source or not made_range.size:
                continue
            for receiver, part in self.receivers(value, maker, made_range):
                if receiver == source:
                    total += part.size
        return total

    def _needed_at_source(self, value: int, maker: int) -> Range:
        """Return the range of a value collected by the source from a device, for itself and for others."""
        own = self.needed_pieces[value][self.plan.source]
        needed = [*own]
        for _, pieces in self._missing_parts(value, maker):
            needed += pieces
        # A single range, even if some elements in it are not needed, so that each piece is one message.
        return hull(needed)

    def _missing_parts(self, value: int, maker: int) -> Iterator[tuple[int, Pieces]]:
        """Yield each device and the device's missing elements of a value, in ring order after ``maker``."""
        # Otherwise all makers would send to the same device first, whose link would be the bottleneck.
        count = len(self.plan.devices)
        for step in range(1, count):
            receiver = (maker + step) % count
            yield receiver, self.missing_pieces(value, receiver)


def make_dataflow(
    graph: Graph, plan: DistributedPlan, settings: PlanSettings
) -> Dataflow:
    """Determine the tasks of every device, and the elements needed from other devices."""
    exchange: Exchange = settings.options.exchange
    if all(layer.scheme == "whole" for layer in plan.layers):
        # The schemes sequential and single: no output has several parts that must be collected or merged.
        exchange = "row"
    tasks, made_ranges = _assign_tasks(graph, plan, exchange)
    # Without tasks, which the origins of inputs do not depend on.
    draft = Dataflow(graph, plan, settings, exchange, (), {}, {}, {})
    needs = _Needs(made_ranges, len(plan.devices))
    needs.add(draft.result(), plan.source, len(graph.layers))
    # From the last layer backwards, since the tasks below depend on the devices that read an output.
    for index in range(len(graph.layers) - 1, plan.tiled_count - 1, -1):
        if exchange == "direct" and graph.layers[index].division == "moves":
            # Only devices that need the moved pixels move them.
            tasks[index] = needs.without_unread(index, tasks[index])
            made_ranges[index] = _made_pieces(graph.layers[index], tasks[index])
        for device, task in enumerate(tasks[index]):
            origins = draft.origins(index, task.input_range)
            needs.add(origins, device, index)
    return replace(
        draft,
        tasks=tuple(tasks),
        made_ranges=made_ranges,
        needed_pieces=_freeze_rows(needs.needed_pieces),
        last_readers=_freeze_rows(needs.last_readers),
    )


def _assign_tasks(
    graph: Graph, plan: DistributedPlan, exchange: Exchange
) -> tuple[list[tuple[LayerTask, ...]], dict[int, tuple[Range, ...]]]:
    """Return the tasks of each layer, and the elements of each value made by each device."""
    all_idle = (IDLE,) * len(plan.devices)
    tasks: list[tuple[LayerTask, ...]] = [all_idle] * plan.tiled_count
    # The first value of the divided layers: the map of all tiles, or the image.
    if plan.tiled_count:
        value = plan.tiled_count - 1
        size = graph.layers[value].outputs
    else:
        value = INPUT
        size = graph.layers[0].inputs
    made_ranges = {value: _at_source(plan, size)}
    for index in range(plan.tiled_count, len(graph.layers)):
        tasks.append(tasks_of(graph, plan, exchange, index, made_ranges))
        made_ranges[index] = _made_pieces(graph.layers[index], tasks[index])
    return tasks, made_ranges


class _Needs:
    """The elements of each value read by each device, and the last layer reading the value there."""

    def __init__(self, values: Iterable[int], devices: int) -> None:
        self.needed_pieces: dict[int, list[Pieces]] = {}
        self.last_readers: dict[int, list[int]] = {}
        for value in values:
            self.needed_pieces[value] = [()] * devices
            # Less than any layer and than the image: no layer reads the value.
            self.last_readers[value] = [INPUT - 1] * devices

    def add(self, origins: Iterable[Origin], device: int, reader: int) -> None:
        """Add the elements read by the layer ``reader`` on a device."""
        for value, part, _ in origins:
            pieces = self.needed_pieces[value]
            pieces[device] = union(pieces[device], (part,))
            last_readers = self.last_readers[value]
            last_readers[device] = max(last_readers[device], reader)

    def without_unread(
        self, index: int, tasks: Sequence[LayerTask]
    ) -> tuple[LayerTask, ...]:
        """Return the tasks of a layer, idle on devices where no later task reads the output."""
        remaining = []
        for task, pieces in zip(tasks, self.needed_pieces[index], strict=True):
            remaining.append(task if pieces else IDLE)
        return tuple(remaining)


def _freeze_rows(rows: Mapping[int, Sequence[T]]) -> dict[int, tuple[T, ...]]:
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
        made.append(scaled(task.output_channels, layer.pixels))
    return tuple(made)


def stored_slices(flow: Dataflow, device: int) -> dict[int, Slice]:
    """Return layer -> slice of the layer's weights stored by a device.

    A device with a tile stores all weights of the tiled layers: each pixel of a tile depends on all of them.
    """
    owners = {tile.device for tile in flow.plan.tiles}
    computes_tiles = device in owners or flow.settings.options.tile_stealing
    slices: dict[int, Slice] = {}
    for index, layer in enumerate(flow.graph.layers):
        if index < flow.tiled_count and computes_tiles:
            slices[index] = layer.whole_slice
            continue
        part = _slice_of(layer, flow.tasks[index][device])
        if part is not None:
            slices[index] = part
    return slices


def _slice_of(layer: GraphLayer, task: LayerTask) -> Slice | None:
    """Return the slice of a layer's weights for a task; None for no task."""
    outputs = as_range(task.output_channels)
    match task.work:
        case "whole":
            return layer.whole_slice
        case "outputs":
            # LOP: the filters of some output channels (Section 4.4).
            return Slice(outputs, layer.whole_slice.columns, outputs)
        case "sums":
            # LIP: of every filter the channels of some inputs; biases belong to the merged channels.
            pixels = layer.inputs // layer.input_channels
            first_channel = task.input_range.first // pixels
            last_channel = task.input_range.last // pixels
            columns = range(first_channel, last_channel)
            return Slice(layer.whole_slice.rows, columns, outputs)
        case "channels":
            return Slice(NO_CHANNELS, NO_CHANNELS, outputs)
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
