"""Cheroot as the agent needs it: bodies straight from the socket, refusals in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from cheroot.server import HTTPServer
from cheroot.wsgi import Gateway_10

from agent.settings import Address
from testbed.wire.serving import PatientServer, refusal

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

STALLED_AFTER = 30
"""Seconds without a single byte after which a request, or an unused connection, is given up."""
_DRAINED = 1 << 16


class Refused(Exception):  # noqa: N818 - what the agent does, in the caller's words
    """The request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(refusal(text))
        self.status = status


class _Gateway(Gateway_10):
    """Lets the application say that the connection of a request is not kept."""

    def get_environ(self) -> Environ:  # type: ignore[override]
        environ: Environ = super().get_environ()  # type: ignore[no-untyped-call]
        environ["testbed.request"] = self.req
        return environ


def serve(address: Address, application: Application, threads: int) -> HTTPServer:
    """Return a server that listens already; its ``serve()`` blocks until ``stop()``."""
    server = PatientServer(address, application, numthreads=threads, request_queue_size=128, timeout=STALLED_AFTER)
    server.gateway = _Gateway
    server.prepare()
    return server


def announced_length(text: str, encoding: str, limit: int) -> int:
    """Return the size of the request's body before any of it is read, by its Content-Length and Transfer-Encoding.

    Raises Refused when it is not known beforehand or above the limit.
    """
    if "chunked" in encoding.lower() or not text.isdecimal():
        raise Refused(411, "send a Content-Length")
    if len(text) > 18 or int(text) > limit:
        raise Refused(413, f"{text[:18]} bytes are more than the {limit} allowed")
    return int(text)


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


def abandon_unread(environ: Environ) -> None:
    """Close the connection after this answer rather than read a body that nobody wants."""
    stream = environ["wsgi.input"]
    remaining = getattr(stream, "remaining", None)
    if remaining is None or remaining > _DRAINED:
        environ["testbed.request"].close_connection = True
