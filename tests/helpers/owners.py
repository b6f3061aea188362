"""A method in a user's file, for scenarios that name this file: devices report the samples that they own."""

from __future__ import annotations

import numpy as np

from testbed.device import Device
from testbed.ml.method import Method, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.wire.message import Message


class Owners(Method):
    """The first device coordinates and owns no samples; the other devices report to it."""

    name = "owners"
    summary = "report the owned samples"
    needs_torch = False

    def data_owners(self, problem: PlanningProblem) -> tuple[str, ...]:
        return tuple(device.name for device in problem.devices[1:])

    def plan(self, problem: PlanningProblem) -> Plan:
        coordinator = problem.devices[0].name
        return Plan(method=self.name, coordinator=coordinator, assignments=())

    async def program(self, device: Device, context: ProgramContext) -> None:
        dataset = context.dataset
        # A device receives no data set if it has neither training nor test samples.
        labels, pixel_sum, test_samples = None, 0.0, 0
        if dataset is not None:
            labels = dataset.train_labels.tolist()
            # A sum identifies the images. In float32 it would depend on the order of summation.
            pixel_sum = float(dataset.train_images.sum(dtype=np.float64))
            test_samples = len(dataset.test_labels)
        samples_of_owners = dict(context.problem.samples)
        device.record(
            "owned_data",
            labels=labels,
            pixels=pixel_sum,
            tests=test_samples,
            samples=samples_of_owners,
        )
        if device.name != context.plan.coordinator:
            await device.send(context.plan.coordinator, Message("done"))
            return
        # The run ends with the coordinator's program, so wait for each owner.
        for _ in samples_of_owners:
            await device.receive()
        # A run without any step is not trusted.
        device.record("step", step=0, loss=0.0, samples=1)
