"""The implementation of `testbed.device.Device` on the real clock."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from testbed.device import Cost, Span
from testbed.hardware import check_message, largest_message
from testbed.trace.events import Event
from testbed.wire.arrays import library_of
from testbed.wire.cast import CastEncoding
from testbed.wire.message import Message, encode
from testbed_agent.casting import Addresses, Caster, ReceiveFilter
from testbed_agent.disk import Disk
from testbed_agent.events import EventLog
from testbed_agent.pacing import (
    Charge,
    DeviceTime,
    Pace,
    Processors,
    WorkTimes,
    constant_charge,
    proportional_charge,
)
from testbed_agent.receiving import Arrival, Inbox
from testbed_agent.sending import STALL_SECONDS, Lane
from testbed_agent.settings import Settings

if TYPE_CHECKING:
    from testbed_agent.deployment import Deployment

T = TypeVar("T")


class RealDevice:
    """The device of a running program, on the real clock; `testbed.device.Device` documents the interface.

    The program runs in an asyncio loop, which also sends and receives; work runs in the threads of the processors, and
    a separate thread sends broadcasts. ``origin`` is the monotonic instant at which the workload began.
    """

    def __init__(
        self,
        settings: Settings,
        deployment: Deployment,
        origin: float,
        log: EventLog,
        pace: Pace | None = None,
        receive_filter: ReceiveFilter = lambda message, _header, _number: message,
        slowness: Mapping[str, float] | None = None,
    ) -> None:
        problem = deployment.problem
        spec = problem.device(settings.device)
        peers = deployment.peers
        self.name = settings.device
        self.leaving = False
        self.exposed: dict[bool, Callable[[], Mapping[str, Any]]] = {}
        """Functions that return weights: under True the weights of the device's part of the model, under False all."""
        self.processors = Processors(spec.processors, pace)
        self.lanes: dict[str, Lane] = {}
        """Delivery to each peer that has been sent a message."""
        self.totals = Totals()
        largest = largest_message(spec)
        tokens = {name: peer.receive_token for name, peer in peers.items()}
        self.inbox = Inbox(tokens, settings.inbox_limit, self._handle_arrival, largest)
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._peers = peers
        self._slowness = {name: peer.slowness for name, peer in peers.items()}
        # A link may have changed between the deployment and the start of the program.
        self._slowness |= slowness or {}
        self._is_computed = problem.workload.is_computed
        """Whether the run computes values, and not only times."""
        self._specs = {device_spec.name: device_spec for device_spec in problem.devices}
        self._origin = origin
        self._time = DeviceTime(max(origin, time.monotonic()))
        self._log = log
        # Number of this start of the program. The monotonic clock continues over restarts, so later starts have larger
        # numbers.
        self._incarnation = time.monotonic_ns()
        self._sequence = count()
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        """Messages not yet received by the program."""
        self.disk = Disk(settings, origin)
        # A lock for writes, because concurrent writes would share a temporary file. A lock for broadcasts, because the
        # datagrams of concurrent ones would be interleaved.
        self._disk_lock = asyncio.Lock()
        self._cast_lock = asyncio.Lock()
        self._cast_number = count()
        names = [device_spec.name for device_spec in problem.devices]
        self._cast_encoding = CastEncoding(self.name, names)
        sources = {name: peer.address[0] for name, peer in peers.items()}
        addresses = Addresses(
            settings.cast, deployment.broadcast, settings.data[0], sources
        )
        self._caster = Caster(
            self._cast_encoding, addresses, settings.run, largest, receive_filter
        )
        self._caster.start(self.inbox)
        self._closed = False

    def close(self) -> None:
        """Stop all threads, abandon pending work and drop late messages."""
        self._closed = True
        self.processors.close()
        self._caster.close()
        for lane in self.lanes.values():
            lane.close()

    def set_slowness(self, slowness: Mapping[str, float]) -> None:
        """Adapt the time-outs of some peers to changed links, in seconds per round trip; thread-safe."""
        self._call_in_loop(self._adapt_lanes, slowness)

    def _adapt_lanes(self, slowness: Mapping[str, float]) -> None:
        self._slowness |= slowness
        for peer, seconds in slowness.items():
            if peer in self.lanes:
                self.lanes[peer].set_slowness(seconds)

    def now(self) -> float:
        """Return the seconds since the workload started."""
        return self._time.now() - self._origin

    def record(self, event: str, **fields: Any) -> None:
        """Write an event; thread-safe."""
        self.totals.count_event(event, fields)
        self._record_at(self._time.now(), event, **fields)

    def _record_at(self, instant: float, event: str, **fields: Any) -> None:
        entry = Event(instant - self._origin, self.name, event, fields)
        self._log.append(entry.to_json())

    def expose(
        self, weights: Callable[[], Mapping[str, Any]], part: bool = False
    ) -> None:
        """Register the function for requests of the weights."""
        self.exposed[part] = weights

    async def save(self, name: str, message: Message) -> None:
        """Write a message to the disk in a separate thread."""
        async with self._disk_lock:
            await asyncio.to_thread(self.disk.save, name, message)

    def saved(self, name: str) -> Message | None:
        """Read a message from the disk, or return None."""
        return self.disk.saved(name)

    def between_works(self, call: Callable[[], T]) -> T:
        """Call a function while the processor is idle, if the device has only one; blocks until the call returns."""
        return self.processors.between_works(call)

    async def sleep(self, seconds: float) -> None:
        """Wait for seconds of the wall clock, counted from the instant of the latest event."""
        end = self._time.now() + seconds
        await asyncio.sleep(end - time.monotonic())
        # The loop wakes up a little late, but for the program, the requested instant is the present.
        self._time.advance_to(end)

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Run the work in a processor's thread; return the result when the emulated device would have it.

        Example::

            loss = await device.compute(lambda: train(batch), Cost(flops=2e9), Span("forward", batch=3))
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def begin(instant: float) -> bool:
            if future.done():
                return False
            self._record_at(instant, "begin", **span.fields())
            return True

        def end(result: T, failure: BaseException | None, measured: WorkTimes) -> None:
            ended = measured.start + measured.duration
            if failure is None:
                self.totals.counts["compute_seconds"] += measured.duration
                self.totals.counts["deficit_seconds"] += measured.deficit
                self.totals.counts["late_seconds"] += measured.late
                self._record_at(
                    ended,
                    "compute",
                    **span.fields(),
                    start=measured.start - self._origin,
                    duration=measured.duration,
                    flops=cost.of().flops,
                    busy=measured.busy,
                    deficit=measured.deficit,
                    late=measured.late,
                )
            self._call_in_loop(self._settle_future, future, result, failure, ended)

        self.processors.put(work, self._charge_for(cost), begin, end, self._time.latest)
        return await future

    def _charge_for(self, cost: Cost) -> Charge:
        if self._spec.slowdown is not None:
            return proportional_charge(self._spec.slowdown)
        return constant_charge(self._spec.seconds(cost))

    def on_timer(self, instant: float) -> None:
        """Advance the program's time to the monotonic instant of a timer of its loop."""
        self._time.advance_to(instant)

    def _settle_future(
        self,
        future: asyncio.Future[T],
        result: T,
        failure: BaseException | None,
        instant: float,
    ) -> None:
        if future.done():
            return  # cancelled
        self._time.advance_to(instant)
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    async def send(self, peer: str, message: Message) -> None:
        """Deliver a message reliably; return after the peer's acknowledgement.

        Raises ValueError if no link exists and `TestbedError` if the message exceeds the memory of either device.
        """
        self._require_link(peer)
        call_instant = self._time.now()
        encoding_began = time.monotonic()
        body = encode(message, self.name, self._incarnation, next(self._sequence))
        encode_seconds = time.monotonic() - encoding_began
        check_message(len(body), self._spec, self._specs[peer])
        if peer not in self.lanes:
            target = self._peers[peer]
            self.lanes[peer] = Lane(
                peer, target.address, target.send_token, self._slowness[peer]
            )
        # The program gets a result a moment before it is due (see `testbed_agent.pacing`), but a message with the
        # result must not leave before.
        delivery = await self.lanes[peer].deliver(body, not_before=call_instant)
        self._time.advance_to(delivery.acknowledged)
        self.totals.count_message("sent", len(body))
        self.record(
            "send",
            peer=peer,
            message=message.kind,
            bytes=len(body),
            start=call_instant - self._origin,
            duration=delivery.acknowledged - call_instant,
            queued=max(0.0, delivery.first_byte - call_instant - encode_seconds),
            encode=encode_seconds,
        )

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Broadcast a message once; return after the last datagram has left. Raises ValueError if a link is missing."""
        for peer in peers:
            self._require_link(peer)
        body = self._cast_encoding.encode(message, peers)
        number = next(self._cast_number)
        for peer in peers:
            check_message(len(body), self._spec, self._specs[peer])
        call_instant = self._time.now()
        async with self._cast_lock:
            # As in `send`, the broadcast must not leave before the result that caused it is due.
            await asyncio.sleep(call_instant - time.monotonic())
            start = time.monotonic()
            # In a thread, because the call blocks until the last datagram has left.
            size, end = await asyncio.to_thread(
                self._caster.send, body, self._incarnation, number
            )
        self._time.advance_to(end)
        self.totals.count_message("sent", size)
        self._record_at(
            end,
            "cast",
            peers=sorted(peers),
            message=message.kind,
            bytes=size,
            start=start - self._origin,
            duration=end - start,
            number=number,
        )

    def _require_link(self, peer: str) -> None:
        if peer not in self._peers:
            names = ", ".join(self._peers) or "none"
            raise ValueError(
                f"no link from {self.name} to {peer}; links lead to: {names}"
            )

    async def receive(self) -> Message:
        """Return the next message, in the order of arrival."""
        arrival = await self._arrivals.get()
        self.inbox.release(arrival.size)
        message = arrival.envelope.message
        if self._is_computed:
            return message
        # A timing-only run must not depend on values, so these are replaced, as in the simulator.
        tensors = {}
        for name, array in message.tensors.items():
            tensors[name] = library_of(array).without_values(array)
        return replace(message, tensors=tensors)

    async def listen(self, handler: Callable[[Message], None]) -> NoReturn:
        """Pass each arriving message to ``handler``; raises the errors of ``handler``."""
        while True:
            handler(await self.receive())

    def receives(self, peer: str) -> bool:
        """Return whether bytes of an incomplete message from the peer have arrived recently."""
        last_bytes = self.inbox.arriving.get(peer, -math.inf)
        silent_seconds = time.monotonic() - last_bytes
        return silent_seconds < STALL_SECONDS + self._slowness.get(peer, 0.0)

    def _handle_arrival(self, arrival: Arrival) -> None:
        """Record and queue a new message; broadcasts come from their receiving thread."""
        message = arrival.envelope.message
        self.totals.count_message("received", arrival.size)
        if self._closed:
            # The program has ended, but the machine is on: the message is acknowledged and dropped.
            self.inbox.release(arrival.size)
            return
        numbers = {"cast": arrival.envelope.sequence} if arrival.cast else {}
        self.record(
            "receive",
            peer=message.sender,
            message=message.kind,
            bytes=arrival.size,
            start=arrival.start - self._origin,
            duration=arrival.duration,
            decode=arrival.decode,
            **numbers,
        )
        if arrival.cast:
            self._call_in_loop(self._enqueue_arrival, arrival)
        else:
            self._enqueue_arrival(arrival)

    def _enqueue_arrival(self, arrival: Arrival) -> None:
        self._time.advance_to(arrival.start + arrival.duration)
        self._arrivals.put_nowait(arrival)

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    @property
    def waiting(self) -> int:
        """Number of messages not yet received by the program."""
        return self._arrivals.qsize()


_LEARNING_METRICS = {
    "step": {"loss": "loss"},
    "evaluate": {"accuracy": "accuracy", "loss": "test_loss"},
}
"""Metrics of the learning progress, by event and field."""


class Totals:
    """Counters of a device since the start of the program, for the endpoint ``/metrics``.

    >>> totals = Totals()
    >>> totals.count_message("sent", 1500)
    >>> totals.counts["sent_bytes"]
    1500.0
    """

    def __init__(self) -> None:
        self.counts: dict[str, float] = defaultdict(float)
        """Values by metric name, as in `testbed_agent.metrics`."""
        self.learned: dict[str, float] = {}
        """Loss of the last step, accuracy and loss of the last test; empty on devices without these values."""

    def count_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event, and keep the loss or accuracy of a step or a test."""
        self.counts[f"{event}s"] += 1
        for key, metric in _LEARNING_METRICS.get(event, {}).items():
            if fields.get(key) is not None:
                self.learned[metric] = fields[key]

    def count_message(self, direction: Literal["sent", "received"], size: int) -> None:
        """Count a sent or received message of ``size`` bytes."""
        self.counts[f"{direction}_bytes"] += size
        self.counts[f"{direction}_messages"] += 1
