"""An HTTP server whose threads wait for nobody: a connection is given one once the head of its request is there."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from cheroot.server import HTTPConnection, HTTPRequest
from cheroot.wsgi import Server

from testbed.common.formats import visible

HEAD_SECONDS = 5.0
"""Seconds in which a request's head has to come."""
MOST_WAITING = 256
"""Connections without a whole head; beyond, the oldest is closed."""
LARGEST_HEAD = 1 << 16
_LOOK_SECONDS = 0.005
_SENDS_NO_MORE = getattr(select, "POLLRDHUP", 0)  # which Linux alone has
_LONGEST_REFUSAL = 4000


def refusal(text: str) -> str:
    """Return why a request is refused as an answer holds it: visible, and at most 4,000 bytes as JSON writes it."""
    shown = visible(text)
    # In JSON a character takes up to twelve bytes.
    return shown if len(json.dumps(shown)) <= _LONGEST_REFUSAL else visible(text, _LONGEST_REFUSAL // 12 - 4)


class Request(HTTPRequest):
    """Cheroot's request, which refuses addresses that are none and headers that begin as the continuation of none."""

    def read_request_line(self) -> bool:
        """Read the first line; answer 400 and return False where it names no address."""
        try:
            return bool(super().read_request_line())  # type: ignore[no-untyped-call]
        except ValueError:  # which urllib raises for brackets that hold no IPv6 address
            self.simple_response("400 Bad Request", "Illegal address.")
            return False

    def read_request_headers(self) -> bool:
        """Read the headers; answer 400 and return False where they are none, 413 where no body is so long."""
        try:
            if not super().read_request_headers():  # type: ignore[no-untyped-call]
                return False
        except UnboundLocalError:  # cheroot looks for the header before the first
            self.simple_response("400 Bad Request", "Illegal header line.")
            return False
        length = self.inheaders.get(b"Content-Length", b"0")
        if length.isdigit() and len(length) >= len(str(sys.maxsize)):  # what is left of it could not even be read away
            self.simple_response("413 Request Entity Too Large")
            return False
        return True


class Connection(HTTPConnection):
    """Cheroot's connection with such requests."""

    RequestHandlerClass = Request


class PatientServer(Server):
    """Cheroot's server, which many half-open connections cannot keep from answering others."""

    ConnectionClass = Connection
    head_seconds = HEAD_SECONDS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: deque[tuple[float, Any]] = deque()
        self._came = threading.Event()
        threading.Thread(target=self._watch, name="heads", daemon=True).start()

    def process_conn(self, conn: Any) -> None:
        """Hand a connection to a thread, or have it wait for the rest of a head."""
        if _is_complete(conn):
            super().process_conn(conn)
            return
        self._waiting.append((time.monotonic() + self.head_seconds, conn))
        self._came.set()

    def _watch(self) -> None:
        while True:
            self._came.wait()
            self._came.clear()
            while self._waiting:
                time.sleep(_LOOK_SECONDS)
                for _ in range(len(self._waiting)):
                    deadline, conn = self._waiting.popleft()
                    if _is_complete(conn):
                        super().process_conn(conn)
                    elif time.monotonic() > deadline or len(self._waiting) >= MOST_WAITING:
                        _close(conn)
                    else:
                        self._waiting.append((deadline, conn))


def _is_complete(conn: Any) -> bool:
    """Say whether a thread would not wait: there is a whole head, one that is too long, or an end."""
    if conn.rfile.has_data():
        return True
    poll = select.poll()
    try:
        poll.register(conn.socket, select.POLLIN | _SENDS_NO_MORE)
        found = poll.poll(0)
        if not found:
            return False
        if found[0][1] & _SENDS_NO_MORE:
            return True
        head = conn.socket.recv(LARGEST_HEAD, socket.MSG_PEEK)
    except (OSError, ValueError):
        return True  # a thread finds it broken, and lets go of it
    return not head or len(head) == LARGEST_HEAD or b"\r\n\r\n" in head or b"\n\n" in head


def _close(conn: Any) -> None:
    with contextlib.suppress(OSError):
        conn.close()
