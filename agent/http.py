"""Cheroot as the agent needs it: bodies straight from the socket, refusals in JSON, connections kept for all peers."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from cheroot.server import HTTPServer
from cheroot.wsgi import Gateway_10

from agent.settings import Address
from testbed.wire.serving import Connection, PatientServer, refusal

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

STALLED_AFTER = 30
"""Seconds without a single byte after which a request, or an unused connection, is given up."""
_LINGER_SECONDS = 10.0
_LINGER_SLICE = 0.25
_HANG_UP_SECONDS = 2.0
_DRAINED = 1 << 16


class Refused(Exception):  # noqa: N818 - what the agent does, in the caller's words
    """The request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(refusal(text))
        self.status = status


class _Gateway(Gateway_10):
    """Lets the application see the request it serves: its socket, and whether its connection is kept."""

    def get_environ(self) -> Environ:  # type: ignore[override]
        environ: Environ = super().get_environ()  # type: ignore[no-untyped-call]
        environ["testbed.request"] = self.req
        return environ


class _LingeringConnection(Connection):
    """Stays with its thread for a while after an answer: the next request need not go through the selector's."""

    hung_up = False
    """Whether the last answer was a refusal, behind which there may be more requests."""

    def close(self) -> None:
        if self.hung_up:
            self._let_answer_arrive()
        super().close()

    def _let_answer_arrive(self) -> None:
        """Read until the peer closes: a connection closed with something unread takes the answer with it."""
        deadline = time.monotonic() + _HANG_UP_SECONDS
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.settimeout(_LINGER_SLICE)
            while time.monotonic() < deadline and not self.server.requests.qsize:
                with contextlib.suppress(TimeoutError):
                    if not self.socket.recv(_DRAINED):
                        return

    def communicate(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        while super().communicate():  # type: ignore[no-untyped-call]
            if not self._another(poll):
                return True
        return False

    def _another(self, poll: select.poll) -> bool:
        """Wait for a request, unless other connections wait for this thread."""
        for _ in range(round(_LINGER_SECONDS / _LINGER_SLICE)):
            if self.rfile.has_data() or poll.poll(_LINGER_SLICE * 1000):
                return True
            if self.server.requests.qsize:
                return False
        return False


def serve(address: Address, application: Application, threads: int, linger: bool = False) -> HTTPServer:
    """Return a server that listens already; its ``serve()`` blocks until ``stop()``.

    A connection gets a thread when the head of a request is there. With ``linger`` it keeps that between requests that
    follow each other closely, as peers' do, whose links may be so slow that a head takes long.
    """
    server = PatientServer(address, application, numthreads=threads, request_queue_size=128, timeout=STALLED_AFTER)
    server.gateway = _Gateway
    if linger:
        server.ConnectionClass, server.head_seconds = _LingeringConnection, STALLED_AFTER
    # Ten by default: a device with more peers than that would lose a connection for each message.
    server.keep_alive_conn_limit = sys.maxsize
    server.prepare()
    return server


def announced_length(environ: Environ, limit: int) -> int:
    """Return the size of the request's body before any of it is read.

    Raises Refused when it is not known beforehand or above the limit.
    """
    text = environ.get("CONTENT_LENGTH") or ""
    if "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower() or not text.isdecimal():
        raise Refused(411, "send a Content-Length")
    length = int(text)
    if length > limit:
        raise Refused(413, f"{length} bytes are more than the {limit} allowed")
    return length


def read_body(environ: Environ, length: int) -> bytearray:
    """Read a body of known length into one new buffer, as it comes from the socket.

    Raises Refused when the sender stops in the middle of it.
    """
    body = bytearray(length)
    view = memoryview(body)
    stream = environ["wsgi.input"]
    done = 0
    try:
        while done < length:
            # Past cheroot's own read(), which collects a copy of every piece; and past readinto(), which fails where
            # the buffer holds the beginning of the next request too.
            count = stream.rfile.readinto1(view[done:])
            if not count:
                raise Refused(400, f"the body ended after {done} of {length} bytes")
            done += count
            stream.remaining -= count
    except TimeoutError as error:
        environ["testbed.request"].close_connection = True
        raise Refused(408, f"nothing came for {STALLED_AFTER} s") from error
    return body


def respond(environ: Environ, start_response: StartResponse, status: int, document: object = None) -> list[bytes]:
    """Answer with JSON, or with nothing; gives up a connection whose request was refused half read."""
    abandon_unread(environ)
    body = b"" if document is None else json.dumps(document).encode() + b"\n"
    headers = [("Content-Length", str(len(body))), ("Content-Type", "application/json")] if body else []
    if not body and status != 204:
        headers = [("Content-Length", "0")]
    start_response(f"{status} {HTTPStatus(status).phrase}", headers)
    return [body] if body else []


def hang_up(environ: Environ) -> None:
    """Close the connection after this answer, once the peer has had time to read it; no further request is served."""
    request = environ["testbed.request"]
    request.close_connection = True
    request.conn.hung_up = True


def abandon_unread(environ: Environ) -> None:
    """Close the connection after this answer rather than read a body that nobody wants."""
    stream = environ["wsgi.input"]
    remaining = getattr(stream, "remaining", None)
    if remaining is None or remaining > _DRAINED:
        environ["testbed.request"].close_connection = True
