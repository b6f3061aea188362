"""The interface between a method's program and its device, on the wall clock and on the virtual clock.

The class `Device` is this interface. ``testbed_agent.device`` implements it in containers, on the wall clock, and
``testbed.simulation.device`` in simulations, on a virtual clock. A program is an ``async`` function of a device and a
`ProgramContext`. The program may start tasks, but it must wait only through the device or asyncio primitives, never
through threads or real time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle, repeat
from operator import add, mul, sub
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, TypeVar, get_args

from testbed.wire.message import Message

T = TypeVar("T")


Kind = Literal[
    "convolution",
    "pointwise",
    "depthwise",
    "linear",
    "normalisation",
    "activation",
    "pooling",
    "other",
]
"""Kind of a layer, each with its own speed on a device. ``pointwise`` is a 1x1 convolution, ``depthwise`` a grouped
one; ``other`` is work outside layers: updates, copies, averages."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds of layers, in the order of `Cost`."""


Precision = Literal["f32", "f16", "bf16", "int8"]
"""Number format of computations: float32; 16 bits with float32 master weights; or 8-bit weights for inference."""


class Work(NamedTuple):
    """Amount of work done by layers."""

    flops: float
    """Floating-point operations, a multiply and an add being two."""
    accessed: float
    """Bytes of activations read and written."""
    weights: float
    """Bytes of weights and gradients read, independent of the batch size."""


_FIELDS = len(Work._fields)
"""Number of amounts of one kind of layer in `Cost`."""


@dataclass(frozen=True, init=False)
class Cost:
    """Amount of work charged for a computation; `testbed.hardware.DeviceSpec.seconds` converts a cost to time.

    >>> cost = Cost(1e9, kind="linear") + Cost(accessed=8e6, kind="activation") * 2
    >>> cost.of(["activation"])
    Work(flops=0.0, accessed=16000000.0, weights=0.0)
    """

    # One flat tuple instead of a `Work` for each kind: planners add up costs millions of times.
    _amounts: tuple[float, ...]
    """The work of each of `KINDS`, one after the other."""

    def __init__(
        self,
        flops: float = 0.0,
        accessed: float = 0.0,
        weights: float = 0.0,
        kind: Kind = "other",
    ) -> None:
        """Create the cost of work in layers of one kind; the sum of costs has work of several kinds."""
        zeros_before = _FIELDS * KINDS.index(kind)
        zeros_after = _FIELDS * (len(KINDS) - 1) - zeros_before
        work = (flops, accessed, weights)
        self._set_amounts(
            (*repeat(0.0, zeros_before), *work, *repeat(0.0, zeros_after))
        )

    def _set_amounts(self, amounts: tuple[float, ...]) -> None:
        # A frozen dataclass refuses plain assignment, also from its own `__init__`.
        object.__setattr__(self, "_amounts", amounts)

    @staticmethod
    def _from_amounts(amounts: Iterable[float]) -> Cost:
        cost = Cost.__new__(Cost)
        cost._set_amounts(tuple(amounts))
        return cost

    def __add__(self, other: Cost) -> Cost:
        return self._from_amounts(map(add, self._amounts, other._amounts))

    def __sub__(self, other: Cost) -> Cost:
        return self._from_amounts(map(sub, self._amounts, other._amounts))

    def __mul__(self, times: float) -> Cost:
        return self.scaled(times, times, times)

    def scaled(self, flops: float, accessed: float, weights: float) -> Cost:
        """Return the cost with FLOPs, activation bytes and weight bytes multiplied by separate factors."""
        factors = cycle((flops, accessed, weights))
        return self._from_amounts(map(mul, self._amounts, factors))

    def of(self, kinds: Collection[Kind] = KINDS) -> Work:
        """Return the total work of the given kinds of layers."""
        amounts = self._amounts
        if len(kinds) < len(KINDS):
            selected: list[float] = []
            for kind in kinds:
                start = _FIELDS * KINDS.index(kind)
                selected += self._amounts[start : start + _FIELDS]
            amounts = tuple(selected)
        # Every third amount, from the first, second or third one on, belongs to the same field of `Work`.
        return Work(*(sum(amounts[field::_FIELDS]) for field in range(_FIELDS)))


@dataclass(frozen=True)
class Span:
    """The name of a piece of work, in traces and in fault triggers ("when worker1 begins backward of batch 205").

    >>> Span("backward", batch=205).fields()
    {'span': 'backward', 'batch': 205}
    """

    name: str
    batch: int | None = None
    """Number of the batch or request, counted from 0; None for work outside of batches."""
    micro: int | None = None
    """Number of the micro-batch within its batch, counted from 0; None for a whole batch."""

    def row(self) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return the names and the values of all set fields."""
        # Spelled out: two events of each computation call this, up to ten million times in a run.
        if self.micro is None:
            if self.batch is None:
                return ("span",), (self.name,)
            return ("span", "batch"), (self.name, self.batch)
        if self.batch is None:
            return ("span", "micro"), (self.name, self.micro)
        return ("span", "batch", "micro"), (self.name, self.batch, self.micro)

    def fields(self) -> dict[str, Any]:
        """Return all set fields, for use in an event."""
        return dict(zip(*self.row(), strict=True))


class Device(Protocol):
    """The interface between a program and the device."""

    @property
    def name(self) -> str:
        """The device's name in the scenario."""

    @property
    def leaving(self) -> bool:
        """Whether a `retire` fault has asked the device to leave. The device stops when the program returns."""

    async def send(self, peer: str, message: Message) -> None:
        """Send reliably, in the order of the calls for each peer; return after the peer's acknowledgement.

        Retries without limit while the peer is down or unreachable. Cancelling the call withdraws the message unless
        all bytes have left; ``asyncio.timeout`` limits the wait. Several sends may run as concurrent tasks and keep the
        link busy: up to `testbed.wire.framing.WINDOW` bytes leave before the first acknowledgement returns. A peer that
        restarts is the same peer with an empty inbox, so methods number the assignments of roles (configurations) and
        ignore messages of older configurations.
        """

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Broadcast once, best effort; return when the message has left the device. Each peer may or may not receive
        the message."""

    async def receive(self) -> Message:
        """Return the next message of any peer, in the order of arrival."""

    async def listen(self, handler: Callable[[Message], None]) -> NoReturn:
        """Call a function with each message on arrival, instead of `receive`, until cancelled.

        Raises what the function raises. A program either listens or receives. On the virtual clock, no task is woken
        for a message.
        """

    def receives(self, peer: str) -> bool:
        """Return whether a message from the peer has arrived in part."""

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Run a computation on one of the device's processors and charge ``cost`` as time.

        Computations begin in the order of the calls, as many at once as the device has processors (one by default).
        Records the events ``begin`` and ``compute``.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait on the device's clock."""

    async def save(self, name: str, message: Message) -> None:
        """Write a message to the device's disk atomically, replacing the previous one of the same name.

        Return when the message is written. The message outlives a restart of the device, but not the run. Calls take
        effect in their order, and writing takes none of the device's time.
        """

    def saved(self, name: str) -> Message | None:
        """Return the message last saved under a name; None without one."""

    def now(self) -> float:
        """Seconds since the workload started; one clock for all devices of the run."""

    def record(self, event: str, **fields: Any) -> None:
        """Write an event to the run's log; ``testbed.trace.events`` lists the events used by metrics."""

    def expose(
        self, weights: Callable[[], Mapping[str, Any]], part: bool = False
    ) -> None:
        """Register a function returning the current weights; the runtime calls the function on request.

        The weights of the coordinator are the result of the run. A ``part`` is the device's own part of the model: a
        run that fails before the coordinator has gathered the whole model keeps the parts of all devices. A device may
        expose both.
        """
