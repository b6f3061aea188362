from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from testbed_controller.hosts.inside.streams import CLOCK, WINDOW, Streams


class Ends:
    """A controller's end and a host's, each reading what the other sends; connections lead to servers here."""

    def __init__(self) -> None:
        self.times: list[bytes] = []
        to_host, to_controller = asyncio.StreamReader(), asyncio.StreamReader()
        self.controller = Streams(to_host.feed_data, self.times.append)
        self.host = Streams(
            to_controller.feed_data,
            lambda times: self.host.send(CLOCK, 0, times + b"!"),
            _connect,
        )
        self.tasks = [
            asyncio.ensure_future(self.controller.handle_frames(to_controller)),
            asyncio.ensure_future(self.host.handle_frames(to_host)),
        ]

    async def port(self, target: int) -> int:
        async def lead(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await self.controller.open({"pid": 0, "port": target}, reader, writer)

        return _port(await asyncio.start_server(lead, "127.0.0.1", 0))


async def _connect(
    target: dict[str, Any],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", target["port"])


def _port(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def _deaf(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def run(test: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Ends()), 20)

    asyncio.run(main())


def test_bytes_come_back_whole_and_in_order_on_many_connections() -> None:
    async def test(ends: Ends) -> None:
        port = await ends.port(_port(await asyncio.start_server(_echo, "127.0.0.1", 0)))

        async def one(number: int) -> None:
            sent = bytes([number]) * 300_000
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.close()

        await asyncio.gather(*(one(number) for number in range(20)))

    run(test)


def test_unread_connection_does_not_block_the_others() -> None:
    async def test(ends: Ends) -> None:
        deaf = await ends.port(
            _port(await asyncio.start_server(_deaf, "127.0.0.1", 0, limit=1))
        )
        echo = await ends.port(_port(await asyncio.start_server(_echo, "127.0.0.1", 0)))
        _, stuck = await asyncio.open_connection("127.0.0.1", deaf)
        stuck.write(bytes(64 * WINDOW))
        reader, writer = await asyncio.open_connection("127.0.0.1", echo)
        for _ in range(3):
            writer.write(b"there?")
            assert await reader.readexactly(6) == b"there?"
        assert ends.host._connections[1].arrived.qsize() <= WINDOW // 1000 + 1

    run(test)


def test_connection_to_a_closed_port_ends_at_once() -> None:
    async def test(ends: Ends) -> None:
        reader, _ = await asyncio.open_connection("127.0.0.1", await ends.port(1))
        assert await reader.read() == b""

    run(test)


def test_lost_end_closes_every_connection() -> None:
    async def test(ends: Ends) -> None:
        port = await ends.port(_port(await asyncio.start_server(_echo, "127.0.0.1", 0)))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        ends.controller._connections[1].arrived.put_nowait(b"")
        assert await reader.read() == b""

    run(test)


def test_clock_frames_pass_beside_the_connections() -> None:
    async def test(ends: Ends) -> None:
        ends.controller.send(CLOCK, 0, b"123")
        while not ends.times:
            await asyncio.sleep(0.01)
        assert ends.times == [b"123!"]

    run(test)
