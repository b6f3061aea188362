"""Reliable, ordered delivery to one peer: messages follow each other without waiting for acknowledgements.

Messages are HTTP requests on one persistent connection in the program's event loop; responses arrive in order. Neither
``requests`` nor ``socket.sendall`` suits emulated devices: their time-outs limit a whole message, but a slow link must
not be cut off while bytes still get through. Here the kernel gives up (``TCP_USER_TIMEOUT``) when TCP has not
acknowledged its data for a while, however long the message takes as a whole. With a thread for each peer, each message
would need four wake-ups of threads instead of one, which takes half a millisecond on a small host.

The acknowledgement of a message is its HTTP response. The acknowledgements of bytes, between kernels, are called TCP's.
A `Lane` orders the messages to one peer and repeats them after a break; a `Connection` transfers their bytes.
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
"""Time-out of an attempt to connect, in seconds; doubled after each attempt that timed out, up to the maximum."""
CONNECT_SECONDS_MOST = 3.0
"""Maximum time-out of an attempt to connect, in seconds. The kernel repeats a lost SYN after one second and again after
two, so a healed link is detected within two seconds."""
STALL_SECONDS = 2.0
"""Seconds without an acknowledgement of TCP for sent data or for a keepalive probe, after which the kernel gives up the
connection and the sender reconnects."""
STALL_SECONDS_MOST = 30.0
"""Maximum of the time-out that begins with `STALL_SECONDS`, in seconds. The time-out is doubled when a connection
stalls, so that a link slowed down by a fault works in the end."""
QUIET_SECONDS = 0.05
"""Time without a response after all messages were written, in seconds, before keepalive is enabled."""
UNSENT_BYTES = 128 << 10
"""Limit of the data in the kernel's buffer that has not been sent, in bytes (128 KiB). The kernel would send a larger
amount even after the message is withdrawn."""
_TCP_NOTSENT_LOWAT = 25
"""Constant of linux/tcp.h, which Python's `socket` lacks."""
_RESPONSE_LIMIT = 1 << 16
"""Maximum size of a response in bytes, since another program on the port might send without end."""
_MOST_PIECES = 256
"""Maximum number of buffers in one system call; the kernel refuses more than 1024 (UIO_MAXIOV)."""

Response = tuple[int, bytes]
"""Status and body of an HTTP response."""
BACKOFF_SECONDS = 0.01
"""Pause after a refused connection, in seconds; doubled up to the maximum."""
BACKOFF_SECONDS_MOST = 0.25
"""Maximum pause after a refused connection, in seconds."""
AT_ONCE = 1 << 20
"""Bytes (1 MiB) after which no further message is collected for one call, since the kernel accepts only what fits into
its buffer, and the rest is collected again for the next call."""
_RETRY_LATER = 503
"""Status of a receiver whose queue is full."""


class ConnectionLost(Exception):  # noqa: N818 - a state of the link
    """The connection broke, and the arrival of unacknowledged messages is unknown."""

    def __init__(self, reason: str, *, retry_at_once: bool = False) -> None:
        super().__init__(reason)
        self.retry_at_once = retry_at_once
        """Whether the next attempt need not wait, since the loss does not mean that the peer is unreachable."""


class Connection:
    """An HTTP connection to one address; after a break, requests without a response must be written again.

    Example::

        connection = Connection(("10.0.0.2", 8701), "/messages", token)
        await connection.open()
        connection.write([connection.request_head(body), body])
        await connection.wait(writing=False)
        [(status, text)] = connection.read()
    """

    def __init__(
        self, address: Address, path: str, token: str, slowness: float = 0.0
    ) -> None:
        """``slowness`` extends all time-outs: an upper bound of the round-trip time of a few packets, in seconds.

        The bound is computed from the properties of the link (`testbed.network.link.slowness`).
        """
        self._address = address
        host, port = address
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Authorization: Bearer {token}\r\n"
        )
        self._socket: socket.socket | None = None
        self._used = False
        """Whether a response has arrived on the connection."""
        self._keepalive = False
        """Whether the kernel probes the peer (keepalive)."""
        self._received = b""
        """Bytes of the first incomplete response."""
        self._ready: asyncio.Future[bool] | None = None
        """The future awaited by `wait`."""
        self._slowness = slowness
        self._connect_seconds = CONNECT_SECONDS + slowness
        """Time-out of the next attempt to connect."""
        self._stall_seconds = STALL_SECONDS + slowness
        """Time without an acknowledgement of TCP after which the kernel gives up the connection."""

    def set_slowness(self, slowness: float) -> None:
        """Adapt all time-outs to a slower or faster link.

        The time-out of an open connection grows at once but shrinks only with the next response, since data sent
        earlier still takes the old time.
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
        link.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            round(self._stall_seconds * 1000),
        )

    async def open(self) -> None:
        """Connect, or check that the peer has kept the existing connection.

        Raises ConnectionLost if connecting fails or the peer has closed the connection.
        """
        if self._socket is None:
            await self._connect()
        self._check_kept()

    def _check_kept(self) -> None:
        # Between requests a peer sends nothing, so readable data is an error of the peer or the end of the stream.
        with self._in_use() as link, contextlib.suppress(BlockingIOError):
            link.recv(1, socket.MSG_PEEK)
            raise ConnectionResetError("the peer has closed the idle connection")

    def request_head(self, body: bytes) -> bytes:
        """Return the request line and headers for a body."""
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode()

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write as many bytes as the kernel accepts without waiting; return the number. Raises `ConnectionLost`."""
        with self._in_use() as link, contextlib.suppress(BlockingIOError):
            return link.sendmsg(pieces[:_MOST_PIECES])
        return 0

    async def wait(self, *, writing: bool) -> None:
        """Wait for a response, for `wake` or, if ``writing``, for room in the kernel's buffer."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        link = self._socket
        self._ready = loop.create_future()
        timer = None
        if not writing and not self._keepalive:
            timer = loop.call_later(QUIET_SECONDS, self._report_silence)
        if writing:
            loop.add_writer(link, self.wake)
        try:
            has_news = await self._ready
            if not has_news:
                # The kernel detects a dead peer by data that TCP has not acknowledged. After all data has been
                # acknowledged, which it usually is by now, only keepalive can detect it.
                self._set_keepalive(enabled=True)
        finally:
            self._ready = None
            if timer is not None:
                timer.cancel()
            if writing:
                loop.remove_writer(link)

    def wake(self) -> None:
        """Make the waiting task check for other work."""
        self._end_wait(has_news=True)

    def _report_silence(self) -> None:
        self._end_wait(has_news=False)

    def _readable(self) -> None:
        if self._ready is not None:
            self.wake()
        else:
            # No request is pending: the peer has closed the connection, or the data was read already.
            with contextlib.suppress(ConnectionLost):
                self._check_kept()

    def _end_wait(self, *, has_news: bool) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(has_news)

    def read(self) -> list[Response]:
        """Return the received responses, in the order of the requests. Raises `ConnectionLost`."""
        responses: list[Response] = []
        with self._in_use() as link:
            with contextlib.suppress(BlockingIOError):
                piece = link.recv(_RESPONSE_LIMIT)
                if not piece:
                    raise ConnectionResetError(
                        "the peer closed the connection instead of answering"
                    )
                self._received += piece
            parsed = _parse_response(self._received)
            while parsed is not None:
                response, self._received = parsed
                responses.append(response)
                parsed = _parse_response(self._received)
            if len(self._received) > _RESPONSE_LIMIT:
                raise ConnectionResetError("the peer's response exceeds the size limit")
        if responses:
            self._used = True
            self._set_stall_seconds(STALL_SECONDS + self._slowness)
            self._set_keepalive(enabled=False)
        return responses

    def close(self) -> None:
        """Close the socket; buffered data is still sent."""
        link = self._socket
        self._socket = None
        if link is not None:
            # The descriptor may be reused at once for another file, which the loop would then watch.
            asyncio.get_running_loop().remove_reader(link)
            link.close()

    def abort(self) -> None:
        """Reset the connection: the kernel drops unsent data and notifies the peer."""
        if self._socket is not None:
            # Lingering for 0 s turns the close into a reset.
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[socket.socket]:
        """Yield the socket; close it and raise `ConnectionLost` on a kernel error."""
        assert self._socket is not None
        try:
            yield self._socket
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                # The link may be slower than assumed rather than dead: allow more time at the next attempt.
                self._stall_seconds = min(
                    2 * self._stall_seconds, STALL_SECONDS_MOST + self._slowness
                )
            raise ConnectionLost(
                f"lost the connection: {error!r}", retry_at_once=self._used
            ) from error

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # The last, short segment of a message must not wait for the acknowledgement of those before.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._limit_stall(link)
        # Once enabled, keepalive probes the peer after each second of silence. The time-out of `_limit_stall` decides
        # when the peer is dead; with it, the kernel ignores the number of probes (TCP_KEEPCNT).
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await loop.sock_connect(link, self._address)
        except OSError as error:
            # Includes the TimeoutError of `asyncio.timeout`, which is an OSError.
            link.close()
            if isinstance(error, TimeoutError):
                self._connect_seconds = min(
                    2 * self._connect_seconds, CONNECT_SECONDS_MOST + self._slowness
                )
            raise ConnectionLost(f"cannot connect: {error!r}") from error
        except BaseException:
            # A cancellation would otherwise leave the socket to the garbage collector.
            link.close()
            raise
        self._connect_seconds = CONNECT_SECONDS + self._slowness
        loop.add_reader(link, self._readable)
        self._socket = link
        self._received = b""
        self._used = False
        self._keepalive = False

    def _set_keepalive(self, *, enabled: bool) -> None:
        """Let the kernel probe the peer while no other data is in transit."""
        if enabled != self._keepalive and self._socket is not None:
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(enabled)
            )
            self._keepalive = enabled


def _parse_response(received: bytes) -> tuple[Response, bytes] | None:
    """Split off the first response; return the response and the remaining bytes, None while it is incomplete.

    The agent's own server always sends a Content-Length and no chunks.
    """
    head, separator, text = received.partition(b"\r\n\r\n")
    if not separator:
        return None
    status, *lines = head.split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    try:
        length = int(headers.get(b"content-length", b"0"))
        number = int(status.split()[1])
    except (ValueError, IndexError):
        raise ConnectionResetError("the peer's response is not HTTP") from None
    if len(text) < length:
        return None
    return (number, text[:length]), text[length:]


class Rejected(Exception):  # noqa: N818 - an action of the peer
    """Raised if the peer refuses a message finally, so that a repetition is useless."""


@dataclass(frozen=True)
class Delivery:
    """The times of an acknowledged message."""

    first_byte: float
    """Monotonic instant at which the first byte left."""
    acknowledged: float
    """Monotonic instant of the acknowledgement."""


# Compared by identity: messages with the same bytes are different messages, and only one of them may be withdrawn.
@dataclass(eq=False)
class _Outgoing:
    """One unacknowledged message."""

    head: bytes
    """Request line and headers."""
    body: bytes
    not_before: float
    """Monotonic instant before which the message must not leave."""
    delivered: asyncio.Future[Delivery] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done with the acknowledgement or a final refusal; cancelled for a withdrawn message."""
    first_byte: float = 0.0
    """Monotonic instant at which the first byte left; 0 before."""

    @property
    def size(self) -> int:
        return len(self.head) + len(self.body)


class Lane:
    """The ordered delivery of messages to one peer, with at most `WINDOW` unacknowledged bytes plus one message.

    After a broken connection, all unacknowledged messages are sent again in order; the receiver drops duplicates. A
    refusal also ends the connection, so no message overtakes a refused one. Example::

        lane = Lane("worker1", ("10.0.0.2", 8701), token)
        delivery = await lane.deliver(body)
    """

    def __init__(
        self, peer: str, address: Address, token: str, slowness: float = 0.0
    ) -> None:
        self.peer = peer
        self._connection = Connection(address, "/messages", token, slowness)
        self._messages: deque[_Outgoing] = deque()
        """Unacknowledged messages; those written to the connection come first."""
        self._written = 0
        """Number of messages written completely to the connection."""
        self._offset = 0
        """Number of bytes written of the next message."""
        self._unacknowledged = 0
        """Bytes in the bodies of unacknowledged messages of which at least one byte was written to this connection."""
        self._must_reconnect = False
        """Whether a partially written message was withdrawn."""
        self._backoff = BACKOFF_SECONDS
        """Pause before the next attempt after a broken connection, in seconds."""
        self._problem = "not connected yet"
        """Reason of the last broken connection, for the log; empty from an acknowledgement on. The initial text makes
        the first acknowledgement log that the peer is connected."""
        self._sending: asyncio.Task[None] | None = None
        """The task that sends all messages; done or None on an idle lane."""

    @property
    def waiting(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._messages)

    async def deliver(self, body: bytes, not_before: float = 0.0) -> Delivery:
        """Send until the peer acknowledges, but not before the monotonic instant ``not_before``.

        Cancellation withdraws the message unless the kernel has all of it. Raises Rejected if the peer refuses the
        message for good.
        """
        outgoing = _Outgoing(self._connection.request_head(body), body, not_before)
        self._messages.append(outgoing)
        # The task ends with the last message: an idle lane costs neither a task nor a wake-up.
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        else:
            self._connection.wake()
        try:
            return await outgoing.delivered
        except asyncio.CancelledError:
            self._withdraw_message(outgoing)
            raise

    def set_slowness(self, slowness: float) -> None:
        """Extend all time-outs by ``slowness`` seconds from now on; see `Connection`."""
        self._connection.set_slowness(slowness)

    def close(self) -> None:
        """Close the connection and abandon all messages."""
        if self._sending is None or self._sending.done():
            self._connection.close()
        else:
            # The task still waits for events of the socket, so the socket is closed after the task's end.
            self._sending.add_done_callback(lambda _: self._connection.close())
            self._sending.cancel()

    def _withdraw_message(self, outgoing: _Outgoing) -> None:
        if outgoing not in self._messages:
            return
        index = self._messages.index(outgoing)
        if index < self._written:
            return  # already sent; the response is ignored
        if index == self._written and self._offset:
            # The peer waits for the rest of the announced body, so only a new connection can begin another message.
            # The message keeps its position until then; `_start_over` drops it.
            self._must_reconnect = True
        else:
            self._messages.remove(outgoing)
        self._connection.wake()

    def _start_over(self) -> None:
        """Reset the state of the connection, and drop withdrawn messages."""
        remaining: deque[_Outgoing] = deque()
        for message in self._messages:
            if not message.delivered.done():
                remaining.append(message)
        self._messages = remaining
        self._written = 0
        self._offset = 0
        self._unacknowledged = 0
        self._must_reconnect = False

    async def _send_all(self) -> None:
        """Send until every message is acknowledged or withdrawn."""
        try:
            while self._messages:
                try:
                    await self._connection.open()
                    await self._exchange_messages()
                except ConnectionLost as lost:
                    self._log_problem(str(lost))
                    self._start_over()
                    if not lost.retry_at_once:
                        await asyncio.sleep(self._backoff)
                        self._backoff = min(2 * self._backoff, BACKOFF_SECONDS_MOST)
        except Exception as error:
            # The testbed has a defect. The error must reach the programs, which would otherwise wait for ever.
            _LOG.exception("sending to %s failed", self.peer)
            for message in self._messages:
                if not message.delivered.done():
                    message.delivered.set_exception(error)
            raise

    def _log_problem(self, problem: str) -> None:
        """Log the reason of a broken connection, once for consecutive equal reasons."""
        if problem != self._problem:
            _LOG.info("%s: %s; trying again", self.peer, problem)
        self._problem = problem

    async def _exchange_messages(self) -> None:
        """Write messages and read responses until no message is left; raises `ConnectionLost`."""
        loop = asyncio.get_running_loop()
        while self._messages:
            writing, next_due = self._write_due()
            timer = None
            if next_due is not None:
                timer = loop.call_at(next_due, self._connection.wake)
            try:
                await self._connection.wait(writing=writing)
            finally:
                if timer is not None:
                    timer.cancel()
            if self._must_reconnect:
                self._connection.abort()
                raise ConnectionLost(
                    "a partially sent message was withdrawn", retry_at_once=True
                )
            for response in self._connection.read():
                self._handle_response(response)

    def _write_due(self) -> tuple[bool, float | None]:
        """Write all due messages.

        Returns whether the kernel's buffer is full, and the instant at which the next message is due: None if no
        message waits for its time, or if the buffer is full.
        """
        while True:
            pieces, next_due = self._collect_due()
            if not pieces:
                return False, next_due
            written = self._connection.write(pieces)
            if not written:
                return True, None
            self._advance_position(written)

    def _collect_due(self) -> tuple[list[bytes | memoryview], float | None]:
        """Return the due pieces for one call, and the instant at which the next message is due.

        The instant is None if no message waits for its time. Without pieces, nothing is due, or the window is full.
        """
        now = time.monotonic()
        offset = self._offset
        room = WINDOW - self._unacknowledged
        total = 0
        pieces: list[bytes | memoryview] = []
        for index in range(self._written, len(self._messages)):
            outgoing = self._messages[index]
            # The rest of a partially written message is not subject to the window and to `not_before`.
            if not offset:
                if room <= 0:
                    break
                if outgoing.not_before > now:
                    return pieces, outgoing.not_before
                room -= len(outgoing.body)
            head_size = len(outgoing.head)
            if offset >= head_size:
                # A view: slicing bytes would copy the rest of a large message at each call.
                pieces.append(memoryview(outgoing.body)[offset - head_size :])
            else:
                pieces += [outgoing.head[offset:], outgoing.body]
            total += outgoing.size - offset
            offset = 0
            if total >= AT_ONCE:
                break
        return pieces, None

    def _advance_position(self, written: int) -> None:
        """Account for ``written`` bytes accepted by the kernel."""
        while written:
            outgoing = self._messages[self._written]
            if not self._offset:
                self._unacknowledged += len(outgoing.body)
                # A message that is sent again keeps the instant at which it first left.
                outgoing.first_byte = outgoing.first_byte or time.monotonic()
            step = min(written, outgoing.size - self._offset)
            written -= step
            self._offset += step
            if self._offset == outgoing.size:
                self._written += 1
                self._offset = 0

    def _handle_response(self, response: Response) -> None:
        """Apply the peer's response to the first unacknowledged message."""
        status, text = response
        is_final = status != _RETRY_LATER
        is_refusal = status >= 300
        if is_refusal and is_final and self._messages:
            rejected = self._messages.popleft()
            reason = f"{self.peer} refused a message: {_explain_refusal(status, text)}"
            _LOG.warning("%s", reason)
            if not rejected.delivered.done():
                rejected.delivered.set_exception(Rejected(reason))
        is_premature = not self._written
        # The peer reads nothing after a refusal, and a response to a message that was not written completely cannot be
        # an acknowledgement. In both cases later messages must go over a new connection.
        if is_refusal or is_premature:
            self._connection.abort()
            raise ConnectionLost("the peer refused a message", retry_at_once=is_final)
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
            acknowledged.delivered.set_result(
                Delivery(acknowledged.first_byte, time.monotonic())
            )


def _explain_refusal(status: int, text: bytes) -> str:
    try:
        return f"{json.loads(text)['error']} ({status})"
    except (ValueError, KeyError, TypeError):
        return str(status)
