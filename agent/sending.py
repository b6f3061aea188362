"""Reliable, ordered delivery to one peer: messages follow each other without waiting for acknowledgements."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass, field

from agent.connection import Answer, Connection, ConnectionLost
from agent.settings import Address
from testbed.wire.framing import WINDOW

BACKOFF_SECONDS = 0.01
BACKOFF_SECONDS_MOST = 0.25
AT_ONCE = 1 << 20
"""Bytes offered to the kernel in one call, where as many wait."""
_COME_BACK = 503


class Rejected(Exception):  # noqa: N818 - what the peer did
    """The peer will not take this message however often it is sent."""


@dataclass(frozen=True)
class Delivery:
    """When a message began to leave for the first time and when it was acknowledged, as monotonic instants."""

    begun: float
    ended: float


@dataclass(eq=False)
class _Outgoing:
    """One message that is not acknowledged."""

    head: bytes
    body: bytes
    not_before: float
    delivered: asyncio.Future[Delivery] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: float = 0.0
    """0 before its first byte has left."""

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


class Lane:
    """The way to one peer, in the order of the calls; at most `WINDOW` bytes, and one message, are unacknowledged.

    When the connection breaks, all that is unacknowledged is sent again in its order: the receiver drops what it has.
    A refusal ends the connection as well, so nothing overtakes what was refused.
    """

    def __init__(self, peer: str, address: Address, token: str, slowness: float = 0.0) -> None:
        self.peer = peer
        self._connection = Connection(address, "/messages", token, slowness)
        self._messages: deque[_Outgoing] = deque()
        """Not acknowledged; first those that this connection has, as far as it took them."""
        self._written = 0
        """How many of the messages the connection has entirely."""
        self._offset = 0
        """Bytes that it has of the next one."""
        self._unacknowledged = 0
        """Bytes of the messages that have begun to leave on this connection."""
        self._broken_off = False
        """Whether a message was withdrawn of which the connection has a part."""
        self._backoff = BACKOFF_SECONDS
        self._sending: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Messages under way or behind one that is."""
        return len(self._messages)

    async def deliver(self, body: bytes, not_before: float = 0.0) -> Delivery:
        """Send until the peer has acknowledged, and nothing before the monotonic instant ``not_before``.

        When this is cancelled, the message is withdrawn unless the kernel has all of it. Raises Rejected when the peer
        refuses the message for good.
        """
        outgoing = _Outgoing(self._connection.head(body), body, not_before)
        self._messages.append(outgoing)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        else:
            self._connection.wake()
        try:
            return await outgoing.delivered
        except asyncio.CancelledError:
            self._withdraw(outgoing)
            raise

    def close(self) -> None:
        """Let go of the connection, and of what is under way."""
        if self._sending is None or self._sending.done():
            self._connection.close()
        else:
            self._sending.add_done_callback(lambda _: self._connection.close())
            self._sending.cancel()

    def _withdraw(self, outgoing: _Outgoing) -> None:
        if outgoing not in self._messages:
            return
        place = self._messages.index(outgoing)
        if place < self._written:
            return  # it arrives; nobody waits for the answer
        if place == self._written and self._offset:
            self._broken_off = True
        else:
            self._messages.remove(outgoing)
        self._connection.wake()

    def _start_over(self) -> None:
        """Forget what the connection has; what was withdrawn is not sent again."""
        self._messages = deque(each for each in self._messages if not each.delivered.done())
        self._written = self._offset = self._unacknowledged = 0
        self._broken_off = False

    async def _send(self) -> None:
        """Send until everything is acknowledged or withdrawn."""
        try:
            while self._messages:
                try:
                    await self._connection.open()
                    await self._converse()
                except ConnectionLost as lost:
                    self._start_over()
                    if not lost.stale:
                        await asyncio.sleep(self._backoff)
                        self._backoff = min(2 * self._backoff, BACKOFF_SECONDS_MOST)
        except Exception as error:
            for each in self._messages:
                if not each.delivered.done():
                    each.delivered.set_exception(error)
            raise

    async def _converse(self) -> None:
        """Write and read answers until nothing is left; raise `ConnectionLost` where that cannot go on."""
        loop = asyncio.get_running_loop()
        while self._messages:
            writing, early = self._write()
            timer = None if early is None else loop.call_at(early, self._connection.wake)
            try:
                await self._connection.wait(writing)
            finally:
                if timer is not None:
                    timer.cancel()
            if self._broken_off:
                self._connection.abort()
                raise ConnectionLost("a message was withdrawn half sent", stale=True)
            for answer in self._connection.read():
                self._take(answer)

    def _write(self) -> tuple[bool, float | None]:
        """Hand the connection what may leave now.

        Returns whether more may leave as soon as the kernel takes it, and the instant at which the next message may.
        """
        while True:
            pieces, early = self._due()
            if not pieces:
                return False, early
            taken = self._connection.write(pieces)
            if not taken:
                return True, None
            self._advance(taken)

    def _due(self) -> tuple[list[bytes | memoryview], float | None]:
        """Return what may leave now, as far as it goes in one call, and when the next message may if that is later."""
        now, offset, room, total = time.monotonic(), self._offset, WINDOW - self._unacknowledged, 0
        pieces: list[bytes | memoryview] = []
        for index in range(self._written, len(self._messages)):
            outgoing = self._messages[index]
            if not offset:
                if room <= 0:
                    break
                if outgoing.not_before > now:
                    return pieces, outgoing.not_before
                room -= len(outgoing.body)
            head = len(outgoing.head)
            pieces += (
                [memoryview(outgoing.body)[offset - head :]]
                if offset >= head
                else [outgoing.head[offset:], outgoing.body]
            )
            total += outgoing.size - offset
            offset = 0
            if total >= AT_ONCE:
                break
        return pieces, None

    def _advance(self, taken: int) -> None:
        """Note that the kernel took this many more bytes."""
        while taken:
            outgoing = self._messages[self._written]
            if not self._offset:
                self._unacknowledged += len(outgoing.body)
                outgoing.begun = outgoing.begun or time.monotonic()
            step = min(taken, outgoing.size - self._offset)
            taken -= step
            self._offset += step
            if self._offset == outgoing.size:
                self._written += 1
                self._offset = 0

    def _take(self, answer: Answer) -> None:
        """Take note of what the peer says of the first message."""
        status, text = answer
        if status >= 300 and self._messages and status != _COME_BACK:
            rejected = self._messages.popleft()
            if not rejected.delivered.done():
                rejected.delivered.set_exception(Rejected(f"{self.peer} refused a message: {_reason(status, text)}"))
        if status >= 300 or not self._written:
            self._connection.abort()
            raise ConnectionLost("the peer refused a message", stale=status != _COME_BACK)
        acknowledged = self._messages.popleft()
        self._written -= 1
        self._unacknowledged -= len(acknowledged.body)
        self._backoff = BACKOFF_SECONDS
        if not acknowledged.delivered.done():
            acknowledged.delivered.set_result(Delivery(acknowledged.begun, time.monotonic()))


def _reason(status: int, text: bytes) -> str:
    try:
        return f"{json.loads(text)['error']} ({status})"
    except (ValueError, KeyError, TypeError):
        return str(status)
