"""What a plan takes of each device: F, the weights; T, the multiplications one after the other; bytes of memory.

Memory is an upper bound of what a device holds, whichever devices are fast or slow. Left out of it, as in
`testbed.ml.partition.memory`: interpreter, torch, scratch space of kernels, messages under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, islice

from testbed.device import Cost
from testbed.ml.layers import layer_slices
from testbed.ml.models.chain import forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed_stahl import tiles
from testbed_stahl.dataflow import Dataflow, by_chunks, layers_stored, stored
from testbed_stahl.plan import Range, intersection, size
from testbed_stahl.tiles import Overlap


def weights(flow: Dataflow, device: int) -> int:
    """Return F: the elements of weights that a device stores, no biases among them."""
    return sum(layer.share(layer.weights, part) for layer, part in layers_stored(flow, device))


def divided_weights(flow: Dataflow, device: int) -> int:
    """Return the weights a device stores of layers that are divided by channels: what shrinks with its share."""
    layers = flow.graph.layers
    return sum(
        layers[index].share(layers[index].weights, part)
        for index, part in stored(flow, device).items()
        if flow.tasks[index][device].work in ("outputs", "sums")
    )


def parameters(flow: Dataflow, device: int) -> int:
    """Return all values that a device stores: its weights, and what belongs to the channels it finishes."""
    return layer_slices.parameters(layers_stored(flow, device))


def multiplications(flow: Dataflow) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    layers = flow.graph.layers
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, work in zip(rows, tiles.multiplications(layers[: flow.tiled], made), strict=False):
            row[tile.device] += work
    for device in flow.devices:
        for index, part in stored(flow, device).items():
            if index >= flow.tiled:
                rows[index][device] = layers[index].share(layers[index].multiplications, part)
    return tuple(map(tuple, rows))


def costs(flow: Dataflow) -> list[list[Cost]]:
    """Return what a request is charged: one row a layer, one column a device; the merging of sums is left out."""
    layers, samples = flow.graph.layers, flow.settings.samples
    rows = [[Cost()] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, cost in zip(rows, tiles.costs(layers[: flow.tiled], made, samples), strict=False):
            row[tile.device] += cost
    for index in range(flow.tiled, len(layers)):
        rows[index] = [forward_of(_one(flow, index, device), samples) for device in flow.devices]
    return rows


def _one(flow: Dataflow, index: int, device: int) -> Cost:
    """Return what a device is charged for its part of a layer and one sample."""
    layer, tasks = flow.graph.layers[index], flow.tasks[index]
    task = tasks[device]
    if task.work == "none":
        return Cost()
    # Chunk by chunk, each from all that is read; of sums, those of all who merge some.
    makes = [each.makes for each in tasks] if task.work == "sums" else [task.makes]
    products = [
        layer.product_cost(task.takes.size, chunk.size)
        for made in makes
        for chunk in (flow.chunks(index, made) if by_chunks(layer, task) else (made,))
    ]
    return sum(products, layer.finish_cost(task.makes.size))


def longest_path(flow: Dataflow) -> int:
    """Return T: multiplications one after the other, where devices work at the same time between two exchanges."""
    rows = multiplications(flow)
    early = max((sum(column) for column in zip(*rows[: flow.tiled], strict=True)), default=0)
    return early + sum(max(row) for row in rows[flow.tiled :])


def memory(flow: Dataflow) -> tuple[float, ...]:
    """Return the bytes each device needs: parameters once, activations for each request under way."""
    samples = flow.settings.options.in_flight * flow.settings.samples
    return tuple(
        float(BYTES_PER_VALUE * (parameters(flow, device) + samples * activations(flow, device)))
        for device in flow.devices
    )


def activations(flow: Dataflow, device: int) -> int:
    """Return the most elements of one sample that a device can hold at once.

    Held are, until the last layer that needs them: what it makes, from the layer on that makes it; and what it wants
    of the others, from the layer on at which these can have it ready, which is before the device has done that layer
    itself. While it works on a layer also the sums that it merges, or those of what has come of the input so far.
    """
    held = _Held(len(flow.graph.layers))
    begins = _begins(flow, device)
    for value in flow.homes:
        _hold_value(held, flow, device, value, begins[value])
    for index in range(flow.tiled, len(flow.tasks)):
        _hold_sums(held, flow, device, index, begins)
    return max(held.peak(), _while_tiling(flow, device) if flow.tiled else 0)


class _Held:
    """The elements that a device holds while it works on each layer, from the image on."""

    def __init__(self, layers: int) -> None:
        self._changes = [0] * (layers - INPUT + 2)

    def hold(self, first: int, last: int, elements: int) -> None:
        """Hold elements from one layer to another, both included."""
        if first <= last:
            self._changes[first - INPUT] += elements
            self._changes[last + 1 - INPUT] -= elements

    def peak(self) -> int:
        """Return the most elements that are held at once."""
        return max(accumulate(self._changes))


def _hold_value(held: _Held, flow: Dataflow, device: int, value: int, begins: int) -> None:
    """Hold the elements of a value that a device makes, receives, or collects for others."""
    made, lacking, last = flow.homes[value][device].size, size(flow.lacks(value, device)), flow.last[value][device]
    merges = value >= flow.tiled and flow.tasks[value][device].work == "sums"
    # Chunk by chunk a result takes the place of its sums.
    held.hold(value + merges, last, made)
    if made and last < value and not merges:
        held.hold(value, value, max(piece.size for piece in flow.pieces(value, device)))
    held.hold(begins, last, lacking)
    if (
        last >= 0
        and flow.way == "source"
        and device == flow.plan.source
        and made + lacking < flow.graph.outputs_of(value)
    ):
        # The source keeps the elements that only others need, too.
        held.hold(begins, len(flow.graph.layers), flow.collected(value) - lacking)


def _hold_sums(held: _Held, flow: Dataflow, device: int, index: int, begins: Mapping[int, int]) -> None:
    """Hold the sums that a device merges or builds up while it works on a layer."""
    layer, task = flow.graph.layers[index], flow.tasks[index][device]
    made = task.makes.size * layer.pixels
    if task.work == "sums" and made:
        mine = task.takes.size > 0
        others = sum(each.takes.size > 0 for each in flow.tasks[index]) - mine
        held.hold(_earliest(flow, device, index, begins), index, others * made)
        held.hold(index, index, mine * made)
    elif by_chunks(layer, task) and _in_pieces(flow, device, index):
        held.hold(index, index, made)


def _begins(flow: Dataflow, device: int) -> dict[int, int]:
    """Return by value the first layer at which a device can have some of what others make of it.

    Others make it without the device unless it needs something of the device's: then they wait until the device has
    done that.
    """
    found: dict[int, int] = {}
    for value in flow.homes:
        if value < flow.tiled:
            found[value] = flow.tiled
        elif flow.tasks[value][device].work == "sums" and flow.tasks[value][device].takes.size:
            # They wait for its sums, which it sends one after the other, its own merging coming last.
            messages = sum(len(flow.pieces(value, merger)) for merger in flow.devices)
            found[value] = value + (messages == 1 and _has_sent_all(flow, device, value))
        else:
            found[value] = _earliest(flow, device, value, found)
    return found


def _earliest(flow: Dataflow, device: int, index: int, begins: Mapping[int, int]) -> int:
    """Return at which of its own layers a device may be when the first of the others has done its part of one."""
    taken = {task.takes: None for other, task in enumerate(flow.tasks[index]) if other != device and task.takes.size}
    return min((_waits(flow, device, index, takes, begins) for takes in taken), default=index)


def _waits(flow: Dataflow, device: int, index: int, takes: Range, begins: Mapping[int, int]) -> int:
    """Return how far a device has to be before there is all that this part of a layer is computed from."""
    found = []
    for value, part, _ in flow.origins(index, takes):
        whole = part.size == flow.graph.outputs_of(value)
        needed = intersection(flow.homes[value][device], part).size or (whole and _has_sent_all(flow, device, value))
        found.append(value + 1 if needed else begins[value])
    return max(found)


def _has_sent_all(flow: Dataflow, device: int, value: int) -> bool:
    """Say whether a device that adds to all of a value has done that layer once all of the value is there."""
    if value < flow.tiled:
        return False
    task = flow.tasks[value][device]
    return task.work == "sums" and task.takes.size > 0 and not task.makes.size


def _in_pieces(flow: Dataflow, device: int, index: int) -> bool:
    """Say whether a device can come to know a layer's input piece by piece; what it has made itself is one."""
    taken = flow.tasks[index][device].takes
    pieces = (
        piece
        for value, part, _ in flow.origins(index, taken)
        for maker, home in enumerate(flow.homes[value])
        if intersection(home, part).size
        for piece in (flow.pieces(value, maker) if maker != device else (home,))
        if intersection(piece, part).size
    )
    return len([*islice(pieces, 2)]) > 1


def _while_tiling(flow: Dataflow, device: int) -> int:
    """Return the most elements that a device can hold in the tiled layers.

    The inputs of all its tiles, what they take of others, and what one of them takes within; at the source, of whose
    image the inputs are parts, the image and the map that it collects.
    """
    layers, tiles = flow.graph.layers[: flow.tiled], flow.plan.tiles
    if flow.settings.options.stealing:
        return _while_stealing(flow, device)
    own = [number for number, tile in enumerate(tiles) if tile.device == device]
    within = max((_within(flow, number) for number in own), default=0)
    taken = sum(sum(map(flow.values, each)) for (_, borrower), each in flow.overlaps.items() if borrower in own)
    if device != flow.plan.source:
        return within + taken + sum(layers[0].input[0] * tiles[number].regions[0].pixels for number in own)
    if len(tiles) == 1:
        return layers[0].inputs + max(within, layers[-1].outputs)
    return layers[0].inputs + layers[-1].outputs + within + taken


def _while_stealing(flow: Dataflow, device: int) -> int:
    """Return the same where a device may have any tile, one at a time; the source keeps what they take of others."""
    layers, everything = flow.graph.layers[: flow.tiled], range(len(flow.plan.tiles))
    within = max(_within(flow, number) for number in everything)
    taken = [
        sum(sum(map(flow.values, each)) for pair, each in flow.overlaps.items() if pair[1] == number)
        for number in everything
    ]
    if device == flow.plan.source:
        return layers[0].inputs + layers[-1].outputs + within + sum(taken)
    inputs = max(layers[0].input[0] * tile.regions[0].pixels for tile in flow.plan.tiles)
    return within + inputs + max(taken)


def _within(flow: Dataflow, number: int) -> int:
    """Return the most that is between the input of a tile and its end, beside what it takes of others.

    That is what one layer takes and makes; where the tile puts a map together, what it has computed of it and the map;
    and what it lends, in parts and in one piece.
    """
    layers, lent = flow.graph.layers, sum(sum(map(flow.values, each)) for each in _lent(flow, number))
    most = before = 0
    for layer, made, whole in zip(layers, flow.computed[number], flow.plan.tiles[number].regions[1:], strict=False):
        parts, after = layer.output[0] * made.pixels, layer.output[0] * whole.pixels
        most = max(most, before + parts, parts + after if made != whole else 0)
        before = after
    return most + 2 * lent


def _lent(flow: Dataflow, number: int) -> Iterator[tuple[Overlap, ...]]:
    return (each for (lender, _), each in flow.overlaps.items() if lender == number)
