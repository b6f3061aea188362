"""The HTTP server of agents under slow, malformed and aborted requests."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests

from testbed.wire import serving
from testbed.wire.serving import PatientServer, refusal

THREADS = 4
PROMPT_SECONDS = 2.5
"""Limit of the time to a prompt response, far below the time-out of slow requests."""
LARGE_BODY = 200 << 20
"""Bytes that a server must not hold in memory."""


def make_url(address: tuple[str, int]) -> str:
    host, port = address
    return f"http://{host}:{port}/"


def peak_resident_bytes() -> int:
    # Linux reports this number in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def echo_body(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Length", str(len(body) + 2))])
    return [b"ok", body]


def refuse_request(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    start_response("401 Unauthorized", [("Content-Length", "2")])
    return [b"no"]


class StreamingApplication:
    """An application with a response in pieces, and with an event at the end of the iteration."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.ended = threading.Event()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        start_response("200 OK", [])
        return self._stream_pieces()

    def _stream_pieces(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        finally:
            self.ended.set()


def endless_stream() -> StreamingApplication:
    def pieces() -> Iterator[bytes]:
        for _ in range(10**6):
            time.sleep(0.02)
            yield b"more"

    return StreamingApplication(pieces())


@contextmanager
def serve(application: Callable[..., Iterable[bytes]]) -> Iterator[tuple[str, int]]:
    server = PatientServer(("127.0.0.1", 0), application, THREADS)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server.address
    finally:
        server.stop()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with serve(echo_body) as server_address:
        yield server_address


def test_half_open_connections_do_not_delay_other_requests(
    address: tuple[str, int],
) -> None:
    with ExitStack() as stack:
        for number in range(60):
            connection = stack.enter_context(socket.create_connection(address))
            # Half of the clients send nothing at all.
            if number % 2:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        # The server accepts these connections first.
        time.sleep(0.1)
        for _ in range(5):
            start = time.monotonic()
            assert requests.get(make_url(address), timeout=5).text == "ok"
            assert time.monotonic() - start < PROMPT_SECONDS


def test_end_of_input_within_head_closes_connection_promptly(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        connection.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        while connection.recv(1000):
            pass
        assert time.monotonic() - start < PROMPT_SECONDS


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        "\N{GRINNING FACE}" * 10**4,
        "\0" * 10**4,
        '"' * 10**4,
        "\udc80" * 10**4,
    ],
    ids=["letters", "emoji", "zero bytes", "quotation marks", "surrogates"],
)
def test_refusal_is_short_as_json(text: str) -> None:
    assert len(json.dumps({"error": refusal(text)})) < 5000


def test_short_refusal_is_unchanged() -> None:
    assert refusal("a µ") == "a µ"


def receive_responses(connection: socket.socket, body: bytes, count: int = 1) -> bytes:
    """Receive until ``count`` responses with the given body have arrived; return all received bytes."""
    connection.settimeout(20)
    received = b""
    while received.count(b"\r\n\r\n" + body) < count:
        received += connection.recv(1000)
    return received


def test_request_arriving_in_pieces_is_answered(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        for piece in (
            b"POST / HT",
            b"TP/1.1\r\nHost: x\r\n",
            b"Content-Length: 3\r\n\r",
            b"\n",
            b"abc",
        ):
            connection.sendall(piece)
            # The server receives the pieces one by one.
            time.sleep(0.02)
        assert receive_responses(connection, b"okabc").endswith(b"okabc")
        # Two further requests arrive together on the same connection.
        connection.sendall(2 * b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert receive_responses(connection, b"ok", count=2).count(b"200 OK") == 2


def test_connection_is_kept_for_bodies_of_any_size(address: tuple[str, int]) -> None:
    with requests.Session() as session:
        for size in (0, 10, 100_000):
            response = session.post(make_url(address), data=b"x" * size, timeout=5)
            assert len(response.content) == len("ok") + size


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\tx",
        b"GET http://[x/ HTTP/1.1",
        b"GET http://]da>a? HTTP/1.1",
    ],
    ids=["continuation of no header", "unclosed bracket", "invalid host"],
)
def test_unparsable_continuation_or_address_is_refused(
    address: tuple[str, int], head: bytes
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(head + b"\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


# Python refuses to parse integers of more than 4,300 digits.
@pytest.mark.parametrize("length", ["9" * 20, "9" * 5000], ids=["20", "5000"])
def test_excessive_content_length_is_refused_without_traceback(
    address: tuple[str, int], length: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(
            f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nab".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 4")
    assert "Traceback" not in capfd.readouterr().err


def test_stalled_head_closes_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STALLED_AFTER", 0.2)
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert connection.recv(100) == b""


def test_oldest_incomplete_request_is_closed_beyond_maximum(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_WAITING", 8)
    with ExitStack() as stack:
        connections = []
        for _ in range(20):
            connection = socket.create_connection(address, timeout=5)
            connections.append(stack.enter_context(connection))
        assert connections[0].recv(100) == b""
        assert requests.get(make_url(address), timeout=5).text == "ok"


# An address without a scheme may begin with two slashes as well, and this host is invalid.
def test_target_starting_with_two_slashes_is_path(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET //]da>a? HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"G\0T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: ".ljust(serving.LARGEST_HEAD, b"x"),
    ],
    ids=["header without colon", "zero byte in method", "too large head"],
)
def test_malformed_or_too_large_head_is_refused(
    address: tuple[str, int], request_bytes: bytes
) -> None:
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(request_bytes)
        assert connection.recv(1000).split()[1] in (b"400", b"431")


def test_expected_continue_line_is_sent_when_body_is_read(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        assert receive_responses(connection, b"okabc").startswith(b"HTTP/1.1 200 ")


def test_chunked_body_is_ignored_and_connection_closed(
    address: tuple[str, int],
) -> None:
    with (
        socket.create_connection(address, timeout=5) as connection,
        connection.makefile("rb") as response,
    ):
        connection.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        # The end of the file is the end of the connection.
        assert response.read().endswith(b"\r\n\r\nok")


def test_body_of_refused_request_is_discarded_without_buffering() -> None:
    size = LARGE_BODY
    with (
        serve(refuse_request) as address,
        socket.create_connection(address, timeout=5) as connection,
    ):
        before = peak_resident_bytes()
        connection.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
        )
        assert receive_responses(connection, b"no").startswith(b"HTTP/1.1 401 ")
        # A client may send the whole body before it reads the refusal.
        for _ in range(size >> 20):
            connection.sendall(bytes(1 << 20))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert receive_responses(connection, b"no").startswith(b"HTTP/1.1 401 ")
        assert peak_resident_bytes() - before < size / 4


def test_missing_bodies_of_refused_requests_do_not_delay_others() -> None:
    with serve(refuse_request) as address, ExitStack() as stack:
        for _ in range(10 * THREADS):
            connection = stack.enter_context(socket.create_connection(address))
            connection.sendall(
                b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
            )
        start = time.monotonic()
        assert requests.get(make_url(address), timeout=5).status_code == 401
        assert time.monotonic() - start < PROMPT_SECONDS


def test_large_response_is_sent_without_copy() -> None:
    size = LARGE_BODY
    body = bytes(size)

    def send_large_body(
        environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", str(size))])
        return [body]

    with (
        serve(send_large_body) as address,
        socket.create_connection(address, timeout=5) as connection,
    ):
        before = peak_resident_bytes()
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = 0
        while piece := connection.recv(1 << 20):
            received += len(piece)
        # The head of the response takes less than 1,000 bytes.
        assert size < received < size + 1000
        assert peak_resident_bytes() - before < size / 4


def test_streamed_pieces_are_sent_immediately() -> None:
    first_piece_received = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"first"
        assert first_piece_received.wait(5)
        yield b"second"

    application = StreamingApplication(pieces())
    with serve(application) as address, requests.Session() as session:
        response = session.get(make_url(address), timeout=5, stream=True)
        content = response.iter_content(None)
        assert next(content) == b"first"
        first_piece_received.set()
        assert b"".join(content) == b"second"


def test_disconnected_client_ends_stream() -> None:
    application = endless_stream()
    with serve(application) as address:
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            connection.recv(1000)
        assert application.ended.wait(5)


def test_stream_is_limited_and_closed_for_client_without_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "STALLED_AFTER", 1)
    piece_sizes: list[int] = []

    def pieces() -> Iterator[bytes]:
        for _ in range(1000):
            piece_sizes.append(1 << 20)
            yield bytes(1 << 20)

    application = StreamingApplication(pieces())
    with serve(application) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert application.ended.wait(10)
    # Buffers of the kernel and of the server hold some of the 1,000 pieces.
    assert len(piece_sizes) < 100


def test_stopped_server_leaves_no_thread_and_no_connection() -> None:
    threads_before = set(threading.enumerate())
    with serve(endless_stream()) as address:
        connection = socket.create_connection(address, timeout=5)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.recv(1000)
        idle = socket.create_connection(address, timeout=5)
    with connection, idle:
        assert idle.recv(1) == b""
    for thread in set(threading.enumerate()) - threads_before:
        assert not thread.name.startswith("waitress")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
