"""A program's mailbox: posting, waiting for messages, and background tasks.

A method posts and takes `TypedMessage` objects through the `Mailbox`. The mailbox sends through an `Outbox` and runs
the method's background work as `Tasks`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload

from testbed.device import Device
from testbed.messaging.typed_messages import TypedMessage, decode, encode
from testbed.network.link import Link, Pair
from testbed.wire.message import Message, WireError, size

T = TypeVar("T")

OVERDUE_FACTOR = 2.0
"""Multiple of the predicted time of a transfer after which the transfer counts as overdue."""


class MailboxFullError(RuntimeError):
    """Raised if too many messages to one peer are unacknowledged, or too many received messages wait to be taken."""


@dataclass(eq=False)
class _Send:
    """An unacknowledged message."""

    peer: str
    deadline: float
    """Instant after which the acknowledgement is overdue, at the predicted speed of the link."""
    task: asyncio.Task[None]
    """Task that ends with the acknowledgement."""


class Outbox:
    """Messages sent in the background, in the order of the calls, until acknowledged."""

    def __init__(
        self, device: Device, links: Mapping[Pair, Link], tasks: Tasks, limit: int
    ) -> None:
        """``limit`` is the maximum number of unacknowledged messages to one peer."""
        self._device = device
        self._links = links
        self._tasks = tasks
        self._limit = limit
        # Dictionaries as ordered sets: one of thousands of messages is removed in constant time.
        self._sends: dict[_Send, None] = {}
        """All unacknowledged messages, in the order of the calls; a server may have thousands of peers."""
        self._by_peer: dict[str, dict[_Send, None]] = defaultdict(dict)
        """Unacknowledged messages by peer."""
        self.on_acknowledgement: Callable[[str, float, float], None] = (
            lambda peer, wire_bytes, posted: None
        )
        """Callback for each acknowledged message: peer, size on the wire in bytes, and the instant of posting."""

    def post(self, peer: str, message: Message) -> asyncio.Task[None]:
        """Send a message after all earlier ones to the peer; the runtime retries until acknowledgement or withdrawal.

        The returned task ends with the acknowledgement and may be ignored. Raises `MailboxFullError`.
        """
        unacknowledged = self._by_peer[peer]
        if len(unacknowledged) >= self._limit:
            raise MailboxFullError(
                f"{self._limit} messages to {peer} are unacknowledged: cannot send '{message.kind}'"
            )
        posted = self._device.now()
        wire_bytes = size(message, self._device.name)
        transfer = transfer_time(self._links, self._device.name, peer, wire_bytes)
        # The link carries one message after the other, so the transfer starts after the earlier ones.
        start = max(posted, self.acknowledgement_deadline(peer))
        deadline = start + OVERDUE_FACTOR * transfer
        task = self._tasks.start(self._device.send(peer, message))
        send = _Send(peer, deadline, task)
        self._sends[send] = None
        unacknowledged[send] = None

        def forget_send(task: asyncio.Task[None]) -> None:
            del self._sends[send]
            del unacknowledged[send]
            if not task.cancelled() and task.exception() is None:
                self.on_acknowledgement(peer, wire_bytes, posted)

        send.task.add_done_callback(forget_send)
        return send.task

    def withdraw(self) -> None:
        """Cancel all unacknowledged messages."""
        for send in self._sends:
            send.task.cancel()

    def acknowledgement_deadline(self, peer: str) -> float:
        """Return the instant by which all messages to a peer should be acknowledged; the present without messages."""
        deadlines = []
        for send in self._by_peer[peer]:
            # The task of a cancelled message ends a turn of the loop later, but the link is free already.
            if not send.task.cancelling():
                deadlines.append(send.deadline)
        return max(deadlines, default=self._device.now())

    def is_busy(self) -> bool:
        """Return whether a message is in transit and not overdue."""
        now = self._device.now()
        return any(send.deadline >= now for send in self._sends)

    def overdue(self) -> dict[str, float]:
        """Return the seconds since the earliest missed deadline, for each peer with an overdue message."""
        now = self._device.now()
        seconds_by_peer: dict[str, float] = {}
        for send in self._sends:
            if send.deadline < now:
                longest = seconds_by_peer.get(send.peer, 0.0)
                seconds_by_peer[send.peer] = max(longest, now - send.deadline)
        return seconds_by_peer


def transfer_time(
    links: Mapping[Pair, Link], source: str, target: str, wire_bytes: float
) -> float:
    """Return the predicted seconds until ``wire_bytes`` are acknowledged; 0 if no link exists.

    >>> links = {("a", "b"): Link(rate=8e6, delay=0.01), ("b", "a"): Link(delay=0.01)}
    >>> transfer_time(links, "a", "b", 1e6)
    1.02
    """
    forward = links.get((source, target))
    backward = links.get((target, source))
    if forward is None or backward is None:
        return 0.0
    return forward.delay + forward.transmission_time(wire_bytes) + backward.delay


class Tasks:
    """A task group for background work: the first failure fails the program, and the program's end cancels all tasks.

    Used as ``async with Tasks() as tasks``. Unlike `asyncio.TaskGroup`, the group raises the first failure itself
    instead of an exception group.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: dict[asyncio.Task[Any], None] = {}
        """Unfinished tasks, in the order of their start."""

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background."""
        task = self._group.create_task(work)
        self._running[task] = None
        # Finished tasks must not accumulate over a long run.
        task.add_done_callback(self._discard_task)
        return task

    def _discard_task(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Cancelling before the group's exit keeps a program that has ended from waiting for endless tasks.
        for task in list(self._running):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            # The first failure is the cause; the others usually follow from its cancellations.
            raise first from first.__cause__


K = TypeVar("K", bound=TypedMessage)
Kinds = type[K] | tuple[type[K], ...]

LIMIT = 10_000
"""Maximum number of unacknowledged messages to one peer, and of received messages not yet taken."""
ANY: Hashable = object()
"""A key that matches every message."""


@dataclass(eq=False)
class _Waiter:
    """A waiting call of `Mailbox.take`."""

    kinds: tuple[str, ...]
    key: Hashable
    message: asyncio.Future[Any]
    """Done with the message."""

    def matches(self, message: TypedMessage) -> bool:
        if message.kind not in self.kinds or self.key not in (ANY, message.identity):
            return False
        return not self.message.done()


class MessageCodec(Protocol):
    """A conversion of message tensors, such as compression, applied before sending and after receiving."""

    def pack(self, message: Message) -> Message:
        """Return the message to send."""

    def unpack(self, message: Message) -> Message:
        """Return the original message."""


class Mailbox:
    """The messages and background tasks of one device's program::

        async with Mailbox(device, links, kinds) as mailbox:
            mailbox.post("worker1", Activation(0, batch, outputs))
            gradient = await mailbox.take(Gradient, batch, deadline=device.now() + 2)

    A received message goes to the handler of its kind, if registered; otherwise to the first matching `take`;
    otherwise it is stored. Broadcasts are received in the same way. Closing the mailbox withdraws unacknowledged
    messages.

    A configuration is one assignment of roles to devices, with a number. Messages of lower
    configurations than the current one are dropped, and so are messages of higher ones, unless their kind ``opens`` a
    configuration. The key of a message is the value of its fields `TypedMessage.key`.
    """

    def __init__(
        self,
        device: Device,
        links: Mapping[Pair, Link],
        kinds: Iterable[type[TypedMessage]],
        limit: int = LIMIT,
        codecs: Mapping[str, MessageCodec] = {},
    ) -> None:
        """``codecs`` convert the tensors of messages to other devices, by kind of message."""
        self.configuration = 0
        """Number of the current configuration; 0 before the first one."""
        self.received_count = 0
        """Number of messages received in the configuration that was current at their arrival."""
        self.device = device
        self.links = links
        self._kinds = {kind.kind: kind for kind in kinds}
        self._limit = limit
        self._codecs = codecs
        self._tasks = Tasks()
        self.outbox = Outbox(device, links, self._tasks, limit)
        self._handlers: dict[str, Callable[[Any], None]] = {}
        """Handlers by kind of message; see `on`."""
        self._open_callbacks: list[Callable[[], None]] = []
        """Callbacks of each new configuration; see `on_open`."""
        self._configuration_tasks: dict[asyncio.Task[Any], None] = {}
        """Unfinished tasks that end with the current configuration."""
        self._waiters: list[_Waiter] = []
        """Calls of `take` that wait for a message, the oldest first."""
        self._stored: dict[str, dict[Hashable, TypedMessage]] = {}
        """Stored messages by kind and key, oldest first."""
        self._lowest_keys: dict[str, Any] = {}
        """Lowest valid key by kind; see `discard_before`."""
        self._numbers = count()
        """Keys of stored messages whose kind has no key."""
        self._change_waiters: list[asyncio.Future[Any]] = []
        """Calls of `changed` that wait for the next message."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self.start(self._receive_all())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    async def _receive_all(self) -> None:
        await self.device.listen(self._decode_and_dispatch)

    def _decode_and_dispatch(self, message: Message) -> None:
        # An unknown kind is an error of the method, not of the network, so it must not pass silently.
        kind = self._kinds.get(message.kind)
        if kind is None:
            raise WireError(
                f"unknown message kind '{message.kind}' from {message.sender}: the method must register it"
            )
        codec = self._codecs.get(message.kind)
        if codec is not None:
            message = codec.unpack(message)
        self._dispatch_message(decode(kind, message))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a background task whose failure fails the program; the end of the program cancels the task."""
        return self._tasks.start(work)

    def start_in_configuration(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a background task until the current configuration ends."""
        task = self._tasks.start(work)
        self._configuration_tasks[task] = None
        task.add_done_callback(lambda _: self._configuration_tasks.pop(task, None))
        return task

    def on(self, kind: type[K], handler: Callable[[K], None]) -> None:
        """Register a synchronous handler for a message type."""
        self._handlers[kind.kind] = handler

    def on_open(self, callback: Callable[[], None]) -> None:
        """Register a callback for the start of each new configuration."""
        self._open_callbacks.append(callback)

    def open(self, configuration: int) -> None:
        """Switch to a newer configuration and discard all state of the current one; ignore older numbers."""
        if configuration <= self.configuration:
            return
        # Set first: callbacks and cancelled tasks see the new number.
        self.configuration = configuration
        self.outbox.withdraw()
        self._stored.clear()
        self._lowest_keys.clear()
        for task in self._configuration_tasks:
            task.cancel()
        for callback in self._open_callbacks:
            callback()

    def post(self, peer: str, message: TypedMessage) -> asyncio.Future[None]:
        """Send in the background, after all earlier messages to the peer; the result ends with the acknowledgement.

        A message to the device itself is delivered at once. Raises `MailboxFullError`.
        """
        # A message to oneself never uses the network and is acknowledged at once.
        if peer != self.device.name:
            encoded = encode(message)
            codec = self._codecs.get(message.kind)
            if codec is not None:
                encoded = codec.pack(encoded)
            return self.outbox.post(peer, encoded)
        self._dispatch_message(replace(message, sender=peer))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def cast(self, peers: Collection[str], message: TypedMessage) -> None:
        """Broadcast once, best effort; return when the message has left the device."""
        await self.device.cast(peers, encode(message))

    @overload
    async def take(self, kinds: Kinds[K], key: Hashable = ANY) -> K: ...

    @overload
    async def take(
        self, kinds: Kinds[K], key: Hashable = ANY, *, deadline: float
    ) -> K | None: ...

    async def take(
        self, kinds: Kinds[K], key: Hashable = ANY, *, deadline: float | None = None
    ) -> K | None:
        """Wait for and remove the oldest message of the given kinds and key.

        Returns None if no such message arrives by ``deadline``, an instant on the device's clock, in seconds.
        Example::

            gradient = await mailbox.take(Gradient, (batch, micro))
        """
        stored = self.pop(kinds, key)
        if stored is not None:
            return stored
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(_kind_names(kinds), key, future)
        self._waiters.append(waiter)
        timeout = None if deadline is None else deadline - self.device.now()
        try:
            return await _wait_for(future, timeout)
        finally:
            # Also after a cancellation, since a message must not go to a cancelled call.
            self._waiters.remove(waiter)

    async def peek(self, kind: type[K]) -> K:
        """Wait for a message of a kind and return the oldest one without removal."""
        while not self._stored.get(kind.kind):
            await self.changed()
        return next(iter(self._stored[kind.kind].values()))  # type: ignore[return-value]

    def holds(self, kind: type[TypedMessage], key: Hashable = ANY) -> bool:
        """Return whether a matching message is stored."""
        messages = self._stored.get(kind.kind, {})
        return bool(messages) if key is ANY else key in messages

    def pop(self, kinds: Kinds[K], key: Hashable = ANY) -> K | None:
        """Remove and return the oldest matching stored message, searching kind after kind; None without a match."""
        for name in _kind_names(kinds):
            messages: dict[Hashable, Any] = self._stored.get(name, {})
            if messages and key is ANY:
                oldest_key = next(iter(messages))
                return messages.pop(oldest_key)  # type: ignore[no-any-return]
            if key in messages:
                return messages.pop(key)  # type: ignore[no-any-return]
        return None

    def discard_before(self, kind: type[TypedMessage], key: Any) -> None:
        """Drop stored and future messages of a kind whose key is lower than ``key``."""
        self._lowest_keys[kind.kind] = key
        messages = self._stored.get(kind.kind, {})
        for stored_key in list(messages):
            if stored_key < key:
                del messages[stored_key]

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait for the arrival of any message, at most ``seconds``; return whether one arrived."""
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._change_waiters.append(waiter)
        try:
            return bool(await _wait_for(waiter, seconds))
        finally:
            # Waits that time out again and again would fill the list.
            if waiter in self._change_waiters:
                self._change_waiters.remove(waiter)

    def _dispatch_message(self, message: TypedMessage) -> None:
        if self._is_current(message):
            # Handlers come first, so that a `take` never competes with them.
            handler = self._handlers.get(message.kind)
            if handler is not None:
                handler(message)
            else:
                self._hand_over(message)
        if self._change_waiters:
            # Swap the list: a woken task may wait again at once.
            waiters, self._change_waiters = self._change_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(True)

    def _hand_over(self, message: TypedMessage) -> None:
        """Give a message to the first matching `take`, or store the message."""
        for waiter in self._waiters:
            if waiter.matches(message):
                # The waiter removes itself from the list as soon as its task runs.
                waiter.message.set_result(message)
                return
        self._store_message(message)

    def _is_current(self, message: TypedMessage) -> bool:
        """Return whether a message belongs to the current configuration or opens a new one, and has not expired."""
        # Messages without a configuration are valid in all of them.
        configuration = getattr(message, "configuration", None)
        if configuration == self.configuration:
            self.received_count += 1
        elif configuration is not None:
            return configuration > self.configuration and message.opens
        lowest_key = self._lowest_keys.get(message.kind)
        return lowest_key is None or message.identity >= lowest_key

    def _store_message(self, message: TypedMessage) -> None:
        messages = self._stored.setdefault(message.kind, {})
        # A number distinguishes messages without a key. Of two messages with one key, the first stays.
        key = message.identity if message.key else next(self._numbers)
        # Without the limit, a program that never takes a kind of message would silently fill the memory.
        if len(messages) >= self._limit:
            raise MailboxFullError(
                f"{self._limit} messages '{message.kind}' wait to be taken: the limit is reached"
            )
        messages.setdefault(key, message)


def _kind_names(kinds: Kinds[Any]) -> tuple[str, ...]:
    if isinstance(kinds, tuple):
        return tuple(kind.kind for kind in kinds)
    return (kinds.kind,)


async def _wait_for(future: asyncio.Future[T], seconds: float | None) -> T | None:
    """Return a future's result, or None after ``seconds``."""
    if seconds is None:
        return await future
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await future
    except TimeoutError:
        # The result may have arrived in the same turn of the loop as the time-out, and must not be lost.
        if future.done() and not future.cancelled():
            return future.result()
        return None
