"""The small interface that a method's program is written against, on whichever clock it runs.

In a container ``agent.device`` implements it on the wall clock; in simulation ``testbed.simulation`` does on a
virtual one. A program is an ``async`` function of a device and a job; it may start tasks of its own, but all
waiting goes through the device or through asyncio primitives, never through threads or real time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from testbed.wire import Message

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """What a piece of work is charged; `testbed.hardware.DeviceSpec.seconds` makes time of it."""

    flops: float = 0.0
    """Floating-point operations, a multiply and an add being two."""
    bytes: float = 0.0
    """That its layers read and write."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.flops - other.flops, self.bytes - other.bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.flops, times * self.bytes)


@dataclass(frozen=True)
class Span:
    """Names a piece of work, in traces and in fault triggers ("when worker1 begins backward of batch 205")."""

    name: str
    batch: int | None = None
    micro: int | None = None

    def fields(self) -> dict[str, Any]:
        """Return the span as event fields, without those that are not given."""
        given = {"span": self.name, "batch": self.batch, "micro": self.micro}
        return {key: value for key, value in given.items() if value is not None}


class Device(Protocol):
    """One device, as its program sees it."""

    @property
    def name(self) -> str:
        """The device's name in the scenario."""

    @property
    def leaving(self) -> bool:
        """Whether it has been told to leave (the fault `retire`); it is off as soon as its program has returned."""

    async def send(self, peer: str, message: Message) -> None:
        """Deliver reliably, in the order of the calls per peer; return once the peer has acknowledged.

        Retries while the peer is gone or cut off, for ever. Cancelling the call withdraws the message unless all of it
        has left; ``asyncio.timeout`` limits how long to wait. The order is that of the calls, so several sends may be
        under way as tasks, and the link is used without a break: up to `testbed.framing.WINDOW` bytes leave before
        the first acknowledgement is back. A peer that restarts is the same peer with an empty inbox: methods number
        their configurations and ignore what is not theirs.
        """

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Transmit once, best effort: each peer hears it or not; return when it has left the device."""

    async def receive(self) -> Message:
        """Return the next message of any peer, in the order of arrival."""

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Do the work on one of the device's processors; takes what ``cost`` does of the device's time.

        Calls queue up and begin in the order of the calls, as many at once as the device has processors: one, unless
        the scenario says otherwise. Records ``begin`` and ``compute``.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait on the device's clock."""

    async def save(self, name: str, message: Message) -> None:
        """Keep a message on the device's disk, whole or not at all, instead of what was kept under that name.

        Return when it is there. It outlives a restart of the device, and nothing else: the next workload does not see
        it. Calls take effect in their order, and none of the device's time.
        """

    def saved(self, name: str) -> Message | None:
        """Return what was last kept under a name; None where nothing was."""

    def now(self) -> float:
        """Seconds since the workload started; one clock for all devices of the run."""

    def record(self, event: str, **fields: Any) -> None:
        """Write an event to the run's log; see ``testbed.trace.events`` for the ones with a meaning."""

    def expose(self, weights: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Name the function that returns the weights held now; the runtime calls it when asked for them."""
