"""A method in a user's file whose devices report the samples that they own."""

from __future__ import annotations

import numpy as np

from testbed.device import Device
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.wire.message import Message


class Owners(Method):
    """The first device coordinates and owns no samples; the other devices report to it."""

    name = "owners"
    summary = "report the owned samples"
    needs_torch = False
    Options = Options

    def data_owners(self, problem: PlanningProblem) -> tuple[str, ...]:
        return tuple(device.name for device in problem.devices[1:])

    def plan(self, problem: PlanningProblem) -> Plan:
        coordinator = problem.devices[0].name
        return Plan(method=self.name, coordinator=coordinator, assignments=())

    async def program(self, device: Device, context: ProgramContext) -> None:
        dataset = context.dataset
        labels, pixels, tests = None, 0.0, 0
        if dataset is not None:
            labels = dataset.train_labels.tolist()
            # In float32 the sum would depend on the order of summation.
            pixels = float(dataset.train_images.sum(dtype=np.float64))
            tests = len(dataset.test_labels)
        device.record(
            "owned_data",
            labels=labels,
            pixels=pixels,
            tests=tests,
            samples=dict(context.problem.samples),
        )
        if device.name != context.plan.coordinator:
            await device.send(context.plan.coordinator, Message("done"))
            return
        for _ in context.problem.samples:
            await device.receive()
        device.record("step", step=0, loss=0.0, samples=1)
