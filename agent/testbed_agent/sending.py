"""Reliable, ordered delivery to one peer: messages follow each other without waiting for acknowledgements.

They are HTTP requests on one connection that is kept, in the program's event loop; answers come back in their order.
Neither ``requests`` nor ``socket.sendall`` will do between emulated devices: a time-out there limits a whole message,
and a slow link must not be cut off while bytes still get through. Here the kernel is set to give up
(``TCP_USER_TIMEOUT``) when nothing it sent was acknowledged for a while, however long the message takes as a whole.
And a thread for each peer costs four wake-ups a message where this costs one, half a millisecond on a small host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from testbed.wire.framing import WINDOW
from testbed_agent.settings import Address

_LOG = logging.getLogger(__name__)

CONNECT_SECONDS = 1.5
CONNECT_SECONDS_MOST = 3.0
"""The kernel repeats a lost SYN after one second and again after two: a healed link is found within two seconds."""
STALL_SECONDS = 2.0
STALL_SECONDS_MOST = 30.0
"""Grows when an established connection stalls, so that a link that a fault made very slow works in the end."""
QUIET_SECONDS = 0.05
"""Without an answer for so long after everything has left, the kernel is set to ask whether the peer is there."""
UNSENT_BYTES = 128 << 10
"""What the kernel takes beyond what the link lets it send: more would still leave after it was withdrawn."""
_TCP_NOTSENT_LOWAT = 25
_ANSWER_LIMIT = 1 << 16
_MOST_PIECES = 256
"""Pieces in one system call; the kernel takes up to 1024."""

Answer = tuple[int, bytes]
"""Status and text."""
BACKOFF_SECONDS = 0.01
BACKOFF_SECONDS_MOST = 0.25
AT_ONCE = 1 << 20
"""Bytes offered to the kernel in one call, where as many wait."""
_COME_BACK = 503


class ConnectionLost(Exception):  # noqa: N818 - a state of the link
    """Nothing can be said about whether the unanswered messages arrived."""

    def __init__(self, reason: str, stale: bool = False) -> None:
        super().__init__(reason)
        self.stale = stale
        """A connection that has served before: worth trying again at once."""


class Connection:
    """Requests to one address. What is written and not answered when it breaks has to be written again."""

    def __init__(self, address: Address, path: str, token: str, slowness: float = 0.0) -> None:
        """``slowness`` is what a few packets there and back take on this link as it is now, in seconds."""
        self._address = address
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {token}\r\n"
        self._socket: socket.socket | None = None
        self._used = False
        """Whether it has brought an answer."""
        self._asking = False
        """Whether the kernel asks if the peer is there."""
        self._received = b""
        self._ready: asyncio.Future[bool] | None = None
        """What `wait` waits for."""
        self._slowness = slowness
        self._connect_seconds = CONNECT_SECONDS + slowness
        self._stall_seconds = STALL_SECONDS + slowness

    def set_slowness(self, slowness: float) -> None:
        """Wait for a link that has become slower or quicker as long as it now takes.

        A connection that is up waits longer at once, and shorter from its next answer on: what left before the link
        became quicker still takes its time.
        """
        self._slowness = slowness
        self._connect_seconds = CONNECT_SECONDS + slowness
        self._set_stall_seconds(max(self._stall_seconds, STALL_SECONDS + slowness))

    def _set_stall_seconds(self, seconds: float) -> None:
        if seconds != self._stall_seconds:
            self._stall_seconds = seconds
            if self._socket is not None:
                self._limit_stall(self._socket)

    def _limit_stall(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._stall_seconds * 1000))

    async def open(self) -> None:
        """Connect, unless there is a connection that the peer has kept.

        Raises ConnectionLost when it could not be had, or was closed by the peer meanwhile.
        """
        if self._socket is None:
            await self._connect()
        self._check_kept()

    def _check_kept(self) -> None:
        with self._in_use() as link, contextlib.suppress(BlockingIOError):
            link.recv(1, socket.MSG_PEEK)
            raise ConnectionResetError("the peer had closed the connection")

    def head(self, body: bytes) -> bytes:
        """Return what comes before a body."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode()

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Hand over as much as the kernel takes now; return how many bytes that were. Raises `ConnectionLost`."""
        with self._in_use() as link, contextlib.suppress(BlockingIOError):
            return link.sendmsg(pieces[:_MOST_PIECES])
        return 0

    async def wait(self, writing: bool) -> None:
        """Wait for an answer, for `wake` or, when ``writing``, until the kernel takes more."""
        assert self._socket is not None
        loop, link = asyncio.get_running_loop(), self._socket
        self._ready = loop.create_future()
        timer = None if writing or self._asking else loop.call_later(QUIET_SECONDS, self._settle, False)
        if writing:
            loop.add_writer(link, self._settle, True)
        try:
            if not await self._ready:
                # Nothing of ours is under way that could show that the peer is gone.
                self._ask(True)
        finally:
            self._ready = None
            if timer is not None:
                timer.cancel()
            if writing:
                loop.remove_writer(link)

    def wake(self) -> None:
        """Let the waiting task look for something else to do."""
        self._settle(True)

    def _readable(self) -> None:
        if self._ready is not None:
            self._settle(True)
        else:  # nothing is asked: the peer has closed the connection, unless what came is read already
            with contextlib.suppress(ConnectionLost):
                self._check_kept()

    def _settle(self, value: bool) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(value)

    def read(self) -> list[Answer]:
        """Return the answers that are there, in the order of the requests. Raises `ConnectionLost`."""
        answers: list[Answer] = []
        with self._in_use() as link:
            with contextlib.suppress(BlockingIOError):
                piece = link.recv(_ANSWER_LIMIT)
                if not piece:
                    raise ConnectionResetError("the peer closed the connection instead of answering")
                self._received += piece
            while (parsed := _parse(self._received)) is not None:
                answer, self._received = parsed
                answers.append(answer)
            if len(self._received) > _ANSWER_LIMIT:
                raise ConnectionResetError("the peer's answer has no end")
        if answers:
            self._used = True
            self._set_stall_seconds(STALL_SECONDS + self._slowness)
            self._ask(False)
        return answers

    def close(self) -> None:
        """Let go of the connection; the kernel still sends what it has."""
        link, self._socket = self._socket, None
        if link is not None:
            asyncio.get_running_loop().remove_reader(link)
            link.close()

    def abort(self) -> None:
        """Break the connection off: the kernel drops what it has not sent, and notifies the peer."""
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[socket.socket]:
        """Yield the socket; close it when the kernel reports an error of it."""
        assert self._socket is not None
        try:
            yield self._socket
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                self._stall_seconds = min(2 * self._stall_seconds, STALL_SECONDS_MOST + self._slowness)
            raise ConnectionLost(f"lost the connection: {error!r}", stale=self._used) from error

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._limit_stall(link)
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await loop.sock_connect(link, self._address)
        except OSError as error:
            link.close()
            if isinstance(error, TimeoutError):
                self._connect_seconds = min(2 * self._connect_seconds, CONNECT_SECONDS_MOST + self._slowness)
            raise ConnectionLost(f"cannot connect: {error!r}") from error
        except BaseException:
            link.close()
            raise
        self._connect_seconds = CONNECT_SECONDS + self._slowness
        loop.add_reader(link, self._readable)
        self._socket, self._received = link, b""
        self._used = self._asking = False

    def _ask(self, asking: bool) -> None:
        """Have the kernel ask the peer, while nothing else is under way, whether it is there."""
        if asking != self._asking and self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(asking))
            self._asking = asking


def _parse(received: bytes) -> tuple[Answer, bytes] | None:
    """Return the first answer and what comes after it, or None while something of it is missing.

    Reads what the agent's own server writes: a known length, no chunks.
    """
    head, separator, text = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    status, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    try:
        length, number = int(headers.get(b"content-length", b"0")), int(status.split()[1])
    except (ValueError, IndexError):
        raise ConnectionResetError("the peer answered something that is not HTTP") from None
    if len(text) < length:
        return None
    return (number, text[:length]), text[length:]


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
        self._problem = "not connected yet"
        """Why the connection broke last; empty since an acknowledgement."""
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

    def set_slowness(self, slowness: float) -> None:
        """Have time-outs allow for what a few packets there and back take from now on, in seconds."""
        self._connection.set_slowness(slowness)

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
                    self._log_problem(str(lost))
                    self._start_over()
                    if not lost.stale:
                        await asyncio.sleep(self._backoff)
                        self._backoff = min(2 * self._backoff, BACKOFF_SECONDS_MOST)
        except Exception as error:
            _LOG.exception("sending to %s ended", self.peer)
            for each in self._messages:
                if not each.delivered.done():
                    each.delivered.set_exception(error)
            raise

    def _log_problem(self, problem: str) -> None:
        """Log why the connection broke, once for attempts in a row that fail alike."""
        if problem != self._problem:
            _LOG.info("%s: %s; trying again", self.peer, problem)
        self._problem = problem

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
            _LOG.warning("%s refused a message: %s", self.peer, _reason(status, text))
            if not rejected.delivered.done():
                rejected.delivered.set_exception(Rejected(f"{self.peer} refused a message: {_reason(status, text)}"))
        if status >= 300 or not self._written:
            self._connection.abort()
            raise ConnectionLost("the peer refused a message", stale=status != _COME_BACK)
        acknowledged = self._messages.popleft()
        self._written -= 1
        self._unacknowledged -= len(acknowledged.body)
        self._backoff = BACKOFF_SECONDS
        if self._problem:
            _LOG.info("%s: connected", self.peer)
            self._problem = ""
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("%s: acknowledged %d bytes", self.peer, len(acknowledged.body))
        if not acknowledged.delivered.done():
            acknowledged.delivered.set_result(Delivery(acknowledged.begun, time.monotonic()))


def _reason(status: int, text: bytes) -> str:
    try:
        return f"{json.loads(text)['error']} ({status})"
    except (ValueError, KeyError, TypeError):
        return str(status)
