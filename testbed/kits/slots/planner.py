"""Which device is which super neuron, and how long a timeslot lasts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pydantic import Field

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.common.quantities import Duration
from testbed.device import Cost
from testbed.kits.layers import costs
from testbed.kits.slots import mapping
from testbed.kits.slots.partition import Allocation, Partition, SuperNeuron, partition
from testbed.kits.slots.timeslots import MARGIN, Timetable, fill_and_drain, timetable
from testbed.kits.slots.topology import Matrix, connectivity, coordinator, passes
from testbed.method import Options, Problem
from testbed.models.chain import backward_of, forward_of
from testbed.models.graph import Graph, GraphLayer, graph_of
from testbed.models.layers import Dropout
from testbed.models.shapes import BYTES_PER_VALUE
from testbed.models.slices import Channels, Slice
from testbed.network.broadcast import broadcast_rate
from testbed.network.link import Pair
from testbed.plan import Details, Piece, Plan
from testbed.wire import cast

ANSWER = 0.005
"""Seconds that a device may take to acknowledge a cast, beside the transmission."""


class EdgePipeOptions(Options):
    """Options of `EdgePipe`."""

    allocation: Allocation = "hybrid"
    """Groups of layers: one layer each, by equation (1), or all layers in one."""
    layers: int | None = Field(None, ge=1)
    """M_layers, the most layers of a group, instead of what `allocation` says."""
    mapping: Literal["genetic", "random", "upper"] = "genetic"
    """Who takes which super neuron: Algorithm 2, by chance, or the best of all orders."""
    pipelined: bool = True
    """False: a batch begins when the one before it is through (the paper's Model)."""
    micro_batches: int = Field(1, ge=1)
    """More than one: GPipe, for the vertical division. All parts of a batch go forward, then all back, one a slot."""
    recovery: Literal["none", "r-tx", "ack"] = "none"
    """Nothing; each message cast `transmissions` times; or until all have acknowledged it or the timeslot is over."""
    transmissions: int = Field(2, ge=1, le=100)
    """How often each message is cast with `r-tx`, all in one timeslot."""
    test_runs: int = Field(1, ge=1, le=1000)
    """How often all test samples pass at an evaluation, each time over the links as they are."""
    test_batch: int | None = Field(None, ge=1)
    """Samples of a test batch; None: those of `batch_size`. With all test samples in one, a test run is one pass."""
    evaluate_every: int | None = Field(None, ge=1)
    """Steps from one evaluation to the next; None: at the end only. The pipeline drains before each."""
    slot: Duration | None = Field(None, gt=0)
    """Length of a timeslot; None: the longest computation, the longest transmission, and `margin`."""
    time: Duration | None = Field(None, gt=0)
    """Train the steps whose timeslots fit into this, without those of tests; the workload's are the most."""
    margin: Duration = MARGIN
    """Seconds that a timeslot has beyond both."""


class EdgePipeDetails(Details):
    """What a plan of EdgePipe tells."""

    groups: tuple[tuple[int, int], ...]
    """First layer of each group, and the one behind its last; layer 0 is the input layer."""
    devices: tuple[str, ...]
    """By super neuron, group after group."""
    coordinator: str
    """Of the highest closeness centrality on expected transmissions; it would plan."""
    score: float
    """Sum of the Hadamard product of connectivity and reception ratios."""
    reception: float
    """Mean reception ratio of all directed links."""
    pipelined: bool
    micro_batches: int
    slot: float
    """Seconds."""
    test_slot: float
    """Seconds of a timeslot of tests, whose batches may be larger."""
    forward: tuple[float, ...]
    """By layer, the seconds of a batch's forward on the device that takes longest."""
    backward: tuple[float, ...]
    """The same of its backward and update."""


def timetable_of(details: EdgePipeDetails) -> Timetable:
    """Return when each layer of a plan works on each batch."""
    groups = [range(first, stop) for first, stop in details.groups]
    if details.micro_batches > 1:
        return fill_and_drain(groups, details.micro_batches)
    return timetable(groups, details.pipelined)


def division_of(problem: Problem[EdgePipeOptions]) -> Partition:
    """Return the network in super neurons, one for each device. Raises `InputError`."""
    layers, options = layers_of(problem), problem.options
    neurons = (layers[0].inputs, *(layer.output_channels for layer in layers))
    return partition(neurons, len(problem.devices), options.layers or options.allocation)


def layers_of(problem: Problem[EdgePipeOptions]) -> tuple[GraphLayer, ...]:
    """Return the layers with weights, dense or of filters, each with the pools behind it: the l-th of them is layer l.

    Raises `InputError` where there is anything else.
    """
    graph: Graph = graph_of(problem.model)
    found: list[GraphLayer] = []
    for index, layer in enumerate(graph.layers):
        follows = layer.sources == (index - 1,)
        if found and follows and layer.by_channel and not layer.parameters:
            found[-1] = found[-1].with_pool(layer)
        elif follows and layer.splits and not any(isinstance(each, Dropout) for each in layer.sequence):
            found.append(layer)
        else:
            text = f"'{layer.name}' of {graph.name} is no convolution, pooling or dense layer behind the one before, "
            raise InputError(text + "or drops values at random: use mlp or cnn", ("model", "name"))
    return tuple(found)


def neuron_values(problem: Problem[EdgePipeOptions]) -> tuple[int, ...]:
    """Return by layer how many values a neuron makes of a sample: one, a filter the pixels of its map."""
    return (1, *(layer.pixels for layer in layers_of(problem)))


def slice_of(layer: GraphLayer, neurons: Channels) -> Slice:
    """Return some neurons of a layer, with all weights that enter them."""
    return Slice(neurons, range(layer.input_channels), neurons)


@dataclass(frozen=True)
class LayerCosts:
    """What some neurons of a layer cost for a batch."""

    forward: Cost
    backward: Cost
    update: Cost


def layer_costs(layer: GraphLayer, neurons: Channels, samples: int, problem: Problem[EdgePipeOptions]) -> LayerCosts:
    """Return what some neurons of a layer cost for a batch."""
    one = layer.cost(layer.inputs, len(neurons))
    update = Cost(costs.update_flops(problem.workload.optimizer) * _parameters(layer, neurons))
    return LayerCosts(forward_of(one, samples), backward_of(one, samples), update)


def plan(problem: Problem[EdgePipeOptions]) -> Plan[EdgePipeDetails]:
    """Divide the layers, map the super neurons onto devices, time the slots. Raises `InputError`."""
    division = division_of(problem)
    names = [device.name for device in problem.devices]
    ratios = {pair: 1 - link.message_loss for pair, link in problem.links.items()}
    order, reached = _mapped(problem, division, mapping.matrix(names, lambda a, b: ratios.get((a, b), 0.0)))
    devices = tuple(names[index] for index in order)
    _check_links(division, devices, ratios, acknowledged=problem.options.recovery == "ack")
    table = _table(problem, division)
    slot = _slot(problem, division, devices)
    times = [
        _computation(problem, division, devices, layer, problem.workload.batch_size)
        for layer in range(len(division.neurons))
    ]
    last = division.holders(len(division.neurons) - 1)
    return Plan(
        method="edgepipe",
        lead=devices[last[0]],
        pieces=tuple(
            _piece(problem, table, division, part, name)
            for part, name in zip(division.super_neurons, devices, strict=True)
        ),
        step_time=table.period * slot,
        steps=_steps(problem, table, slot),
        details=EdgePipeDetails(
            groups=tuple((group.start, group.stop) for group in division.groups),
            devices=devices,
            coordinator=coordinator(names, ratios),
            score=reached,
            reception=fmean(ratios.values()) if ratios else 1.0,
            pipelined=problem.options.pipelined,
            micro_batches=problem.options.micro_batches,
            slot=slot,
            test_slot=max(slot, sum(_needed(problem, division, devices, test_batch(problem)))),
            forward=tuple(each[0] for each in times),
            backward=tuple(each[1] for each in times),
        ),
    )


def _table(problem: Problem[EdgePipeOptions], division: Partition) -> Timetable:
    micro, size = problem.options.micro_batches, problem.workload.batch_size
    if micro == 1:
        return timetable(division.groups, problem.options.pipelined)
    if any(len(group) > 1 for group in division.groups):
        text = "is GPipe, which divides layer by layer: use allocation: vertical and a device for each layer"
        raise InputError(text, ("method", "micro_batches"))
    if micro > size:
        text = f"cuts a batch of {size} samples into more parts than it has: take {size} at most"
        raise InputError(text, ("method", "micro_batches"))
    return fill_and_drain(division.groups, micro)


def _mapped(problem: Problem[EdgePipeOptions], division: Partition, ratios: Matrix) -> tuple[mapping.Order, float]:
    wanted, count = connectivity(division), len(problem.devices)
    if problem.options.mapping == "upper" and count > mapping.MOST_EXHAUSTIVE:
        text = f"{count} devices have too many orders to try: use genetic, or at most {mapping.MOST_EXHAUSTIVE}"
        raise InputError(text, ("method", "mapping"))
    if problem.options.mapping == "upper":
        order = mapping.exhaustive(wanted, ratios)
    elif problem.options.mapping == "random":
        order = mapping.by_chance(count, problem.seed)
    else:
        order = mapping.genetic(wanted, ratios, problem.seed)
    return order, mapping.score(wanted, ratios, order)


def _check_links(
    division: Partition, devices: tuple[str, ...], ratios: Mapping[Pair, float], acknowledged: bool
) -> None:
    """Raise `InputError` where super neurons that transmit to each other never hear each other, or never the answer."""
    for a, row in enumerate(passes(division)):
        for b, count in enumerate(row):
            if count and acknowledged and ratios.get((devices[b], devices[a]), 0) <= 0:
                text = f"ack needs a way back, and {devices[a]} receives nothing of {devices[b]}: use r-tx, or a link"
                raise InputError(text, ("method", "recovery"))
            if count and (devices[a], devices[b]) not in ratios:
                text = f"no link leads from {devices[a]} to {devices[b]}, which have to hear each other: use mesh"
                raise InputError(text, ("network", "topology"))
            if count and ratios[devices[a], devices[b]] <= 0:
                text = f"{devices[b]} receives none of the casts of {devices[a]}, which it needs: put them closer, or "
                raise InputError(text + "lower the message_loss of that link", ("network",))


def test_batch(problem: Problem[EdgePipeOptions]) -> int:
    """Return the most samples of a test batch."""
    return problem.options.test_batch or problem.workload.batch_size


def _slot(problem: Problem[EdgePipeOptions], division: Partition, devices: tuple[str, ...]) -> float:
    """Return the seconds of a timeslot, as given or by equation (4). Raises `InputError` for one that is too short."""
    samples = math.ceil(problem.workload.batch_size / problem.options.micro_batches)
    computing, transmitting = _needed(problem, division, devices, samples)
    needed = computing + transmitting
    given = problem.options.slot
    if given is None:
        return needed + problem.options.margin
    if given < needed:
        text = f"{formats.seconds(given)} is too short: computing takes up to {formats.seconds(computing)}, "
        text += f"transmitting {formats.seconds(transmitting)}"
        raise InputError(text, ("method", "slot"))
    return given


def _steps(problem: Problem[EdgePipeOptions], table: Timetable, slot: float) -> int | None:
    """Return how many steps fit into the time for training. Raises `InputError` where not one does."""
    time = problem.options.time
    if time is None:
        return None
    steps = table.steps(math.floor(time / slot + 1e-9))
    if steps < 1:
        least = formats.seconds(table.slots(table.micro) * slot)
        raise InputError(f"{formats.seconds(time)} is too short: one step takes {least}", ("method", "time"))
    return steps


def _needed(
    problem: Problem[EdgePipeOptions], division: Partition, devices: tuple[str, ...], samples: int
) -> tuple[float, float]:
    """Return the longest computation and the longest transmission of any device for this many samples, in seconds."""
    parts = zip(division.super_neurons, devices, strict=True)
    layers = range(len(division.neurons))
    return (
        max(max(_computation(problem, division, devices, layer, samples)) for layer in layers),
        max(_longest_transmission(problem, division, part, name, samples) for part, name in parts),
    )


def _computation(
    problem: Problem[EdgePipeOptions], division: Partition, devices: tuple[str, ...], layer: int, samples: int
) -> tuple[float, float]:
    """Return the seconds of a layer's forward, and of its backward with the update, where they take longest."""
    if layer == 0:
        return 0.0, 0.0
    whole = layers_of(problem)[layer - 1]
    forward = backward = 0.0
    for at in division.holders(layer):
        cost = layer_costs(whole, division.super_neurons[at].of(layer), samples, problem)
        device = problem.device(devices[at])
        forward = max(forward, device.seconds(cost.forward))
        backward = max(backward, device.seconds(cost.backward + cost.update))
    return forward, backward


def _longest_transmission(
    problem: Problem[EdgePipeOptions], division: Partition, part: SuperNeuron, name: str, samples: int
) -> float:
    """Return the seconds until a device's longest message has arrived everywhere, as often as it is cast.

    With ``ack`` until it was acknowledged once.
    """
    rate, delay = _leaving(problem, name)
    values, options = division.largest_message(part, neuron_values(problem)) * samples, problem.options
    size = cast.size_around(BYTES_PER_VALUE * values) * (options.transmissions if options.recovery == "r-tx" else 1)
    answered = answering_time(problem, name) if options.recovery == "ack" else 0.0
    return delay + answered + (0.0 if rate is None else 8 * size / rate)


def answering_time(problem: Problem[EdgePipeOptions], name: str) -> float:
    """Return the seconds after a cast of a device has left, until all have acknowledged it one after the other."""
    _, there = _leaving(problem, name)
    others = [device.name for device in problem.devices if device.name != name]
    back = [_leaving(problem, other) for other in others]
    casting = sum(8 * cast.size_around(0) / rate for rate, _ in back if rate is not None)
    return there + casting + max((delay for _, delay in back), default=0.0) + ANSWER


def _leaving(problem: Problem[EdgePipeOptions], name: str) -> tuple[float | None, float]:
    """Return the bit/s of a device's casts, None without a limit, and the seconds until all have heard one."""
    links = [link for pair, link in problem.links.items() if pair[0] == name]
    return broadcast_rate(links), max((link.delay + 4 * link.jitter for link in links), default=0.0)


def _parameters(layer: GraphLayer, neurons: Channels) -> int:
    return layer.share(layer.weights, slice_of(layer, neurons)) + layer.channel_values * len(neurons)


def _piece(
    problem: Problem[EdgePipeOptions], table: Timetable, division: Partition, part: SuperNeuron, name: str
) -> Piece:
    layers, samples = layers_of(problem), problem.workload.batch_size
    parameters, values, cost = 0, 0, Cost()
    for layer in part.layers:
        if layer == 0:
            continue
        whole = layers[layer - 1]
        own = _parameters(whole, part.of(layer))
        kept = table.staleness(layer)  # of one batch, however it is cut
        parameters += own
        cost += layer_costs(whole, part.of(layer), samples, problem).forward
        # The newest weights, a gradient, and for each batch under way the weights, inputs and outputs of its forward.
        made = len(part.of(layer)) * math.prod(whole.summed[1:])
        values += own * (2 + kept) + samples * kept * (whole.inputs + made)
    memory = float(BYTES_PER_VALUE * values)
    costs.check_memory(problem.device(name), memory)
    return Piece(
        device=name,
        first=max(0, part.layers.start - 1),
        last=part.layers.stop - 1,
        memory=memory,
        part=f"share {part.place + 1} of {len(division.members(part.group))}",
        parameters=parameters,
        flops=cost.of().flops / samples,
        seconds=problem.device(name).seconds(cost),
    )
