"""Demands of a plan on its devices: weights, multiplications, and bytes of memory.

Section 3 of the paper counts F_n, the weights that device n stores, and T, the multiplications on the longest path of a
plan. Its third number C, the communication, is in `testbed_stahl.communication`.

The memory of a device consists of its parameters and of its activations. Which activations the device holds at once
depends on the speeds of the other devices: a fast device sends its part of a layer long before a slow one needs it. The
demand is the maximum over all speeds, so that a plan that fits does so at any speeds. As in
`testbed.ml.partition.memory`, the interpreter, torch, temporary memory within an operation and messages in transit are
excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from testbed.device import Cost
from testbed.ml.layers import layer_slices
from testbed.ml.models.chain import forward_of
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed_stahl import tiles
from testbed_stahl.dataflow import Dataflow, is_chunked, stored_layers, stored_slices
from testbed_stahl.plan import Range, intersection, total_size


def count_weights(flow: Dataflow, device: int) -> int:
    """Return F_n of a device: the stored weights, without biases.

    The paper's example network, on one of two devices:

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
    total = 0
    for layer, part in stored_layers(flow, device):
        total += layer.share(layer.weights, part)
    return total


def count_divisible_weights(flow: Dataflow, device: int) -> int:
    """Return a device's stored weights of layers divided by channels, which shrink with the device's share."""
    total = 0
    for index, part in stored_slices(flow, device).items():
        if flow.tasks[index][device].work in ("outputs", "sums"):
            layer = flow.graph.layers[index]
            total += layer.share(layer.weights, part)
    return total


def count_parameters(flow: Dataflow, device: int) -> int:
    """Return the number of values stored by a device for all layers.

    These are its weights and, for each output channel that it finishes, the bias and the values of a normalisation.
    """
    return layer_slices.count_values(stored_layers(flow, device))


def count_multiplications(flow: Dataflow) -> tuple[tuple[int, ...], ...]:
    """Return the multiplications for one sample: one row for each layer, one column for each device.

    The sum of a row is R_l of equations (2) and (5), plus the overlaps of tiles.
    """
    layers = flow.graph.layers
    tiled = layers[: flow.tiled_count]
    rows = [[0] * len(flow.devices) for _ in layers]
    for tile, regions in zip(flow.plan.tiles, flow.computed_regions, strict=True):
        counts = tiles.tile_multiplications(tiled, regions)
        for index, count in enumerate(counts):
            rows[index][tile.device] += count
    for device in flow.devices:
        for index, part in stored_slices(flow, device).items():
            if index >= flow.tiled_count:
                layer = layers[index]
                count = layer.share(layer.multiplications, part)
                rows[index][device] = count
    return tuple(map(tuple, rows))


def layer_costs(flow: Dataflow) -> list[list[Cost]]:
    """Return the cost of a request, which has `PlanSettings.samples` samples: one row a layer, one column a device.

    The additions that merge partial sums are excluded.
    """
    layers = flow.graph.layers
    tiled = layers[: flow.tiled_count]
    samples = flow.settings.samples
    rows = [[Cost()] * len(flow.devices) for _ in layers]
    for tile, regions in zip(flow.plan.tiles, flow.computed_regions, strict=True):
        costs = tiles.tile_costs(tiled, regions, samples)
        for index, cost in enumerate(costs):
            rows[index][tile.device] += cost
    for index in range(flow.tiled_count, len(layers)):
        for device in flow.devices:
            one_sample = _layer_cost(flow, index, device)
            rows[index][device] = forward_of(one_sample, samples)
    return rows


def _layer_cost(flow: Dataflow, index: int, device: int) -> Cost:
    """Return the cost of a device's part of a layer for one sample."""
    layer = flow.graph.layers[index]
    tasks = flow.tasks[index]
    task = tasks[device]
    if task.work == "none":
        return Cost()
    computed = [task.output_channels]
    if task.work == "sums":
        # In LIP a device computes partial sums of all output channels, separately for each device that merges some.
        computed = [merger_task.output_channels for merger_task in tasks]
    cost = layer.finish_cost(task.output_channels.size)
    for channels in computed:
        # Each chunk of the output is computed by itself, and reads the device's whole input again.
        chunks: tuple[Range, ...] = (channels,)
        if is_chunked(layer, task):
            chunks = flow.chunks(index, channels)
        for chunk in chunks:
            cost += layer.product_cost(task.input_range.size, chunk.size)
    return cost


def longest_path(flow: Dataflow) -> int:
    """Return T: the multiplications following one another, for one sample.

    Devices compute a layer in parallel and exchange its output, so that the slowest part of each layer counts.

    The paper's example network, on one of two devices:

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
    # A device computes all tiled layers without waiting for other devices; waits for reused overlaps are not counted.
    tiled_rows = rows[: flow.tiled_count]
    tile_sums = [sum(column) for column in zip(*tiled_rows, strict=True)]
    path = max(tile_sums, default=0)
    for row in rows[flow.tiled_count :]:
        # The devices exchange data after each other layer, so all wait for the slowest one.
        path += max(row)
    return path


def memory_needs(flow: Dataflow) -> tuple[float, ...]:
    """Return the bytes of memory needed by each device: parameters, and activations of each request in flight."""
    samples = flow.settings.options.in_flight * flow.settings.samples
    needs = []
    for device in flow.devices:
        parameters = count_parameters(flow, device)
        activations = samples * peak_activations(flow, device)
        needs.append(float(BYTES_PER_VALUE * (parameters + activations)))
    return tuple(needs)


# Activations
#
# A device computes its layers in order. Its progress is the index of the layer that it computes: `INPUT` before the
# first layer, and the number of layers after the last one. A value is the image (`INPUT`), or the output of a layer,
# named by the index of the layer. The following functions determine, for each part of a value, the interval of the
# device's progress in which the part is in its memory. The peak is the maximum over all progresses of the sum of parts.


def peak_activations(flow: Dataflow, device: int) -> int:
    """Return the peak number of elements of one sample held by a device, for any speeds of the devices.

    The paper's example network, each layer divided by LOP over two devices:

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> from testbed_stahl.candidates import divided_plan
    >>> from testbed_stahl.dataflow import make_dataflow
    >>> from testbed_stahl.options import PlanSettings
    >>> from testbed_stahl.plan import equal_shares
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> plan = divided_plan("lop", graph, ["a", "b"], 0, equal_shares(2), ["lop"] * 4)
    >>> flow = make_dataflow(graph, plan, PlanSettings())
    >>> peak_activations(flow, 1)
    32

    Device b reaches the peak at layer 1, which has 8 inputs and 16 outputs. It holds the inputs (4 made by itself and 4
    by a), the 8 outputs that it makes, 8 outputs that a may have sent already, and 8 sums, because the inputs of two
    makers arrive at different times and are added one after the other. By progress, from `INPUT` on:

    >>> _held_by_progress(flow, 1)
    [0, 12, 32, 22, 8, 0]
    """
    peak = max(_held_by_progress(flow, device))
    if flow.tiled_count:
        peak = max(peak, _peak_while_tiling(flow, device))
    return peak


def _held_by_progress(flow: Dataflow, device: int) -> list[int]:
    """Return the elements of one sample held by a device at each progress, from `INPUT` on, without tiles."""
    held = _HeldElements(len(flow.graph.layers))
    arrivals = _first_arrivals(flow, device)
    for value in flow.made_ranges:
        _hold_made_elements(held, flow, device, value)
        _hold_received_elements(held, flow, device, value, arrivals[value])
    for index in range(flow.tiled_count, len(flow.tasks)):
        _hold_sums(held, flow, device, index, arrivals)
    return held.by_progress()


class _HeldElements:
    """The elements of one sample held by a device at each progress.

    >>> held = _HeldElements(layers=2)
    >>> held.hold(first=0, last=1, elements=5)
    >>> held.by_progress()
    [0, 5, 5, 0]
    """

    def __init__(self, layers: int) -> None:
        # The change of the number at each progress, from `INPUT` to `layers`; the last element is the change after it.
        self._changes = [0] * (layers - INPUT + 2)

    def hold(self, first: int, last: int, elements: int) -> None:
        """Add elements held from progress ``first`` to ``last``, inclusive; nothing if ``last`` is before ``first``."""
        if first <= last:
            self._changes[first - INPUT] += elements
            self._changes[last + 1 - INPUT] -= elements

    def by_progress(self) -> list[int]:
        """Return the number of held elements at each progress, from `INPUT` to the number of layers."""
        return list(accumulate(self._changes[:-1]))


def _hold_made_elements(
    held: _HeldElements, flow: Dataflow, device: int, value: int
) -> None:
    """Add the elements of a value made by the device."""
    made = flow.made_ranges[value][device].size
    last_use = flow.last_readers[value][device]
    is_divided = value >= flow.tiled_count
    if is_divided and flow.tasks[value][device].work == "sums":
        # Each merged chunk takes the place of the partial sums that it was merged from, which `_hold_sums`
        # counts.
        held.hold(value + 1, last_use, made)
    elif last_use >= value:
        held.hold(value, last_use, made)
    elif made:
        # The device itself does not need the value, so each piece is dropped as soon as it is sent.
        largest_piece = max(piece.size for piece in flow.pieces(value, device))
        held.hold(value, value, largest_piece)


def _hold_received_elements(
    held: _HeldElements, flow: Dataflow, device: int, value: int, arrival: int
) -> None:
    """Add the elements of a value received by the device from others, from progress ``arrival`` on."""
    made = flow.made_ranges[value][device].size
    missing = total_size(flow.missing_pieces(value, device))
    last_use = flow.last_readers[value][device]
    held.hold(arrival, last_use, missing)
    collects = flow.exchange == "via-source" and device == flow.plan.source
    is_needed = last_use >= 0
    needs_part = made + missing < flow.graph.outputs_of(value)
    if collects and is_needed and needs_part:
        # The source stores whole pieces that pass through it, also with elements that only other devices need. Such a
        # piece may arrive after the source's last use of the value, and then remains until the end of the request.
        only_for_others = flow.collected(value) - missing
        held.hold(arrival, len(flow.graph.layers), only_for_others)


def _hold_sums(
    held: _HeldElements,
    flow: Dataflow,
    device: int,
    index: int,
    arrivals: Mapping[int, int],
) -> None:
    """Add the incomplete sums of a layer's outputs: the sums merged by the device in LIP, or added up in LOP."""
    layer = flow.graph.layers[index]
    task = flow.tasks[index][device]
    made = task.output_channels.size * layer.pixels
    if task.work == "sums" and made:
        # The device merges the partial sums of all devices with inputs, of which it may be one itself.
        own = 1 if task.input_range.size else 0
        senders = 0
        for device_task in flow.tasks[index]:
            if device_task.input_range.size > 0:
                senders += 1
        first = _earliest_completion(flow, device, index, arrivals)
        held.hold(first, index, (senders - own) * made)
        held.hold(index, index, own * made)
    elif is_chunked(layer, task) and _arrives_in_pieces(flow, device, index):
        # The products of the pieces are added up in sums. A single piece gives finished outputs, without sums.
        held.hold(index, index, made)


def _first_arrivals(flow: Dataflow, device: int) -> dict[int, int]:
    """Return, for each value, the earliest progress of a device at which a part from another device can arrive.

    Other devices may be any number of layers ahead, until they need elements or sums that only this device makes.
    """
    arrivals: dict[int, int] = {}
    for value in flow.made_ranges:
        if value < flow.tiled_count:
            # The image, or the map of all tiles: the source sends it before any device begins an untiled layer.
            arrivals[value] = flow.tiled_count
        elif _contributes_sums(flow, device, value):
            arrivals[value] = _arrival_of_merged_sums(flow, device, value)
        else:
            arrivals[value] = _earliest_completion(flow, device, value, arrivals)
    return arrivals


def _arrival_of_merged_sums(flow: Dataflow, device: int, value: int) -> int:
    """Return the earliest arrival of a value that is merged from partial sums, of which this device computes some.

    No device can merge a chunk without the sums of this device, which sends them chunk by chunk. The first merged chunk
    may arrive while the device still computes sums for other chunks. If there is a single chunk, and another device
    merges it, this device has finished the layer before the chunk can arrive.
    """
    chunks = 0
    for merger in flow.devices:
        chunks += len(flow.pieces(value, merger))
    if chunks == 1 and _ends_with_its_sums(flow, device, value):
        return value + 1
    return value


def _earliest_completion(
    flow: Dataflow, device: int, index: int, arrivals: Mapping[int, int]
) -> int:
    """Return the earliest progress of a device at which another device can complete its part of a layer.

    Returns the layer itself if no other device has a part, so that nothing arrives.
    """
    inputs = set()
    for other, task in enumerate(flow.tasks[index]):
        if other != device and task.input_range.size:
            inputs.add(task.input_range)
    completions = []
    for input_range in inputs:
        completions.append(
            _progress_when_available(flow, device, index, input_range, arrivals)
        )
    return min(completions, default=index)


def _progress_when_available(
    flow: Dataflow,
    device: int,
    index: int,
    input_range: Range,
    arrivals: Mapping[int, int],
) -> int:
    """Return the earliest progress of a device at which all elements of a part of a layer's input can exist.

    If the device makes some of these elements, or if the elements cannot exist without its partial sums, the device
    must have finished the layer that makes them.
    """
    progress = []
    for value, part, _ in flow.origins(index, input_range):
        makes_some = intersection(flow.made_ranges[value][device], part).size > 0
        is_whole = part.size == flow.graph.outputs_of(value)
        if makes_some or (is_whole and _ends_with_its_sums(flow, device, value)):
            progress.append(value + 1)
        else:
            progress.append(arrivals[value])
    return max(progress)


def _contributes_sums(flow: Dataflow, device: int, value: int) -> bool:
    """Return whether the device computes partial sums of a value."""
    task = flow.tasks[value][device]
    return task.work == "sums" and task.input_range.size > 0


def _ends_with_its_sums(flow: Dataflow, device: int, value: int) -> bool:
    """Return whether the device's work for a value ends with sending partial sums, since it merges none.

    Such a device has finished the layer before the whole value can exist, since the value contains all of its sums.
    """
    if value < flow.tiled_count:
        return False
    merges_none = not flow.tasks[value][device].output_channels.size
    return _contributes_sums(flow, device, value) and merges_none


def _arrives_in_pieces(flow: Dataflow, device: int, index: int) -> bool:
    """Return whether a device can get a layer's input in several pieces; its own part of the input is one piece."""
    taken = flow.tasks[index][device].input_range
    count = 0
    for value, part, _ in flow.origins(index, taken):
        for maker, made_range in enumerate(flow.made_ranges[value]):
            if not intersection(made_range, part).size:
                continue
            pieces = (made_range,) if maker == device else flow.pieces(value, maker)
            for piece in pieces:
                if intersection(piece, part).size:
                    count += 1
    return count > 1


# Tiles


def _peak_while_tiling(flow: Dataflow, device: int) -> int:
    """Return the peak number of elements of one sample held by a device in the tiled layers.

    A worker holds the image regions of all its tiles, all overlaps that its tiles reuse from other tiles, and the maps
    within one tile. The source holds the whole image instead of the regions, and the map that collects all tiles.
    """
    if flow.settings.options.tile_stealing:
        return _peak_while_stealing(flow, device)
    within = 0
    reused = 0
    regions = 0
    for number, tile in enumerate(flow.plan.tiles):
        if tile.device != device:
            continue
        # Tiles are computed one after the other, but all their inputs may arrive before the first one begins.
        within = max(within, _peak_within_tile(flow, number))
        reused += _reused_elements(flow, number)
        regions += _image_elements(flow, number)
    if device != flow.plan.source:
        return within + reused + regions
    image = flow.graph.layers[0].inputs
    collected = flow.graph.layers[flow.tiled_count - 1].outputs
    if len(flow.plan.tiles) == 1:
        # The map is allocated after the only tile is computed, when the maps within the tile are released.
        return image + max(within, collected)
    return image + collected + within + reused


def _peak_while_stealing(flow: Dataflow, device: int) -> int:
    """Return the peak with tile stealing: a device may compute any tile, one at a time.

    All overlaps wait at the source until the tiles that reuse them are assigned.
    """
    numbers = range(len(flow.plan.tiles))
    within = max(_peak_within_tile(flow, number) for number in numbers)
    reused = [_reused_elements(flow, number) for number in numbers]
    if device == flow.plan.source:
        image = flow.graph.layers[0].inputs
        collected = flow.graph.layers[flow.tiled_count - 1].outputs
        return image + collected + within + sum(reused)
    largest_region = max(_image_elements(flow, number) for number in numbers)
    return within + largest_region + max(reused)


def _image_elements(flow: Dataflow, number: int) -> int:
    """Return the elements of the image region needed by a tile."""
    channels = flow.graph.layers[0].input[0]
    return channels * flow.plan.tiles[number].regions[0].pixels


def _reused_elements(flow: Dataflow, number: int) -> int:
    """Return the elements reused by a tile from other tiles."""
    total = 0
    for (_, borrower), overlaps in flow.overlaps.items():
        if borrower == number:
            total += sum(map(flow.values, overlaps))
    return total


def _lent_elements(flow: Dataflow, number: int) -> int:
    """Return the elements of a tile reused by other tiles."""
    total = 0
    for (lender, _), overlaps in flow.overlaps.items():
        if lender == number:
            total += sum(map(flow.values, overlaps))
    return total


def _peak_within_tile(flow: Dataflow, number: int) -> int:
    """Return the peak number of elements in the maps created by the computation of a tile.

    The image region and the reused overlaps are inputs of the tile and counted elsewhere. In each layer there is a
    first peak while the layer computes a region from the previous map. If the tile reuses overlaps, there is a second
    peak while the region is copied, with the overlaps, into the map for the next layer; the previous map is released by
    then.
    """
    peak = 0
    previous_map = 0
    # The first region of a tile is the region of the image.
    maps = flow.plan.tiles[number].regions[1:]
    tiled_layers = flow.graph.layers[: flow.tiled_count]
    regions = flow.computed_regions[number]
    for layer, region, whole in zip(tiled_layers, regions, maps, strict=True):
        computed = layer.output[0] * region.pixels
        assembled = layer.output[0] * whole.pixels
        peak = max(peak, previous_map + computed)
        # Without overlaps the region is the whole map, and is not copied.
        if region != whole:
            peak = max(peak, computed + assembled)
        previous_map = assembled
    # Regions for other tiles are kept to the end, and then copied once more into one message for each tile.
    return peak + 2 * _lent_elements(flow, number)
