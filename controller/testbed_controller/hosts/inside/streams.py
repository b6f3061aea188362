"""Multiplexing of connections over one pair of byte streams, between the controller and the relay on a host.

The streams consist of frames. A frame has its type, the number of its connection, the length of its content, and the
content. The controller opens connections. On each connection, an end may send `WINDOW` bytes before the other end has
forwarded them, so that a slow connection does not block the others.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

OPEN, DATA, FORWARDED, END, CLOCK = range(5)
"""Frame types: open a connection (target as JSON), data, number of forwarded bytes, end of data, clock times."""
HEAD = struct.Struct(">BII")
"""Head of a frame: type, number of the connection, length of the content in bytes."""
TIMES = struct.Struct(">ddd")
"""Content of a `CLOCK` frame: instants in seconds at which the controller sent it, the relay received it, and the relay
answered. The controller sets the first, the relay the others."""
PIECE = 1 << 16
"""Maximum number of bytes read at a time."""
WINDOW = 1 << 20
"""Bytes that an end may send before the other end has forwarded them."""

Connect = Callable[
    [dict[str, Any]], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
]
"""Function that connects to the target of an `OPEN` frame; raises an error on failure."""


class _Connection:
    """The state of one connection."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[bytes] = asyncio.Queue()
        """Data from the other end that is not forwarded yet; an empty piece marks the end."""
        self.sendable_bytes = WINDOW
        """Number of bytes that may be sent before the other end has forwarded earlier ones."""
        self.may_send = asyncio.Event()
        """Set whenever `sendable_bytes` increases."""


class Streams:
    """One end of the multiplexer.

    ``send`` transmits the bytes of a frame without waiting, and ``on_clock`` is called with the content of each `CLOCK`
    frame. ``connect`` connects to the target of a connection that the other end opens; the controller needs none.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        on_clock: Callable[[bytes], None],
        connect: Connect | None = None,
    ) -> None:
        self._send = send
        self._on_clock = on_clock
        self._connect = connect
        self._connections: dict[int, _Connection] = {}
        self._last_number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle_frames(self, reader: asyncio.StreamReader) -> None:
        """Handle arriving frames until the end of the stream; then close all connections."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                kind, number, length = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._handle_frame(kind, number, await reader.readexactly(length))
        for connection in self._connections.values():
            self._end_connection(connection)

    async def open(
        self,
        target: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Connect a local reader and writer to a target at the other end, until either side closes."""
        self._last_number += 1
        number = self._last_number
        self._connections[number] = _Connection()
        self.send(OPEN, number, json.dumps(target).encode())
        await self._forward(number, reader, writer)

    def send(self, kind: int, number: int, content: bytes) -> None:
        """Send a frame."""
        self._send(HEAD.pack(kind, number, len(content)) + content)

    def _handle_frame(self, kind: int, number: int, content: bytes) -> None:
        connection = self._connections.get(number)
        if kind == CLOCK:
            self._on_clock(content)
        elif kind == OPEN:
            # Registered before the target is connected, since data for the target may follow at once.
            self._connections[number] = _Connection()
            connecting = self._connect_target(number, json.loads(content))
            task = asyncio.get_running_loop().create_task(connecting)
            # Stored, since event loops hold only weak references to tasks.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif connection is None:
            # The connection is closed at this end, and the other end will get an END frame.
            return
        elif kind == DATA:
            connection.arrivals.put_nowait(content)
        elif kind == FORWARDED:
            connection.sendable_bytes += int.from_bytes(content, "big")
            connection.may_send.set()
        elif kind == END:
            self._end_connection(connection)

    def _end_connection(self, connection: _Connection) -> None:
        connection.arrivals.put_nowait(b"")

    async def _connect_target(self, number: int, target: dict[str, Any]) -> None:
        assert self._connect is not None
        try:
            reader, writer = await self._connect(target)
        except Exception:  # noqa: BLE001 - the target is unreachable, whatever the reason
            self._connections.pop(number, None)
            self.send(END, number, b"")
            return
        await self._forward(number, reader, writer)

    async def _forward(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward data in both directions until either side closes."""
        connection = self._connections[number]
        outgoing = asyncio.ensure_future(self._forward_out(number, reader))
        incoming = asyncio.ensure_future(self._forward_in(number, writer))
        both = (outgoing, incoming)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not incoming.done() and not connection.arrivals.empty():
            # The local side sends no more, but it still gets the data that has arrived for it.
            connection.arrivals.put_nowait(b"")
            await incoming
        for direction in both:
            direction.cancel()
        self._connections.pop(number, None)
        self.send(END, number, b"")
        writer.close()

    async def _forward_out(self, number: int, reader: asyncio.StreamReader) -> None:
        connection = self._connections[number]
        with suppress(OSError):
            while True:
                piece = await reader.read(PIECE)
                if not piece:
                    return
                while connection.sendable_bytes <= 0:
                    connection.may_send.clear()
                    await connection.may_send.wait()
                connection.sendable_bytes -= len(piece)
                self.send(DATA, number, piece)

    async def _forward_in(self, number: int, writer: asyncio.StreamWriter) -> None:
        arrived = self._connections[number].arrivals
        with suppress(OSError):
            while True:
                piece = await arrived.get()
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()
                # After draining, so that the other end does not send faster than the target receives.
                self.send(FORWARDED, number, len(piece).to_bytes(4, "big"))
