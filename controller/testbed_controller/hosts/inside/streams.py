"""Many connections over one pair of byte streams. Both ends run this: the controller, and the keeper on a host.

A frame is its kind, the number of its connection, the length of what follows, and that. A connection is opened by the
controller; each end may send `WINDOW` bytes that the other has not passed on yet, so that one slow connection keeps
none of the others waiting.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

OPEN, DATA, TAKEN, END, CLOCK = range(5)
"""Kinds of frames: a connection, with what it leads to as JSON; bytes; how many were passed on; no more; times."""
HEAD = struct.Struct(">BII")
TIMES = struct.Struct(">ddd")
"""Seconds when a frame `CLOCK` was sent, arrived, and was sent back."""
PIECE = 1 << 16
WINDOW = 1 << 20

Connect = Callable[[dict[str, Any]], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class _Connection:
    """One of the connections."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        """What is to be passed on; an empty piece is the end."""
        self.room = WINDOW
        self.more_room = asyncio.Event()


class Streams:
    """One end; ``send`` passes on a frame and keeps nobody waiting.

    ``connect`` makes what a connection that the other end opens leads to; ``on_clock`` takes the times of a frame
    `CLOCK` that has arrived.
    """

    def __init__(
        self, send: Callable[[bytes], None], on_clock: Callable[[bytes], None], connect: Connect | None = None
    ) -> None:
        self._send = send
        self._on_clock = on_clock
        self._connect = connect
        self._connections: dict[int, _Connection] = {}
        self._last = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_in(self, reader: asyncio.StreamReader) -> None:
        """Handle the frames that arrive, until there are no more; then end all connections."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                kind, number, length = HEAD.unpack(await reader.readexactly(HEAD.size))
                self._handle(kind, number, await reader.readexactly(length))
        for connection in self._connections.values():
            self._stop(connection)

    async def open(self, target: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect these two ends to a target at the other end, until one side ends it."""
        self._last += 1
        number, self._connections[self._last] = self._last, _Connection()
        self.send(OPEN, number, json.dumps(target).encode())
        await self._serve(number, reader, writer)

    def send(self, kind: int, number: int, content: bytes) -> None:
        """Send a frame."""
        self._send(HEAD.pack(kind, number, len(content)) + content)

    def _handle(self, kind: int, number: int, content: bytes) -> None:
        connection = self._connections.get(number)
        if kind == CLOCK:
            self._on_clock(content)
        elif kind == OPEN:
            self._connections[number] = _Connection()
            task = asyncio.get_running_loop().create_task(self._lead(number, json.loads(content)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif connection is None:
            pass  # it has ended here, which the other end will hear
        elif kind == DATA:
            connection.arrived.put_nowait(content)
        elif kind == TAKEN:
            connection.room += int.from_bytes(content, "big")
            connection.more_room.set()
        elif kind == END:
            self._stop(connection)

    def _stop(self, connection: _Connection) -> None:
        connection.arrived.put_nowait(b"")

    async def _lead(self, number: int, target: dict[str, Any]) -> None:
        assert self._connect is not None
        try:
            reader, writer = await self._connect(target)
        except Exception:  # noqa: BLE001 - whatever it is, nobody is there: the connection ends
            self._connections.pop(number, None)
            self.send(END, number, b"")
            return
        await self._serve(number, reader, writer)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on in both directions until either side ends."""
        connection = self._connections[number]
        ways = [asyncio.ensure_future(each) for each in (self._out(number, reader), self._into(number, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if not ways[1].done() and not connection.arrived.empty():
            connection.arrived.put_nowait(b"")
            await ways[1]
        for way in ways:
            way.cancel()
        self._connections.pop(number, None)
        self.send(END, number, b"")
        writer.close()

    async def _out(self, number: int, reader: asyncio.StreamReader) -> None:
        connection = self._connections[number]
        with suppress(OSError):
            while piece := await reader.read(PIECE):
                while connection.room <= 0:
                    connection.more_room.clear()
                    await connection.more_room.wait()
                connection.room -= len(piece)
                self.send(DATA, number, piece)

    async def _into(self, number: int, writer: asyncio.StreamWriter) -> None:
        arrived = self._connections[number].arrived
        with suppress(OSError):
            while piece := await arrived.get():
                writer.write(piece)
                await writer.drain()
                self.send(TAKEN, number, len(piece).to_bytes(4, "big"))
