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
from testbed_stahl.tiles import Overlap, computed, overlaps

T = TypeVar("T")

Way = Literal["direct", "via-source", "row"]
"""An exchange, or ``row``: every layer is whole and goes from its owner to the next one's; nothing passes the source
for that."""
TaskKind = Literal["none", "outputs", "sums", "whole", "channels"]
"""``outputs``: some output channels from all of the input. ``sums``: partial sums of all outputs from a part of the
input. ``whole``: the layer as it is. ``channels``: a layer that treats each channel by itself, on some of them."""


Homes = Mapping[int, tuple[Range, ...]]


@dataclass(frozen=True)
class LayerTask:
    """The share of one layer computed by one device."""

    work: TaskKind = "none"
    takes: Range = NOTHING
    """Elements of the layer's input that it computes from."""
    makes: Range = NOTHING
    """Output channels that it ends up with; for ``sums`` those that it merges, of everybody's sums."""


IDLE = LayerTask()


def is_alias(layer: GraphLayer, way: Way) -> bool:
    """Return whether a layer only renames outputs of other layers."""
    return way == "direct" and layer.joins


def by_chunks(layer: GraphLayer, task: LayerTask) -> bool:
    """Whether a device computes its part in chunks and sends each chunk immediately."""
    return task.work in ("outputs", "sums") or (task.work == "whole" and layer.splits)


def tasks_of(
    graph: Graph, plan: DistributedPlan, way: Way, index: int, homes: Homes
) -> tuple[LayerTask, ...]:
    """Return the task of each device in an untiled layer; ``homes`` maps each value and device to its elements."""
    layer, decided = graph.layers[index], plan.layers[index]
    if decided.scheme in ("lop", "fuse1"):
        everything = Range(0, layer.inputs)
        return tuple(
            LayerTask("outputs", everything, made) if made.size else IDLE
            for made in decided.outputs
        )
    if decided.scheme in ("lip", "fuse2"):
        merging = _merged_ranges(graph, plan, way, index)
        each = layer.inputs // layer.input_channels
        return tuple(
            LayerTask("sums", scaled(taken, each), made)
            for taken, made in zip(decided.inputs, merging, strict=True)
        )
    if way == "direct" and (
        local := _without_exchange(layer, len(plan.devices), homes)
    ):
        return local
    tasks = [IDLE] * len(plan.devices)
    tasks[plan.source if decided.owner is None else decided.owner] = _whole_task(layer)
    return tuple(tasks)


def _without_exchange(
    layer: GraphLayer, devices: int, homes: Homes
) -> tuple[LayerTask, ...]:
    """Return the tasks in a layer applied locally to existing elements; empty for other layers."""
    if layer.joins:
        return (IDLE,) * devices
    if layer.division == "moves":
        return (_whole_task(layer),) * devices
    homes_before = homes.get(layer.sources[0], ())
    if (
        not layer.by_channel
        or len(layer.sources) > 1
        or not any(home.size for home in homes_before)
    ):
        return ()
    channel = layer.inputs // layer.output[0]
    return tuple(
        LayerTask("channels", home, Range(home.first // channel, home.last // channel))
        if home.size
        else IDLE
        for home in homes_before
    )


def _whole_task(layer: GraphLayer) -> LayerTask:
    return LayerTask("whole", Range(0, layer.inputs), Range(0, layer.output[0]))


def _merged_ranges(
    graph: Graph, plan: DistributedPlan, way: Way, index: int
) -> tuple[Range, ...]:
    """Return the range of output channels merged by each device."""
    channels, decided = graph.layers[index].output[0], plan.layers[index]
    if way == "direct" and graph.readers[index]:
        return divide(
            channels, proportional_shares([taken.size for taken in decided.inputs])
        )
    return tuple(
        Range(0, channels if device == plan.source else 0)
        for device in range(len(plan.devices))
    )


class Origin(NamedTuple):
    """Origin of one part of a layer's input."""

    value: int
    """The layer that made it, or `INPUT`."""
    part: Range
    """Elements of that value."""
    at: int
    """First element of the layer's input that it becomes."""


@dataclass(frozen=True)
class Dataflow:
    """A plan as tasks and transfers; created by `dataflow`."""

    graph: Graph
    plan: DistributedPlan
    settings: PlanSettings
    way: Way
    tasks: tuple[tuple[LayerTask, ...], ...]
    """By layer and device; the layers that are tiled have none."""
    homes: Homes
    """By value and device: the elements that the device itself makes. Of the tiled layers there is only the last one's
    output, which the source collects."""
    wants: Mapping[int, tuple[Pieces, ...]]
    """By value and device: the elements that the device computes from at some time, or hands out as the result."""
    last: Mapping[int, tuple[int, ...]]
    """By value and device: the last layer for which the device needs the value. Beyond all layers where it is the
    result, before all where it is not needed."""

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
        return tuple(computed(tiling, number) for number in range(len(tiling.tiles)))

    @cached_property
    def overlaps(self) -> Mapping[tuple[int, int], tuple[Overlap, ...]]:
        """Regions reused between tiles, by lender and borrower; each pair is sent as one message."""
        by_pair: dict[tuple[int, int], tuple[Overlap, ...]] = {}
        if (
            self.plan.tiling is not None
            and self.settings.options.tile_overlap == "reuse"
        ):
            for each in overlaps(self.plan.tiling):
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
            there = Range(at, at + self.graph.outputs_of(source))
            part = intersection(there, taken)
            if (
                part.size
                and source != INPUT
                and is_alias(self.graph.layers[source], self.way)
            ):
                for origin in self.origins(source, shifted(part, -at)):
                    yield origin._replace(at=origin.at + at)
            elif part.size:
                yield Origin(source, shifted(part, -at), part.first)
            at = there.last

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
        options = self.settings.options
        size = (
            made.size
            * self.graph.layers[index].pixels
            * self.settings.samples
            * BYTES_PER_VALUE
        )
        count = (
            1
            if options.layerwise
            else max(1, min(options.chunks, made.size, size // options.min_chunk_bytes))
        )
        return (
            tuple(shifted(part, made.first) for part in divide_evenly(made.size, count))
            if made.size
            else ()
        )

    def pieces(self, value: int, device: int) -> Pieces:
        """Return the ranges of elements a device produces of a value, in order of production."""
        if (value, device) not in self._pieces:
            self._pieces[value, device] = self._made_in(value, device)
        return self._pieces[value, device]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], Pieces]:
        return {}

    def _made_in(self, value: int, device: int) -> Pieces:
        home = self.homes[value][device]
        if value < self.tiled or not by_chunks(
            self.graph.layers[value], self.tasks[value][device]
        ):
            return (home,) if home.size else ()
        each = self.graph.layers[value].pixels
        return tuple(
            scaled(chunk, each)
            for chunk in self.chunks(value, self.tasks[value][device].makes)
        )

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
        return sum(
            part.size
            for maker, home in enumerate(self.homes[value])
            if maker != source and home.size
            for to, part in self.receivers(value, maker, home)
            if to == source
        )

    def _for_source(self, value: int, maker: int) -> Range:
        """Return the elements of another device's part collected by the source, for itself and for others."""
        needed = [
            piece for _, pieces in self._missing_parts(value, maker) for piece in pieces
        ]
        return hull([*self.wants[value][self.plan.source], *needed])

    def _missing_parts(self, value: int, maker: int) -> Iterator[tuple[int, Pieces]]:
        """Yield each device and its missing elements of a value, in ring order after ``maker`` to spread the load over
        links.
        """
        count = len(self.plan.devices)
        for step in range(1, count):
            receiver = (maker + step) % count
            yield receiver, self.lacks(value, receiver)


def dataflow(graph: Graph, plan: DistributedPlan, settings: PlanSettings) -> Dataflow:
    """Determine the tasks of every device and the elements each needs from others."""
    way: Way = (
        "row"
        if all(layer.scheme == "whole" for layer in plan.layers)
        else settings.options.exchange
    )
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
        self.wants: dict[int, list[Pieces]] = {
            value: [()] * devices for value in values
        }
        self.last = {value: [INPUT - 1] * devices for value in self.wants}

    def add(self, origins: Iterable[Origin], device: int, reader: int) -> None:
        """Add the elements read by a layer on a device."""
        for value, part, _ in origins:
            self.wants[value][device] = union(self.wants[value][device], (part,))
            self.last[value][device] = max(self.last[value][device], reader)

    def without_unread(
        self, index: int, tasks: Sequence[LayerTask]
    ) -> tuple[LayerTask, ...]:
        """Keep the tasks of a layer on devices whose later tasks read the output."""
        return tuple(
            task if self.wants[index][device] else IDLE
            for device, task in enumerate(tasks)
        )


def _freeze_pieces(rows: Mapping[int, Sequence[T]]) -> dict[int, tuple[T, ...]]:
    return {value: tuple(row) for value, row in rows.items()}


def _at_source(plan: DistributedPlan, elements: int) -> tuple[Range, ...]:
    return tuple(
        Range(0, elements if device == plan.source else 0)
        for device in range(len(plan.devices))
    )


def _made_pieces(layer: GraphLayer, tasks: Sequence[LayerTask]) -> tuple[Range, ...]:
    each = layer.pixels
    return tuple(scaled(task.makes, each) for task in tasks)


def stored(flow: Dataflow, device: int) -> dict[int, Slice]:
    """Return the slices stored by a device, in layer order. Each device with a tile stores complete tiled layers."""
    slices: dict[int, Slice] = {}
    tiles = flow.settings.options.tile_stealing or any(
        tile.device == device for tile in flow.plan.tiles
    )
    for index, layer in enumerate(flow.graph.layers):
        task, whole = flow.tasks[index][device], layer.whole
        makes = as_range(task.makes)
        if task.work == "whole" or (index < flow.tiled and tiles):
            slices[index] = whole
        elif task.work == "outputs":
            slices[index] = Slice(makes, whole.columns, makes)
        elif task.work == "sums":
            each = layer.inputs // layer.input_channels
            columns = range(task.takes.first // each, task.takes.last // each)
            slices[index] = Slice(whole.rows, columns, makes)
        elif task.work == "channels":
            slices[index] = Slice(NONE, NONE, makes)
    return slices


def layers_stored(flow: Dataflow, device: int) -> list[tuple[GraphLayer, Slice]]:
    """Return the slices stored by a device together with their layers."""
    return [
        (flow.graph.layers[index], part) for index, part in stored(flow, device).items()
    ]


def as_range(part: Range) -> range:
    """Convert a range of a plan to a Python range."""
    return range(part.first, part.last)
