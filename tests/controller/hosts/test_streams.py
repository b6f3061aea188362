"""Multiplexed connections between the controller and a host, with servers of the test as targets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from testbed_controller.hosts.inside.streams import CLOCK, WINDOW, Streams


class StreamsPair:
    """The controller's end and the host's end, connected in memory."""

    def __init__(self) -> None:
        self.clock_frames: list[bytes] = []
        to_host, to_controller = asyncio.StreamReader(), asyncio.StreamReader()
        self.controller = Streams(to_host.feed_data, self.clock_frames.append)
        self.host = Streams(to_controller.feed_data, self._return_clock, connect)
        # A reference keeps the tasks from being collected.
        self.tasks = [
            asyncio.ensure_future(self.controller.handle_frames(to_controller)),
            asyncio.ensure_future(self.host.handle_frames(to_host)),
        ]

    def _return_clock(self, times: bytes) -> None:
        self.host.send(CLOCK, 0, times + b"!")

    async def forward_port(self, target_port: int) -> int:
        """Return a local port whose connections lead through both ends to a target port."""

        async def forward(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            target = {"pid": 0, "port": target_port}
            await self.controller.open(target, reader, writer)

        return await start_server(forward)


async def connect(
    target: dict[str, Any],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", target["port"])


async def start_server(serve: Any, **options: Any) -> int:
    """Start a server on a free port and return the port."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, **options)
    return int(server.sockets[0].getsockname()[1])


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def ignore(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def run_test(test: Callable[[StreamsPair], Awaitable[None]]) -> None:
    async def main() -> None:
        # The ends are created here, since they need a running loop.
        await asyncio.wait_for(test(StreamsPair()), 20)

    asyncio.run(main())


def test_many_connections_return_all_bytes_in_order() -> None:
    async def test(pair: StreamsPair) -> None:
        port = await pair.forward_port(await start_server(echo))

        async def check_echo(number: int) -> None:
            sent = bytes([number]) * 300_000
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()

        await asyncio.gather(*(check_echo(number) for number in range(20)))

    run_test(test)


def test_unread_connection_does_not_block_the_others() -> None:
    async def test(pair: StreamsPair) -> None:
        ignoring = await pair.forward_port(await start_server(ignore, limit=1))
        echoing = await pair.forward_port(await start_server(echo))
        _, stuck = await asyncio.open_connection("127.0.0.1", ignoring)
        stuck.write(bytes(64 * WINDOW))
        reader, writer = await asyncio.open_connection("127.0.0.1", echoing)
        for _ in range(3):
            writer.write(b"there?")
            assert await reader.readexactly(6) == b"there?"
        # The window limits the bytes in the queue; a bound on the pieces, most of which have 64 KiB, suffices here.
        assert pair.host._connections[1].arrivals.qsize() <= WINDOW // 1000 + 1

    run_test(test)


def test_connection_to_a_closed_port_ends_at_once() -> None:
    async def test(pair: StreamsPair) -> None:
        closed_port = 1
        port = await pair.forward_port(closed_port)
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""

    run_test(test)


def test_end_of_data_closes_the_connection() -> None:
    async def test(pair: StreamsPair) -> None:
        port = await pair.forward_port(await start_server(echo))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        # An empty piece marks the end of a connection.
        pair.controller._connections[1].arrivals.put_nowait(b"")
        assert await reader.read() == b""

    run_test(test)


def test_clock_frames_pass_beside_the_connections() -> None:
    async def test(pair: StreamsPair) -> None:
        pair.controller.send(CLOCK, 0, b"123")
        while not pair.clock_frames:
            await asyncio.sleep(0.01)
        assert pair.clock_frames == [b"123!"]

    run_test(test)
