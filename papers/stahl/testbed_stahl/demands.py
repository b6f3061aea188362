"""Resource demands of a plan: weights (F), sequential multiplications (T), and bytes of memory.

The memory demand is an upper bound for any relative speed of the devices. As in `testbed.ml.partition.memory`, the
interpreter, torch, scratch space of kernels and messages in transit are excluded.
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
from testbed_stahl.plan import Range, intersection, total_size
from testbed_stahl.tiles import Overlap


def weights(flow: Dataflow, device: int) -> int:
    """Return F: the weight elements stored by a device, biases excluded."""
    return sum(
        layer.share(layer.weights, part) for layer, part in layers_stored(flow, device)
    )


def divided_weights(flow: Dataflow, device: int) -> int:
    """Return the stored weights of layers divided by channels; only these shrink with the device's share."""
    layers = flow.graph.layers
    return sum(
        layers[index].share(layers[index].weights, part)
        for index, part in stored(flow, device).items()
        if flow.tasks[index][device].work in ("outputs", "sums")
    )


def parameters(flow: Dataflow, device: int) -> int:
    """Return all stored values of a device: its weights, and the values of each channel it finishes."""
    return layer_slices.count_values(layers_stored(flow, device))


def multiplications(flow: Dataflow) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    layers = flow.graph.layers
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, work in zip(
            rows, tiles.multiplications(layers[: flow.tiled], made), strict=False
        ):
            row[tile.device] += work
    for device in flow.devices:
        for index, part in stored(flow, device).items():
            if index >= flow.tiled:
                rows[index][device] = layers[index].share(
                    layers[index].multiplications, part
                )
    return tuple(map(tuple, rows))


def costs(flow: Dataflow) -> list[list[Cost]]:
    """Return the cost of a request, one row a layer and one column a device; merging sums is excluded."""
    layers, samples = flow.graph.layers, flow.settings.samples
    rows = [[Cost()] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for row, cost in zip(
            rows, tiles.costs(layers[: flow.tiled], made, samples), strict=False
        ):
            row[tile.device] += cost
    for index in range(flow.tiled, len(layers)):
        rows[index] = [
            forward_of(_layer_cost(flow, index, device), samples)
            for device in flow.devices
        ]
    return rows


def _layer_cost(flow: Dataflow, index: int, device: int) -> Cost:
    """Return the cost of a device's part of a layer for one sample."""
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
    """Return T: the sequential multiplications if devices compute in parallel between exchanges."""
    rows = multiplications(flow)
    early = max(
        (sum(column) for column in zip(*rows[: flow.tiled], strict=True)), default=0
    )
    return early + sum(max(row) for row in rows[flow.tiled :])


def memory(flow: Dataflow) -> tuple[float, ...]:
    """Return the bytes each device needs: parameters once, activations for each request under way."""
    samples = flow.settings.options.in_flight * flow.settings.samples
    return tuple(
        float(
            BYTES_PER_VALUE
            * (parameters(flow, device) + samples * activations(flow, device))
        )
        for device in flow.devices
    )


def activations(flow: Dataflow, device: int) -> int:
    """Return the peak number of elements of one sample held by a device.

    Outputs are held from the layer producing them until the last layer reading them. Inputs from other devices are held
    from the first layer at which the senders can have finished, which may be earlier than the device's own progress.
    During a layer, the partial sums under construction are held too.
    """
    held = _Held(len(flow.graph.layers))
    begins = _first_arrivals(flow, device)
    for value in flow.homes:
        _hold_value(held, flow, device, value, begins[value])
    for index in range(flow.tiled, len(flow.tasks)):
        _hold_sums(held, flow, device, index, begins)
    return max(held.peak(), _while_tiling(flow, device) if flow.tiled else 0)


class _Held:
    """The elements held by a device during each layer, starting with the image."""

    def __init__(self, layers: int) -> None:
        self._changes = [0] * (layers - INPUT + 2)

    def hold(self, first: int, last: int, elements: int) -> None:
        """Hold elements from one layer to another, inclusive."""
        if first <= last:
            self._changes[first - INPUT] += elements
            self._changes[last + 1 - INPUT] -= elements

    def peak(self) -> int:
        """Return the peak number of elements held at once."""
        return max(accumulate(self._changes))


def _hold_value(
    held: _Held, flow: Dataflow, device: int, value: int, begins: int
) -> None:
    """Hold the elements of a value while the device produces, receives or collects them."""
    made, lacking, last = (
        flow.homes[value][device].size,
        total_size(flow.lacks(value, device)),
        flow.last[value][device],
    )
    merges = value >= flow.tiled and flow.tasks[value][device].work == "sums"
    # Chunk by chunk a result takes the place of its sums.
    held.hold(value + merges, last, made)
    if made and last < value and not merges:
        held.hold(value, value, max(piece.size for piece in flow.pieces(value, device)))
    held.hold(begins, last, lacking)
    if (
        last >= 0
        and flow.way == "via-source"
        and device == flow.plan.source
        and made + lacking < flow.graph.outputs_of(value)
    ):
        # The source keeps the elements that only others need, too.
        held.hold(begins, len(flow.graph.layers), flow.collected(value) - lacking)


def _hold_sums(
    held: _Held, flow: Dataflow, device: int, index: int, begins: Mapping[int, int]
) -> None:
    """Hold the partial sums merged or accumulated during a layer."""
    layer, task = flow.graph.layers[index], flow.tasks[index][device]
    made = task.makes.size * layer.pixels
    if task.work == "sums" and made:
        mine = task.takes.size > 0
        others = sum(each.takes.size > 0 for each in flow.tasks[index]) - mine
        held.hold(_earliest_layer(flow, device, index, begins), index, others * made)
        held.hold(index, index, mine * made)
    elif by_chunks(layer, task) and _in_pieces(flow, device, index):
        held.hold(index, index, made)


def _first_arrivals(flow: Dataflow, device: int) -> dict[int, int]:
    """Return, by value, the first layer at which a part from another device can arrive.

    Other devices proceed independently of this device unless they need one of its outputs.
    """
    first_layers: dict[int, int] = {}
    for value in flow.homes:
        if value < flow.tiled:
            first_layers[value] = flow.tiled
        elif (
            flow.tasks[value][device].work == "sums"
            and flow.tasks[value][device].takes.size
        ):
            # They wait for its sums, which it sends one after the other, its own merging coming last.
            messages = sum(len(flow.pieces(value, merger)) for merger in flow.devices)
            first_layers[value] = value + (
                messages == 1 and _has_sent_all(flow, device, value)
            )
        else:
            first_layers[value] = _earliest_layer(flow, device, value, first_layers)
    return first_layers


def _earliest_layer(
    flow: Dataflow, device: int, index: int, begins: Mapping[int, int]
) -> int:
    """Return the earliest own layer during which another device can finish a part of the given layer."""
    taken = {
        task.takes: None
        for other, task in enumerate(flow.tasks[index])
        if other != device and task.takes.size
    }
    return min(
        (_needed_progress(flow, device, index, takes, begins) for takes in taken),
        default=index,
    )


def _needed_progress(
    flow: Dataflow, device: int, index: int, takes: Range, begins: Mapping[int, int]
) -> int:
    """Return the progress of a device required before all inputs of this part exist."""
    progress = []
    for value, part, _ in flow.origins(index, takes):
        whole = part.size == flow.graph.outputs_of(value)
        needed = intersection(flow.homes[value][device], part).size or (
            whole and _has_sent_all(flow, device, value)
        )
        progress.append(value + 1 if needed else begins[value])
    return max(progress)


def _has_sent_all(flow: Dataflow, device: int, value: int) -> bool:
    """Return whether a device has finished a layer once all of the value exists."""
    if value < flow.tiled:
        return False
    task = flow.tasks[value][device]
    return task.work == "sums" and task.takes.size > 0 and not task.makes.size


def _in_pieces(flow: Dataflow, device: int, index: int) -> bool:
    """Return whether a device can receive a layer's input in pieces; its own output counts as one piece."""
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
    """Return the peak number of elements held in the tiled layers.

    Counted are the inputs of all tiles, data reused from other tiles, and the intermediate values of one tile; at the
    source also the image, which contains all tile inputs, and the collected map.
    """
    layers, tiles = flow.graph.layers[: flow.tiled], flow.plan.tiles
    if flow.settings.options.tile_stealing:
        return _while_stealing(flow, device)
    own = [number for number, tile in enumerate(tiles) if tile.device == device]
    within = max((_tile_peak(flow, number) for number in own), default=0)
    taken = sum(
        sum(map(flow.values, each))
        for (_, borrower), each in flow.overlaps.items()
        if borrower in own
    )
    if device != flow.plan.source:
        return (
            within
            + taken
            + sum(
                layers[0].input[0] * tiles[number].regions[0].pixels for number in own
            )
        )
    if len(tiles) == 1:
        return layers[0].inputs + max(within, layers[-1].outputs)
    return layers[0].inputs + layers[-1].outputs + within + taken


def _while_stealing(flow: Dataflow, device: int) -> int:
    """Return the peak for tile stealing: any one tile at a time on a worker; the source keeps all reused data."""
    layers, everything = flow.graph.layers[: flow.tiled], range(len(flow.plan.tiles))
    within = max(_tile_peak(flow, number) for number in everything)
    taken = [
        sum(
            sum(map(flow.values, each))
            for pair, each in flow.overlaps.items()
            if pair[1] == number
        )
        for number in everything
    ]
    if device == flow.plan.source:
        return layers[0].inputs + layers[-1].outputs + within + sum(taken)
    inputs = max(
        layers[0].input[0] * tile.regions[0].pixels for tile in flow.plan.tiles
    )
    return within + inputs + max(taken)


def _tile_peak(flow: Dataflow, number: int) -> int:
    """Return the peak of intermediate values within a tile, apart from the data reused from other tiles.

    Counted are the input and output of one layer; the computed part and the assembled map where a tile merges reused
    data; and lent regions, both in parts and in one message.
    """
    layers, lent = (
        flow.graph.layers,
        sum(sum(map(flow.values, each)) for each in _lent_elements(flow, number)),
    )
    most = before = 0
    for layer, made, whole in zip(
        layers, flow.computed[number], flow.plan.tiles[number].regions[1:], strict=False
    ):
        parts, after = layer.output[0] * made.pixels, layer.output[0] * whole.pixels
        most = max(most, before + parts, parts + after if made != whole else 0)
        before = after
    return most + 2 * lent


def _lent_elements(flow: Dataflow, number: int) -> Iterator[tuple[Overlap, ...]]:
    return (each for (lender, _), each in flow.overlaps.items() if lender == number)
