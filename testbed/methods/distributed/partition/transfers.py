"""What goes over the network in one inference, and what that weighs on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.ranges import Pieces, Range, common
from testbed.models.shapes import BYTES_PER_VALUE, INPUT
from testbed.wire.message import size_around


@dataclass(frozen=True)
class Transfer:
    """What goes from one device to another on account of one layer's output."""

    sender: int
    receiver: int
    value: int
    """The layer, or `INPUT`."""
    messages: tuple[int, ...]
    """The elements of one sample in each."""
    forwarded: bool = False
    """Whether the sender passes on what others made, or first puts their tiles together or adds up their sums."""
    sums: bool = False
    """Whether it is partial sums, of which each receiver gets others; all receivers of a value get the same."""

    @cached_property
    def elements(self) -> int:
        """Of one sample, in all messages."""
        return sum(self.messages)

    def wire_bytes(self, samples: int) -> float:
        """Return the bytes on the wire of a request of ``samples`` samples, headers included."""
        sizes = Counter(self.messages)
        return sum(count * size_around(samples * BYTES_PER_VALUE * elements) for elements, count in sizes.items())


def transfers(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return everything that one inference sends."""
    return (*of_tiles(flow), *_of_values(flow), *_of_sums(flow))


def elements(found: Sequence[Transfer]) -> int:
    """Return the elements of one sample in all of them: C, if they are all of an inference's."""
    return sum(transfer.elements for transfer in found)


def of_tiles(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return what is sent for tiles that the source does not do itself: regions of the image, and what they become.

    What tiles reuse of each other counts as of the last map within. It goes through the source, as all else about
    tiles does, unless devices send each other directly; always where tiles can be stolen. These are counted as if none
    were.
    """
    source, tiles, found = flow.plan.source, flow.plan.tiles, []
    for tile in flow.plan.tiles:
        if tile.device != source:
            first, last = flow.graph.layers[0], flow.graph.layers[flow.tiled - 1]
            there, back = first.input[0] * tile.regions[0].pixels, last.output[0] * tile.regions[-1].pixels
            found.append(Transfer(source, tile.device, INPUT, (there,)))
            found.append(Transfer(tile.device, source, flow.tiled - 1, (back,)))
    for (lender, borrower), taken in flow.overlaps.items():
        size = sum(map(flow.values, taken))
        way = [tiles[lender].device, tiles[borrower].device]
        if flow.execution.stealing or (way[0] != way[1] and flow.way == "source"):
            way.insert(1, source)
        for leg, (one, other) in enumerate(pairwise(way)):
            if one != other:
                found.append(Transfer(one, other, flow.tiled - 2, (size,), forwarded=leg == 1 and source != way[0]))
    return tuple(found)


def _of_values(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the parts of values that others than their makers want, where all passes the source in two legs."""
    source = flow.plan.source
    for value, homes in flow.homes.items():
        for maker, home in enumerate(homes):
            if not home.size:
                continue
            pieces = flow.pieces(value, maker)
            merges = value != INPUT and (value == flow.tiled - 1 or flow.tasks[value][maker].work == "sums")
            for receiver, part in flow.receivers(value, maker, home):
                yield Transfer(maker, receiver, value, _cut(pieces, part), forwarded=merges)
            if flow.way == "source" and maker != source:
                for receiver, part in flow.forwarded(value, maker, home):
                    yield Transfer(source, receiver, value, _cut(pieces, part), forwarded=True)


def _cut(pieces: Pieces, part: Range) -> tuple[int, ...]:
    """Return the sizes of what is in each of the pieces of a part."""
    if part.first <= pieces[0].first and pieces[-1].last <= part.last:
        return tuple(piece.size for piece in pieces)
    return tuple(size for piece in pieces if (size := common(piece, part).size))


def _of_sums(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the partial sums that others than who has computed them merge."""
    for index, tasks in enumerate(flow.tasks):
        each = flow.graph.layers[index].pixels
        for merger, merging in enumerate(tasks):
            if merging.work != "sums" or not merging.makes.size:
                continue
            messages = tuple(each * chunk.size for chunk in flow.chunks(index, merging.makes))
            for device, task in enumerate(tasks):
                if device != merger and task.takes.size:
                    yield Transfer(device, merger, index, messages, sums=True)
