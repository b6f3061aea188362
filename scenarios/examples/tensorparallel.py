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
    piece,
    product_cost,
)
from testbed.ml.method import Job, Method, Problem
from testbed.ml.models.graph import graph_of
from testbed.ml.models.slices import evenly, pick
from testbed.plan import Plan


def divide(problem: Problem) -> list[LayerSlices]:
    """Return each device's slices: of the last layer by inputs, of the one before by outputs, and so on."""
    layers, devices = graph_of(problem.model).layers, len(problem.devices)
    if any(not layer.splits or len(layer.entering) > 1 for layer in layers):
        raise InputError(
            "tensor-parallel divides fully connected layers: use the model mlp",
            ("model", "name"),
        )
    held = [[] for _ in range(devices)]
    for index, layer in enumerate(layers):
        by_inputs = (len(layers) - index) % 2 == 1
        for slices, part in zip(
            held,
            evenly(layer.inputs if by_inputs else layer.outputs, devices),
            strict=True,
        ):
            slices.append(
                (layer, layer.by_inputs(part) if by_inputs else layer.by_outputs(part))
            )
    return held


class TensorParallel(Method):
    """A layer divided by inputs gives each device sums that an all-reduce completes; by outputs, its own outputs."""

    name = "tensor-parallel"
    summary = "each layer of a perceptron divided over all devices, with an all-reduce after every second one"
    tasks = ("infer",)
    supports = frozenset({"initial_weights"})

    def plan(self, problem: Problem) -> Plan:
        """Give every device an equal share of each layer. Raises `InputError` for layers of other kinds."""
        names = [device.name for device in problem.devices]
        held = zip(names, divide(problem), strict=True)
        pieces = tuple(
            piece(problem, name, slices, "an equal share") for name, slices in held
        )
        return Plan(method=self.name, lead=names[0], pieces=pieces)

    async def program(self, device: Device, job: Job) -> None:
        """Ask and answer on the lead; elsewhere do the same part of every request until the lead has all answers."""
        workload = job.problem.workload
        async with Mailbox(device, job.problem.links, (Contribution,)) as mailbox:
            group = Group(mailbox, [each.name for each in job.problem.devices])
            layers = await load_slices(group, job, divide(job.problem))
            while device.name != job.plan.lead:
                await self.infer(group, layers, None, job.plan.lead)
            requests = Requests(job.dataset, workload.batch_size, workload.requests)
            answers = Answers(device, job.problem, requests)
            for number in range(len(requests)):
                began = device.now()
                outputs = await self.infer(
                    group, layers, requests.images(number).flatten(1), job.plan.lead
                )
                device.record("request", request=number, latency=device.now() - began)
                answers.add(number, outputs)
            answers.finish()

    async def infer(self, group: Group, layers, images, lead: str):
        """Return on every device the outputs (samples, classes) of the images (samples, values) of the lead."""
        values = await group.broadcast(images, lead)
        held = range(values.shape[1])
        for sliced in layers:
            layer, part, values = (
                sliced.layer,
                sliced.part,
                pick(values, 1, sliced.part.columns, held),
            )
            work = partial(sliced.sums, values)
            sums = await group.device.compute(
                work, product_cost(layer, part, len(values)), Span("forward")
            )
            if part.columns != layer.whole.columns:
                sums = await group.all_reduce(sums)
            work = partial(sliced.finish, sums)
            values = await group.device.compute(
                work, finish_cost(layer, part, len(sums)), Span("forward")
            )
            held = part.channels
        return values
