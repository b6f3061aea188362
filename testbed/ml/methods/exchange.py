"""Exchange of equal messages between devices, to measure links and transport without a model."""

from __future__ import annotations

from testbed.common.errors import InputError, nearest
from testbed.common.quantities import Size
from testbed.device import Device
from testbed.ml.lazy import torch
from testbed.ml.method import Method, Options, PlanningProblem, ProgramContext
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.plan import Assignment, Plan
from testbed.wire.message import Message

DEFAULT_REQUESTS = 50
"""Number of exchanges if the scenario gives none."""
ARRIVAL_MARGIN = 0.2
"""Seconds that the coordinator waits after its last cast, in addition to the longest delay of a link.

The run ends with the coordinator's program, and the other devices must receive the cast before this end.
"""


class ExchangeOptions(Options):
    """Options of `Exchange`."""

    payload: Size = 1e6
    """Bytes of the tensor in each message."""
    peer: str | None = None
    """Receiver of the messages; None: the second device of the scenario."""
    cast: bool = False
    """Whether each message is cast to all neighbours, without acknowledgement, instead of sent to one device."""
    everyone: bool = False
    """With ``cast``: whether all devices cast at the same time, instead of the first device alone."""


class Exchange(Method[ExchangeOptions]):
    """The first device sends one message after the other.

    A request is complete once its message is acknowledged or, with casts, once the message has left the device.
    """

    name = "exchange"
    summary = "messages of one size between two devices, or cast to all, to measure links and transport"
    tasks = ("infer",)
    Options = ExchangeOptions
    supports = frozenset({"timing_only"})
    span_names = frozenset()

    def plan(self, problem: PlanningProblem[ExchangeOptions]) -> Plan:
        """Name the participating devices. Raises `InputError` for missing links."""
        coordinator = problem.devices[0].name
        if problem.options.cast:
            receivers = self._cast_receivers(problem, coordinator)
        else:
            receivers = [self._linked_peer(problem, coordinator)]
        # A device has a message and its encoded form in memory: see `testbed.hardware.largest_message`.
        memory = 2 * problem.options.payload
        assignments = []
        for name in (coordinator, *receivers):
            # The range of units is empty, since devices exchange messages without a model.
            assignment = Assignment(device=name, start=0, stop=0, memory=memory)
            assignments.append(assignment)
        return Plan(
            method=self.name, coordinator=coordinator, assignments=tuple(assignments)
        )

    def _cast_receivers(
        self, problem: PlanningProblem[ExchangeOptions], coordinator: str
    ) -> list[str]:
        """Return the devices that receive the coordinator's casts; raises `InputError` if none does."""
        if problem.options.peer is not None:
            text = "a cast goes to all neighbours: remove the key"
            raise InputError(text, ("method", "peer"))
        neighbours = _linked_neighbours(problem, coordinator)
        if not neighbours:
            text = f"no device receives the casts of '{coordinator}': add links to and from it"
            raise InputError(text, ("network",))
        return neighbours

    def _linked_peer(
        self, problem: PlanningProblem[ExchangeOptions], coordinator: str
    ) -> str:
        """Return the receiver of sent messages; raises `InputError` without links to and from the receiver."""
        if problem.options.everyone:
            raise InputError("requires casts: add cast: true", ("method", "everyone"))
        peer = self._peer_name(problem)
        if not _has_both_links(problem, coordinator, peer):
            text = f"no link between '{coordinator}' and '{peer}': add one, or name another peer"
            raise InputError(text, ("method", "peer"))
        return peer

    async def program(
        self, device: Device, context: ProgramContext[ExchangeOptions]
    ) -> None:
        """Send or cast messages on the coordinator; on other devices cast with the option ``everyone``, and receive."""
        options = context.problem.options
        is_coordinator = device.name == context.plan.coordinator
        if options.cast and (options.everyone or is_coordinator):
            await self._cast_messages(device, context)
        elif is_coordinator:
            await self._send_messages(device, context)
        if not is_coordinator:
            # The runtime cancels this program when the coordinator's program ends.
            while True:
                await device.receive()

    async def _send_messages(
        self, device: Device, context: ProgramContext[ExchangeOptions]
    ) -> None:
        peer = self._peer_name(context.problem)
        for request, message in _make_messages(context):
            start = device.now()
            await device.send(peer, message)
            latency = device.now() - start
            device.record("request", request=request, latency=latency)

    async def _cast_messages(
        self, device: Device, context: ProgramContext[ExchangeOptions]
    ) -> None:
        is_coordinator = device.name == context.plan.coordinator
        neighbours = _linked_neighbours(context.problem, device.name)
        for request, message in _make_messages(context):
            start = device.now()
            await device.cast(neighbours, message)
            latency = device.now() - start
            if is_coordinator:
                device.record("request", request=request, latency=latency)
        if is_coordinator:
            links = context.problem.links.values()
            # Jitter is a standard deviation: hardly any packet is delayed by four of them.
            longest_delay = max(link.delay + 4 * link.jitter for link in links)
            await device.sleep(ARRIVAL_MARGIN + longest_delay)

    def _peer_name(self, problem: PlanningProblem[ExchangeOptions]) -> str:
        """Return the device that receives sent messages; raises `InputError` for an unknown one."""
        names = [device.name for device in problem.devices]
        if len(names) < 2:
            raise InputError("an exchange needs at least two devices", ("devices",))
        peer = problem.options.peer or names[1]
        if peer not in names[1:]:
            raise InputError(
                f"unknown device '{peer}': {nearest(peer, names[1:])}",
                ("method", "peer"),
            )
        return peer


def _linked_neighbours(problem: PlanningProblem, name: str) -> list[str]:
    names = [device.name for device in problem.devices]
    return [other for other in names if _has_both_links(problem, name, other)]


def _has_both_links(problem: PlanningProblem, one: str, other: str) -> bool:
    # Acknowledgements need the second direction.
    return (one, other) in problem.links and (other, one) in problem.links


def _make_messages(
    context: ProgramContext[ExchangeOptions],
) -> list[tuple[int, Message]]:
    """Return the number and the message of each request."""
    values = int(context.problem.options.payload) // BYTES_PER_VALUE
    payload = torch.zeros(values)
    count = context.problem.workload.requests or DEFAULT_REQUESTS
    messages = []
    for request in range(count):
        message = Message("payload", {"request": request}, {"payload": payload})
        messages.append((request, message))
    return messages
