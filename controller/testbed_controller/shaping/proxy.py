"""A reverse proxy: a device has no network but that of its links, and is controlled through the shaper.

``/devices/worker1/health`` is ``/health`` on the control port of worker1's loopback; all else is the shaper's own.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress

from testbed.wire.serving import LARGEST_HEAD

HEAD_SECONDS = 5.0
"""Seconds in which the head of a connection's first request has to arrive."""
_END = b"\r\n\r\n"
_PIECE = 1 << 16
_TO_DEVICE = re.compile(rb"([A-Z]+ )/devices/([^/ ]+)(?=/)")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_NOBODY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Connect = Callable[[str], socket.socket]
"""Returns a connection to a device, or to the shaper where none is named; raises an error where nobody answers."""


async def serve(connect: Connect, listening: socket.socket) -> None:
    """Answer for ever."""

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await _lead(connect, reader, writer)
        writer.close()

    server = await asyncio.start_server(lead, sock=listening, limit=LARGEST_HEAD)
    await server.serve_forever()


async def _lead(connect: Connect, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    device, head = _addressed(await asyncio.wait_for(reader.readuntil(_END), HEAD_SECONDS))
    while True:
        try:
            connected = await asyncio.to_thread(connect, device)
        except Exception:  # noqa: BLE001 - whatever it is, the device does not answer
            writer.write(_NOBODY)
            return
        connected.setblocking(False)
        answers, requests = await asyncio.open_connection(sock=connected)
        asking = asyncio.ensure_future(_ask(device, head, reader, requests))
        answering = asyncio.ensure_future(_pass(answers, writer))
        try:
            await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            device, head = asking.result()
        finally:
            for way in (asking, answering):
                way.cancel()
            await asyncio.gather(asking, answering, return_exceptions=True)
            requests.close()


async def _ask(
    device: str, head: bytes, reader: asyncio.StreamReader, requests: asyncio.StreamWriter
) -> tuple[str, bytes]:
    """Pass on requests to one device; return one to another, which comes when what was asked before is answered."""
    wanted = device
    while wanted == device:
        found = _LENGTH.search(head)
        left = int(found[1]) if found else 0
        requests.write(head)
        while left:
            piece = await reader.read(min(left, _PIECE))
            if not piece:
                raise ConnectionError("the request is not whole")
            requests.write(piece)
            await requests.drain()
            left -= len(piece)
        wanted, head = _addressed(await reader.readuntil(_END))
    return wanted, head


async def _pass(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await answers.read(_PIECE):
        writer.write(piece)
        await writer.drain()


def _addressed(head: bytes) -> tuple[str, bytes]:
    """Return the device that a request is for, if any, and the request as that is to have it."""
    found = _TO_DEVICE.match(head)
    return (found[2].decode(), found[1] + head[found.end() :]) if found else ("", head)
