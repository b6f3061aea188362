"""Tasks beside a program's main one, and messages that are sent by them while nobody waits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from testbed.device import Device
from testbed.network.link import Link, Pair
from testbed.wire.message import Message, size

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
