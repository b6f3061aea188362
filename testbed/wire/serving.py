"""An HTTP server that assigns a thread to a request only after its complete head, so slow senders occupy no thread.

The server derives from waitress. In waitress's terms, a channel is a connection, and a task is the response to one
request. The head of a request is its first line and its headers.
"""

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

from testbed.common.formats import escape_control

STALLED_AFTER = 30
"""Seconds without a byte after which a request, a response or an idle connection is closed."""
MOST_WAITING = 256
"""Maximum number of connections without a complete head; the least recently active one beyond is closed."""
LARGEST_HEAD = 1 << 16
"""Maximum size of a request's head in bytes."""
_PIECE = 1 << 16
"""Maximum number of bytes received or sent in one call."""
_MAX_UNSENT = 1 << 20
"""Maximum number of buffered response bytes per connection; at this number, the application waits."""
_FILE_THRESHOLD = 1 << 30
"""Bytes of a response beyond which waitress would use a temporary file; too high for any response of an agent."""
_CHECK_SECONDS = 1
"""Seconds between two checks for stalled connections."""
_MAX_REFUSAL = 4000
"""Maximum size of a refusal as JSON in bytes; a refusal may quote the request."""

# Waitress would warn about each request that waits for a thread.
logging.getLogger("waitress.queue").disabled = True


def refusal(text: str) -> str:
    """Return the reason for a refused request without control characters, at most 4,000 bytes long as JSON."""
    printable = escape_control(text)
    if len(json.dumps(printable)) <= _MAX_REFUSAL:
        return printable
    # In JSON a character takes up to twelve bytes; 48 bytes remain for the number of omitted characters.
    return escape_control(text, _MAX_REFUSAL // 12 - 4)


class Body(io.RawIOBase):
    """The body of a request, read on demand by the thread of the request."""

    def __init__(
        self, channel: Channel, length: int, early: bytes, expected: bool
    ) -> None:
        self.left = length
        """Number of bytes not yet read."""
        self.early = early
        """Bytes received together with the head; they may include the next request."""
        self._channel = channel
        self._link = channel.socket
        self._expected = expected

    def readable(self) -> bool:
        """Return True: the stream supports reading."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at least one byte into the buffer; return 0 at the end or if the sender has disconnected.

        Raises TimeoutError after `STALLED_AFTER` seconds without a byte.
        """
        size = min(len(buffer), self.left)
        if self.early:
            count = min(size, len(self.early))
            buffer[:count] = self.early[:count]
            self.early = self.early[count:]
        else:
            count = self._receive_into(memoryview(buffer)[:size]) if size else 0
        self.left -= count
        return count

    def _receive_into(self, buffer: memoryview) -> int:
        # The client waits for this line with "Expect: 100-continue"; a refused request never reads the body.
        if self._expected:
            self._expected = False
            self._channel.write_soon(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            if poll.poll(STALLED_AFTER * 1000):
                return int(self._link.recv_into(buffer))
        # The connection is broken, or closed by another thread.
        except (OSError, ValueError):
            return 0
        raise TimeoutError(f"no data received for {STALLED_AFTER} s")


class Request(HTTPRequestParser):
    """A request complete after its head, and therefore refusable before the body arrives."""

    expect_continue: bool = False
    # Waitress uses the version in its response and logs the path, even for a head that it cannot parse.
    version = "1.1"
    path = ""

    def __init__(self, channel: Channel, adjustments: Any) -> None:
        super().__init__(adjustments)
        self._channel = channel

    def received(self, data: bytes) -> int:
        """Parse a piece of the head, possibly with the first bytes of the body; return the number of bytes used."""
        count = int(super().received(data))
        if self.empty or not self.headers_finished:
            return count
        self.body = Body(
            self._channel, self.content_length, data[count:], self.expect_continue
        )
        # Otherwise waitress would request the body at once, before the application has authorised the request.
        self.expect_continue = False
        self.completed = True
        return len(data)

    def parse_header(self, head: bytes) -> None:
        """Parse the head; raises ParsingError if the head is malformed."""
        try:
            super().parse_header(head)
        # Python refuses invalid IPv6 addresses in brackets, and numbers of 5,000 digits.
        except ValueError as error:
            raise ParsingError(str(error)) from error
        if self.chunked:
            # Waitress removes this header, but the application has to refuse the request: chunks are not parsed here.
            self.headers.update(TRANSFER_ENCODING="chunked", CONNECTION="close")

    def get_body_stream(self) -> Body:
        """Return the stream from which the application reads the body."""
        return self.body


class Task(WSGITask):
    """The response to a request; afterwards, the connection parses the next request."""

    def finish(self) -> None:
        """Complete the response."""
        super().finish()
        if not self.close_on_finish:
            self.channel.resume_after(self.request.body)


class Channel(HTTPChannel):
    """An HTTP connection whose bodies are read by the application."""

    task_class = Task

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._unread = 0
        super().__init__(*arguments, **options)
        # Waitress copies this much of its output buffer for each call of send.
        self.sendbuf_len = _PIECE

    def parser_class(self, adjustments: Any) -> Request:
        """Return a parser for the next request."""
        return Request(self, adjustments)

    def received(self, data: bytes) -> bool:
        """Skip the unread rest of the last body, then parse the next head."""
        skipped = min(self._unread, len(data))
        self._unread -= skipped
        return bool(super().received(data[skipped:]))

    def resume_after(self, body: Body) -> None:
        """Parse the bytes behind the body of an answered request."""
        self._unread = body.left
        self.received(body.early)

    def write_soon(self, data: bytes) -> int:
        """Send bytes in pieces, since waitress copies the unsent rest and large responses must not be copied."""
        for start in range(0, len(data), _PIECE):
            super().write_soon(data[start : start + _PIECE])
        return len(data)

    def is_waiting(self) -> bool:
        """Return whether the client has to act: send a request or read a response."""
        # While a thread holds the lock, a response is being sent and the client is not stalled.
        with self.outbuf_lock:
            return not self.requests or self.total_outbufs_len > 0


class PatientServer(TcpWSGIServer):
    """Waitress's server without buffering of request bodies and of large responses.

    Waitress would read whole bodies before authorisation and write large ones into files. Example::

        server = PatientServer(("127.0.0.1", 0), application, threads=4)
        threading.Thread(target=server.serve).start()
        server.stop()
    """

    channel_class = Channel

    def __init__(
        self, address: tuple[str, int], application: Any, threads: int
    ) -> None:
        """Bind the listening socket; requests are answered only after `serve` starts."""
        host, port = address
        super().__init__(
            application,
            host=host,
            port=port,
            threads=threads,
            connection_limit=2 * MOST_WAITING,
            cleanup_interval=_CHECK_SECONDS,
            recv_bytes=_PIECE,
            max_request_header_size=LARGEST_HEAD,
            max_request_body_size=sys.maxsize,
            outbuf_high_watermark=_MAX_UNSENT,
            outbuf_overflow=_FILE_THRESHOLD,
            log_socket_errors=False,
            clear_untrusted_proxy_headers=False,
        )
        self._stopping = False
        self._stopped = threading.Event()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the listening socket."""
        host, port = self.socket.getsockname()
        return host, port

    def serve(self) -> None:
        """Answer requests until `stop` is called."""
        try:
            while not self._stopping:
                wasyncore.poll2(_CHECK_SECONDS, self._map)
        finally:
            for channel in list(self.active_channels.values()):
                channel.handle_close()
            self.task_dispatcher.shutdown()
            self._stopped.set()

    def stop(self) -> None:
        """Stop `serve`, close all connections and wait for the threads to end; must be called once only."""
        self._stopping = True
        # The trigger interrupts the poll, which would otherwise last up to a second.
        self.pull_trigger()
        self._stopped.wait()
        self.close()

    def handle_accept(self) -> None:
        """Accept a connection; if too many wait, close the least recently active one."""
        super().handle_accept()
        waiting = []
        for channel in self.active_channels.values():
            if channel.is_waiting():
                waiting.append(channel)
        # Connections that send nothing must not keep others out.
        if len(waiting) > MOST_WAITING:
            stalest = min(waiting, key=lambda channel: channel.last_activity)
            stalest.handle_close()

    def maintenance(self, now: float) -> None:
        """Close stalled connections, including those in the middle of a response, which waitress would keep."""
        for channel in list(self.active_channels.values()):
            if channel.is_waiting() and now > channel.last_activity + STALLED_AFTER:
                channel.handle_close()
