"""A method in one file: a token travels round a ring, and the first device replaces a lost one."""

import asyncio

from testbed.device import Cost, Device, Span
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed.wire.message import Message


class RingOptions(Options):
    """Options of `Ring`."""

    stall_timeout: float = 4.0
    """Seconds after which the token of a round counts as lost."""


class Ring(Method[RingOptions]):
    """Each device holds the token for a while, then sends it to the next."""

    name = "ring"
    summary = "pass a token round; a round is a request"
    tasks = ("infer",)
    needs_torch = False
    Options = RingOptions
    declared = MetricsSpec(
        metrics=(
            Metric(
                "tokens_lost",
                "number",
                "tokens that were lost and replaced",
                lambda run: len(run.of("lost")),
            ),
        ),
        events=(EventType("lost", "the token of this round was lost", ("batch",)),),
        rows=(Row("Lost", "{tokens_lost}", "tokens that were lost and replaced"),),
    )

    def plan(self, problem: PlanningProblem[RingOptions]) -> Plan:
        """Make the first device the coordinator; there is no model to partition."""
        return Plan(
            method=self.name, coordinator=problem.devices[0].name, assignments=()
        )

    async def program(
        self, device: Device, context: ProgramContext[RingOptions]
    ) -> None:
        """Coordinate on the first device, pass the token on elsewhere."""
        names = [spec.name for spec in context.problem.devices]
        following = names[(names.index(device.name) + 1) % len(names)]
        if device.name == context.plan.coordinator:
            await self.coordinate(device, following, context)
        else:
            await self.pass_tokens(device, following)

    async def pass_tokens(self, device: Device, following: str) -> None:
        """Hold each token for a while and send it to the following device."""
        while True:
            token = await device.receive()
            hold = Span("hold", batch=token["round"])
            await device.compute(lambda: None, Cost(flops=1e9), hold)
            await device.send(following, token)

    async def coordinate(
        self, device: Device, following: str, context: ProgramContext[RingOptions]
    ) -> None:
        """Send a token in each round, and another whenever one is lost."""
        stall_timeout = context.problem.options.stall_timeout
        for number in range(context.problem.workload.requests or 1):
            began = device.now()
            while not await self.returns(device, following, number, stall_timeout):
                device.record("lost", step=number)
            device.record("request", request=number, latency=device.now() - began)

    async def returns(
        self, device: Device, following: str, number: int, stall_timeout: float
    ) -> bool:
        """Send the token of a round; return whether the token comes back in time."""
        try:
            async with asyncio.timeout(stall_timeout):
                await device.send(following, Message("token", {"round": number}))
                token = await device.receive()
                # A token of an earlier round may return after it was replaced.
                while token["round"] != number:
                    token = await device.receive()
        except TimeoutError:
            return False
        return True
