"""One kept-alive HTTP connection to a peer, owned by one thread.

Neither ``requests`` nor ``socket.sendall`` will do between emulated devices: a time-out there limits a whole message,
and a slow link must not be cut off while bytes still get through. Here the kernel is told to give up
(``TCP_USER_TIMEOUT``) when nothing it sent was acknowledged for a while, however long the message takes as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse

from agent.settings import Address

CONNECT_SECONDS = 1.5
CONNECT_SECONDS_MOST = 3.0
"""The kernel repeats a lost SYN after one second and again after two: a healed link is found within two seconds."""
STALL_SECONDS = 2.0
STALL_SECONDS_MOST = 30.0
"""Grows when an established connection stalls, so that links slower than a packet a second work in the end."""
_SLICE = 0.05


class ConnectionLost(Exception):  # noqa: N818 - a state of the link
    """Nothing can be said about whether the message arrived."""

    def __init__(self, reason: str, stale: bool = False, connecting: bool = False) -> None:
        super().__init__(reason)
        self.stale = stale
        """A kept-alive connection that the peer had closed meanwhile: worth trying again at once."""
        self.connecting = connecting


class Connection:
    """Posts messages to one address, one at a time."""

    def __init__(self, address: Address, path: str, token: str, source: str | None = None) -> None:
        self._address = address
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {token}\r\n"
        self._source = source
        self._socket: socket.socket | None = None
        self._used = False
        self._connect_seconds = CONNECT_SECONDS
        self._stall_seconds = STALL_SECONDS

    def connect(self) -> None:
        """Be connected; does nothing when it is. Raises `ConnectionLost`."""
        if self._socket is not None:
            return
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._stall_seconds * 1000))
            for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
            link.settimeout(self._connect_seconds)
            link.connect(self._address)
        except OSError as error:
            link.close()
            if isinstance(error, TimeoutError):
                self._connect_seconds = min(2 * self._connect_seconds, CONNECT_SECONDS_MOST)
            raise ConnectionLost(f"cannot connect: {error}", connecting=True) from error
        link.setblocking(False)
        self._connect_seconds = CONNECT_SECONDS
        self._socket = link
        self._used = False

    def post(self, body: bytes, acknowledged: Callable[[int], None]) -> tuple[int, bytes]:
        """Send one body over the open connection; return status and text of the answer.

        ``acknowledged`` is called now and then, while it takes long, with the bytes that the peer's kernel has.

        Raises:
            ConnectionLost: when the connection broke, or stalled, before the answer was complete.
        """
        link = self._socket
        assert link is not None
        try:
            answer = self._exchange(link, body, acknowledged)
        except (OSError, HTTPException) as error:
            stale = self._used and not isinstance(error, TimeoutError)
            if isinstance(error, TimeoutError):
                self._stall_seconds = min(2 * self._stall_seconds, STALL_SECONDS_MOST)
            self.close()
            raise ConnectionLost(f"lost the connection: {error!r}", stale=stale) from error
        self._used = True
        self._stall_seconds = STALL_SECONDS
        return answer

    def close(self) -> None:
        """Let go of the connection; may be called while another thread is in `post`, which then fails."""
        link, self._socket = self._socket, None
        if link is not None:
            with contextlib.suppress(OSError):  # it may be broken already, which is as good as shut down
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def interrupt(self) -> None:
        """Make a `post` under way in another thread fail now."""
        link = self._socket
        if link is not None:
            with contextlib.suppress(OSError):  # it may be broken already, which is what is wanted
                link.shutdown(socket.SHUT_RDWR)

    def _exchange(self, link: socket.socket, body: bytes, acknowledged: Callable[[int], None]) -> tuple[int, bytes]:
        head = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        poll = select.poll()
        total = len(head) + len(body)
        sent = _send(link, [head, body]) if _idle(link) else 0
        view = memoryview(body)
        keepalive = False
        while True:
            complete = sent == total
            poll.register(link, select.POLLIN if complete else select.POLLIN | select.POLLOUT)
            ready = poll.poll(_SLICE * 1000)
            if not ready:
                acknowledged(sent - _unacknowledged(link))
                if complete and not keepalive:
                    # Nothing of ours is under way that could tell that the peer is gone: let the kernel ask.
                    keepalive = True
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                continue
            if ready[0][1] & (select.POLLIN | select.POLLERR | select.POLLHUP):
                break
            if sent < len(head):
                sent += _send(link, [memoryview(head)[sent:], view])
            else:
                sent += _send(link, [view[sent - len(head) :]])
        acknowledged(sent - _unacknowledged(link))
        if keepalive:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        return self._answer(link, complete)

    def _answer(self, link: socket.socket, complete: bool) -> tuple[int, bytes]:
        """Read the answer; one that came before the message was out ends the connection."""
        link.settimeout(self._stall_seconds)
        response = HTTPResponse(link, method="POST")
        response.begin()
        text = response.read()
        link.setblocking(False)
        if response.will_close or not complete:
            self.close()
        return response.status, text


def _send(link: socket.socket, pieces: list[bytes | memoryview]) -> int:
    try:
        return link.sendmsg(pieces)
    except BlockingIOError:
        return 0


def _idle(link: socket.socket) -> bool:
    """Whether nothing is to be read, as it should be between requests. Raises OSError when the peer has closed."""
    try:
        if not link.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError("the peer had closed the connection")
    except BlockingIOError:
        return True
    raise HTTPException("the peer said something unasked")


def _unacknowledged(link: socket.socket) -> int:
    """Bytes handed to the kernel that the peer's kernel has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
