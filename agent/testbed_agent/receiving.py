"""Messages of peers: taken in from the data network, each once and in order, into a bounded inbox.

They are HTTP requests, which the program's event loop reads itself: each thread on a message's way to the program would
cost a wake-up, and a wait for the interpreter's lock.
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

MOST_OF_ONE = 2
"""Connections of one sender, which has given up all of them but the newest."""
HANG_UP_SECONDS = 2.0
"""How long a peer has to read a refusal: a connection closed with something unread takes the answer with it."""
_TOGETHER = 1 << 15
"""Bytes of a message for which to wake up: its packets come one by one. Half of the smallest window, so that no sender
has to wait."""
_PIECE = 1 << 14
_TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"


@dataclass(frozen=True)
class Arrival:
    """A message that is fully there."""

    envelope: Envelope
    size: int
    """Bytes it takes of the inbox until the program has received it."""
    start: float
    """Monotonic instant of its first byte."""
    duration: float
    """Seconds from its first to its last byte."""
    decode: float
    cast: bool = False
    """Whether it was sent to several at once; its sequence number then counts its sender's casts."""


class Inbox:
    """Decides what is new, and how much may wait; hands arrivals over in order."""

    def __init__(
        self, peers: Mapping[str, str], limit: int, deliver: Callable[[Arrival], None], largest: int = 1 << 30
    ) -> None:
        """``peers`` are the tokens of the messages from each; ``largest`` is the size of one message at most."""
        self.largest = largest
        self.arriving: dict[str, float] = {}
        """Monotonic instant of the last bytes of each sender's message that is there in part."""
        self._senders = {f"Bearer {token}": name for name, token in peers.items()}
        self._limit = limit
        self._deliver = deliver
        self._lock = threading.RLock()  # whoever a message is delivered to may release its room at once
        self._latest: dict[tuple[str, bool], tuple[int, int]] = {}
        self.bytes = 0
        """Reserved by messages that arrive or wait."""

    def sender(self, authorization: str) -> str:
        """Return whose token a request bears in that header; raises Refused (401) where that is no peer's."""
        # Found by its hash, so that how long it takes says nothing of how much of a token is right.
        try:
            return self._senders[authorization]
        except KeyError:
            raise Refused(401, "send the token of this way as 'Authorization: Bearer <token>'") from None

    def reserve(self, size: int) -> bool:
        """Set room aside for a message about to be read; a single one always fits into an empty inbox."""
        with self._lock:
            if self.bytes and self.bytes + size > self._limit:
                return False
            self.bytes += size
            return True

    def release(self, size: int) -> None:
        """Give room back: the program has the message, or it was none."""
        with self._lock:
            self.bytes -= size

    def put(self, arrival: Arrival) -> bool:
        """Deliver what is new; return False for a repetition, or something older than what was delivered.

        A sender's messages come in their order, and from the first that is not acknowledged after a connection broke.
        So whatever is not newer than the newest was either delivered or given up by its sender. A receiver that
        restarted takes up wherever a sender is.
        """
        sender = arrival.envelope.message.sender
        number = (arrival.envelope.incarnation, arrival.envelope.sequence)
        with self._lock:
            if number <= self._latest.get((sender, arrival.cast), (-1, -1)):
                return False
            self._latest[sender, arrival.cast] = number
            # Within the lock, so that two connections of one sender cannot overtake each other.
            self._deliver(arrival)
        return True


class DataServer:
    """``POST /messages`` on the data network: the one request that must cost next to nothing.

    Answers come in the order of the requests. A refusal ends the connection: nothing that was sent behind it may be
    taken in before it.
    """

    def __init__(self, settings: Settings) -> None:
        """Listen; nobody is answered before `serve`."""
        self.slowness = 0.0
        """Seconds that a few packets from the slowest peer and back take: so much longer a connection may be silent."""
        self.inbox: Inbox | None = None
        """Inbox of the program that runs; without one, senders are asked to try again later."""
        self._listener = socket.create_server(settings.data, backlog=128)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._strangers: deque[_Connection] = deque()
        """Connections that have not sent a peer's token yet, the oldest first."""
        self._known: dict[str, deque[_Connection]] = defaultdict(deque)

    @property
    def address(self) -> Address:
        """Where it listens."""
        found: Address = self._listener.getsockname()
        return found

    def wait(self) -> None:
        """Return when a first peer has come."""
        select.select([self._listener], [], [])

    def serve(self) -> None:
        """Answer from now on, in the event loop that runs."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept, loop)
        self._look(loop)

    def recognise(self, connection: _Connection, sender: str) -> None:
        """Note whose connection it is; close the oldest of too many.

        A message whose rest never comes would else keep room in the inbox for long.
        """
        mine = self._known[sender]
        if connection not in mine:
            self.forget(connection)
            mine.append(connection)
            if len(mine) > MOST_OF_ONE:
                mine[0].close()

    def forget(self, connection: _Connection) -> None:
        """Note that a connection is closed."""
        for some in (self._strangers, *self._known.values()):
            with suppress(ValueError):
                some.remove(connection)

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(OSError):  # the peer has given up, or there is none left
            while True:
                link, _ = self._listener.accept()
                self._strangers.append(_Connection(self, link, loop))
                if len(self._strangers) > MOST_WAITING:
                    self._strangers[0].close()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close, now and then, connections on which nothing comes."""
        for some in (self._strangers, *self._known.values()):
            for connection in list(some):
                connection.look()
        loop.call_later(STALLED_AFTER / 3, self._look, loop)


class _Connection:
    """Requests of one peer, or of a stranger, one after the other."""

    def __init__(self, server: DataServer, link: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._link = link
        self._loop = loop
        self._heard = time.monotonic()
        self._reading = False
        """Whether a message is there in part."""
        self._together = 1
        link.setblocking(False)
        self._requests: Generator[int, None, None] = self._take_requests()
        next(self._requests)
        loop.add_reader(link, self._readable)

    def close(self) -> None:
        """Let go of the connection; a message that is there in part is forgotten."""
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link)
            self._link.close()
            self._server.forget(self)
            self._requests.close()

    def look(self) -> None:
        """Give the connection up if nothing has come for a while, but for what is too little to wake up for."""
        if self._reading:
            self._readable()
        longest = STALLED_AFTER + self._server.slowness
        if time.monotonic() - self._heard > longest:
            if self._reading:
                self._refuse(Refused(408, f"nothing came for {longest:g} s"))
            else:
                self.close()

    def _readable(self) -> None:
        try:
            together = next(self._requests)
            if together != self._together:
                self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, together)
                self._together = together
        except Refused as refused:
            self._refuse(refused)
        except (OSError, StopIteration):
            self.close()
        except Exception:
            self.close()
            raise

    def _refuse(self, refused: Refused) -> None:
        """Answer with why, and close the connection once the peer has had time to read it."""
        self._requests.close()
        self._reading = False
        text = json.dumps({"error": str(refused)}).encode() + b"\n"
        status = f"{refused.status} {HTTPStatus(refused.status).phrase}"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._requests = self._drain()
        try:
            self._link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._link.sendall(head.encode() + text)
            self._link.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
        else:
            self._loop.call_later(HANG_UP_SECONDS, self.close)

    def _drain(self) -> Generator[int, None, None]:
        while self._link.recv(_PIECE):
            yield 1

    def _take_requests(self) -> Generator[int, None, None]:
        """Take in one message after the other; go on whenever there is something to read.

        Yields for how many bytes to wait. Raises `Refused`, and OSError where the connection is broken.
        """
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                if len(received) > LARGEST_HEAD:
                    raise Refused(431, "the head of the request is too long")
                yield 1
                if not (piece := self._link.recv(_PIECE)):
                    return
                self._heard = time.monotonic()
                received += piece
            start = time.monotonic()
            head, _, received = received.partition(b"\r\n\r\n")
            inbox, sender, size = self._announced(head)
            if not inbox.reserve(size):
                raise Refused(503, "the inbox is full")
            new = False
            try:
                body, self._reading = bytearray(size), True
                done = min(size, len(received))
                body[:done], received = received[:done], received[done:]
                with memoryview(body) as rest:
                    while done < size:
                        yield min(_TOGETHER, size - done)
                        try:
                            count = self._link.recv_into(rest[done:])
                        except BlockingIOError:  # `look` goes on without being told that there is something
                            continue
                        if not count:
                            raise Refused(400, f"the body ended after {done} of {size} bytes")
                        self._heard = inbox.arriving[sender] = time.monotonic()
                        done += count
                self._reading = False
                new = _put(body, start, inbox, sender)
            finally:
                inbox.arriving.pop(sender, None)
                if not new:
                    inbox.release(size)
            self._link.sendall(_TAKEN)

    def _announced(self, head: bytes) -> tuple[Inbox, str, int]:
        """Return where a message is to go, who sends it and how long it is."""
        request, *lines = head.decode("latin-1").split("\r\n")
        method, path = [*request.split(" "), "", ""][:2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if path != "/messages":
            raise Refused(404, "this port takes POST /messages only")
        if method != "POST":
            raise Refused(405, "this port takes POST /messages only")
        inbox = self._server.inbox
        if inbox is None:
            raise Refused(503, "no program runs here yet")
        sender = inbox.sender(headers.get("authorization", ""))
        self._server.recognise(self, sender)
        size = announced_length(headers.get("content-length", ""), headers.get("transfer-encoding", ""), inbox.largest)
        return inbox, sender, size


def _put(body: bytearray, start: float, inbox: Inbox, sender: str) -> bool:
    there = time.monotonic()
    try:
        envelope = decode(body)
    except WireError as error:
        raise Refused(400, str(error)) from error
    if envelope.message.sender != sender:
        raise Refused(403, f"'{sender}' may not speak as '{envelope.message.sender}'")
    return inbox.put(Arrival(envelope, len(body), start, there - start, time.monotonic() - there))
