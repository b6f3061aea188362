"""The slices of layers that one device holds, if a method divides each layer over the devices: memory, costs, weights.

A `Slice` selects output channels (rows) and input channels (columns) of a layer's weights. The device first computes
sums of products with these weights; for some channels it also finishes complete sums: bias, normalisation, activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from testbed.device import Cost, Span
from testbed.ml.layers.collectives import Group
from testbed.ml.layers.shard import State
from testbed.ml.method import PlanningProblem, ProgramContext
from testbed.ml.models.chain import forward_of
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.models.sliced import SlicedLayer, cut_copies, draw_tensors
from testbed.ml.models.slices import Slice
from testbed.plan import Assignment

LayerSlices = Sequence[tuple[GraphLayer, Slice]]
"""The layers held by a device in model order, each with its slice."""


def count_values(slices: LayerSlices) -> int:
    """Return the number of values in slices: weights, and bias and normalisation of each finished channel.

    >>> from testbed.ml.models.catalog import create
    >>> from testbed.ml.models.graph import graph_of
    >>> layers = graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers
    >>> count_values([(layer, layer.whole_slice) for layer in layers])
    2410
    """
    values = 0
    for layer, part in slices:
        values += layer.share(layer.weights, part)
        values += layer.channel_values * len(part.channels)
    return values


def place_slices(
    problem: PlanningProblem, device: str, slices: LayerSlices, part: str
) -> Assignment:
    """Return the assignment of a device holding slices of all units; ``part`` describes the slices for display.

    The memory includes the weights, and for a batch the input and output of the layer that needs most for them.
    """
    samples = problem.workload.batch_size
    weights = count_values(slices)
    max_activations = 0
    multiplications = 0
    cost = Cost()
    for layer, layer_part in slices:
        outputs = layer.pixels * len(layer_part.rows)
        max_activations = max(max_activations, layer.inputs + outputs)
        multiplications += layer.share(layer.multiplications, layer_part)
        cost += product_cost(layer, layer_part, samples)
    return Assignment(
        device=device,
        start=0,
        stop=len(problem.model.units),
        memory=float(BYTES_PER_VALUE * (weights + samples * max_activations)),
        part=part,
        parameters=weights,
        # For one sample: each product of a weight is a multiplication and an addition.
        flops=2.0 * multiplications,
        seconds=problem.device(device).seconds(cost),
    )


def product_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.sums` for a batch: the products of inputs with the weights of a slice."""
    elements_per_channel = layer.inputs // layer.input_channels
    input_elements = elements_per_channel * len(part.columns)
    sample_cost = layer.product_cost(input_elements, len(part.rows))
    return forward_of(sample_cost, samples)


def finish_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.finish` for a batch: the operations after the products, on a slice's channels."""
    sample_cost = layer.finish_cost(len(part.channels))
    return forward_of(sample_cost, samples)


async def load_slices(
    group: Group, context: ProgramContext, member_slices: Sequence[LayerSlices]
) -> list[SlicedLayer]:
    """Return the slices of this device with initial weights; every member of the group calls this function.

    ``member_slices`` has the slices of each group member. If the scenario names a file of weights, the coordinator
    sends each member its slices; otherwise every member draws them from the seed. Loading costs the device one
    operation for each value.
    """
    problem = context.problem
    own_slices = member_slices[group.rank]
    make_state: Callable[[], State]
    if problem.workload.model.weights is None:
        make_state = partial(draw_tensors, problem.model, own_slices, problem.seed)
    else:
        member_states = None
        # Only the coordinator has the file.
        if context.weights is not None:
            member_states = []
            for slices in member_slices:
                member_states.append(cut_copies(slices, context.weights))
        received = await group.scatter(member_states, context.plan.coordinator)
        make_state = partial(dict, received)
    cost = Cost(count_values(own_slices))
    state = await group.device.compute(make_state, cost, Span("load"))
    return [SlicedLayer(layer, part, state) for layer, part in own_slices]
