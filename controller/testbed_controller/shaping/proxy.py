"""A reverse proxy to the devices, which have no network except their links.

``/devices/worker1/health`` leads to ``/health`` on the control port of worker1's loopback; other paths belong to the
shaper.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import suppress

from testbed.wire.serving import LARGEST_HEAD

HEAD_SECONDS = 5.0
"""Time limit for the head of a connection's first request, in seconds."""
_END = b"\r\n\r\n"
_PIECE = 1 << 16
"""Bytes read at a time."""
_TO_DEVICE = re.compile(rb"([A-Z]+ )/devices/([^/ ]+)(?=/)")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_NOBODY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Connect = Callable[[str], socket.socket]
"""Function that connects to a device, or to the shaper for an empty name; raises an error if nobody listens."""


async def serve(connect: Connect, listening: socket.socket) -> None:
    """Answer requests forever."""

    async def handle(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(
            OSError,
            TimeoutError,
            ValueError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            await _forward(connect, reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, sock=listening, limit=LARGEST_HEAD)
    await server.serve_forever()


async def _forward(
    connect: Connect, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    device, head = _split_address(
        await asyncio.wait_for(reader.readuntil(_END), HEAD_SECONDS)
    )
    while True:
        try:
            connected = await asyncio.to_thread(connect, device)
        except Exception:  # noqa: BLE001 - the device is unreachable, whatever the reason
            writer.write(_NOBODY)
            return
        # One connection to the device for all requests of this client, until the client names another device.
        connected.setblocking(False)
        answers, requests = await asyncio.open_connection(sock=connected)
        # Both ways at once: a device may answer, or stream events, while a body is still on its way.
        asking = asyncio.ensure_future(
            _forward_requests(device, head, reader, requests)
        )
        answering = asyncio.ensure_future(_forward_responses(answers, writer))
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


async def _forward_requests(
    device: str,
    head: bytes,
    reader: asyncio.StreamReader,
    requests: asyncio.StreamWriter,
) -> tuple[str, bytes]:
    """Forward requests to one device; return the first request to another one, after earlier responses."""
    wanted = device
    while wanted == device:
        length = _LENGTH.search(head)
        left = int(length[1]) if length else 0
        requests.write(head)
        while left:
            piece = await reader.read(min(left, _PIECE))
            if not piece:
                raise ConnectionError("the request is truncated")
            requests.write(piece)
            await requests.drain()
            left -= len(piece)
        wanted, head = _split_address(await reader.readuntil(_END))
    return wanted, head


async def _forward_responses(
    answers: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while True:
        piece = await answers.read(_PIECE)
        if not piece:
            return
        writer.write(piece)
        # Without waiting, a fast device and a slow reader would fill the shaper's memory.
        await writer.drain()


def _split_address(head: bytes) -> tuple[str, bytes]:
    """Return the addressed device, or an empty name, and the request without the prefix."""
    match = _TO_DEVICE.match(head)
    if match is None:
        return "", head
    return match[2].decode(), match[1] + head[match.end() :]
