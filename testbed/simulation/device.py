"""`testbed.device.Device` on the virtual clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

from testbed.device import Cost, Span
from testbed.hardware import check_message
from testbed.network.link import transmission_time
from testbed.simulation.channel import Cast, Channel, Parcel, deliver_casts
from testbed.simulation.event_queue import EventQueue
from testbed.simulation.host import Host
from testbed.simulation.loop import VirtualLoop
from testbed.simulation.medium import Medium, occupy
from testbed.simulation.recorder import Recorder
from testbed.simulation.sharing import SharedTransfer, Sharing
from testbed.trace.events import Event
from testbed.trace.log import Form, Row
from testbed.wire.cast import CastEncoding
from testbed.wire.framing import CAST_CHUNK, cast_wire_bytes
from testbed.wire.message import Message, as_cast, delivered

T = TypeVar("T")

_RECEIVED = ("peer", "message", "bytes", "start", "duration", "decode")
RECEIVE: Form = ("receive", _RECEIVED)
"""Name and fields of the event of an arrived message."""
HEAR: Form = ("receive", (*_RECEIVED, "cast"))
"""Name and fields of the event of an arrived broadcast."""
CAST: Form = ("cast", ("peers", "message", "bytes", "start", "duration", "number"))
"""Name and fields of the event of a sent broadcast."""


@cache
def _work_forms(span: tuple[str, ...]) -> tuple[Form, Form]:
    """Return the forms of the events at the start and end of work whose span has these fields."""
    end_fields = (*span, "start", "duration", "flops", "busy", "deficit")
    return ("begin", span), ("compute", end_fields)


def _wake_program(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Surroundings(Protocol):
    """The part of `testbed.simulation.world.World` used by a device."""

    loop: VirtualLoop
    event_queue: EventQueue
    recorder: Recorder
    hosts: dict[str, Host]
    sharing: Sharing

    def channel(self, source: str, target: str) -> Channel:
        """Return the channel between two devices. Raises ValueError without a link."""

    def cast_media(self, name: str) -> list[Medium]:
        """Return the media occupied by a device's broadcast."""

    def cast_rate(self, name: str) -> float | None:
        """Return the bit/s at which a device casts, right now."""


@dataclass(eq=False, slots=True)
class _Work:
    """One call of `SimulatedDevice.compute`."""

    function: Callable[[], Any]
    cost: Cost
    span: Span
    future: asyncio.Future[Any]
    start: float = 0.0
    """Time when a processor took up the work."""
    remaining: float = 0.0
    """Seconds of work left at the start, or at the last halt."""
    end: float = -1.0
    """End time; negative if unknown."""
    transfer: SharedTransfer | None = None
    """The work as a transfer over shared cores; None while halted or without shared cores."""
    result: Any = None
    """Result of the function, handed over at the end time."""


class SimulatedDevice:
    """Implementation of `testbed.device.Device` on the virtual clock, from one boot to the next."""

    def __init__(self, world: Surroundings, host: Host) -> None:
        # Attributes read for each message come first.
        self.name = host.name
        self.alive = True
        self._event_queue = world.event_queue
        self._loop = world.loop
        self._recorder = world.recorder
        self._channels: dict[str, Channel] = {}
        self._inbox: deque[Message] = deque()
        self._receivers: list[asyncio.Future[Message]] = []
        """Waiting calls of `receive`, in the order of the calls."""
        self._listener: Callable[[Message], None] | None = None
        """Function of `listen`, which gets each message instead of the inbox."""
        self.host = host
        self.leaving = False
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Tasks of the program in the order of their start."""
        self.started_tasks = 0
        """Number of tasks started so far."""
        self.running = True
        """Whether the program has not returned."""
        self.exposed: dict[bool, Callable[[], Mapping[str, Any]]] = {}
        """Functions that return weights: under True the weights of the device's part of the model, under False all."""
        self._world = world
        self._cast_encoding: CastEncoding | None = None
        """Encoding of broadcasts; None before the first broadcast."""
        self._cast_count = 0
        """Number of broadcasts since the boot."""
        self._last_cast_end = 0.0
        """Time when the last broadcast has left."""
        self._waiting_work: list[_Work] = []
        """Work waiting for a processor."""
        self._running_work: list[_Work] = []
        """Work on the processors, also while these are paused."""
        self._charge_of = lru_cache(256)(
            lambda cost: (host.spec.seconds(cost), cost.of().flops)
        )
        """Function from a cost to its seconds and FLOPs; most costs are charged again and again."""

    def now(self) -> float:
        """Return the virtual time."""
        return self._event_queue.now

    def record(self, event: str, **fields: Any) -> None:
        """Write an event."""
        self.write(event, fields)

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Write an event, unless the device is dead."""
        if self.alive:
            self._recorder.write(Event(self._event_queue.now, self.name, event, fields))

    def add(self, form: Form, row: Row) -> None:
        """Record an event as a row of values, unless the device is dead."""
        if self.alive:
            self._recorder.add(form, row)

    def expose(
        self, weights: Callable[[], Mapping[str, Any]], part: bool = False
    ) -> None:
        """Register a function that returns all weights, or with ``part`` only the device's part of the model."""
        self.exposed[part] = weights

    async def save(self, name: str, message: Message) -> None:
        """Store a copy of a message at the host."""
        if self.alive:
            self.host.disk[name] = delivered(message, self.name)[0]

    def saved(self, name: str) -> Message | None:
        """Return the last saved message of a name."""
        return self.host.disk.get(name)

    async def sleep(self, seconds: float) -> None:
        """Wait on the virtual clock."""
        # As with asyncio, a sleep of zero seconds lets other tasks run.
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake_up: asyncio.Future[None] = self._loop.create_future()
        self._event_queue.at(self._event_queue.now + seconds, _wake_program, wake_up)
        await wake_up

    def _make_cast_encoding(self) -> CastEncoding:
        """Return the encoding, made on first use: most devices never cast, and need no list of peers."""
        if self._cast_encoding is None:
            self._cast_encoding = CastEncoding(self.name, self._world.hosts)
        return self._cast_encoding

    def _channel_to(self, peer: str) -> Channel:
        channel = self._channels[peer] = self._world.channel(self.name, peer)
        return channel

    async def send(self, peer: str, message: Message) -> None:
        """Deliver a message reliably; return when the acknowledgement has arrived."""
        if not self.alive:
            self._stop_program()
        channel = self._channels.get(peer) or self._channel_to(peer)
        # A copy, since the program may change the message while it is in transit.
        sent, size = delivered(message, self.name)
        if size > channel.max_message_size:
            check_message(size, self.host.spec, channel.target.spec)
        future = asyncio.Future[None](loop=self._loop)
        parcel = Parcel(channel, self, sent, size, self._event_queue.now, future)
        channel.enqueue(parcel)
        try:
            await future
        except asyncio.CancelledError:
            # A dead device's messages are discarded by `Channel.abandon`.
            if self.alive:
                channel.withdraw(parcel)
            raise

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Broadcast a message with one transmission for all peers; return when the last byte has left."""
        if not self.alive:
            self._stop_program()
        channels = [
            self._channels.get(peer) or self._channel_to(peer) for peer in peers
        ]
        sent, fields = as_cast(message, self.name)
        values = sum(tensor.nbytes for tensor in message.tensors.values())
        header = self._make_cast_encoding().header_size(message, peers, fields)
        size = header + values + message.padding
        for channel in channels:
            check_message(size, self.host.spec, channel.target.spec)
        on_wire = cast_wire_bytes(size)
        seconds = transmission_time(on_wire, self._world.cast_rate(self.name))
        call_time = self._event_queue.now
        start, end = occupy(self._world.cast_media(self.name), call_time, seconds)
        # The wait for the device's own earlier broadcasts is not part of the duration.
        ready = max(call_time, self._last_cast_end)
        self._last_cast_end = end
        number = self._cast_count
        self._cast_count += 1
        # The broadcast begins to arrive with its first datagram.
        first_datagram_seconds = 0.0
        if seconds:
            first_datagram = cast_wire_bytes(min(size, CAST_CHUNK))
            first_datagram_seconds = seconds * first_datagram / on_wire
        cast = Cast(sent, header, size, number, start + first_datagram_seconds)
        self._event_queue.at(end, self._propagate_cast, (channels, cast))
        await self.sleep(end - call_time)
        row = (
            self._event_queue.now,
            self.name,
            sorted(peers),
            message.kind,
            size,
            ready,
            end - ready,
            number,
        )
        self.add(CAST, row)

    def _propagate_cast(self, departure: tuple[list[Channel], Cast]) -> None:
        # The sender died before the end of the transmission.
        if not self.alive:
            return
        channels, cast = departure
        # One entry of the event queue for all receivers at the same delay; most broadcasts have a single delay.
        channels_by_delay: dict[float, list[Channel]] = {}
        for channel in channels:
            delay = channel.draw_cast_delay(cast)
            if delay is not None:
                channels_by_delay.setdefault(delay, []).append(channel)
        for delay, group in channels_by_delay.items():
            self._event_queue.at(
                self._event_queue.now + delay, deliver_casts, (group, cast, delay)
            )

    def deliver(
        self,
        message: Message,
        size: int,
        start: float,
        duration: float,
        cast: int | None = None,
    ) -> None:
        """Put a message into the inbox; ``cast`` is the number of a broadcast."""
        if self._listener is None and not self._hand_to_waiter(message):
            self._inbox.append(message)
        # The last value is 0: decoding takes none of the device's time.
        row = (
            self._event_queue.now,
            self.name,
            message.sender,
            message.kind,
            size,
            start,
            duration,
            0.0,
        )
        # The event comes before the program's reaction at the same instant, and may trigger a fault.
        if cast is None:
            self.add(RECEIVE, row)
        else:
            self.add(HEAR, (*row, cast))
        if self._listener is not None:
            self._listener(message)

    def _hand_to_waiter(self, message: Message) -> bool:
        """Give a message to the longest waiting call of `receive`; return False if none waits."""
        while self._receivers:
            receiver = self._receivers.pop(0)
            if not receiver.done():
                receiver.set_result(message)
                return True
        return False

    async def receive(self) -> Message:
        """Return the next message, in the order of arrival."""
        if not self.alive:
            self._stop_program()
        if self._inbox:
            return self._inbox.popleft()
        receiver: asyncio.Future[Message] = asyncio.Future(loop=self._loop)
        self._receivers.append(receiver)
        try:
            return await receiver
        except asyncio.CancelledError:
            if receiver in self._receivers:
                self._receivers.remove(receiver)
            elif not receiver.cancelled():
                # A message that arrived at the instant of the cancellation must not be lost.
                message = receiver.result()
                if not self._hand_to_waiter(message):
                    self._inbox.appendleft(message)
            raise

    def receives(self, peer: str) -> bool:
        """Return whether a message from the peer is arriving."""
        return self._world.channel(peer, self.name).has_partial_arrival()

    async def listen(self, handler: Callable[[Message], None]) -> NoReturn:
        """Call a function with each message on arrival, like a program in a loop of `receive`.

        Raises what ``handler`` raises.
        """
        failed: asyncio.Future[NoReturn] = self._loop.create_future()
        context = copy_context()

        def deliver(message: Message) -> None:
            if self.alive and not failed.done():
                try:
                    context.run(handler, message)
                except Exception as error:  # noqa: BLE001 - the program handles it
                    failed.set_exception(error)

        # Messages that arrived before the program began to listen.
        while self._inbox:
            handler(self._inbox.popleft())
        self._listener = deliver
        try:
            await failed
        finally:
            self._listener = None
        raise AssertionError("the future `failed` has an exception as its only result")

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Run a function now, and return the result after the time charged for ``cost``."""
        if not self.alive:
            self._stop_program()
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting_work.append(_Work(work, cost, span, future))
        self._begin_work()
        return await future

    def _begin_work(self) -> None:
        """Start waiting work on free processors, skipping cancelled work."""
        while (
            self._waiting_work and len(self._running_work) < self.host.spec.processors
        ):
            work = self._waiting_work.pop(0)
            # The caller has been cancelled while the work waited.
            if work.future.done():
                continue
            work.start = self._event_queue.now
            keys, values = work.span.row()
            self.add(_work_forms(keys)[0], (self._event_queue.now, self.name, *values))
            # A fault that waits for this event may have killed the device.
            if not self.alive:
                return
            # The result is computed now and handed over when the charged time has passed.
            try:
                work.result = work.function()
            except Exception as error:  # noqa: BLE001 - the program handles it
                work.future.set_exception(error)
                continue
            work.remaining = self._charge_of(work.cost)[0] / self.host.factor
            self._running_work.append(work)
            self._continue_work(work)

    def _continue_work(self, work: _Work) -> None:
        if self.host.paused:
            return
        if self.host.cores is not None:
            finish = partial(self._finish_work, work)
            uses = ((self.host.cores, 1.0),)
            work.transfer = SharedTransfer(work.remaining, 1.0, uses, finish)
            self._world.sharing.begin(work.transfer)
            return
        work.end = self._event_queue.now + work.remaining
        self._event_queue.at(work.end, self._end_work, work)

    def _halt_work(self, work: _Work) -> None:
        if work.transfer is not None:
            work.remaining = self._world.sharing.stop(work.transfer)
            work.transfer = None
        elif work.end >= 0:
            work.remaining = work.end - self._event_queue.now
            work.end = -1.0

    def pause(self) -> None:
        """Stop the processors and suspend the program."""
        self._event_queue.freeze(self)
        for work in self._running_work:
            self._halt_work(work)

    def resume(self) -> None:
        """Resume processors and program."""
        self._event_queue.thaw(self)
        for work in self._running_work:
            self._continue_work(work)

    def change_speed(self, factor: float) -> None:
        """Rescale the remaining work to ``factor`` times the previous speed."""
        for work in self._running_work:
            is_unfinished = (
                work.transfer is not None or work.end > self._event_queue.now
            )
            if self.host.paused or is_unfinished:
                self._halt_work(work)
                work.remaining /= factor
                self._continue_work(work)

    def kill(self) -> None:
        """Stop the program; its remaining code has no effect."""
        self.alive = False
        for work in self._running_work:
            self._halt_work(work)
        # Tasks of a paused device must run once more, to be cancelled.
        self._event_queue.thaw(self)
        for task in list(self.tasks):
            task.cancel()

    def _end_work(self, work: _Work) -> None:
        if not self.alive or work.end != self._event_queue.now:
            return
        self._finish_work(work)

    def _finish_work(self, work: _Work) -> None:
        # Reset, because a pause of zero seconds leaves two entries in the event queue for this instant.
        work.end = -1.0
        work.transfer = None
        self._running_work.remove(work)
        keys, values = work.span.row()
        now, flops = self._event_queue.now, self._charge_of(work.cost)[1]
        # The host has no part in this clock, so ``busy`` and ``deficit`` are 0.
        row = (now, self.name, *values, work.start, now - work.start, flops, 0.0, 0.0)
        self.add(_work_forms(keys)[1], row)
        # The processor finishes work whose caller has been cancelled.
        if not work.future.done():
            work.future.set_result(work.result)
        self._begin_work()

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Remove a finished task."""
        self.tasks.pop(task, None)

    def waits_for(self) -> str:
        """Describe the awaited event for a deadlock report."""
        if not self.running:
            return "has finished"
        reasons = []
        for name, channel in self._channels.items():
            if channel.awaits_acknowledgement(self):
                reasons.append(f"{name} to acknowledge")
        reasons += [f"its processor ({work.span.name})" for work in self._running_work]
        if any(not receiver.done() for receiver in self._receivers):
            reasons.append("a message")
        awaited = " and ".join(reasons) or "an event unknown to the testbed"
        return f"waits for {awaited}"

    def _stop_program(self) -> NoReturn:
        raise asyncio.CancelledError(f"{self.name} was killed")
