"""Resource demands of a plan: weights (F), sequential multiplications (T), and bytes of memory.

The memory demand is an upper bound for any relative speed of the devices. As in `testbed.ml.partition.memory`, the
interpreter, torch, scratch space of kernels and messages in transit are excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from testbed.device import Cost
from testbed.ml.layers import layer_slices
from testbed.ml.models.chain import forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed_stahl import tiles
from testbed_stahl.dataflow import Dataflow, by_chunks, stored_layers, stored_slices
from testbed_stahl.plan import Range, intersection, total_size


def count_weights(flow: Dataflow, device: int) -> int:
    """Return F: the weight elements stored by a device, biases excluded.

    The paper's worked example on a single device:

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> from testbed_stahl.candidates import single_plan
    >>> from testbed_stahl.dataflow import make_dataflow
    >>> from testbed_stahl.options import PlanSettings
    >>> flow = make_dataflow(graph, single_plan("single", graph, ["a", "b"], 0), PlanSettings())
    >>> count_weights(flow, 0), count_weights(flow, 1)
    (240, 0)
    """
    held = stored_layers(flow, device)
    return sum(layer.share(layer.weights, part) for layer, part in held)


def divided_weights(flow: Dataflow, device: int) -> int:
    """Return the stored weights of layers divided by channels; only these shrink with the device's share."""
    total = 0
    for index, part in stored_slices(flow, device).items():
        if flow.tasks[index][device].work in ("outputs", "sums"):
            layer = flow.graph.layers[index]
            total += layer.share(layer.weights, part)
    return total


def count_parameters(flow: Dataflow, device: int) -> int:
    """Return all stored values of a device: its weights, and the values of each channel it finishes."""
    return layer_slices.count_values(stored_layers(flow, device))


def count_multiplications(flow: Dataflow) -> tuple[tuple[int, ...], ...]:
    """Return each layer's multiplications on each device: one row a layer, one column a device."""
    layers = flow.graph.layers
    tiled = layers[: flow.tiled]
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for index, products in enumerate(tiles.tile_multiplications(tiled, made)):
            rows[index][tile.device] += products
    for device in flow.devices:
        for index, part in stored_slices(flow, device).items():
            if index >= flow.tiled:
                layer = layers[index]
                rows[index][device] = layer.share(layer.multiplications, part)
    return tuple(map(tuple, rows))


def layer_costs(flow: Dataflow) -> list[list[Cost]]:
    """Return the cost of a request, one row a layer and one column a device; merging sums is excluded."""
    layers = flow.graph.layers
    tiled = layers[: flow.tiled]
    samples = flow.settings.samples
    rows = [[Cost()] * len(flow.devices) for _ in layers]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        for index, cost in enumerate(tiles.tile_costs(tiled, made, samples)):
            rows[index][tile.device] += cost
    for index in range(flow.tiled, len(layers)):
        for device in flow.devices:
            rows[index][device] = forward_of(_layer_cost(flow, index, device), samples)
    return rows


def _layer_cost(flow: Dataflow, index: int, device: int) -> Cost:
    """Return the cost of a device's part of a layer for one sample."""
    layer = flow.graph.layers[index]
    tasks = flow.tasks[index]
    task = tasks[device]
    if task.work == "none":
        return Cost()
    # A device with partial sums computes them for every device that merges some, each time from its whole input.
    makes = [each.makes for each in tasks] if task.work == "sums" else [task.makes]
    cost = layer.finish_cost(task.makes.size)
    for made in makes:
        chunks = flow.chunks(index, made) if by_chunks(layer, task) else (made,)
        for chunk in chunks:
            cost += layer.product_cost(task.takes.size, chunk.size)
    return cost


def longest_path(flow: Dataflow) -> int:
    """Return T: the sequential multiplications if devices compute in parallel between exchanges.

    The paper's worked example on a single device:

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> from testbed_stahl.candidates import single_plan
    >>> from testbed_stahl.dataflow import make_dataflow
    >>> from testbed_stahl.options import PlanSettings
    >>> flow = make_dataflow(graph, single_plan("single", graph, ["a", "b"], 0), PlanSettings())
    >>> longest_path(flow)
    240
    """
    rows = count_multiplications(flow)
    # All tiled layers of a device follow one another without an exchange.
    of_tiles = [sum(column) for column in zip(*rows[: flow.tiled], strict=True)]
    return max(of_tiles, default=0) + sum(max(row) for row in rows[flow.tiled :])


def memory_needs(flow: Dataflow) -> tuple[float, ...]:
    """Return the bytes each device needs: parameters once, activations for each request under way."""
    samples = flow.settings.options.in_flight * flow.settings.samples
    needs = []
    for device in flow.devices:
        values = count_parameters(flow, device) + samples * peak_activations(
            flow, device
        )
        needs.append(float(BYTES_PER_VALUE * values))
    return tuple(needs)


def peak_activations(flow: Dataflow, device: int) -> int:
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
    made = flow.homes[value][device].size
    lacking = total_size(flow.lacks(value, device))
    last = flow.last[value][device]
    merges = value >= flow.tiled and flow.tasks[value][device].work == "sums"
    # A merged result replaces its partial sums chunk by chunk, so it counts from the next layer on.
    held.hold(value + merges, last, made)
    if made and last < value and not merges:
        largest = max(piece.size for piece in flow.pieces(value, device))
        held.hold(value, value, largest)
    held.hold(begins, last, lacking)
    collects = flow.way == "via-source" and device == flow.plan.source
    is_partial = made + lacking < flow.graph.outputs_of(value)
    if last >= 0 and collects and is_partial:
        # The source keeps the elements that only others need, too.
        held.hold(begins, len(flow.graph.layers), flow.collected(value) - lacking)


def _hold_sums(
    held: _Held, flow: Dataflow, device: int, index: int, begins: Mapping[int, int]
) -> None:
    """Hold the partial sums merged or accumulated during a layer."""
    layer = flow.graph.layers[index]
    task = flow.tasks[index][device]
    made = task.makes.size * layer.pixels
    if task.work == "sums" and made:
        own = 1 if task.takes.size else 0
        others = sum(each.takes.size > 0 for each in flow.tasks[index]) - own
        held.hold(_earliest_layer(flow, device, index, begins), index, others * made)
        held.hold(index, index, own * made)
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
        elif _contributes_sums(flow, device, value):
            # Other devices wait for this device's sums, which it sends one after the other before it merges its own.
            messages = sum(len(flow.pieces(value, merger)) for merger in flow.devices)
            has_finished = messages == 1 and _has_sent_all(flow, device, value)
            first_layers[value] = value + 1 if has_finished else value
        else:
            first_layers[value] = _earliest_layer(flow, device, value, first_layers)
    return first_layers


def _earliest_layer(
    flow: Dataflow, device: int, index: int, begins: Mapping[int, int]
) -> int:
    """Return the earliest own layer during which another device can finish a part of the given layer."""
    inputs = set()
    for other, task in enumerate(flow.tasks[index]):
        if other != device and task.takes.size:
            inputs.add(task.takes)
    progress = [_needed_progress(flow, device, index, each, begins) for each in inputs]
    return min(progress, default=index)


def _needed_progress(
    flow: Dataflow, device: int, index: int, takes: Range, begins: Mapping[int, int]
) -> int:
    """Return the progress of a device required before all inputs of this part exist."""
    progress = []
    for value, part, _ in flow.origins(index, takes):
        is_whole = part.size == flow.graph.outputs_of(value)
        waits_for_all = is_whole and _has_sent_all(flow, device, value)
        if waits_for_all or intersection(flow.homes[value][device], part).size:
            progress.append(value + 1)
        else:
            progress.append(begins[value])
    return max(progress)


def _contributes_sums(flow: Dataflow, device: int, value: int) -> bool:
    task = flow.tasks[value][device]
    return task.work == "sums" and task.takes.size > 0


def _has_sent_all(flow: Dataflow, device: int, value: int) -> bool:
    """Return whether a device has finished a layer once all of the value exists."""
    if value < flow.tiled:
        return False
    merges_none = not flow.tasks[value][device].makes.size
    return _contributes_sums(flow, device, value) and merges_none


def _in_pieces(flow: Dataflow, device: int, index: int) -> bool:
    """Return whether a device can receive a layer's input in pieces; its own output counts as one piece."""
    taken = flow.tasks[index][device].takes
    count = 0
    for value, part, _ in flow.origins(index, taken):
        for maker, home in enumerate(flow.homes[value]):
            if not intersection(home, part).size:
                continue
            pieces = (home,) if maker == device else flow.pieces(value, maker)
            for piece in pieces:
                if intersection(piece, part).size:
                    count += 1
                if count > 1:
                    return True
    return False


def _while_tiling(flow: Dataflow, device: int) -> int:
    """Return the peak number of elements held in the tiled layers.

    Counted are the inputs of all tiles, data reused from other tiles, and the intermediate values of one tile; at the
    source also the image, which contains all tile inputs, and the collected map.
    """
    if flow.settings.options.tile_stealing:
        return _while_stealing(flow, device)
    image = flow.graph.layers[0].inputs
    result = flow.graph.layers[flow.tiled - 1].outputs
    tiles = flow.plan.tiles
    own = [number for number, tile in enumerate(tiles) if tile.device == device]
    within = max((_tile_peak(flow, number) for number in own), default=0)
    borrowed = sum(_borrowed_elements(flow, number) for number in own)
    if device != flow.plan.source:
        inputs = sum(_tile_input(flow, number) for number in own)
        return within + borrowed + inputs
    if len(tiles) == 1:
        return image + max(within, result)
    return image + result + within + borrowed


def _tile_input(flow: Dataflow, number: int) -> int:
    """Return the elements of the image that a tile needs."""
    channels = flow.graph.layers[0].input[0]
    return channels * flow.plan.tiles[number].regions[0].pixels


def _borrowed_elements(flow: Dataflow, number: int) -> int:
    """Return the elements that a tile reuses from other tiles."""
    total = 0
    for (_, borrower), overlaps in flow.overlaps.items():
        if borrower == number:
            total += sum(map(flow.values, overlaps))
    return total


def _while_stealing(flow: Dataflow, device: int) -> int:
    """Return the peak for tile stealing: any one tile at a time on a worker; the source keeps all reused data."""
    numbers = range(len(flow.plan.tiles))
    within = max(_tile_peak(flow, number) for number in numbers)
    borrowed = [_borrowed_elements(flow, number) for number in numbers]
    if device == flow.plan.source:
        image = flow.graph.layers[0].inputs
        result = flow.graph.layers[flow.tiled - 1].outputs
        return image + result + within + sum(borrowed)
    inputs = max(_tile_input(flow, number) for number in numbers)
    return within + inputs + max(borrowed)


def _tile_peak(flow: Dataflow, number: int) -> int:
    """Return the peak of intermediate values within a tile, apart from the data reused from other tiles.

    Counted are the input and output of one layer; the computed part and the assembled map where a tile merges reused
    data; and lent regions, both in parts and in one message.
    """
    computed = flow.computed[number]
    regions = flow.plan.tiles[number].regions[1:]
    peak = 0
    before = 0
    for layer, made, whole in zip(
        flow.graph.layers[: flow.tiled], computed, regions, strict=True
    ):
        parts = layer.output[0] * made.pixels
        after = layer.output[0] * whole.pixels
        # A map without reused parts is the computed part itself and needs no second copy.
        assembled = parts + after if made != whole else 0
        peak = max(peak, before + parts, assembled)
        before = after
    return peak + 2 * _lent_elements(flow, number)


def _lent_elements(flow: Dataflow, number: int) -> int:
    """Return the elements that a tile lends to other tiles."""
    total = 0
    for (lender, _), overlaps in flow.overlaps.items():
        if lender == number:
            total += sum(map(flow.values, overlaps))
    return total
