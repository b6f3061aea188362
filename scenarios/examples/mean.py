"""A method in one file: one device asks all others for a value, and goes on without those that are late."""

from dataclasses import dataclass

from testbed.device import Cost, Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.method import Job, Method, Options, Problem
from testbed.plan import Plan
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, MetricsSpec, Row
from testbed.trace.record import RunView


@dataclass(frozen=True)
class Ask(Typed, kind="ask"):
    """From the coordinator: what do you measure?"""

    round: int


@dataclass(frozen=True)
class Reply(Typed, kind="reply", key=("round", "sender")):
    """To the coordinator."""

    round: int
    value: float


class MeanOptions(Options):
    """Options of the mean."""

    deadline: float = 0.5
    """Seconds that a round may take."""


def replies_left_out(run: RunView) -> int:
    """Return how many replies all rounds together went on without."""
    return sum(event.fields["late"] for event in run.of("mean"))


class Mean(Method[MeanOptions]):
    """A round is a request; what is missing of it is left out."""

    name = "mean"
    summary = "the mean of what all devices measure, without those that are late"
    tasks = ("infer",)
    Options = MeanOptions
    declared = MetricsSpec(
        figures=(Metric("late", "number", "replies left out", replies_left_out),),
        events=(EventType("mean", "a round is over", ("batch", "value", "late")),),
        rows=(Row("Late", "{late}", "replies that were left out"),),
    )

    def plan(self, problem: Problem[MeanOptions]) -> Plan:
        """Divide nothing."""
        return Plan(method=self.name, lead=problem.devices[0].name, pieces=())

    async def program(self, device: Device, job: Job[MeanOptions]) -> None:
        """Ask on the first device, reply elsewhere."""
        async with Mailbox(device, job.problem.links, (Ask, Reply)) as mailbox:
            if device.name == job.plan.lead:
                await self.coordinate(mailbox, job)
            else:
                await self.reply(mailbox, job.plan.lead)

    async def reply(self, mailbox: Mailbox, coordinator: str) -> None:
        """Measure something whenever asked."""
        while True:
            ask = await mailbox.take(Ask)
            span = Span("measure", batch=ask.round)
            value = await mailbox.device.compute(
                lambda: float(len(mailbox.device.name)), Cost(flops=1e8), span
            )
            mailbox.post(coordinator, Reply(ask.round, value))

    async def coordinate(self, mailbox: Mailbox, job: Job[MeanOptions]) -> None:
        """Ask all, take what comes in time, go on."""
        device = mailbox.device
        others = [each.name for each in job.problem.devices if each.name != device.name]
        for number in range(job.problem.workload.requests or 1):
            began = device.now()
            for name in others:
                mailbox.post(name, Ask(number))
            deadline = began + job.problem.options.deadline
            replies = [
                await mailbox.take(Reply, (number, name), deadline=deadline)
                for name in others
            ]
            values = [reply.value for reply in replies if reply is not None]
            mailbox.discard_before(Reply, (number + 1, ""))
            mean = sum(values) / len(values) if values else None
            late = len(replies) - len(values)
            device.record("mean", batch=number, value=mean, late=late)
            device.record("request", request=number, latency=device.now() - began)
