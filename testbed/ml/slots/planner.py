"""Plans of methods in timeslots: super neurons on devices, and the length of a timeslot.

A super neuron is the set of neurons that one device holds. A timeslot is as long as the longest computation of any
device in a slot, the longest transmission of one cast, and a margin (EdgePipe, Section VI). All devices follow the
clock, so a device that needs longer loses the slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Literal, TypeVar

from pydantic import Field

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.common.quantities import Duration
from testbed.device import Cost
from testbed.ml.layers import costs
from testbed.ml.method import Method, Options, PlanningProblem
from testbed.ml.models.chain import backward_of, forward_of
from testbed.ml.models.graph import Graph, GraphLayer, graph_of
from testbed.ml.models.layers import Dropout
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.models.slices import Channels, Slice
from testbed.ml.slots import mapping
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.timeslots import (
    TIMESLOT_MARGIN,
    Timetable,
    draw_timetable,
    fill_and_drain,
    learning_layers,
    make_timetable,
)
from testbed.network.broadcast import broadcast_rate
from testbed.network.link import Pair
from testbed.plan import Assignment, Plan, PlanDetails
from testbed.wire import cast

ACKNOWLEDGEMENT_TIME = 0.005
"""Seconds that a device may take to acknowledge a cast, beside the transmission."""

BYTES_PER_RANGE = 32
"""Approximate bytes in a message for the neurons of one device in one layer: its name and two numbers as JSON."""

Divide = Callable[[Sequence[int], Sequence[str]], NeuronAssignment]
"""Hook: (number of neurons of each layer from the input layer on, names of devices) -> super neurons of the devices.

The first device gets the first super neuron, and so on.
"""


class SlotOptions(Options):
    """Options of every method training in timeslots."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "draw": "random_order",
        "layers": "layers_per_group",
        "margin": "timeslot_margin",
        "slot": "timeslot",
        "test_batch": "test_batch_size",
        "time": "training_time",
    }
    baseline: str | None = None
    """Name of a baseline for comparison; sets the options of the baseline."""
    layers_per_group: int | None = Field(None, ge=1)
    """The paper's M_layers: the maximum number of layers in a group, instead of `allocation`."""
    mapping: Literal["genetic", "hill-climbing", "random", "upper"] = "genetic"
    """Mapping of super neurons to devices: Algorithm 2 as printed, the same followed by hill climbs (exchanges of two
    devices from many orders), random, or exhaustive search."""
    random_order: int = Field(1, ge=1, le=1000)
    """Number of the order that the mapping `random` uses, in a random sequence; two numbers may give the same order."""
    pipelined: bool = True
    """False: a batch begins after the previous one is complete (the paper's Model)."""
    recovery: Literal["none", "r-tx", "ack"] = "none"
    """No recovery; `transmissions` repetitions of each cast; or repetition until all receivers have acknowledged or the
    timeslot ends."""
    transmissions: int = Field(2, ge=1, le=100)
    """Transmissions of each message with `r-tx`, all in one timeslot."""
    test_runs: int = Field(1, ge=1, le=1000)
    """Passes of all test samples in an evaluation, each over the links at that time."""
    test_batch_size: int | None = Field(None, ge=1)
    """Samples of a test batch; None: `batch_size`. With all test samples in one batch, a test run is one pass."""
    test_results: Literal["cast", "gathered"] = "cast"
    """Scored test results: `cast` uses the results received by the coordinator, counting missing ones as zeros, as in a
    deployment; `gathered` collects all results reliably after the tests and reports both scores."""
    final_weights: bool = False
    """Whether devices send their weights to the coordinator after the last slot, to be part of the results."""
    evaluate_every: int | None = Field(None, ge=1)
    """Steps between evaluations; None: at the end only. The pipeline drains before each evaluation."""
    timeslot: Duration | None = Field(None, gt=0)
    """Length of a timeslot; None: the longest computation, the longest transmission, and `timeslot_margin`."""
    training_time: Duration | None = Field(None, gt=0)
    """Time limit for training: as many steps as fit, without tests, but at most the workload's."""
    timeslot_margin: Duration = TIMESLOT_MARGIN
    """Seconds of a timeslot beyond computation and transmission."""


class SlotDetails(PlanDetails):
    """Plan details of a method in timeslots."""

    groups: tuple[tuple[int, int], ...]
    """(first layer, last layer exclusive) of each group; layer 0 is the input layer."""
    devices: tuple[str, ...]
    """The device of each super neuron, group after group."""
    device_coordinator: str
    """The paper's device coordinator, which partitions the model: the device of the highest closeness centrality on
    expected transmissions. The plan's `coordinator` is another role: it records losses and scores."""
    transmissions: tuple[tuple[int, ...], ...]
    """Transmissions per batch from each super neuron to each super neuron, both in the order of `devices`."""
    largest_message: int
    """M_pkt of equation (4): the maximum number of values per sample that a device sends at once."""
    mapping_score: float
    """Sum of the Hadamard product of connectivity and reception ratios."""
    mean_reception: float
    """Mean reception ratio of all directed links."""
    pipelined: bool
    micro_batches: int
    timeslot: float
    """Seconds of a timeslot of training."""
    test_timeslot: float
    """Seconds of a timeslot of tests, whose batches may be larger."""
    forward_seconds: tuple[float, ...]
    """By layer, the seconds of a batch's forward on the slowest device."""
    backward_seconds: tuple[float, ...]
    """By layer, the seconds of a batch's backward and update on the slowest device."""
    start_time: float | None = None
    """Start of the first slot in seconds, after weights or the assignment have been distributed; None: at once."""
    acknowledgement_seconds: tuple[float, ...]
    """For each of `devices`, the seconds from the end of its cast until all receivers have acknowledged it.

    Part of the plan, because a device knows its own links only.
    """


def timetable_of(details: SlotDetails) -> Timetable:
    """Return the timetable of a plan's layers and batches."""
    groups = [range(first, stop) for first, stop in details.groups]
    return _timetable_for(
        groups, pipelined=details.pipelined, micro_batches=details.micro_batches
    )


def _timetable_for(
    groups: Sequence[range], *, pipelined: bool, micro_batches: int
) -> Timetable:
    """Return GPipe's timetable for several micro-batches, otherwise EdgePipe's."""
    if micro_batches > 1:
        return fill_and_drain(groups, micro_batches)
    return make_timetable(groups, pipelined=pipelined)


def layer_sizes(problem: PlanningProblem[SlotOptions]) -> tuple[int, ...]:
    """Return the neurons of each layer, the input layer's first. Raises `InputError`."""
    layers = layers_of(problem)
    outputs = [layer.output_channels for layer in layers]
    return (layers[0].inputs, *outputs)


def layers_of(problem: PlanningProblem[SlotOptions]) -> tuple[GraphLayer, ...]:
    """Return the dense and convolutional layers, the latter with their pools.

    The input layer, layer 0, is no element, so layer l is at index l - 1. Raises `InputError` for other kinds of
    layers.
    """
    graph: Graph = graph_of(problem.model)
    layers: list[GraphLayer] = []
    for index, layer in enumerate(graph.layers):
        follows = layer.sources == (index - 1,)
        is_pool = layer.is_channelwise and not layer.parameters
        if layers and follows and is_pool:
            # A pool stays with its filters, so that devices cast the smaller maps.
            layers[-1] = layers[-1].with_pool(layer)
        elif follows and layer.splits and not _has_dropout(layer):
            layers.append(layer)
        else:
            raise InputError(
                f"'{layer.name}' of {graph.name} must be a convolution, a pool or a dense layer that follows the "
                "previous layer, without dropout: use mlp or cnn",
                ("model", "name"),
            )
    return tuple(layers)


def _has_dropout(layer: GraphLayer) -> bool:
    return any(isinstance(module, Dropout) for module in layer.sequence)


def values_per_neuron(problem: PlanningProblem[SlotOptions]) -> tuple[int, ...]:
    """Return by layer the number of values per neuron and sample: one, or the pixels of a filter's map."""
    pixels = [layer.pixels for layer in layers_of(problem)]
    return (1, *pixels)


def slice_of(layer: GraphLayer, neurons: Channels) -> Slice:
    """Return the slice of a layer's weights with some of its neurons, and for these all inputs."""
    return Slice(neurons, range(layer.input_channels), neurons)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of some neurons of a layer for a batch."""

    forward: Cost
    backward: Cost
    update: Cost


def layer_costs(
    layer: GraphLayer,
    neurons: Channels,
    samples: int,
    problem: PlanningProblem[SlotOptions],
) -> LayerCosts:
    """Return the costs of some neurons of a layer for a batch of ``samples`` samples."""
    one_sample = layer.cost(layer.inputs, len(neurons))
    update_flops = problem.training.update_flops * _parameter_count(layer, neurons)
    return LayerCosts(
        forward=forward_of(one_sample, samples),
        backward=backward_of(one_sample, samples),
        update=Cost(update_flops),
    )


def plan(
    method: str,
    problem: PlanningProblem[SlotOptions],
    divide: Divide,
    micro_batches: int = 1,
    send_model_partition: bool = False,
) -> Plan[SlotDetails]:
    """Divide the layers, map super neurons to devices, and determine the length of the slots.

    ``send_model_partition``: whether the device coordinator sends all others their neurons before the first slot.
    Raises `InputError` if the devices, links or options allow no plan.
    """
    options = problem.options
    batch_size = problem.workload.batch_size
    sizes = layer_sizes(problem)
    names = [device.name for device in problem.devices]
    ratios = {}
    for pair, link in problem.links.items():
        ratios[pair] = 1 - link.message_loss
    # Two divisions: the mapping needs the super neurons of the first one, and gives the order of devices of the second.
    unmapped = divide(sizes, names)
    reception = mapping.reception_matrix(names, ratios)
    order, score = _map_neurons(problem, unmapped, reception)
    assignment = divide(sizes, [names[index] for index in order])
    _check_links(assignment, ratios, acknowledged=options.recovery == "ack")
    _check_micro_batches(problem, assignment, micro_batches)
    table = _timetable_for(
        assignment.groups, pipelined=options.pipelined, micro_batches=micro_batches
    )
    # The micro-batches of a batch may differ by one sample; the largest one determines the slot.
    samples = math.ceil(batch_size / micro_batches)
    slot = _slot_seconds(problem, assignment, samples)
    # Test batches may be larger than batches of training and need longer slots.
    test_samples = samples_per_test_batch(problem)
    test_seconds = sum(_needed_seconds(problem, assignment, test_samples))
    forward_seconds, backward_seconds = _layer_seconds(problem, assignment)
    # The coordinator records losses and scores, so it needs the results. The paper's device coordinator, which
    # partitions the model, may be another device.
    coordinator = assignment.holders(assignment.output_layer)[0]
    device_coordinator = mapping.choose_device_coordinator(names, ratios)
    start_time = _weights_seconds(problem, coordinator)
    if send_model_partition:
        start_time += _partition_seconds(problem, device_coordinator, assignment)
    acknowledgement_seconds = []
    for name in assignment.devices:
        acknowledgement_seconds.append(_acknowledgement_seconds(problem, name))
    groups = [(group.start, group.stop) for group in assignment.groups]
    values = values_per_neuron(problem)
    messages = [assignment.largest_message(name, values) for name in names]
    details = SlotDetails(
        groups=tuple(groups),
        devices=assignment.devices,
        device_coordinator=device_coordinator,
        transmissions=mapping.count_transmissions(assignment),
        largest_message=max(messages),
        mapping_score=score,
        mean_reception=fmean(ratios.values()) if ratios else 1.0,
        pipelined=options.pipelined,
        micro_batches=micro_batches,
        timeslot=slot,
        test_timeslot=max(slot, test_seconds),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        start_time=start_time or None,
        acknowledgement_seconds=tuple(acknowledgement_seconds),
    )
    placements = []
    for name in assignment.devices:
        placements.append(_make_placement(problem, table, assignment, name))
    return Plan(
        method=method,
        coordinator=coordinator,
        assignments=tuple(placements),
        step_time=table.period * slot,
        steps=_step_count(problem, table, slot),
        details=details,
    )


def _weights_seconds(problem: PlanningProblem[SlotOptions], coordinator: str) -> float:
    """Return the seconds to distribute the scenario's initial weights; 0 if weights are drawn from the seed."""
    if problem.workload.model.weights is None:
        return 0.0
    parameters = costs.count_parameters(problem.model.units)
    return _distribution_seconds(problem, coordinator, BYTES_PER_VALUE * parameters)


def _partition_seconds(
    problem: PlanningProblem[SlotOptions],
    device_coordinator: str,
    assignment: NeuronAssignment,
) -> float:
    """Return the seconds in which the device coordinator sends all others the assignment of neurons."""
    range_count = sum(map(len, assignment.layers))
    size = BYTES_PER_RANGE * range_count
    return _distribution_seconds(problem, device_coordinator, size)


def _check_micro_batches(
    problem: PlanningProblem[SlotOptions], assignment: NeuronAssignment, count: int
) -> None:
    size = problem.workload.batch_size
    key = ("method", "micro_batches")
    largest_group = max(map(len, assignment.groups))
    if count > 1 and largest_group > 1:
        text = "is GPipe, which needs groups of one layer: use allocation: vertical and a device for each layer"
        raise InputError(text, key)
    if count > size:
        text = f"{count} micro-batches are too many for a batch of {size} samples: use {size} at most"
        raise InputError(text, key)


def _map_neurons(
    problem: PlanningProblem[SlotOptions],
    assignment: NeuronAssignment,
    ratios: mapping.Matrix,
) -> tuple[mapping.Order, float]:
    """Return the order of devices by the algorithm of the option `mapping`, and the score of the order."""
    options = problem.options
    seed = problem.seed
    count = len(problem.devices)
    connectivity = mapping.connectivity_matrix(assignment)
    match options.mapping:
        case "upper":
            limit = mapping.MAX_EXHAUSTIVE_DEVICES
            if count > limit:
                raise InputError(
                    f"{count} devices are too many for an exhaustive search: use genetic, or at most {limit}",
                    ("method", "mapping"),
                )
            order = mapping.best_order(connectivity, ratios)
        case "random":
            order = mapping.random_order(count, seed, options.random_order)
        case "hill-climbing":
            order = mapping.climbed_order(connectivity, ratios, seed)
        case _:
            order = mapping.genetic_order(connectivity, ratios, seed)
    return order, mapping.score_order(connectivity, ratios, order)


def _check_links(
    assignment: NeuronAssignment, ratios: Mapping[Pair, float], *, acknowledged: bool
) -> None:
    """Raise `InputError` if a super neuron cannot receive or acknowledge the required casts."""
    for receiver in assignment.devices:
        for sender in assignment.senders(receiver):
            # Acknowledgements return over the opposite link.
            if acknowledged and ratios.get((receiver, sender), 0) <= 0:
                raise InputError(
                    f"ack needs acknowledgements, but {sender} receives none from {receiver}: use r-tx, or add a link",
                    ("method", "recovery"),
                )
            if (sender, receiver) not in ratios:
                raise InputError(
                    f"no link leads from {sender} to {receiver}, which must communicate: use the topology mesh",
                    ("network", "topology"),
                )
            if ratios[sender, receiver] <= 0:
                raise InputError(
                    f"{receiver} needs the casts of {sender}, but receives none: place the devices closer, or lower "
                    "the message_loss of this link",
                    ("network",),
                )


def samples_per_test_batch(problem: PlanningProblem[SlotOptions]) -> int:
    """Return the maximum number of samples in a test batch."""
    return problem.options.test_batch_size or problem.workload.batch_size


def _slot_seconds(
    problem: PlanningProblem[SlotOptions], assignment: NeuronAssignment, samples: int
) -> float:
    """Return the seconds of a timeslot: the option `timeslot`, by default by equation (4).

    Raises `InputError` if the option is shorter than a computation and a transmission.
    """
    computing, transmitting = _needed_seconds(problem, assignment, samples)
    needed = computing + transmitting
    configured = problem.options.timeslot
    if configured is None:
        return needed + problem.options.timeslot_margin
    if configured < needed:
        raise InputError(
            f"{formats.seconds(configured)} is too short: computing takes up to {formats.seconds(computing)}, "
            f"transmitting {formats.seconds(transmitting)}",
            ("method", "timeslot"),
        )
    return configured


def _step_count(
    problem: PlanningProblem[SlotOptions], table: Timetable, slot: float
) -> int | None:
    """Return the number of steps fitting into the option `training_time`; None without the option.

    Raises `InputError` if no step fits.
    """
    time = problem.options.training_time
    if time is None:
        return None
    # If the time is a multiple of the slot, rounding must not lose a slot.
    slots = math.floor(time / slot + 1e-9)
    steps = table.step_count(slots)
    if steps < 1:
        step_time = formats.seconds(table.slot_count(table.micro_batches) * slot)
        raise InputError(
            f"{formats.seconds(time)} is too short: one step takes {step_time}",
            ("method", "training_time"),
        )
    return steps


def _distribution_seconds(
    problem: PlanningProblem[SlotOptions], sender: str, size: int
) -> float:
    """Return the seconds to distribute ``size`` bytes from one device to all others, such as initial weights.

    The first slot begins after this time, whether or not the transfers are complete. The time is therefore generous:
    twice the time of sequential transfers, and two round trips. Raises `InputError` for a missing link.
    """
    receivers = 0
    for device in problem.devices:
        if device.name == sender:
            continue
        if (sender, device.name) not in problem.links:
            raise InputError(
                f"no link leads from {sender}, which sends the initial state, to {device.name}: use the topology mesh",
                ("network", "topology"),
            )
        receivers += 1
    rate, delay = _cast_rate(problem, sender)
    transfers = 0.0
    if rate is not None:
        transfers = 8 * size * receivers / rate
    return 2 * transfers + 4 * delay + problem.options.timeslot_margin


def _needed_seconds(
    problem: PlanningProblem[SlotOptions], assignment: NeuronAssignment, samples: int
) -> tuple[float, float]:
    """Return the longest computation and the longest transmission of any device for ``samples`` samples, in seconds."""
    longest_computation = 0.0
    longest_transmission = 0.0
    for layer in range(len(assignment.sizes)):
        # A slot has either a forward or a backward of one layer.
        seconds = max(_computation_seconds(problem, assignment, layer, samples))
        longest_computation = max(longest_computation, seconds)
    for name in assignment.devices:
        seconds = _transmission_seconds(problem, assignment, name, samples)
        longest_transmission = max(longest_transmission, seconds)
    return longest_computation, longest_transmission


def _layer_seconds(
    problem: PlanningProblem[SlotOptions], assignment: NeuronAssignment
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the results of `_computation_seconds` for a batch in each layer: of all forwards, and of all backwards."""
    batch_size = problem.workload.batch_size
    forward_seconds = []
    backward_seconds = []
    for layer in range(len(assignment.sizes)):
        forward, backward = _computation_seconds(problem, assignment, layer, batch_size)
        forward_seconds.append(forward)
        backward_seconds.append(backward)
    return tuple(forward_seconds), tuple(backward_seconds)


def _computation_seconds(
    problem: PlanningProblem[SlotOptions],
    assignment: NeuronAssignment,
    layer: int,
    samples: int,
) -> tuple[float, float]:
    """Return the seconds of a layer on the slowest device: of the forward, and of the backward with the update."""
    # The input layer only reads samples.
    if layer == 0:
        return 0.0, 0.0
    graph_layer = layers_of(problem)[layer - 1]
    forward = 0.0
    backward = 0.0
    for name, neurons in assignment.layers[layer].items():
        cost = layer_costs(graph_layer, neurons, samples, problem)
        device = problem.device(name)
        forward = max(forward, device.seconds(cost.forward))
        backward = max(backward, device.seconds(cost.backward + cost.update))
    return forward, backward


def _transmission_seconds(
    problem: PlanningProblem[SlotOptions],
    assignment: NeuronAssignment,
    name: str,
    samples: int,
) -> float:
    """Return the seconds until a device's longest message has arrived everywhere.

    The time includes all transmissions with ``r-tx``, and the acknowledgements of one transmission with ``ack``.
    """
    options = problem.options
    rate, delay = _cast_rate(problem, name)
    values = assignment.largest_message(name, values_per_neuron(problem)) * samples
    size = cast.size_around(BYTES_PER_VALUE * values)
    if options.recovery == "r-tx":
        size *= options.transmissions
    acknowledging = 0.0
    if options.recovery == "ack":
        acknowledging = _acknowledgement_seconds(problem, name)
    sending = 0.0
    if rate is not None:
        sending = 8 * size / rate
    return delay + acknowledging + sending


def _acknowledgement_seconds(problem: PlanningProblem[SlotOptions], name: str) -> float:
    """Return the seconds from the end of a device's cast until all others have acknowledged it."""
    _, delay = _cast_rate(problem, name)
    answering = 0.0
    longest_return = 0.0
    for device in problem.devices:
        if device.name == name:
            continue
        rate, return_delay = _cast_rate(problem, device.name)
        # Receivers acknowledge one after the other, since they share the channel.
        if rate is not None:
            answering += 8 * cast.size_around(0) / rate
        longest_return = max(longest_return, return_delay)
    return delay + answering + longest_return + ACKNOWLEDGEMENT_TIME


def _cast_rate(
    problem: PlanningProblem[SlotOptions], name: str
) -> tuple[float | None, float]:
    """Return the rate of a device's casts in bit/s (None without a limit), and the longest delay in seconds."""
    links = []
    longest_delay = 0.0
    for (source, _), link in problem.links.items():
        if source == name:
            links.append(link)
            # Nearly all packets arrive within four standard deviations of the delay.
            longest_delay = max(longest_delay, link.delay + 4 * link.jitter)
    return broadcast_rate(links), longest_delay


def _parameter_count(layer: GraphLayer, neurons: Channels) -> int:
    """Return the trained values of some neurons of a layer."""
    weights = layer.share(layer.weights, slice_of(layer, neurons))
    # Each neuron has a bias beside its weights, and may have a normalisation.
    return weights + layer.channel_values * len(neurons)


def _make_placement(
    problem: PlanningProblem[SlotOptions],
    table: Timetable,
    assignment: NeuronAssignment,
    name: str,
) -> Assignment:
    """Return a device's part of the plan; raises `InputError` if the part exceeds the device's memory."""
    layers = layers_of(problem)
    samples = problem.workload.batch_size
    group = assignment.group_of(name)
    assert group is not None
    members = assignment.members(group)
    group_layers = assignment.groups[group]
    parameters = 0
    stored_values = 0
    cost = Cost()
    for layer in learning_layers(group_layers):
        graph_layer = layers[layer - 1]
        neurons = assignment.neurons_of(name, layer)
        weights = _parameter_count(graph_layer, neurons)
        # Whole batches: the micro-batches of a batch together store as much.
        batches_in_flight = table.staleness(layer)
        parameters += weights
        cost += layer_costs(graph_layer, neurons, samples, problem).forward
        # The newest weights, a gradient, and for each batch in flight the weights, inputs and outputs of its forward.
        pixels = math.prod(graph_layer.main_output[1:])
        outputs = len(neurons) * pixels
        stored_values += weights * (2 + batches_in_flight)
        stored_values += samples * batches_in_flight * (graph_layer.inputs + outputs)
    memory = float(BYTES_PER_VALUE * stored_values)
    costs.check_memory(problem.device(name), memory)
    return Assignment(
        device=name,
        # Units of a plan exclude the input layer, which is layer 0 here.
        start=max(0, group_layers.start - 1),
        stop=group_layers.stop - 1,
        memory=memory,
        part=f"share {members.index(name) + 1} of {len(members)}",
        parameters=parameters,
        flops=cost.of().flops / samples,
        seconds=problem.device(name).seconds(cost),
    )


SlotMethodOptions = TypeVar("SlotMethodOptions", bound=SlotOptions)
SlotMethodDetails = TypeVar("SlotMethodDetails", bound=SlotDetails)


class SlotMethod(Method[SlotMethodOptions, SlotMethodDetails]):
    """A method whose devices hold super neurons and follow the clock of timeslots.

    Every device has all samples: devices of the input layer read the values of their neurons, and devices of the output
    layer the labels.
    """

    supports = frozenset({"all_samples", "initial_weights"})
    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("optimizer", "schedule", "loss", "clip", "ema", "metrics"),
        "its neurons are updated by plain descent on cross-entropy",
    )

    def draw(self, plan: Plan[SlotMethodDetails]) -> str | None:
        """Draw the first timeslots, with one line for each group of layers."""
        return draw_timetable(timetable_of(plan.details))

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the names of the spans of a device with a super neuron; other devices have no spans."""
        if device not in plan.devices:
            return frozenset()
        return frozenset({"forward", "backward", "evaluate"})
