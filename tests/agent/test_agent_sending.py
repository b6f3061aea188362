"""One sender and one receiver over real sockets: order, repetition and refusal, whatever becomes of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from testbed.wire.framing import HTTP_HEADERS, WINDOW
from testbed.wire.message import Message, encode
from testbed_agent.receiving import Arrival, DataServer, Inbox
from testbed_agent.sending import Connection, Delivery, Lane, Rejected
from testbed_agent.settings import Address, Settings
from tests.helpers.waiting import wait_for

TOKEN = "a-token-of-the-tests"


class Receiver:
    """An agent's data server whose program takes in what comes, a little later."""

    def __init__(self, limit: int = 1 << 26, holds: float = 0.0, port: int = 0) -> None:
        settings = Settings("run", "b", TOKEN, data=("127.0.0.1", port))
        self.numbers: list[int] = []
        self._holds = holds
        server = DataServer(settings)
        self.inbox = server.inbox = Inbox({"a": TOKEN}, limit, self._arrived, WINDOW)
        self.address = server.address
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(server.serve)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _arrived(self, arrival: Arrival) -> None:
        self.numbers.append(arrival.envelope.message["number"])
        threading.Timer(self._holds, self.inbox.release, [arrival.size]).start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as made:
        yield made


@contextlib.asynccontextmanager
async def proxy(
    target: Address, behave: Callable[[], Awaitable[None]]
) -> AsyncIterator[Address]:
    """Forward connections until ``behave`` returns, then break them off, and so on with the next."""

    async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(1 << 14):
            sink.write(piece)
            await sink.drain()

    async def connected(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        there, back = await asyncio.open_connection(*target)
        tasks = [
            asyncio.ensure_future(each)
            for each in (forward(reader, back), forward(there, writer), behave())
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.transport.abort()
        back.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


def test_the_head_of_a_request_is_as_long_as_predictions_say() -> None:
    token = secrets.token_urlsafe(24)
    for address, size in (("172.18.0.2", 5_000), ("10.213.17.12", 1_000_000)):
        head = Connection((address, 8701), "/messages", token).request_head(bytes(size))
        assert len(head) == pytest.approx(HTTP_HEADERS, abs=6)


def numbered(number: int, size: int = 0, sequence: int | None = None) -> bytes:
    return encode(
        Message("m", {"number": number}, padding=size),
        "a",
        1,
        number if sequence is None else sequence,
    )


def test_many_messages_are_under_way_at_once(receiver: Receiver) -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    async def main() -> list[Delivery]:
        lane = Lane("b", receiver.address, TOKEN)
        found = await asyncio.gather(
            *(lane.deliver(numbered(number, 1000)) for number in range(50))
        )
        lane.close()
        return found

    found = asyncio.run(main())
    assert receiver.numbers == list(range(50))
    assert max(each.begun for each in found) < min(each.ended for each in found)
    assert [each.ended for each in found] == sorted(each.ended for each in found)


def test_time_out_grows_at_once_and_shrinks_with_the_next_response(
    receiver: Receiver,
) -> None:
    async def main() -> list[int]:
        lane = Lane("b", receiver.address, TOKEN, slowness=0.5)
        await lane.deliver(numbered(0))
        link = lane._connection._socket
        assert link is not None
        found = []
        for slowness in (4.0, 0.0):
            lane.set_slowness(slowness)
            found.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        await lane.deliver(numbered(1))
        found.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        lane.close()
        return found

    assert asyncio.run(main()) == [6000, 6000, 2000]


@pytest.mark.parametrize("seed", range(6))
def test_a_link_that_breaks_loses_nothing_and_repeats_nothing(seed: int) -> None:
    chance = random.Random(seed)

    async def breaks() -> None:
        await asyncio.sleep(chance.choice([0.0, 0.001, 0.005, 0.02]))

    async def main(address: Address) -> None:
        async with proxy(address, breaks) as between:
            lane = Lane("b", between, TOKEN)
            sizes = [chance.choice([0, 1000, 50_000]) for _ in range(60)]
            await asyncio.gather(
                *(
                    lane.deliver(numbered(number, size))
                    for number, size in enumerate(sizes)
                )
            )
            lane.close()

    # A small inbox on top: some are refused for a while.
    with contextlib.closing(Receiver(limit=200_000, holds=0.003)) as receiver:
        asyncio.run(asyncio.wait_for(main(receiver.address), 30))
        assert receiver.numbers == list(range(60))


def test_rejected_message_does_not_affect_others(receiver: Receiver) -> None:
    async def main() -> list[Delivery | BaseException]:
        lane = Lane("b", receiver.address, TOKEN)
        bodies = [numbered(0), b"no message", numbered(2), numbered(3, 100_000)]
        found = await asyncio.gather(*map(lane.deliver, bodies), return_exceptions=True)
        lane.close()
        return found

    found = asyncio.run(main())
    assert [isinstance(each, Delivery) for each in found] == [True, False, True, True]
    assert isinstance(found[1], Rejected)
    assert (
        "b refused a message: truncated message: the prefix is incomplete (400)"
        in str(found[1])
    )
    assert receiver.numbers == [0, 2, 3]


def test_partially_sent_message_can_be_withdrawn() -> None:
    async def main(server: socket.socket, receiver: Receiver) -> None:
        loop = asyncio.get_running_loop()
        lane = Lane("b", server.getsockname(), TOKEN)
        sizes = {0: 1000, 1: 8 << 20, 2: 1000}
        sends = [
            asyncio.create_task(lane.deliver(numbered(number, size)))
            for number, size in sizes.items()
        ]
        link, _ = await loop.sock_accept(
            server
        )  # and reads nothing, so that the large one gets stuck
        await asyncio.sleep(0.1)
        sends[1].cancel()
        await asyncio.sleep(0.1)
        link.close()
        # The next connection goes through.
        link, _ = await loop.sock_accept(server)
        back = socket.create_connection(receiver.address)
        back.setblocking(False)

        async def forward(source: socket.socket, sink: socket.socket) -> None:
            while piece := await loop.sock_recv(source, 1 << 16):
                await loop.sock_sendall(sink, piece)

        tasks = [
            asyncio.create_task(forward(link, back)),
            asyncio.create_task(forward(back, link)),
        ]
        await asyncio.gather(sends[0], sends[2])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lane.close()

    with (
        contextlib.closing(Receiver()) as receiver,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.setblocking(False)
        asyncio.run(asyncio.wait_for(main(server, receiver), 20))
        assert receiver.numbers == [0, 2]


def test_a_full_window_waits_for_acknowledgements() -> None:
    async def main(server: socket.socket) -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        lane = Lane("b", server.getsockname(), TOKEN)
        bodies = [numbered(number, WINDOW // 2 + 1) for number in range(4)]
        sends = [asyncio.create_task(lane.deliver(body)) for body in bodies]
        link, _ = await loop.sock_accept(server)
        received = 0
        with contextlib.suppress(TimeoutError):
            while (
                True
            ):  # two of them come however long that takes; then nothing more does
                patience = 20 if received < 2 * len(bodies[0]) else 0.3
                received += len(
                    await asyncio.wait_for(loop.sock_recv(link, 1 << 20), patience)
                )
        for send in sends:
            send.cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        lane.close()
        return received, len(bodies[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        received, one = asyncio.run(main(server))
        assert 2 * one < received < 2 * one + 1000


@pytest.mark.parametrize(
    ("pause", "status"), [(0.2, b"204"), (None, b"408")], ids=["slowly", "not at all"]
)
def test_slow_message_is_received_and_stalled_message_is_dropped(
    monkeypatch: pytest.MonkeyPatch, pause: float | None, status: bytes
) -> None:
    monkeypatch.setattr("testbed_agent.receiving.STALLED_AFTER", 0.9)
    body = numbered(0, 1000)
    with (
        contextlib.closing(Receiver()) as receiver,
        socket.create_connection(receiver.address, timeout=10) as link,
    ):
        link.sendall(
            Connection(receiver.address, "/messages", TOKEN).request_head(body)
        )
        for at in range(0, len(body), 200):
            link.sendall(body[at : at + 200])
            if pause is None:
                break
            time.sleep(pause)
        assert link.recv(1000).split()[1] == status
        assert receiver.numbers == [0][: pause is not None]
        if pause is None:
            assert receiver.inbox.bytes == 0


def test_the_inbox_knows_whose_message_is_there_in_part(receiver: Receiver) -> None:
    body = numbered(0, 100_000)
    with socket.create_connection(receiver.address) as link:
        link.sendall(
            Connection(receiver.address, "/messages", TOKEN).request_head(body)
            + body[:50_000]
        )
        wait_for(lambda: "a" in receiver.inbox.arriving)
        link.sendall(body[50_000:])
        wait_for(lambda: receiver.numbers == [0] and not receiver.inbox.arriving)


def test_unreachable_peer_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "testbed_agent.sending")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

    async def scenario() -> None:
        lane = Lane("b", ("127.0.0.1", port), TOKEN)
        delivery = asyncio.create_task(lane.deliver(numbered(0)))
        await asyncio.sleep(0.2)
        with contextlib.closing(Receiver(port=port)):
            await delivery
        lane.close()

    asyncio.run(scenario())
    first, *later = caplog.messages
    assert first.startswith("b: cannot connect")
    assert later == ["b: connected"]


def test_nothing_leaves_too_early(receiver: Receiver) -> None:
    async def main() -> None:
        lane = Lane("b", receiver.address, TOKEN)
        first = asyncio.create_task(lane.deliver(numbered(0)))
        held_back = asyncio.create_task(
            lane.deliver(numbered(1), not_before=time.monotonic() + 3600)
        )
        await first
        assert not held_back.done()
        held_back.cancel()
        due = time.monotonic() + 0.1
        assert due <= (await lane.deliver(numbered(2), not_before=due)).begun
        lane.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert receiver.numbers == [0, 2]
