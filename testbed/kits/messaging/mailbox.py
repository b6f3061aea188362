"""How a program posts messages and waits for messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from testbed.device import Device
from testbed.kits.messaging.sends import MailboxFullError, Sends, Tasks
from testbed.kits.messaging.transfer import Codec, packed, unpacked
from testbed.kits.messaging.typed import Typed, decode, encode
from testbed.network.link import Link, Pair
from testbed.wire.message import Message, WireError

K = TypeVar("K", bound=Typed)
T = TypeVar("T")
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
        codecs: Mapping[str, Codec] = {},
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
        listen = getattr(self.device, "listen", None)
        if listen is not None:  # the virtual clock's: quicker, since no task is woken for each message
            await listen(self._take_in)
        while True:
            self._take_in(await self.device.receive())

    def _take_in(self, message: Message) -> None:
        kind = self._kinds.get(message.kind)
        if kind is None:
            raise WireError(f"{message.sender} sent '{message.kind}', which this method does not know")
        codec = self._codecs.get(message.kind)
        self._deliver(decode(kind, message if codec is None else unpacked(message, codec)))

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
            return self.sends.post(peer, encode(message) if codec is None else packed(encode(message), codec))
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
            else:
                self._hand_over(message)
        news, self._news = self._news, []
        for waiting in news:
            if not waiting.done():
                waiting.set_result(True)

    def _hand_over(self, message: Typed) -> None:
        """Give a message to the first that waits for it, or keep it."""
        waiter = next((waiter for waiter in self._waiters if waiter.wants(message)), None)
        if waiter is not None:
            waiter.found.set_result(message)
        else:
            self._keep(message)

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
