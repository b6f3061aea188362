"""Helpers for HTTP requests to the agent: body lengths, bodies and refusals."""

from __future__ import annotations

from typing import Any, TypeGuard

from testbed.wire.serving import STALLED_AFTER, refusal


class Refused(Exception):  # noqa: N818 - a response, not a defect
    """Raised to refuse a request, with the HTTP status and the text of the response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(refusal(text))
        self.status = status


def is_number(value: object, minimum: float, maximum: float) -> TypeGuard[float]:
    """Return whether a decoded JSON value is a number within a range, both ends included.

    >>> is_number(0.5, 0, 1), is_number(2, 0, 1), is_number(True, 0, 1)
    (True, False, False)
    """
    # Python counts booleans as integers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return minimum <= value <= maximum


def announced_length(text: str, encoding: str, limit: int) -> int:
    """Return the size of a request's body in bytes, from Content-Length and Transfer-Encoding.

    Raises Refused if the size is unknown or above ``limit``.

    >>> announced_length("1024", "", limit=4096)
    1024
    """
    if "chunked" in encoding.lower() or not text.isdecimal():
        raise Refused(411, "send a Content-Length")
    # The length is checked before `int` is called, which takes quadratic time and refuses more than 4,300 digits.
    if len(text) > 18 or int(text) > limit:
        raise Refused(
            413, f"the body of {text[:18]} bytes exceeds the limit of {limit}"
        )
    return int(text)


def read_body(environ: dict[str, Any], length: int) -> bytearray:
    """Read a body of ``length`` bytes from the socket into a new buffer.

    Raises Refused if the sender stops in the middle of the body.
    """
    body = bytearray(length)
    view = memoryview(body)
    received = 0
    while received < length:
        try:
            count = environ["wsgi.input"].readinto(view[received:])
        except TimeoutError as error:
            raise Refused(408, f"no data received for {STALLED_AFTER} s") from error
        if not count:
            raise Refused(400, f"the body ended after {received} of {length} bytes")
        received += count
    return body
