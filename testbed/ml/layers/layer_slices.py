"""A device's part of a model with divided layers: the slice of each layer, and its demands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from testbed.device import Cost, Span
from testbed.ml.layers.collectives import Group
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
    """Return the placement of a device holding slices of all units; ``part`` describes the slices for display.

    The memory is that of the weights and, for a batch, of the largest sum of one layer's input and output.
    """
    samples = problem.workload.batch_size
    values = count_values(slices)
    most = 0
    multiplications = 0
    cost = Cost()
    for layer, layer_part in slices:
        most = max(most, layer.inputs + layer.pixels * len(layer_part.rows))
        multiplications += layer.share(layer.multiplications, layer_part)
        cost += product_cost(layer, layer_part, samples)
    return Assignment(
        device=device,
        start=0,
        stop=len(problem.model.units),
        memory=float(BYTES_PER_VALUE * (values + samples * most)),
        part=part,
        parameters=values,
        flops=2.0 * multiplications,
        seconds=problem.device(device).seconds(cost),
    )


def product_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.sums` for a batch: the products of a slice's rows and columns."""
    elements = layer.inputs // layer.input_channels
    read = elements * len(part.columns)
    return forward_of(layer.product_cost(read, len(part.rows)), samples)


def finish_cost(layer: GraphLayer, part: Slice, samples: int) -> Cost:
    """Return the cost of `SlicedLayer.finish` for a batch: the operations after the products, on a slice's channels."""
    return forward_of(layer.finish_cost(len(part.channels)), samples)


async def load_slices(
    group: Group, context: ProgramContext, held: Sequence[LayerSlices]
) -> list[SlicedLayer]:
    """Return this device's slices with their initial weights, from the coordinator's context or from the seed.

    ``held`` has the slices of each group member. Loading costs the device one operation for each value.
    """
    problem = context.problem
    own = held[group.rank]
    if problem.workload.model.weights is None:
        # Every device draws its own slices: nothing is transmitted.
        make = partial(draw_tensors, problem.model, own, problem.seed)
    else:
        given = context.weights
        # Only the coordinator has the file.
        sent = None if given is None else [cut_copies(slices, given) for slices in held]
        make = partial(dict, await group.scatter(sent, context.plan.coordinator))
    state = await group.device.compute(make, Cost(count_values(own)), Span("load"))
    return [SlicedLayer(layer, part, state) for layer, part in own]
