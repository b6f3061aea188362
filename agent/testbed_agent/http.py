"""What requests to the agent and answers of its have in common: lengths, bodies, refusals in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from testbed.wire.serving import STALLED_AFTER, refusal

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class Refused(Exception):  # noqa: N818 - what the agent does, in the caller's words
    """The request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(refusal(text))
        self.status = status


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
    done = 0
    while done < length:
        try:
            count = environ["wsgi.input"].readinto(view[done:])
        except TimeoutError as error:
            raise Refused(408, f"nothing came for {STALLED_AFTER} s") from error
        if not count:
            raise Refused(400, f"the body ended after {done} of {length} bytes")
        done += count
    return body


def respond(start_response: StartResponse, status: int, document: object) -> list[bytes]:
    """Answer with JSON."""
    body = json.dumps(document).encode() + b"\n"
    headers = [("Content-Length", str(len(body))), ("Content-Type", "application/json")]
    start_response(f"{status} {HTTPStatus(status).phrase}", headers)
    return [body]
