"""The small interface that a method's program is written against, on whichever clock it runs.

In a container ``testbed_agent.device`` implements it on the wall clock; in simulation ``testbed.simulation`` does on a
virtual one. A program is an ``async`` function of a device and a job; it may start tasks of its own, but all
waiting goes through the device or through asyncio primitives, never through threads or real time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import cycle, repeat
from operator import add, mul, sub
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, get_args

from testbed.wire.message import Message

T = TypeVar("T")


Kind = Literal["convolution", "pointwise", "depthwise", "linear", "normalisation", "activation", "pooling", "other"]
"""Kind of a layer: a device can have a speed for each. ``pointwise`` is a convolution of single pixels, ``depthwise``
one in groups; ``other`` is what no layer does: updates, copies, averages."""

KINDS: tuple[Kind, ...] = get_args(Kind)


Precision = Literal["f32", "f16", "bf16", "int8"]
"""What a device computes in: float32; 16 bits, what is trained stays float32; or weights of 8 bits, for inference."""


class Work(NamedTuple):
    """What layers do."""

    flops: float
    """Floating-point operations, a multiply and an add being two."""
    accessed: float
    """Bytes of values that they read and write."""
    weights: float
    """Bytes of weights that they read, and of their gradients: as many for a batch as for a sample."""


_EACH = len(Work._fields)


@dataclass(frozen=True, init=False)
class Cost:
    """What a piece of work is charged; `testbed.hardware.DeviceSpec.seconds` makes time of it."""

    _amounts: tuple[float, ...]
    """The work of each of `KINDS`, one after the other."""

    def __init__(self, flops: float = 0.0, accessed: float = 0.0, weights: float = 0.0, kind: Kind = "other") -> None:
        """Work of one kind; costs add up to work of several."""
        before = _EACH * KINDS.index(kind)
        after = _EACH * (len(KINDS) - 1) - before
        self._set((*repeat(0.0, before), flops, accessed, weights, *repeat(0.0, after)))

    def _set(self, amounts: tuple[float, ...]) -> Cost:
        object.__setattr__(self, "_amounts", amounts)
        return self

    def __add__(self, other: Cost) -> Cost:
        return Cost.__new__(Cost)._set(tuple(map(add, self._amounts, other._amounts)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost.__new__(Cost)._set(tuple(map(sub, self._amounts, other._amounts)))

    def __mul__(self, times: float) -> Cost:
        return self.scaled(times, times, times)

    def scaled(self, flops: float, accessed: float, weights: float) -> Cost:
        """Return so many times the FLOPs, the bytes of values and those of weights."""
        return Cost.__new__(Cost)._set(tuple(map(mul, self._amounts, cycle((flops, accessed, weights)))))

    def of(self, kinds: Collection[Kind] = KINDS) -> Work:
        """Return the work of some kinds together."""
        amounts = self._amounts
        if len(kinds) < len(KINDS):
            amounts = tuple(amounts[_EACH * KINDS.index(kind) + field] for kind in kinds for field in range(_EACH))
        return Work(sum(amounts[0::_EACH]), sum(amounts[1::_EACH]), sum(amounts[2::_EACH]))


@dataclass(frozen=True)
class Span:
    """Names a piece of work, in traces and in fault triggers ("when worker1 begins backward of batch 205")."""

    name: str
    batch: int | None = None
    micro: int | None = None

    def row(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return the names of the span's fields in an event, without those that are not given, and their values."""
        if self.micro is None:
            if self.batch is None:
                return ("span",), (self.name,)
            return ("span", "batch"), (self.name, self.batch)
        if self.batch is None:
            return ("span", "micro"), (self.name, self.micro)
        return ("span", "batch", "micro"), (self.name, self.batch, self.micro)

    def fields(self) -> dict[str, Any]:
        """Return the span as event fields, without those that are not given."""
        return dict(zip(*self.row(), strict=True))


class Device(Protocol):
    """One device, as its program sees it."""

    @property
    def name(self) -> str:
        """The device's name in the scenario."""

    @property
    def leaving(self) -> bool:
        """Whether it has been asked to leave (the fault `retire`); it is off as soon as its program has returned."""

    async def send(self, peer: str, message: Message) -> None:
        """Deliver reliably, in the order of the calls per peer; return once the peer has acknowledged.

        Retries while the peer is gone or cut off, for ever. Cancelling the call withdraws the message unless all of it
        has left; ``asyncio.timeout`` limits how long to wait. The order is that of the calls, so several sends may be
        under way as tasks, and the link is used without a break: up to `testbed.wire.framing.WINDOW` bytes leave before
        the first acknowledgement is back. A peer that restarts is the same peer with an empty inbox: methods number
        their configurations and ignore what is not theirs.
        """

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Transmit once, best effort: each peer hears it or not; return when it has left the device."""

    async def receive(self) -> Message:
        """Return the next message of any peer, in the order of arrival."""

    async def listen(self, take: Callable[[Message], None]) -> NoReturn:
        """Pass each message to a function as it arrives, instead of `receive`, until cancelled.

        Raises what the function raises. A program either listens or receives. On the virtual clock, no task is woken
        for a message.
        """

    def receives(self, peer: str) -> bool:
        """Return whether a part of a message from this peer has arrived and the rest is on its way."""

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

    def expose(self, weights: Callable[[], Mapping[str, Any]], part: bool = False) -> None:
        """Name the function that returns the weights held now; the runtime calls it when asked for them.

        Those of the lead are the run's. A ``part`` is the device's own part of the model: a run that fails before the
        lead has gathered the whole keeps the parts of all devices. A device may expose both.
        """
