"""A method in one file: a token goes round, and the first device sends another when it was lost."""

import asyncio

from testbed.device import Cost, Device, Span
from testbed.ml.method import Job, Method, Options, Problem
from testbed.plan import Plan
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed.wire.message import Message


class RingOptions(Options):
    """Options of the ring."""

    patience: float = 4.0
    """Seconds that a round may take before its token counts as lost."""


class Ring(Method[RingOptions]):
    """Each device holds the token for a while and passes it on."""

    name = "ring"
    summary = "pass a token round; a round is a request"
    tasks = ("infer",)
    needs_torch = False
    Options = RingOptions
    declared = MetricsSpec(
        figures=(
            Metric(
                "tokens_lost",
                "number",
                "tokens that did not come back",
                lambda run: len(run.of("lost")),
            ),
        ),
        events=(
            EventType(
                "lost", "the token of this round did not come back in time", ("batch",)
            ),
        ),
        rows=(
            Row(
                "Lost",
                "{tokens_lost}",
                "tokens that did not come back and were replaced",
            ),
        ),
    )

    def plan(self, problem: Problem[RingOptions]) -> Plan:
        """Divide nothing: there is only the token."""
        return Plan(method=self.name, lead=problem.devices[0].name, pieces=())

    async def program(self, device: Device, job: Job[RingOptions]) -> None:
        """Pass on whatever token comes; on the first device, send a token for each round."""
        names = [each.name for each in job.problem.devices]
        following = names[(names.index(device.name) + 1) % len(names)]
        while device.name != job.plan.lead:
            token = await device.receive()
            await device.compute(
                lambda: None, Cost(flops=1e9), Span("hold", batch=token["round"])
            )
            await device.send(following, token)
        for number in range(job.problem.workload.requests or 1):
            began = device.now()
            while not await self.goes_round(
                device, following, number, job.problem.options.patience
            ):
                device.record("lost", step=number)
            device.record("request", request=number, latency=device.now() - began)

    async def goes_round(
        self, device: Device, following: str, number: int, patience: float
    ) -> bool:
        """Send a token and say whether it came back in time."""
        try:
            async with asyncio.timeout(patience):
                await device.send(following, Message("token", {"round": number}))
                while (await device.receive())["round"] != number:
                    pass  # a token that had been given up
        except TimeoutError:
            return False
        return True
