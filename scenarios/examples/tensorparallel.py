"""A method in one file: tensor-parallel inference of a perceptron, divided as by Shoeybi et al., "Megatron-LM"."""

from functools import partial

from testbed.common.errors import InputError
from testbed.device import Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed.ml.layers.collectives import Contribution, Group
from testbed.ml.layers.feed import Answers, Requests
from testbed.ml.layers.layer_slices import (
    LayerSlices,
    finish_cost,
    load_slices,
    place_slices,
    product_cost,
)
from testbed.ml.method import Method, PlanningProblem, ProgramContext
from testbed.ml.models.graph import graph_of
from testbed.ml.models.slices import even_ranges, pick
from testbed.plan import Plan


def divide(problem: PlanningProblem) -> list[LayerSlices]:
    """Return each device's slices: of the last layer by inputs, of the one before by outputs, and so on.

    Raises `InputError` for networks with layers that are not fully connected.
    """
    layers = graph_of(problem.model).layers
    devices = len(problem.devices)
    for layer in layers:
        if not layer.splits or len(layer.main_input) > 1:
            text = "tensor-parallel divides fully connected layers: use the model mlp"
            raise InputError(text, ("model", "name"))
    slices_of = [[] for _ in range(devices)]
    for index, layer in enumerate(layers):
        # The last layer is divided by inputs, since its sum is complete on every device after an all-reduce.
        by_inputs = (len(layers) - index) % 2 == 1
        channels = layer.inputs if by_inputs else layer.outputs
        select = layer.by_inputs if by_inputs else layer.by_outputs
        for slices, part in zip(slices_of, even_ranges(channels, devices), strict=True):
            slices.append((layer, select(part)))
    return slices_of


class TensorParallel(Method):
    """A layer divided by inputs gives each device sums that an all-reduce completes; by outputs, its own outputs."""

    name = "tensor-parallel"
    summary = "each layer of a perceptron divided over all devices, with an all-reduce after every second one"
    tasks = ("infer",)
    supports = frozenset({"initial_weights"})

    def plan(self, problem: PlanningProblem) -> Plan:
        """Give every device an equal share of each layer. Raises `InputError` for layers of other kinds."""
        names = [device.name for device in problem.devices]
        assignments = []
        for name, slices in zip(names, divide(problem), strict=True):
            assignments.append(place_slices(problem, name, slices, "an equal share"))
        return Plan(
            method=self.name, coordinator=names[0], assignments=tuple(assignments)
        )

    async def program(self, device: Device, context: ProgramContext) -> None:
        """Send and answer requests on the coordinator; compute a share of each request on the others."""
        names = [spec.name for spec in context.problem.devices]
        coordinator = context.plan.coordinator
        async with Mailbox(device, context.problem.links, (Contribution,)) as mailbox:
            group = Group(mailbox, names)
            layers = await load_slices(group, context, divide(context.problem))
            # The others compute until they are stopped: the run ends with the coordinator's program.
            while device.name != coordinator:
                await self.infer(group, layers, None, coordinator)
            workload = context.problem.workload
            requests = Requests(context.dataset, workload.batch_size, workload.requests)
            answers = Answers(device, context.problem, requests)
            for number in range(len(requests)):
                began = device.now()
                images = requests.images(number).flatten(1)
                outputs = await self.infer(group, layers, images, coordinator)
                device.record("request", request=number, latency=device.now() - began)
                answers.add(number, outputs)
            answers.finish()

    async def infer(self, group: Group, layers, images, coordinator: str):
        """Return the outputs (samples, classes) for the coordinator's images (samples, values) on every device."""
        values = await group.broadcast(images, coordinator)
        channels = range(values.shape[1])
        for sliced in layers:
            layer = sliced.layer
            part = sliced.part
            values = pick(values, 1, part.columns, channels)
            cost = product_cost(layer, part, len(values))
            work = partial(sliced.sums, values)
            sums = await group.device.compute(work, cost, Span("forward"))
            if part.columns != layer.whole_slice.columns:
                sums = await group.all_reduce(sums)
            cost = finish_cost(layer, part, len(sums))
            work = partial(sliced.finish, sums)
            values = await group.device.compute(work, cost, Span("forward"))
            channels = part.channels
        return values
