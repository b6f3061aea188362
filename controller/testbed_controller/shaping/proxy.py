"""A reverse proxy to the devices, which have no network except their links.

A request for ``/devices/worker1/health`` is forwarded as ``/health`` to the control port on worker1's loopback.
Requests for other paths are forwarded to the shaper's HTTP server.
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
_HEAD_END = b"\r\n\r\n"
"""End of the head of a request: the request line and the headers."""
_PIECE = 1 << 16
"""Maximum number of bytes read at a time."""
_TO_DEVICE = re.compile(rb"([A-Z]+ )/devices/([^/ ]+)(?=/)")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)

Connect = Callable[[str], socket.socket]
"""Function that connects to a device by name, or to the shaper for an empty name; raises an error on failure."""


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
    """Forward all requests of a client's connection."""
    first_head = await asyncio.wait_for(reader.readuntil(_HEAD_END), HEAD_SECONDS)
    device, head = _split_address(first_head)
    while True:
        try:
            connected = await asyncio.to_thread(connect, device)
        except Exception:  # noqa: BLE001 - the device is unreachable, whatever the reason
            writer.write(_BAD_GATEWAY)
            return
        # One connection to the device for all requests of this client, until the client names another device.
        connected.setblocking(False)
        responses, requests = await asyncio.open_connection(sock=connected)
        # Both directions at once: a device may answer, or stream events, before it has received the whole body.
        request_task = asyncio.ensure_future(
            _forward_requests(device, head, reader, requests)
        )
        response_task = asyncio.ensure_future(_forward_responses(responses, writer))
        tasks = (request_task, response_task)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The device has closed its connection.
            if not request_task.done():
                return
            device, head = request_task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            requests.close()


async def _forward_requests(
    device: str,
    head: bytes,
    reader: asyncio.StreamReader,
    requests: asyncio.StreamWriter,
) -> tuple[str, bytes]:
    """Forward requests until one names another device; return this device and the head of its request."""
    target = device
    while target == device:
        length = _LENGTH.search(head)
        remaining = int(length[1]) if length else 0
        requests.write(head)
        while remaining:
            piece = await reader.read(min(remaining, _PIECE))
            if not piece:
                raise ConnectionError("the request is truncated")
            requests.write(piece)
            await requests.drain()
            remaining -= len(piece)
        target, head = _split_address(await reader.readuntil(_HEAD_END))
    return target, head


async def _forward_responses(
    responses: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    while True:
        piece = await responses.read(_PIECE)
        if not piece:
            return
        writer.write(piece)
        # Without waiting, a fast device and a slow reader would fill the shaper's memory.
        await writer.drain()


def _split_address(head: bytes) -> tuple[str, bytes]:
    """Return the device in a request's path, or an empty name, and the head without ``/devices/NAME``."""
    match = _TO_DEVICE.match(head)
    if match is None:
        return "", head
    return match[2].decode(), match[1] + head[match.end() :]
