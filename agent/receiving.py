"""Messages of peers: taken in from the data network, each once and in order, into a bounded inbox."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agent.http import (
    Environ,
    Refused,
    StartResponse,
    announced_length,
    hang_up,
    read_body,
    respond,
)
from agent.settings import Settings
from testbed.wire.message import Envelope, WireError, decode

MOST_READING = 2
"""Connections of one sender from which messages are read at once; there are so many threads for each."""


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

    def __init__(self, peers: Mapping[str, str], limit: int, deliver: Callable[[Arrival], None]) -> None:
        """``peers`` are the tokens of the messages from each."""
        self._senders = {f"Bearer {token}": name for name, token in peers.items()}
        self._limit = limit
        self._deliver = deliver
        self._lock = threading.RLock()  # whoever a message is delivered to may release its room at once
        self._latest: dict[tuple[str, bool], tuple[int, int]] = {}
        self.bytes = 0
        """Reserved by messages that arrive or wait."""

    def sender(self, environ: Environ) -> str:
        """Return whose token a request bears; raises Refused (401) where that is no peer's."""
        # Found by its hash, so that how long it takes says nothing of how much of a token is right.
        try:
            return self._senders[environ.get("HTTP_AUTHORIZATION", "")]
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


class DataApplication:
    """``POST /messages`` on the data network, as WSGI: the one request that must cost next to nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.inbox: Inbox | None = None
        """Inbox of the program that runs; without one, senders are asked to try again later."""
        self._reading: dict[str, deque[Any]] = defaultdict(deque)
        """Connections from which a message of a sender is being read, the oldest first."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        try:
            self._take(environ)
        except Refused as refused:
            # Nothing that was sent behind it may be taken in before it.
            hang_up(environ)
            return respond(environ, start_response, refused.status, {"error": str(refused)})
        return respond(environ, start_response, 204)

    def _take(self, environ: Environ) -> None:
        start = time.monotonic()
        if environ["PATH_INFO"] != "/messages":
            raise Refused(404, "this port takes POST /messages only")
        if environ["REQUEST_METHOD"] != "POST":
            raise Refused(405, "this port takes POST /messages only")
        inbox = self.inbox
        if inbox is None:
            raise Refused(503, "no program runs here yet")
        sender = inbox.sender(environ)
        size = announced_length(environ, self._settings.message_limit)
        if not inbox.reserve(size):
            raise Refused(503, "the inbox is full")
        new = False
        try:
            with self._alone(sender, environ):
                new = _receive(environ, size, start, inbox, sender)
        finally:
            if not new:
                inbox.release(size)

    @contextmanager
    def _alone(self, sender: str, environ: Environ) -> Iterator[None]:
        """Break off the oldest of too many connections of a sender, which has given up all of them but one.

        A message whose rest never comes would else keep a thread for long, and many such messages all threads.
        """
        mine, all_ = environ["testbed.request"].conn.socket, self._reading[sender]
        all_.append(mine)
        if len(all_) > MOST_READING:
            with suppress(OSError):
                all_[0].shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            all_.remove(mine)


def _receive(environ: Environ, size: int, start: float, inbox: Inbox, sender: str) -> bool:
    body = read_body(environ, size)
    there = time.monotonic()
    try:
        envelope = decode(body)
    except WireError as error:
        raise Refused(400, str(error)) from error
    if envelope.message.sender != sender:
        raise Refused(403, f"'{sender}' may not speak as '{envelope.message.sender}'")
    return inbox.put(Arrival(envelope, size, start, there - start, time.monotonic() - there))
