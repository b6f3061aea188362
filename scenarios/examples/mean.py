"""A method in one file: one device asks all others for a value, and continues without the late ones."""

from dataclasses import dataclass

from testbed.device import Cost, Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.plan import Plan
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed.trace.record import RunView


@dataclass(frozen=True)
class Ask(TypedMessage, kind="ask"):
    """From the coordinator: measure a value in this round."""

    round: int


@dataclass(frozen=True)
class Reply(TypedMessage, kind="reply", key=("round", "sender")):
    """To the coordinator: the value measured in a round."""

    round: int
    value: float


class MeanOptions(Options):
    """Options of `Mean`."""

    deadline: float = 0.5
    """Seconds after which a round ends."""


def replies_left_out(run: RunView) -> int:
    """Return the number of late replies in all rounds."""
    return sum(event.fields["late"] for event in run.of("mean"))


class Mean(Method[MeanOptions]):
    """A round is a request; its mean leaves out late replies."""

    name = "mean"
    summary = "the mean of the values measured by all devices, without late ones"
    tasks = ("infer",)
    Options = MeanOptions
    declared = MetricsSpec(
        metrics=(Metric("late", "number", "replies left out", replies_left_out),),
        events=(EventType("mean", "a round is over", ("batch", "value", "late")),),
        rows=(Row("Late", "{late}", "replies that were left out"),),
    )

    def plan(self, problem: PlanningProblem[MeanOptions]) -> Plan:
        """Make the first device the coordinator; there is no model to partition."""
        return Plan(
            method=self.name, coordinator=problem.devices[0].name, assignments=()
        )

    async def program(
        self,
        device: Device,
        context: ProgramContext[MeanOptions],
    ) -> None:
        """Coordinate on the first device, reply on the others."""
        async with Mailbox(device, context.problem.links, (Ask, Reply)) as mailbox:
            if device.name == context.plan.coordinator:
                await self.coordinate(mailbox, context)
            else:
                await self.reply(mailbox, context.plan.coordinator)

    async def reply(self, mailbox: Mailbox, coordinator: str) -> None:
        """Measure a value whenever the coordinator asks."""
        while True:
            ask = await mailbox.take(Ask)
            value = await mailbox.device.compute(
                lambda: float(len(mailbox.device.name)),
                Cost(flops=1e8),
                Span("measure", batch=ask.round),
            )
            mailbox.post(coordinator, Reply(ask.round, value))

    async def coordinate(
        self, mailbox: Mailbox, context: ProgramContext[MeanOptions]
    ) -> None:
        """Ask all devices in each round, and record the mean of the replies that arrive in time."""
        device = mailbox.device
        names = [spec.name for spec in context.problem.devices]
        others = [name for name in names if name != device.name]
        for number in range(context.problem.workload.requests or 1):
            began = device.now()
            for name in others:
                mailbox.post(name, Ask(number))
            deadline = began + context.problem.options.deadline
            values = []
            for name in others:
                key = (number, name)
                reply = await mailbox.take(Reply, key, deadline=deadline)
                if reply is not None:
                    values.append(reply.value)
            # Replies that arrive later would stay in the mailbox.
            mailbox.discard_before(Reply, (number + 1, ""))
            mean = sum(values) / len(values) if values else None
            late = len(others) - len(values)
            device.record("mean", batch=number, value=mean, late=late)
            device.record("request", request=number, latency=device.now() - began)
