"""Random messages to the listeners of a run: requests and datagrams with random damage, and checks of the answers.

Most messages are valid ones of `listeners` with bytes, values, lengths, tokens or paths changed.
"""

from __future__ import annotations

import io
import json
import logging
import random
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from tools.stress.files import (
    MAX_MESSAGE,
    SYNTAX,
    damage_bytes,
    damage_tree,
    peak_memory,
)

MESSAGES = 1000
"""Number of messages per seed."""
MAX_SECONDS = 5.0
"""Maximum seconds until an answer; a request for events is answered after 2 s if there are none."""
MAX_GROWTH = 500 << 20
"""Maximum growth of the process by the messages of a seed, in bytes."""
HANG_UP_SECONDS = 0.05
"""Seconds after which a sender of damaged HTTP closes the connection."""
LENGTHS = ("", "-1", "abc", "0", "1", "9" * 20, "1e3", " 5", "0x10", "\u0663")
"""Wrong Content-Length headers; the last is a digit outside ASCII."""
TOKENS = ("", "Bearer", "Bearer ", "Bearer \xff", "Basic dDp0", "Bearer " + "t" * 9000)
"""Wrong Authorization headers."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Target = Callable[[random.Random], Iterator[str]]
"""Function that sends one message and yields the violations in the answer."""


@dataclass(frozen=True)
class Request:
    """A request to a WSGI application."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | dict[str, Any] = b""
    query: str = ""
    length: str | None = None
    """Content-Length header; None for the actual length of the body."""

    @property
    def content(self) -> bytes:
        """The body as bytes."""
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()

    @property
    def content_length(self) -> str:
        """The value of the Content-Length header, which may be wrong."""
        return str(len(self.content)) if self.length is None else self.length

    def damaged(self, draw: random.Random) -> Request:
        """Return the request with at most one random change."""
        match draw.randrange(10):
            case 0:
                return self
            case 1:
                token = {"HTTP_AUTHORIZATION": draw.choice(TOKENS)}
                return replace(self, headers={**self.headers, **token})
            case 2:
                return replace(self, length=draw.choice(LENGTHS))
            case 3:
                path = damage_bytes(draw, self.path.encode()).decode("latin1")
                query = damage_bytes(draw, self.query.encode()).decode("latin1")
                method = draw.choice([self.method, "DELETE", "\0"])
                return replace(self, path=path, query=query, method=method)
            case 4 | 5 | 6 if isinstance(self.body, dict):
                body = json.loads(self.content)
                for _ in range(draw.choice([1, 1, 2])):
                    damage_tree(draw, body)
                return replace(self, body=body)
            case 7:
                # Valid JSON of another type, or nested deeper than a parser allows.
                bodies = [b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[1]", b'"a"']
                return replace(self, body=draw.choice(bodies))
            case _:
                return replace(self, body=damage_bytes(draw, self.content))

    def to_http(self) -> bytes:
        """Return the request in HTTP/1.1, for a connection with a single request."""
        lines = [
            f"{self.method} {self.path}?{self.query} HTTP/1.1",
            "Host: a",
            f"Content-Length: {self.content_length}",
            f"Authorization: {self.headers['HTTP_AUTHORIZATION']}",
            "Connection: close",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + self.content


def attack(
    seed: int, listeners: Callable[[ExitStack], Mapping[str, Target]]
) -> list[str]:
    """Send the messages of a seed to the listeners, and return the violations."""
    # No logs are needed, since the answer of Flask contains the error.
    logging.disable(logging.CRITICAL)
    draw = random.Random(seed)
    violations: list[str] = []
    with ExitStack() as stack:
        targets = listeners(stack)
        size_before = peak_memory()
        for number in range(MESSAGES):
            name = draw.choice(list(targets))
            suffix = f"({name}, message {number})"
            began = time.monotonic()
            try:
                violations += [f"{each} {suffix}" for each in targets[name](draw)]
            except Exception:  # noqa: BLE001 - an unexpected exception of any kind is a violation
                text = traceback.format_exc()[-700:]
                violations.append(f"traceback: {text!r} {suffix}")
            seconds = time.monotonic() - began
            if seconds > MAX_SECONDS:
                violations.append(f"time: answered after {seconds:.1f} s {suffix}")
    growth = peak_memory() - size_before
    if growth > MAX_GROWTH:
        violations.append(f"memory: {growth >> 20} MiB more")
    return violations


def call_target(application: Application, requests: Sequence[Request]) -> Target:
    """Return a target for an application, which is called directly, as by a server."""

    def call(draw: random.Random) -> Iterator[str]:
        request = draw.choice(requests).damaged(draw)
        status, answer = _call_application(application, request)
        if status in (200, 204, 308):
            return
        # 503: a device that is not ready.
        is_client_error = 400 <= status < 500 or status == 503
        if not is_client_error or len(answer) > MAX_MESSAGE:
            text = f"{status}, {len(answer)} bytes, {answer[:200]!r}"
            yield f"answer: {text} to {_describe_request(request)}"

    return call


def _describe_request(request: Request) -> str:
    return f"{request.method} {request.path[:60]!r} {request.content[:300]!r}"


def _call_application(application: Application, request: Request) -> tuple[int, bytes]:
    """Return the status and the first block of the answer."""
    environ = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": request.path,
        "QUERY_STRING": request.query,
        "CONTENT_LENGTH": request.content_length,
        "CONTENT_TYPE": "application/json",
        "SERVER_NAME": "a",
        "SERVER_PORT": "1",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.content),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        **request.headers,
    }
    statuses: list[str] = []
    answer = application(environ, lambda status, *_: statuses.append(status))
    try:
        first = next(iter(answer), b"")
    finally:
        # Optional in WSGI.
        getattr(answer, "close", lambda: None)()
    return int(statuses[0].split()[0]), first


def port_target(address: tuple[str, int], requests: Sequence[Request]) -> Target:
    """Return a target for a port, which receives damaged HTTP over a connection of short duration."""

    def send(draw: random.Random) -> Iterator[str]:
        content = draw.choice(requests).damaged(draw).to_http()
        for _ in range(draw.randrange(3)):
            if draw.random() < 0.8:
                content = damage_bytes(draw, content)
            else:
                content += draw.choice(SYNTAX)
        answer = b""
        with (
            socket.create_connection(address, timeout=MAX_SECONDS) as connection,
            suppress(OSError),
        ):
            connection.sendall(content)
            if draw.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(HANG_UP_SECONDS)
            answer = connection.recv(MAX_MESSAGE)
        if answer.startswith(b"HTTP/1.1 500"):
            yield f"answer: {answer[:300]!r} to {content[:300]!r}"

    return send
