"""A method for tests, as a file that a scenario names: every device reports the samples that it was given."""

from __future__ import annotations

import numpy as np

from testbed.device import Device
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.wire.message import Message


class Owners(Method):
    """The first device leads and owns no samples; the others report to it."""

    name = "owners"
    summary = "who owns what"
    needs_torch = False
    Options = Options

    def data_owners(self, problem: PlanningProblem) -> tuple[str, ...]:
        return tuple(device.name for device in problem.devices[1:])

    def plan(self, problem: PlanningProblem) -> Plan:
        return Plan(
            method=self.name, coordinator=problem.devices[0].name, assignments=()
        )

    async def program(self, device: Device, context: ProgramContext) -> None:
        given = context.dataset
        labels = None if given is None else given.train_labels.tolist()
        pixels = (
            0.0 if given is None else float(given.train_images.sum(dtype=np.float64))
        )
        tests = 0 if given is None else len(given.test_labels)
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
