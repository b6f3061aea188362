"""`testbed.device.Device` on the real clock."""

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
from testbed.wire.cast import CastForm
from testbed.wire.message import Message, encode
from testbed_agent.casting import Addresses, Caster, Hears
from testbed_agent.disk import Disk
from testbed_agent.events import EventLog
from testbed_agent.pacing import Charge, DeviceTime, Pace, Processors, WorkTimes, fixed, slowed
from testbed_agent.receiving import Arrival, Inbox
from testbed_agent.sending import STALL_SECONDS, Lane
from testbed_agent.settings import Settings

if TYPE_CHECKING:
    from testbed_agent.deployment import Deployment

T = TypeVar("T")


class RealDevice:
    """One device from the start of its program to its end; see `testbed.device.Device` for what it promises.

    The program runs in an asyncio loop, which sends and receives too; work runs in the processors' threads, and casts
    are handed over by a thread of their own. ``origin`` is the monotonic instant at which the workload began.
    """

    def __init__(
        self,
        settings: Settings,
        deployment: Deployment,
        origin: float,
        log: EventLog,
        pace: Pace | None = None,
        hears: Hears = lambda message, _header, _number: message,
        slowness: Mapping[str, float] | None = None,
    ) -> None:
        spec, peers = deployment.problem.device(settings.device), deployment.peers
        self.name = settings.device
        self.leaving = False
        self.exposed: dict[bool, Callable[[], Mapping[str, Any]]] = {}
        """What returns the weights, by whether they are the device's part alone."""
        self.processors = Processors(spec.processors, pace)
        self.lanes: dict[str, Lane] = {}
        self.totals = Totals()
        largest = largest_message(spec)
        tokens = {name: peer.received for name, peer in peers.items()}
        self.inbox = Inbox(tokens, settings.inbox_limit, self._arrived, largest)
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._peers = peers
        self._slowness = {name: peer.slowness for name, peer in peers.items()} | dict(slowness or {})
        self._computes = deployment.problem.workload.is_computed
        self._specs = {each.name: each for each in deployment.problem.devices}
        self._origin = origin
        self._time = DeviceTime(max(origin, time.monotonic()))
        self._log = log
        # The clock is the same for every start on this machine, so that a later start has a larger number.
        self._incarnation = time.monotonic_ns()
        self._sequence = count()
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.disk = Disk(settings, origin)
        self._writing = asyncio.Lock()
        self._casts = asyncio.Lock()
        self._cast_number = count()
        self._form = CastForm(self.name, (each.name for each in deployment.problem.devices))
        sources = {name: peer.address[0] for name, peer in peers.items()}
        addresses = Addresses(settings.cast, deployment.broadcast, settings.data[0], sources)
        self._caster = Caster(self._form, addresses, settings.run, largest, hears)
        self._caster.start(self.inbox)
        self._closed = False

    def close(self) -> None:
        """Stop every thread; what is under way is given up, what still arrives is forgotten."""
        self._closed = True
        self.processors.close()
        self._caster.close()
        for lane in self.lanes.values():
            lane.close()

    def set_slowness(self, slowness: Mapping[str, float]) -> None:
        """Have the time-outs of the ways to some peers follow changed links; may be called from any thread."""
        self._from_thread(self._adapt, slowness)

    def _adapt(self, slowness: Mapping[str, float]) -> None:
        self._slowness |= slowness
        for peer, seconds in slowness.items():
            if peer in self.lanes:
                self.lanes[peer].set_slowness(seconds)

    def now(self) -> float:
        """Return seconds since the workload started."""
        return self._time.now() - self._origin

    def record(self, event: str, **fields: Any) -> None:
        """Write an event; may be called from any thread."""
        self.totals.saw(event, fields)
        self._record_at(self._time.now(), event, **fields)

    def _record_at(self, instant: float, event: str, **fields: Any) -> None:
        self._log.append(Event(instant - self._origin, self.name, event, fields).to_json())

    def expose(self, weights: Callable[[], Mapping[str, Any]], part: bool = False) -> None:
        """Keep the callable that returns the weights when they are asked for."""
        self.exposed[part] = weights

    async def save(self, name: str, message: Message) -> None:
        """Write to the disk, in a thread of its own."""
        async with self._writing:
            await asyncio.to_thread(self.disk.save, name, message)

    def saved(self, name: str) -> Message | None:
        """Read from the disk."""
        return self.disk.saved(name)

    def between_works(self, call: Callable[[], T]) -> T:
        """Call something while the processor, if there is but one, does nothing else; blocks until it could."""
        return self.processors.between_works(call)

    async def sleep(self, seconds: float) -> None:
        """Wait on the wall clock."""
        end = self._time.now() + seconds
        await asyncio.sleep(end - time.monotonic())
        self._time.advance_to(end)

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Do the work in a processor's thread, and return its result when the device would have it."""
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
            self._from_thread(self._settle, future, result, failure, ended)

        self.processors.put(work, self._charge(cost), begin, end, self._time.latest)
        return await future

    def _charge(self, cost: Cost) -> Charge:
        if self._spec.slowdown is not None:
            return slowed(self._spec.slowdown)
        return fixed(self._spec.seconds(cost))

    def on_timer(self, instant: float) -> None:
        """Note that a timer of the program's loop goes off, which was set to this monotonic instant."""
        self._time.advance_to(instant)

    def _settle(self, future: asyncio.Future[T], result: T, failure: BaseException | None, instant: float) -> None:
        if future.done():
            return
        self._time.advance_to(instant)
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    async def send(self, peer: str, message: Message) -> None:
        """Deliver reliably; return when the peer has acknowledged.

        Raises ValueError where there is no link, `TestbedError` for a message that an end cannot hold.
        """
        if peer not in self._peers:
            raise ValueError(f"there is no link from {self.name} to {peer}")
        called, began = self._time.now(), time.monotonic()
        body = encode(message, self.name, self._incarnation, next(self._sequence))
        encoded = time.monotonic() - began
        check_message(len(body), self._spec, self._specs[peer])
        if peer not in self.lanes:
            known = self._peers[peer]
            self.lanes[peer] = Lane(peer, known.address, known.sent, self._slowness[peer])
        delivery = await self.lanes[peer].deliver(body, not_before=called)
        self._time.advance_to(delivery.ended)
        self.totals.moved("sent", len(body))
        self.record(
            "send",
            peer=peer,
            message=message.kind,
            bytes=len(body),
            start=called - self._origin,
            duration=delivery.ended - called,
            queued=max(0.0, delivery.begun - called - encoded),
            encode=encoded,
        )

    async def cast(self, peers: Collection[str], message: Message) -> None:
        """Transmit once to all; return when the last datagram has left. Raises ValueError where there is no link."""
        for peer in peers:
            if peer not in self._peers:
                raise ValueError(f"there is no link from {self.name} to {peer}")
        body, number = self._form.encode(message, peers), next(self._cast_number)
        for peer in peers:
            check_message(len(body), self._spec, self._specs[peer])
        called = self._time.now()
        async with self._casts:
            await asyncio.sleep(called - time.monotonic())
            start = time.monotonic()
            size, left = await asyncio.to_thread(self._caster.send, body, self._incarnation, number)
        self._time.advance_to(left)
        self.totals.moved("sent", size)
        self._record_at(
            left,
            "cast",
            peers=sorted(peers),
            message=message.kind,
            bytes=size,
            start=start - self._origin,
            duration=left - start,
            number=number,
        )

    async def receive(self) -> Message:
        """Return the next message, in the order of arrival."""
        arrival = await self._arrivals.get()
        self.inbox.release(arrival.size)
        message = arrival.envelope.message
        if self._computes:
            return message
        arrays = message.tensors.items()
        return replace(message, tensors={name: library_of(array).without_values(array) for name, array in arrays})

    async def listen(self, take: Callable[[Message], None]) -> NoReturn:
        """Pass each message to a function as it arrives; raises what that raises."""
        while True:
            take(await self.receive())

    def receives(self, peer: str) -> bool:
        """Return whether bytes of a message that is not complete have come from this peer lately."""
        silent = time.monotonic() - self.inbox.arriving.get(peer, -math.inf)
        return silent < STALL_SECONDS + self._slowness.get(peer, 0.0)

    def _arrived(self, arrival: Arrival) -> None:
        """Take a new message over, a cast from the thread that heard it."""
        message = arrival.envelope.message
        self.totals.moved("received", arrival.size)
        if self._closed:
            self.inbox.release(arrival.size)
            return
        self.record(
            "receive",
            peer=message.sender,
            message=message.kind,
            bytes=arrival.size,
            start=arrival.start - self._origin,
            duration=arrival.duration,
            decode=arrival.decode,
            **({"cast": arrival.envelope.sequence} if arrival.cast else {}),
        )
        if arrival.cast:
            self._from_thread(self._take, arrival)
        else:
            self._take(arrival)

    def _take(self, arrival: Arrival) -> None:
        self._time.advance_to(arrival.start + arrival.duration)
        self._arrivals.put_nowait(arrival)

    def _from_thread(self, call: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments)

    @property
    def waiting(self) -> int:
        """Messages that the program has not received yet."""
        return self._arrivals.qsize()


class Totals:
    """What the device did since it booted, for `/metrics`."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = defaultdict(float)
        """By the names of the metrics, which `testbed_agent.control` has."""
        self.learned: dict[str, float] = {}
        """Loss of the last step, and accuracy and loss of the last test, on the devices that know of them."""

    def saw(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count a step or a request, and keep what the program says of its learning."""
        self.counts[f"{event}s"] += 1
        names = {"step": {"loss": "loss"}, "evaluate": {"accuracy": "accuracy", "loss": "test_loss"}}.get(event, {})
        self.learned |= {name: fields[key] for key, name in names.items() if fields.get(key) is not None}

    def moved(self, way: Literal["sent", "received"], size: int) -> None:
        """Count a message that left or arrived, of so many bytes."""
        self.counts[f"{way}_bytes"] += size
        self.counts[f"{way}_messages"] += 1
