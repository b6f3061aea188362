"""A sender and a receiver over real sockets: order, duplicates and refusals, in spite of broken connections."""

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
    """The data server of an agent, and a program freeing the inbox ``hold_seconds`` after each message."""

    def __init__(
        self, limit: int = 1 << 26, hold_seconds: float = 0.0, port: int = 0
    ) -> None:
        settings = Settings("run", "b", TOKEN, data=("127.0.0.1", port))
        self.numbers: list[int] = []
        """Numbers of the received messages."""
        self._hold_seconds = hold_seconds
        server = DataServer(settings)
        self.inbox = server.inbox = Inbox({"a": TOKEN}, limit, self._receive, WINDOW)
        self.address = server.address
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(server.serve)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _receive(self, arrival: Arrival) -> None:
        self.numbers.append(arrival.envelope.message["number"])
        release = threading.Timer(
            self._hold_seconds, self.inbox.release, [arrival.size]
        )
        release.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as receiver:
        yield receiver


async def cancel_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def breaking_proxy(
    target: Address, wait_for_break: Callable[[], Awaitable[None]]
) -> AsyncIterator[Address]:
    """Forward each connection until ``wait_for_break`` returns, then break the connection."""

    async def forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 14):
            sink.write(data)
            await sink.drain()

    async def serve_client(
        client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        target_reader, target_writer = await asyncio.open_connection(*target)
        tasks = [
            asyncio.ensure_future(forward(client_reader, target_writer)),
            asyncio.ensure_future(forward(target_reader, client_writer)),
            asyncio.ensure_future(wait_for_break()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await cancel_tasks(tasks)
        # An abort drops buffered data, as a lost link does.
        client_writer.transport.abort()
        target_writer.close()

    server = await asyncio.start_server(serve_client, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()


def test_request_head_has_the_predicted_length() -> None:
    # Predictions of transmission times use a constant; lengths of addresses and sizes vary by a few digits.
    token = secrets.token_urlsafe(24)
    for address, size in (("172.18.0.2", 5_000), ("10.213.17.12", 1_000_000)):
        connection = Connection((address, 8701), "/messages", token)
        head = connection.request_head(bytes(size))
        assert len(head) == pytest.approx(HTTP_HEADERS, abs=6)


def numbered_message(number: int, size: int = 0) -> bytes:
    """Return an encoded message with a padding of ``size`` bytes."""
    message = Message("m", {"number": number}, padding=size)
    return encode(message, "a", 1, number)


def test_messages_do_not_wait_for_earlier_acknowledgements(receiver: Receiver) -> None:
    async def main() -> list[Delivery]:
        lane = Lane("b", receiver.address, TOKEN)
        bodies = [numbered_message(number, 1000) for number in range(50)]
        deliveries = await asyncio.gather(*map(lane.deliver, bodies))
        lane.close()
        return deliveries

    deliveries = asyncio.run(main())
    assert receiver.numbers == list(range(50))
    begins = [delivery.first_byte for delivery in deliveries]
    ends = [delivery.acknowledged for delivery in deliveries]
    assert max(begins) < min(ends)
    assert ends == sorted(ends)


def test_time_out_grows_at_once_and_shrinks_with_the_next_response(
    receiver: Receiver,
) -> None:
    async def main() -> list[int]:
        lane = Lane("b", receiver.address, TOKEN, slowness=0.5)
        await lane.deliver(numbered_message(0))
        link = lane._connection._socket
        assert link is not None

        def time_out() -> int:
            return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        lane.set_slowness(4.0)
        time_outs = [time_out()]
        lane.set_slowness(0.0)
        time_outs.append(time_out())
        await lane.deliver(numbered_message(1))
        time_outs.append(time_out())
        lane.close()
        return time_outs

    # Two seconds and the slowness, in milliseconds.
    assert asyncio.run(main()) == [6000, 6000, 2000]


@pytest.mark.parametrize("seed", range(6))
def test_broken_connections_neither_lose_nor_repeat_messages(seed: int) -> None:
    generator = random.Random(seed)

    async def wait_for_break() -> None:
        await asyncio.sleep(generator.choice([0.0, 0.001, 0.005, 0.02]))

    async def main(address: Address) -> None:
        async with breaking_proxy(address, wait_for_break) as proxy_address:
            lane = Lane("b", proxy_address, TOKEN)
            sends = []
            for number in range(60):
                size = generator.choice([0, 1000, 50_000])
                sends.append(lane.deliver(numbered_message(number, size)))
            await asyncio.gather(*sends)
            lane.close()

    # The inbox is so small that it also refuses some messages for a while.
    small_receiver = Receiver(limit=200_000, hold_seconds=0.003)
    with contextlib.closing(small_receiver) as receiver:
        asyncio.run(asyncio.wait_for(main(receiver.address), 30))
        assert receiver.numbers == list(range(60))


def test_rejected_message_does_not_affect_others(receiver: Receiver) -> None:
    async def main() -> list[Delivery | BaseException]:
        lane = Lane("b", receiver.address, TOKEN)
        bodies = [
            numbered_message(0),
            b"no message",
            numbered_message(2),
            numbered_message(3, 100_000),
        ]
        sends = map(lane.deliver, bodies)
        results = await asyncio.gather(*sends, return_exceptions=True)
        lane.close()
        return results

    results = asyncio.run(main())
    is_delivered = [isinstance(result, Delivery) for result in results]
    assert is_delivered == [True, False, True, True]
    rejection = results[1]
    assert isinstance(rejection, Rejected)
    error = "b refused a message: truncated message: the prefix is incomplete (400)"
    assert error in str(rejection)
    assert receiver.numbers == [0, 2, 3]


async def forward_socket(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, 1 << 16):
        await loop.sock_sendall(sink, data)


def test_partially_sent_message_can_be_withdrawn() -> None:
    async def main(server: socket.socket, receiver: Receiver) -> None:
        loop = asyncio.get_running_loop()
        lane = Lane("b", server.getsockname(), TOKEN)
        sends = []
        for number, size in ((0, 1000), (1, 8 << 20), (2, 1000)):
            send = lane.deliver(numbered_message(number, size))
            sends.append(asyncio.create_task(send))
        # The server accepts the first connection and reads nothing, so that the large message blocks.
        link, _ = await loop.sock_accept(server)
        await asyncio.sleep(0.1)
        sends[1].cancel()
        await asyncio.sleep(0.1)
        link.close()
        # The server forwards the second connection to the receiver.
        link, _ = await loop.sock_accept(server)
        receiver_link = socket.create_connection(receiver.address)
        receiver_link.setblocking(False)
        tasks = [
            asyncio.create_task(forward_socket(link, receiver_link)),
            asyncio.create_task(forward_socket(receiver_link, link)),
        ]
        await asyncio.gather(sends[0], sends[2])
        await cancel_tasks(tasks)
        lane.close()

    with (
        contextlib.closing(Receiver()) as receiver,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.setblocking(False)
        asyncio.run(asyncio.wait_for(main(server, receiver), 20))
        assert receiver.numbers == [0, 2]


def test_full_window_waits_for_acknowledgements() -> None:
    # The second message begins within the window and exceeds it; the third one has to wait.
    bodies = [numbered_message(number, WINDOW // 2 + 1) for number in range(4)]
    two_messages = 2 * len(bodies[0])

    async def main(server: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        lane = Lane("b", server.getsockname(), TOKEN)
        sends = [asyncio.create_task(lane.deliver(body)) for body in bodies]
        link, _ = await loop.sock_accept(server)
        received = 0
        # Two messages arrive even on a busy host; the time-out ends the wait for a third one.
        with contextlib.suppress(TimeoutError):
            while True:
                time_out = 20 if received < two_messages else 0.3
                data = await asyncio.wait_for(loop.sock_recv(link, 1 << 20), time_out)
                received += len(data)
        await cancel_tasks(sends)
        lane.close()
        return received

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        received = asyncio.run(main(server))
    # Heads of requests add less than 1000 bytes.
    assert two_messages < received < two_messages + 1000


def post_head(receiver: Receiver, body: bytes) -> bytes:
    """Return the head of a request with a message for the receiver."""
    return Connection(receiver.address, "/messages", TOKEN).request_head(body)


def test_slow_message_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five pieces, 0.2 s apart, take longer than the time-out as a whole.
    monkeypatch.setattr("testbed_agent.receiving.STALLED_AFTER", 0.9)
    body = numbered_message(0, 1000)
    with (
        contextlib.closing(Receiver()) as receiver,
        socket.create_connection(receiver.address, timeout=10) as link,
    ):
        link.sendall(post_head(receiver, body))
        for start in range(0, len(body), 200):
            link.sendall(body[start : start + 200])
            time.sleep(0.2)
        assert link.recv(1000).split()[1] == b"204"
        assert receiver.numbers == [0]


def test_stalled_message_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed_agent.receiving.STALLED_AFTER", 0.9)
    body = numbered_message(0, 1000)
    with (
        contextlib.closing(Receiver()) as receiver,
        socket.create_connection(receiver.address, timeout=10) as link,
    ):
        link.sendall(post_head(receiver, body) + body[:200])
        assert link.recv(1000).split()[1] == b"408"
        assert receiver.numbers == []
        assert receiver.inbox.bytes == 0


def test_inbox_lists_senders_of_incomplete_messages(receiver: Receiver) -> None:
    body = numbered_message(0, 100_000)
    with socket.create_connection(receiver.address) as link:
        link.sendall(post_head(receiver, body) + body[:50_000])
        wait_for(lambda: "a" in receiver.inbox.arriving)
        link.sendall(body[50_000:])
        wait_for(lambda: receiver.numbers == [0] and not receiver.inbox.arriving)


def test_unreachable_peer_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "testbed_agent.sending")
    with socket.create_server(("127.0.0.1", 0)) as closed_server:
        port = closed_server.getsockname()[1]

    async def main() -> None:
        lane = Lane("b", ("127.0.0.1", port), TOKEN)
        delivery = asyncio.create_task(lane.deliver(numbered_message(0)))
        # Time for several attempts to connect.
        await asyncio.sleep(0.2)
        with contextlib.closing(Receiver(port=port)):
            await delivery
        lane.close()

    asyncio.run(main())
    first, *later = caplog.messages
    assert first.startswith("b: cannot connect")
    assert later == ["b: connected"]


def test_message_does_not_leave_before_earliest_instant(
    receiver: Receiver,
) -> None:
    async def main() -> None:
        lane = Lane("b", receiver.address, TOKEN)
        first = asyncio.create_task(lane.deliver(numbered_message(0)))
        in_an_hour = time.monotonic() + 3600
        delayed = asyncio.create_task(
            lane.deliver(numbered_message(1), not_before=in_an_hour)
        )
        await first
        assert not delayed.done()
        delayed.cancel()
        earliest = time.monotonic() + 0.1
        delivery = await lane.deliver(numbered_message(2), not_before=earliest)
        assert earliest <= delivery.first_byte
        lane.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert receiver.numbers == [0, 2]
