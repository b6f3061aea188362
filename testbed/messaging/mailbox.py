"""How a program posts messages and waits for messages, and the tasks beside its main one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload

from testbed.device import Device
from testbed.messaging.typed import Typed, decode, encode
from testbed.network.link import Link, Pair
from testbed.wire.message import Message, WireError, size

T = TypeVar("T")

SLACK = 2.0
"""How many times the predicted time of a transfer may pass before it counts as overdue."""


class MailboxFullError(RuntimeError):
    """A program posts, or is sent, more messages than it is made for: nobody takes them."""


@dataclass(eq=False)
class _Send:
    peer: str
    due: float
    """When it should have been acknowledged, however slowly the link goes."""
    task: asyncio.Task[None]


class Sends:
    """Sends in the order of the calls without holding up the caller, and knows what is not acknowledged yet."""

    def __init__(self, device: Device, links: Mapping[Pair, Link], tasks: Tasks, limit: int) -> None:
        """``limit``: messages to one peer that may be unacknowledged at once."""
        self._device = device
        self._links = links
        self._tasks = tasks
        self._limit = limit
        self._sends: dict[_Send, None] = {}
        """All that is not acknowledged, in the order of the calls; a server may have thousands of peers."""
        self._to: dict[str, dict[_Send, None]] = defaultdict(dict)
        """The same by peer."""
        self.acknowledged: Callable[[str, float, float], None] = lambda peer, wire_bytes, posted: None
        """Is called with each message that is acknowledged, at that instant: its peer, size and when it was posted."""

    def post(self, peer: str, message: Message) -> asyncio.Task[None]:
        """Send, after what was posted to that peer before; retries until acknowledged or withdrawn.

        What is returned may be awaited for the acknowledgement, or left alone. Raises `MailboxFullError`.
        """
        if len(self._to[peer]) >= self._limit:
            raise MailboxFullError(
                f"{self._limit} messages to {peer} are not acknowledged; '{message.kind}' is one more"
            )
        posted, wire_bytes = self._device.now(), size(message, self._device.name)
        carrying = transfer_time(self._links, self._device.name, peer, wire_bytes)
        due = max(posted, self.due(peer)) + SLACK * carrying
        send = _Send(peer, due, self._tasks.start(self._device.send(peer, message)))
        self._sends[send] = self._to[peer][send] = None

        def over(task: asyncio.Task[None]) -> None:
            del self._sends[send], self._to[peer][send]
            if not task.cancelled() and task.exception() is None:
                self.acknowledged(peer, wire_bytes, posted)

        send.task.add_done_callback(over)
        return send.task

    def withdraw(self) -> None:
        """Take back everything that is not acknowledged yet."""
        for send in self._sends:
            send.task.cancel()

    def due(self, peer: str) -> float:
        """Return when all that was posted to a peer should have been acknowledged, however slowly the link goes."""
        return max((send.due for send in self._to[peer]), default=self._device.now())

    def waiting(self) -> bool:
        """Say whether anything is under way that is not overdue."""
        now = self._device.now()
        return any(send.due >= now for send in self._sends)

    def overdue(self) -> dict[str, float]:
        """Return the peers that should have acknowledged something by now, and for how many seconds."""
        now = self._device.now()
        late: dict[str, float] = {}
        for send in self._sends:
            if send.due < now:
                late[send.peer] = max(late.get(send.peer, 0.0), now - send.due)
        return late


def transfer_time(links: Mapping[Pair, Link], source: str, target: str, wire_bytes: float) -> float:
    """Return the predicted seconds until this many bytes on the wire are acknowledged; 0 where there is no link."""
    there, back = links.get((source, target)), links.get((target, source))
    if there is None or back is None:
        return 0.0
    return there.delay + there.transmission_time(wire_bytes) + back.delay


class Tasks:
    """A task group that ends with its program: the first task to fail fails the program, its end cancels the others.

    Used as ``async with Tasks() as tasks``; what is raised is the first failure itself, not a group of them.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run beside the program."""
        task = self._group.create_task(work)
        self._running[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._running):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__


K = TypeVar("K", bound=Typed)
Kinds = type[K] | tuple[type[K], ...]

LIMIT = 10_000
"""Messages to one peer that are not acknowledged, and messages that nobody has taken, at most."""
ANY: Hashable = object()
"""Stands for every key."""


@dataclass(eq=False)
class _Waiter:
    kinds: tuple[str, ...]
    key: Hashable
    found: asyncio.Future[Any]

    def wants(self, message: Typed) -> bool:
        return message.kind in self.kinds and self.key in (ANY, message.identity) and not self.found.done()


class MessageCodec(Protocol):
    """Changes how the arrays of messages travel."""

    def pack(self, message: Message) -> Message:
        """Return the message to send."""

    def unpack(self, message: Message) -> Message:
        """Return the message that was packed."""


class Mailbox:
    """The messages of one device's program, and the tasks beside it::

        async with Mailbox(device, links, kinds) as mailbox:
            mailbox.post("worker1", Activation(0, batch, outputs))
            gradient = await mailbox.take(Gradient, batch, deadline=device.now() + 2)

    A message is given to the handler of its kind, if there is one; else to the first `take` that waits for it; else it
    is kept. Casts arrive in the same way. What is not acknowledged when the mailbox closes is withdrawn.

    ``configuration`` numbers the arrangements of devices. Messages of a lower one are dropped here and nowhere else;
    those of a higher one are too, unless their kind ``opens`` it.
    """

    def __init__(
        self,
        device: Device,
        links: Mapping[Pair, Link],
        kinds: Iterable[type[Typed]],
        limit: int = LIMIT,
        codecs: Mapping[str, MessageCodec] = {},
    ) -> None:
        """``codecs`` carry the tensors of messages to other devices, by their kinds."""
        self.configuration = 0
        self.arrived = 0
        """Messages of what was the present configuration when they came."""
        self.device = device
        self.links = links
        self._kinds = {kind.kind: kind for kind in kinds}
        self._limit = limit
        self._codecs = codecs
        self._tasks = Tasks()
        self.sends = Sends(device, links, self._tasks, limit)
        self._handlers: dict[str, Callable[[Any], None]] = {}
        self._opened: list[Callable[[], None]] = []
        self._in_configuration: dict[asyncio.Task[Any], None] = {}
        self._waiters: list[_Waiter] = []
        self._kept: dict[str, dict[Hashable, Typed]] = {}
        self._expired: dict[str, Any] = {}
        self._numbers = count()
        self._news: list[asyncio.Future[Any]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.start(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def _listen(self) -> None:
        await self.device.listen(self._take_in)

    def _take_in(self, message: Message) -> None:
        kind = self._kinds.get(message.kind)
        if kind is None:
            raise WireError(f"{message.sender} sent '{message.kind}', which this method does not know")
        codec = self._codecs.get(message.kind)
        self._deliver(decode(kind, message if codec is None else codec.unpack(message)))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task beside the program: its failure is the program's, the program's end is its own."""
        return self._tasks.start(work)

    def start_in_configuration(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task beside the program that ends with the present configuration."""
        task = self._tasks.start(work)
        self._in_configuration[task] = None
        task.add_done_callback(lambda _: self._in_configuration.pop(task, None))
        return task

    def on(self, kind: type[K], handler: Callable[[K], None]) -> None:
        """Hand every message of a kind to a function that never waits."""
        self._handlers[kind.kind] = handler

    def on_open(self, callback: Callable[[], None]) -> None:
        """Call something whenever a new configuration begins."""
        self._opened.append(callback)

    def open(self, configuration: int) -> None:
        """Begin a configuration, if it is higher than the present one, of which nothing is left then."""
        if configuration <= self.configuration:
            return
        self.configuration = configuration
        self.sends.withdraw()
        self._kept.clear()
        self._expired.clear()
        for task in self._in_configuration:
            task.cancel()
        for callback in self._opened:
            callback()

    def post(self, peer: str, message: Typed) -> asyncio.Future[None]:
        """Send without waiting, after what was posted to that peer before; awaited, it is acknowledged.

        A message to the device itself is delivered at once. Raises `MailboxFullError`.
        """
        if peer != self.device.name:
            codec = self._codecs.get(message.kind)
            return self.sends.post(peer, encode(message) if codec is None else codec.pack(encode(message)))
        self._deliver(replace(message, sender=peer))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def cast(self, peers: Collection[str], message: Typed) -> None:
        """Transmit once, best effort; return when it has left the device."""
        await self.device.cast(peers, encode(message))

    @overload
    async def take(self, kinds: Kinds[K], key: Hashable = ANY) -> K: ...

    @overload
    async def take(self, kinds: Kinds[K], key: Hashable = ANY, *, deadline: float) -> K | None: ...

    async def take(self, kinds: Kinds[K], key: Hashable = ANY, *, deadline: float | None = None) -> K | None:
        """Return a message of these kinds and this key as soon as it is there, once; without a key the oldest.

        None when it has not come by ``deadline``, an instant on the device's clock.
        """
        found = self.pop(kinds, key)
        if found is not None:
            return found
        waiter = _Waiter(_names(kinds), key, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await _wait(waiter.found, None if deadline is None else deadline - self.device.now())
        finally:
            self._waiters.remove(waiter)

    async def peek(self, kind: type[K]) -> K:
        """Return the oldest message of a kind as soon as there is one, and leave it there."""
        while not self._kept.get(kind.kind):
            await self.changed()
        return next(iter(self._kept[kind.kind].values()))  # type: ignore[return-value]

    def holds(self, kind: type[Typed], key: Hashable = ANY) -> bool:
        """Say whether a message could be taken at once."""
        kept = self._kept.get(kind.kind, {})
        return bool(kept) if key is ANY else key in kept

    def pop(self, kinds: Kinds[K], key: Hashable = ANY) -> K | None:
        """Return what `take` would, or None if it is not there."""
        for name in _names(kinds):
            kept: dict[Hashable, Any] = self._kept.get(name, {})
            if kept and key is ANY:
                return kept.pop(next(iter(kept)))  # type: ignore[no-any-return]
            if key in kept:
                return kept.pop(key)  # type: ignore[no-any-return]
        return None

    def discard_before(self, kind: type[Typed], key: Any) -> None:
        """Drop what was not taken of a kind with a lower key, and whatever of it still comes."""
        self._expired[kind.kind] = key
        kept = self._kept.get(kind.kind, {})
        for old in [old for old in kept if old < key]:
            del kept[old]

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait until any message arrives, at most this long; say whether one did."""
        news: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._news.append(news)
        try:
            return bool(await _wait(news, seconds))
        finally:
            if news in self._news:
                self._news.remove(news)

    def _deliver(self, message: Typed) -> None:
        if self._counts(message):
            handler = self._handlers.get(message.kind)
            if handler is not None:
                handler(message)
            elif (waiter := next((waiter for waiter in self._waiters if waiter.wants(message)), None)) is not None:
                waiter.found.set_result(message)
            else:
                self._keep(message)
        if self._news:
            news, self._news = self._news, []
            for waiting in news:
                if not waiting.done():
                    waiting.set_result(True)

    def _counts(self, message: Typed) -> bool:
        """Say whether a message is of the present configuration, or begins another, and not too late."""
        configuration = getattr(message, "configuration", None)
        self.arrived += configuration == self.configuration
        if configuration is not None and configuration != self.configuration:
            return configuration > self.configuration and message.opens
        return message.kind not in self._expired or message.identity >= self._expired[message.kind]

    def _keep(self, message: Typed) -> None:
        kept = self._kept.setdefault(message.kind, {})
        key = message.identity if message.key else next(self._numbers)
        if len(kept) >= self._limit:
            raise MailboxFullError(f"{self._limit} messages '{message.kind}' wait to be taken, and here is one more")
        kept.setdefault(key, message)


def _names(kinds: Kinds[Any]) -> tuple[str, ...]:
    return tuple(kind.kind for kind in kinds) if isinstance(kinds, tuple) else (kinds.kind,)


async def _wait(future: asyncio.Future[T], seconds: float | None) -> T | None:
    """Wait for a future, at most this long; None when it has no result by then."""
    if seconds is None:
        return await future
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await future
    except TimeoutError:
        return future.result() if future.done() and not future.cancelled() else None
