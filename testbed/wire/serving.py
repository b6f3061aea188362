"""An HTTP server that has a thread for a request once its head is there: who sends half a head keeps nobody waiting."""

from __future__ import annotations

import io
import json
import logging
import select
import sys
import threading
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.server import TcpWSGIServer
from waitress.task import WSGITask

from testbed.common.formats import visible

STALLED_AFTER = 30
"""Seconds without a single byte after which a request, an answer or an unused connection is given up."""
MOST_WAITING = 256
"""Connections without a whole head; beyond, one of the oldest is closed."""
LARGEST_HEAD = 1 << 16
_PIECE = 1 << 16
_UNSENT = 1 << 20
"""Bytes of an answer that wait for who reads it; the application waits with those beyond."""
_NEVER_A_FILE = 1 << 30
_LOOK_SECONDS = 1
_LONGEST_REFUSAL = 4000

# It would warn of each request that waits for a thread.
logging.getLogger("waitress.queue").disabled = True


def refusal(text: str) -> str:
    """Return why a request is refused as an answer holds it: visible, and at most 4,000 bytes as JSON writes it."""
    shown = visible(text)
    # In JSON a character takes up to twelve bytes.
    return shown if len(json.dumps(shown)) <= _LONGEST_REFUSAL else visible(text, _LONGEST_REFUSAL // 12 - 4)


class Body(io.RawIOBase):
    """The body of a request, which is read from its connection by whoever answers the request, if at all."""

    def __init__(self, channel: Channel, length: int, early: bytes, expected: bool) -> None:
        self.left = length
        """Bytes of it that nobody has read."""
        self.early = early
        """What came with the head, and may reach into the next request."""
        self._channel = channel
        self._link = channel.socket
        self._expected = expected

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what there is, at least a byte; 0 at the end, and where the sender is gone. Raises TimeoutError."""
        size = min(len(buffer), self.left)
        if self.early:
            count = min(size, len(self.early))
            buffer[:count], self.early = self.early[:count], self.early[count:]
        else:
            count = self._receive(memoryview(buffer)[:size]) if size else 0
        self.left -= count
        return count

    def _receive(self, buffer: memoryview) -> int:
        if self._expected:
            self._expected = False
            self._channel.write_soon(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            if poll.poll(STALLED_AFTER * 1000):
                return int(self._link.recv_into(buffer))
        except (OSError, ValueError):  # broken, or closed
            return 0
        raise TimeoutError(f"nothing came for {STALLED_AFTER} s")


class Request(HTTPRequestParser):
    """Waitress's request, which is complete with its head, so that it can be refused before there is more of it."""

    expect_continue: bool = False
    # Waitress answers by the one, and logs the other, also where it could read neither.
    version = "1.1"
    path = ""

    def __init__(self, channel: Channel, adjustments: Any) -> None:
        super().__init__(adjustments)
        self._channel = channel

    def received(self, data: bytes) -> int:
        """Take in some of the head, or its end and all that came with it; return how much was taken in."""
        count = int(super().received(data))
        if self.empty or not self.headers_finished:
            return count
        self.body = Body(self._channel, self.content_length, data[count:], self.expect_continue)
        self.expect_continue = False  # else waitress would ask for the body at once
        self.completed = True
        return len(data)

    def parse_header(self, head: bytes) -> None:
        """Read the head; raises ParsingError where it is none."""
        try:
            super().parse_header(head)
        except ValueError as error:  # for brackets that hold no IPv6 address, and for numbers of 5,000 digits
            raise ParsingError(str(error)) from error
        if self.chunked:
            # Waitress would hide it from the application, which is to refuse it: its end is not looked for.
            self.headers.update(TRANSFER_ENCODING="chunked", CONNECTION="close")

    def get_body_stream(self) -> Body:
        """Return what the application reads the body from."""
        return self.body


class Task(WSGITask):
    """Answers a request, and lets the next one of its connection begin."""

    def finish(self) -> None:
        """End the answer."""
        super().finish()
        if not self.close_on_finish:
            self.channel.go_on(self.request.body)


class Channel(HTTPChannel):
    """A connection."""

    task_class = Task

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._unread = 0
        super().__init__(*arguments, **options)
        self.sendbuf_len = _PIECE  # of what waits, waitress copies so much each time that some of it can be sent

    def parser_class(self, adjustments: Any) -> Request:
        """Return the parser of the next request."""
        return Request(self, adjustments)

    def received(self, data: bytes) -> bool:
        """Parse bytes that arrive between two answers: the unread rest of the last body, then a head."""
        skipped = min(self._unread, len(data))
        self._unread -= skipped
        return bool(super().received(data[skipped:]))

    def go_on(self, body: Body) -> None:
        """Parse the bytes that follow a request that is answered."""
        self._unread = body.left
        self.received(body.early)

    def write_soon(self, data: bytes) -> int:
        """Send something, piece by piece: waitress copies what cannot be sent yet, and large answers must not be."""
        for start in range(0, len(data), _PIECE):
            super().write_soon(data[start : start + _PIECE])
        return len(data)

    def waits(self) -> bool:
        """Return whether the client has to act: to send a request, or to read an answer."""
        # An answer that is just being sent, by whoever has the lock, does not wait.
        with self.outbuf_lock:
            return not self.requests or self.total_outbufs_len > 0


class PatientServer(TcpWSGIServer):
    """Waitress's server, which leaves the bodies of requests to who answers them.

    Waitress would take in whole bodies, also of who may not ask, and write large ones into files.
    """

    channel_class = Channel

    def __init__(self, address: tuple[str, int], application: Any, threads: int) -> None:
        """Listen; nobody is answered before `serve`."""
        host, port = address
        super().__init__(
            application,
            host=host,
            port=port,
            threads=threads,
            connection_limit=2 * MOST_WAITING,
            cleanup_interval=_LOOK_SECONDS,
            recv_bytes=_PIECE,
            max_request_header_size=LARGEST_HEAD,
            max_request_body_size=sys.maxsize,
            outbuf_high_watermark=_UNSENT,
            outbuf_overflow=_NEVER_A_FILE,
            log_socket_errors=False,
            clear_untrusted_proxy_headers=False,
        )
        self._stopping = False
        self._stopped = threading.Event()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self.socket.getsockname()
        return host, port

    def serve(self) -> None:
        """Answer until `stop` is called."""
        try:
            while not self._stopping:
                wasyncore.poll2(_LOOK_SECONDS, self._map)
        finally:
            for channel in list(self.active_channels.values()):
                channel.handle_close()
            self.task_dispatcher.shutdown()
            self._stopped.set()

    def stop(self) -> None:
        """End `serve`, all connections and threads, and return when they have ended; to be called once."""
        self._stopping = True
        self.pull_trigger()
        self._stopped.wait()
        self.close()

    def handle_accept(self) -> None:
        """Accept a connection; if too many wait, close the one that was silent the longest."""
        super().handle_accept()
        waiting = [each for each in self.active_channels.values() if each.waits()]
        if len(waiting) > MOST_WAITING:
            min(waiting, key=lambda each: each.last_activity).handle_close()

    def maintenance(self, now: float) -> None:
        """Close connections whose client has stalled, also in the middle of an answer, which waitress would await."""
        for channel in list(self.active_channels.values()):
            if channel.waits() and now > channel.last_activity + STALLED_AFTER:
                channel.handle_close()
