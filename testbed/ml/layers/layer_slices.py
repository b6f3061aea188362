"""A device's part of a model with divided layers: the slice of each layer, with the memory and time of the slices."""

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
    """Return the number of values in slices: weights, and the values of each finished channel.

    >>> from testbed.ml.models.catalog import create
    >>> from testbed.ml.models.graph import graph_of
    >>> layers = graph_of(create("mlp", {"hidden": [32]}, (1, 8, 8), 10)).layers
    >>> count_values([(layer, layer.whole) for layer in layers])
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

    The memory is that of the weights and, for a batch, of the largest sum of one layer's input and output.
    """
    samples = problem.workload.batch_size
    weights = count_values(slices)
    most_activations = 0
    multiplications = 0
    cost = Cost()
    for layer, layer_part in slices:
        outputs = layer.pixels * len(layer_part.rows)
        most_activations = max(most_activations, layer.inputs + outputs)
        multiplications += layer.share(layer.multiplications, layer_part)
        cost += product_cost(layer, layer_part, samples)
    return Assignment(
        device=device,
        start=0,
        stop=len(problem.model.units),
        memory=float(BYTES_PER_VALUE * (weights + samples * most_activations)),
        part=part,
        parameters=weights,
        # A multiplication of a weight and the addition of the product, for one sample.
        flops=2.0 * multiplications,
        seconds=problem.device(device).seconds(cost),
    )


def product_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.sums` for a batch: the products of a slice's rows and columns."""
    elements_per_channel = layer.inputs // layer.input_channels
    read = elements_per_channel * len(part.columns)
    one_sample = layer.product_cost(read, len(part.rows))
    return forward_of(one_sample, samples)


def finish_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.finish` for a batch: the operations after the products, on a slice's channels."""
    one_sample = layer.finish_cost(len(part.channels))
    return forward_of(one_sample, samples)


async def load_slices(
    group: Group, context: ProgramContext, held: Sequence[LayerSlices]
) -> list[SlicedLayer]:
    """Return the slices of this device with initial weights, from the coordinator's context or from the seed.

    ``held`` has the slices of each group member. Loading costs the device one operation for each value.
    """
    problem = context.problem
    own = held[group.rank]
    make: Callable[[], State]
    if problem.workload.model.weights is None:
        # Every device draws its own slices: nothing is transmitted.
        make = partial(draw_tensors, problem.model, own, problem.seed)
    else:
        sent = None
        # Only the coordinator has the file.
        if context.weights is not None:
            sent = [cut_copies(slices, context.weights) for slices in held]
        received = await group.scatter(sent, context.plan.coordinator)
        make = partial(dict, received)
    cost = Cost(count_values(own))
    state = await group.device.compute(make, cost, Span("load"))
    return [SlicedLayer(layer, part, state) for layer, part in own]
