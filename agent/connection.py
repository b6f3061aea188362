"""One kept-alive HTTP connection to a peer, in the program's event loop.

Neither ``requests`` nor ``socket.sendall`` will do between emulated devices: a time-out there limits a whole message,
and a slow link must not be cut off while bytes still get through. Here the kernel is told to give up
(``TCP_USER_TIMEOUT``) when nothing it sent was acknowledged for a while, however long the message takes as a whole.
And a thread for each peer costs four wake-ups a message where this costs one, half a millisecond on a small host.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable

from agent.settings import Address

CONNECT_SECONDS = 1.5
CONNECT_SECONDS_MOST = 3.0
"""The kernel repeats a lost SYN after one second and again after two: a healed link is found within two seconds."""
STALL_SECONDS = 2.0
STALL_SECONDS_MOST = 30.0
"""Grows when an established connection stalls, so that a link that a fault made very slow works in the end."""
SLICE_SECONDS = 0.05
_ANSWER_LIMIT = 1 << 16


class ConnectionLost(Exception):  # noqa: N818 - a state of the link
    """Nothing can be said about whether the message arrived."""

    def __init__(self, reason: str, stale: bool = False) -> None:
        super().__init__(reason)
        self.stale = stale
        """A kept-alive connection that the peer had closed meanwhile: worth trying again at once."""


class Connection:
    """Posts messages to one address, one at a time."""

    def __init__(self, address: Address, path: str, token: str, slowness: float = 0.0) -> None:
        """``slowness`` is what a few packets there and back take on this link, in seconds."""
        self._address = address
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {token}\r\n"
        self._socket: socket.socket | None = None
        self._used = False
        self._slowness = slowness
        self._connect_seconds = CONNECT_SECONDS + slowness
        self._stall_seconds = STALL_SECONDS + slowness

    async def post(self, body: bytes, acknowledged: Callable[[int], None]) -> tuple[int, bytes]:
        """Send one body, connecting first where need be; return status and text of the answer.

        ``acknowledged`` is called now and then, while it takes long, with the bytes that the peer's kernel has.

        Raises:
            ConnectionLost: when the connection could not be had, broke, or stalled before the answer was complete.
        """
        link = self._socket or await self._connect()
        try:
            if self._used:
                _check_open(link)
            status, text, kept = await _exchange(link, self._head, body, acknowledged)
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                self._stall_seconds = min(2 * self._stall_seconds, STALL_SECONDS_MOST + self._slowness)
            raise ConnectionLost(f"lost the connection: {error!r}", stale=self._used) from error
        except BaseException:  # above all a cancellation: half a request is out
            self.close()
            raise
        self._used = True
        self._stall_seconds = STALL_SECONDS + self._slowness
        if not kept:
            self.close()
        return status, text

    def close(self) -> None:
        """Let go of the connection."""
        link, self._socket = self._socket, None
        if link is not None:
            link.close()

    async def _connect(self) -> socket.socket:
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._stall_seconds * 1000))
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            async with asyncio.timeout(self._connect_seconds):
                await asyncio.get_running_loop().sock_connect(link, self._address)
        except OSError as error:
            link.close()
            if isinstance(error, TimeoutError):
                self._connect_seconds = min(2 * self._connect_seconds, CONNECT_SECONDS_MOST + self._slowness)
            raise ConnectionLost(f"cannot connect: {error!r}") from error
        except BaseException:
            link.close()
            raise
        self._connect_seconds = CONNECT_SECONDS + self._slowness
        self._socket = link
        self._used = False
        return link


async def _exchange(
    link: socket.socket, head: str, body: bytes, acknowledged: Callable[[int], None]
) -> tuple[int, bytes, bool]:
    """Return status, text, and whether the connection can be used again."""
    start = f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
    total = len(start) + len(body)
    rest = memoryview(body)
    sent = 0
    answer = b""
    keepalive = False
    while True:
        if sent < total:
            pieces: list[bytes | memoryview] = (
                [start[sent:], rest] if sent < len(start) else [rest[sent - len(start) :]]
            )
            with contextlib.suppress(BlockingIOError):
                sent += link.sendmsg(pieces)
        if await _ready(link, writing=sent < total):
            with contextlib.suppress(BlockingIOError):
                piece = link.recv(_ANSWER_LIMIT)
                if not piece or len(answer) > _ANSWER_LIMIT:
                    raise ConnectionResetError("the peer closed the connection instead of answering")
                answer += piece
                if (parsed := _parse(answer)) is not None:
                    break
        else:
            acknowledged(sent - _unacknowledged(link))
            if sent == total and not keepalive:
                # Nothing of ours is under way that could tell that the peer is gone: let the kernel ask.
                keepalive = True
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    acknowledged(sent - _unacknowledged(link))
    if keepalive:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    status, text, kept = parsed
    return status, text, kept and sent == total


def _parse(answer: bytes) -> tuple[int, bytes, bool] | None:
    """Return status, text and whether the connection is kept, or None while something is missing.

    Reads what the agent's own server writes: a known length, no chunks.
    """
    head, separator, text = answer.partition(b"\r\n\r\n")
    if not separator:
        return None
    status, *lines = head.split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    try:
        length, number = int(headers.get(b"content-length", b"0")), int(status.split()[1])
    except (ValueError, IndexError):
        raise ConnectionResetError("the peer answered something that is not HTTP") from None
    if len(text) < length:
        return None
    kept = len(text) == length and headers.get(b"connection", b"").lower() != b"close"
    return number, text[:length], kept


async def _ready(link: socket.socket, writing: bool) -> bool:
    """Wait until there is something to read, or room to write; return False when neither comes for a slice of time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def settle(value: bool) -> None:
        if not ready.done():
            ready.set_result(value)

    timer = loop.call_later(SLICE_SECONDS, settle, False)
    loop.add_reader(link, settle, True)
    if writing:
        loop.add_writer(link, settle, True)
    try:
        return await ready
    finally:
        timer.cancel()
        loop.remove_reader(link)
        if writing:
            loop.remove_writer(link)


def _check_open(link: socket.socket) -> None:
    """Raise OSError when the peer has closed a kept connection, or said something unasked."""
    with contextlib.suppress(BlockingIOError):
        link.recv(1, socket.MSG_PEEK)
        raise ConnectionResetError("the peer had closed the connection")


def _unacknowledged(link: socket.socket) -> int:
    """Bytes handed to the kernel that the peer's kernel has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
