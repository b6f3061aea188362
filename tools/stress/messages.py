"""Random messages: requests and datagrams that are changed at random, and what may not come of them.

Most begin as right ones (`listeners`), of which bytes, values, lengths, tokens or paths are then changed.
"""

from __future__ import annotations

import io
import json
import logging
import random
import resource
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from tools.stress.files import SYNTAX, WORDIEST, bend, torn

MESSAGES = 1000
"""How many messages belong to one seed."""
LONGEST = 5.0
"""Seconds in which a message is answered; who asks for events waits for 2 s where there are none."""
LARGEST = 500 << 20
"""Bytes by which the messages of one seed may let the process grow."""
HANGS_UP = 0.05
"""Seconds after which a sender of bytes that are hardly HTTP waits no more for an answer."""
LENGTHS = ("", "-1", "abc", "0", "1", "9" * 20, "1e3", " 5", "0x10", "\u0663")
TOKENS = ("", "Bearer", "Bearer ", "Bearer \xff", "Basic dDp0", "Bearer " + "t" * 9000)

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Target = Callable[[random.Random], Iterator[str]]
"""Sends one message and yields what is wrong with the answer."""


@dataclass(frozen=True)
class Request:
    """What an application is asked, as WSGI has it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | dict[str, Any] = b""
    query: str = ""
    length: str | None = None
    """What its head says of the length of its body; None: the truth."""

    @property
    def content(self) -> bytes:
        """The body as it travels."""
        return (
            self.body
            if isinstance(self.body, bytes)
            else json.dumps(self.body).encode()
        )

    def changed(self, draw: random.Random) -> Request:
        """Return a request that is like this one but for one thing; or the same."""
        match draw.randrange(10):
            case 0:
                return self
            case 1:
                return replace(
                    self,
                    headers={**self.headers, "HTTP_AUTHORIZATION": draw.choice(TOKENS)},
                )
            case 2:
                return replace(self, length=draw.choice(LENGTHS))
            case 3:
                path, query = (
                    torn(draw, part.encode()).decode("latin1")
                    for part in (self.path, self.query)
                )
                return replace(
                    self,
                    path=path,
                    query=query,
                    method=draw.choice([self.method, "DELETE", "\0"]),
                )
            case 4 | 5 | 6 if isinstance(self.body, dict):
                body = json.loads(self.content)
                for _ in range(draw.choice([1, 1, 2])):
                    bend(draw, body)
                return replace(self, body=body)
            case 7:
                return replace(
                    self,
                    body=draw.choice(
                        [b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[1]", b'"a"']
                    ),
                )
            case _:
                return replace(self, body=torn(draw, self.content))

    def raw(self) -> bytes:
        """Return it as HTTP has it, for a sender that waits for no other answer."""
        length = str(len(self.content)) if self.length is None else self.length
        lines = [
            f"{self.method} {self.path}?{self.query} HTTP/1.1",
            "Host: a",
            f"Content-Length: {length}",
        ]
        lines += [
            f"Authorization: {self.headers['HTTP_AUTHORIZATION']}",
            "Connection: close",
            "",
            "",
        ]
        return "\r\n".join(lines).encode() + self.content


def attack(
    seed: int, listeners: Callable[[ExitStack], Mapping[str, Target]]
) -> list[str]:
    """Send the messages of a seed to what listens, and return what is wrong with the answers."""
    logging.disable(logging.CRITICAL)  # what Flask says of an error is in its answer
    draw, found = random.Random(seed), list[str]()
    with ExitStack() as stack:
        targets = listeners(stack)
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(MESSAGES):
            name, began = draw.choice(list(targets)), time.monotonic()
            try:
                found += [
                    f"{each} ({name}, message {number})" for each in targets[name](draw)
                ]
            except Exception:  # noqa: BLE001  (whatever it is, it is what is looked for)
                found.append(
                    f"traceback: {traceback.format_exc()[-700:]!r} ({name}, message {number})"
                )
            if (took := time.monotonic() - began) > LONGEST:
                found.append(
                    f"time: answered after {took:.1f} s ({name}, message {number})"
                )
    if (
        grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) << 10
    ) > LARGEST:
        found.append(f"memory: {grown >> 20} MiB more")
    return found


def asking(application: Application, requests: Sequence[Request]) -> Target:
    """Return what calls an application as its server does."""

    def ask(draw: random.Random) -> Iterator[str]:
        request = draw.choice(requests).changed(draw)
        status, said = _called(application, request)
        if status not in (200, 204, 308) and (
            (not 400 <= status < 500 and status != 503) or len(said) > WORDIEST
        ):
            yield f"answer: {status}, {len(said)} bytes, {said[:200]!r} to {_shown(request)}"

    return ask


def _shown(request: Request) -> str:
    return f"{request.method} {request.path[:60]!r} {request.content[:300]!r}"


def _called(application: Application, request: Request) -> tuple[int, bytes]:
    """Return the status and what comes first of the answer."""
    environ = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": request.path,
        "QUERY_STRING": request.query,
        "CONTENT_LENGTH": str(len(request.content))
        if request.length is None
        else request.length,
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
        said = next(iter(answer), b"")
    finally:
        getattr(answer, "close", lambda: None)()
    return int(statuses[0].split()[0]), said


def sending(address: tuple[str, int], requests: Sequence[Request]) -> Target:
    """Return what sends bytes that are hardly HTTP to a port, and hangs up soon."""

    def send(draw: random.Random) -> Iterator[str]:
        whole = draw.choice(requests).changed(draw).raw()
        for _ in range(draw.randrange(3)):
            whole = (
                torn(draw, whole)
                if draw.random() < 0.8
                else whole + draw.choice(SYNTAX)
            )
        said = b""
        with (
            socket.create_connection(address, timeout=LONGEST) as connection,
            suppress(OSError),
        ):
            connection.sendall(whole)
            if draw.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(HANGS_UP)
            said = connection.recv(WORDIEST)
        if said.startswith(b"HTTP/1.1 500"):
            yield f"answer: {said[:300]!r} to {whole[:300]!r}"

    return send
