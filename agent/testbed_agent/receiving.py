"""Reception of messages over the data network: each once and in order, into a bounded inbox.

The `DataServer` accepts a `_Connection` from each peer; a connection reads messages and puts an `Arrival` for each into
the `Inbox`. Messages are HTTP requests, which the program's event loop reads without further threads: every additional
thread would cost a wake-up and a wait for the interpreter's lock.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from testbed.common.lazy import asyncio
from testbed.wire.message import Envelope, WireError, decode
from testbed.wire.serving import LARGEST_HEAD, MOST_WAITING, STALLED_AFTER
from testbed_agent.http import Refused, announced_length
from testbed_agent.settings import Address, Settings

MAX_CONNECTIONS_OF_PEER = 2
"""Maximum number of connections of one sender, which uses only the newest."""
HANG_UP_SECONDS = 2.0
"""Time for a peer to read a refusal, in seconds: closing a connection with unread data discards the response."""
_WAKE_BYTES = 1 << 15
"""Bytes that the kernel gathers before it wakes up the loop, which would otherwise wake up for each packet: half of the
smallest TCP window, so that no sender has to wait."""
_READ_BYTES = 1 << 14
"""Bytes received in one call while the head of a message is incomplete."""
_ACCEPTED = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass(frozen=True)
class Arrival:
    """A completely received message."""

    envelope: Envelope
    size: int
    """Number of bytes reserved in the inbox until the program receives the message."""
    start: float
    """Monotonic instant of the first byte."""
    duration: float
    """Seconds from the first to the last byte."""
    decode: float
    """Seconds of decoding on the host."""
    cast: bool = False
    """Whether the message is a broadcast; the sequence number then counts the sender's broadcasts."""


class Inbox:
    """The gate for received messages: authenticates senders, drops duplicates and limits the memory of messages.

    Room is reserved before a body is read, so that many large messages cannot exhaust the device's memory together.

    >>> inbox = Inbox({"worker1": "token"}, limit=1000, deliver=print)
    >>> inbox.reserve(900), inbox.reserve(200)
    (True, False)
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        limit: int,
        deliver: Callable[[Arrival], None],
        largest: int = 1 << 30,
    ) -> None:
        """``peers`` maps each peer to a token for messages; ``largest`` is the maximum message size in bytes."""
        self.largest = largest
        self.arriving: dict[str, float] = {}
        """Monotonic instant of the last received bytes, for each sender with an incomplete message."""
        self._senders = {f"Bearer {token}": name for name, token in peers.items()}
        """Peers by the Authorization header of their requests."""
        self._limit = limit
        self._deliver = deliver
        # Reentrant, because `deliver` is called with the lock, and may call `release`.
        self._lock = threading.RLock()
        self._latest: dict[tuple[str, bool], tuple[int, int]] = {}
        """Newest (incarnation, sequence number) by (sender, whether for broadcasts), since broadcasts have their own
        sequence."""
        self.bytes = 0
        """Number of bytes reserved by arriving and waiting messages."""

    def authenticate(self, authorization: str) -> str:
        """Return the peer of an Authorization header; raises Refused (401) for an unknown token."""
        # A look-up by hash takes constant time, so the duration reveals nothing about a token.
        try:
            return self._senders[authorization]
        except KeyError:
            raise Refused(
                401, "send the token of this link as 'Authorization: Bearer <token>'"
            ) from None

    def reserve(self, size: int) -> bool:
        """Reserve room for a message before its body is read; return whether the message may be received.

        An empty inbox accepts a message of any size, since a message above the limit could otherwise never arrive.
        """
        with self._lock:
            if self.bytes and self.bytes + size > self._limit:
                return False
            self.bytes += size
            return True

    def release(self, size: int) -> None:
        """Free the room of a received or discarded message."""
        with self._lock:
            self.bytes -= size

    def put(self, arrival: Arrival) -> bool:
        """Deliver a message and return True, or return False for a duplicate or an outdated message.

        A sender's messages arrive in order, and again from the first unacknowledged one after a broken connection. A
        message with a number up to the newest was therefore either delivered or withdrawn by its sender. A restarted
        receiver continues at the sender's position.
        """
        sender = arrival.envelope.message.sender
        number = (arrival.envelope.incarnation, arrival.envelope.sequence)
        with self._lock:
            if number <= self._latest.get((sender, arrival.cast), (-1, -1)):
                return False
            self._latest[sender, arrival.cast] = number
            # Delivered with the lock, so that messages on two connections of a sender keep their order.
            self._deliver(arrival)
        return True


class DataServer:
    """The server of ``POST /messages`` on the data network, optimised for a minimum of work per request.

    Responses have the order of the requests. A refusal ends the connection, so that no later message is accepted before
    the refused one.
    """

    def __init__(self, settings: Settings) -> None:
        """Bind the listening socket; requests are answered only after `serve`."""
        self.slowness = 0.0
        """Round-trip time of a few packets to the slowest peer, in seconds; added to the time-out of silent
        connections."""
        self.inbox: Inbox | None = None
        """Inbox of the running program; without a program, senders have to retry."""
        self._listener = socket.create_server(settings.data, backlog=128)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unauthenticated: deque[_Connection] = deque()
        """Connections without an authenticated request, the oldest first."""
        self._by_sender: dict[str, deque[_Connection]] = defaultdict(deque)
        """Connections of each peer, the oldest first."""

    @property
    def address(self) -> Address:
        """The address of the listening socket."""
        bound: Address = self._listener.getsockname()
        return bound

    def wait(self) -> None:
        """Return when the first peer connects."""
        select.select([self._listener], [], [])

    def serve(self) -> None:
        """Answer requests in the running event loop from now on."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept, loop)
        self._close_stalled(loop)

    def assign_sender(self, connection: _Connection, sender: str) -> None:
        """Assign a connection to a sender; close the oldest connection beyond the limit.

        Closing the connection releases the room of an incomplete message, which an abandoned connection would keep.
        """
        connections = self._by_sender[sender]
        if connection not in connections:
            self.forget(connection)
            connections.append(connection)
            if len(connections) > MAX_CONNECTIONS_OF_PEER:
                connections[0].close()

    def forget(self, connection: _Connection) -> None:
        """Remove a closed connection."""
        for connections in (self._unauthenticated, *self._by_sender.values()):
            with suppress(ValueError):
                connections.remove(connection)

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        # The listener does not block: an OSError ends the loop after the last waiting peer, or if one has disconnected.
        with suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self._unauthenticated.append(_Connection(self, link, loop))
                if len(self._unauthenticated) > MOST_WAITING:
                    self._unauthenticated[0].close()

    def _close_stalled(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close stalled connections, and repeat periodically."""
        for connections in (self._unauthenticated, *self._by_sender.values()):
            for connection in list(connections):
                connection.check_stall()
        loop.call_later(STALLED_AFTER / 3, self._close_stalled, loop)


class _Connection:
    """A connection of a peer, or of an unauthenticated client, with one request after the other."""

    def __init__(
        self, server: DataServer, link: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._server = server
        self._link = link
        self._loop = loop
        self._last_received = time.monotonic()
        """Monotonic instant of the last received bytes."""
        self._is_reading = False
        """Whether a message is incomplete."""
        self._wake_bytes = 1
        """Number of received bytes at which the kernel wakes up the loop (SO_RCVLOWAT)."""
        link.setblocking(False)
        # The first `next` runs the generator up to its first wait for data.
        self._requests: Generator[int, None, None] = self._take_requests()
        next(self._requests)
        loop.add_reader(link, self._readable)

    def close(self) -> None:
        """Close the connection; an incomplete message is discarded."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link)
            self._link.close()
            self._server.forget(self)
            self._requests.close()

    def check_stall(self) -> None:
        """Read a small rest of a message, and close the connection after a long silence."""
        # The kernel does not wake up the loop for a rest below the threshold `_wake_bytes`.
        if self._is_reading:
            self._readable()
        limit = STALLED_AFTER + self._server.slowness
        if time.monotonic() - self._last_received <= limit:
            return
        if self._is_reading:
            self._refuse(Refused(408, f"no data received for {limit:g} s"))
        else:
            self.close()

    def _readable(self) -> None:
        try:
            wake_bytes = next(self._requests)
            if wake_bytes != self._wake_bytes:
                self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
                self._wake_bytes = wake_bytes
        except Refused as refused:
            self._refuse(refused)
        except (OSError, StopIteration):
            self.close()
        except Exception:
            self.close()
            raise

    def _refuse(self, refused: Refused) -> None:
        """Send the reason, and close the connection after a pause for reading."""
        self._requests.close()
        self._is_reading = False
        text = json.dumps({"error": str(refused)}).encode() + b"\n"
        status = f"{refused.status} {HTTPStatus(refused.status).phrase}"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._requests = self._drain()
        try:
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._link.sendall(head.encode() + text)
            # The peer sees the end of the stream while its own data is still drained, see HANG_UP_SECONDS.
            self._link.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
        else:
            self._loop.call_later(HANG_UP_SECONDS, self.close)

    def _drain(self) -> Generator[int, None, None]:
        while self._link.recv(_READ_BYTES):
            yield 1

    def _take_requests(self) -> Generator[int, None, None]:
        """Read one message after the other; resumed whenever data is available.

        Yields the number of bytes to wait for. Raises `Refused`, and OSError for a broken connection.
        """
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                if len(received) > LARGEST_HEAD:
                    raise Refused(
                        431, f"the request's head exceeds {LARGEST_HEAD} bytes"
                    )
                yield 1
                piece = self._link.recv(_READ_BYTES)
                if not piece:
                    return
                self._last_received = time.monotonic()
                received += piece
            start = time.monotonic()
            head, _, received = received.partition(b"\r\n\r\n")
            inbox, sender, size = self._parse_head(head)
            if not inbox.reserve(size):
                raise Refused(503, "the inbox is full")
            is_delivered = False
            try:
                self._is_reading = True
                body = bytearray(size)
                filled = min(size, len(received))
                body[:filled] = received[:filled]
                received = received[filled:]
                # Data is received directly into the body, since joining pieces would store a large message twice.
                with memoryview(body) as view:
                    while filled < size:
                        yield min(_WAKE_BYTES, size - filled)
                        try:
                            count = self._link.recv_into(view[filled:])
                        except BlockingIOError:  # resumed by `check_stall` without data
                            continue
                        if not count:
                            raise Refused(
                                400, f"the body ended after {filled} of {size} bytes"
                            )
                        self._last_received = time.monotonic()
                        inbox.arriving[sender] = self._last_received
                        filled += count
                self._is_reading = False
                is_delivered = _deliver(body, start, inbox, sender)
            finally:
                inbox.arriving.pop(sender, None)
                if not is_delivered:
                    inbox.release(size)
            # A duplicate is acknowledged too, since the sender has not received the first acknowledgement.
            self._link.sendall(_ACCEPTED)

    def _parse_head(self, head: bytes) -> tuple[Inbox, str, int]:
        """Return the inbox, the sender and the body size of a message; raises `Refused`."""
        request, *lines = head.decode("latin-1").split("\r\n")
        # A malformed request line has fewer than two words; empty words then stand for the rest, an unknown path.
        words = [*request.split(" "), "", ""]
        method, path = words[:2]
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if path != "/messages":
            raise Refused(404, "this port accepts POST /messages only")
        if method != "POST":
            raise Refused(405, "this port accepts POST /messages only")
        inbox = self._server.inbox
        if inbox is None:
            raise Refused(503, "no program is running")
        sender = inbox.authenticate(headers.get("authorization", ""))
        self._server.assign_sender(self, sender)
        size = announced_length(
            headers.get("content-length", ""),
            headers.get("transfer-encoding", ""),
            inbox.largest,
        )
        return inbox, sender, size


def _deliver(body: bytearray, start: float, inbox: Inbox, sender: str) -> bool:
    arrived = time.monotonic()
    try:
        envelope = decode(body)
    except WireError as error:
        raise Refused(400, str(error)) from error
    if envelope.message.sender != sender:
        raise Refused(403, f"'{sender}' must not send as '{envelope.message.sender}'")
    decode_seconds = time.monotonic() - arrived
    return inbox.put(
        Arrival(envelope, len(body), start, arrived - start, decode_seconds)
    )
