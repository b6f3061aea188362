"""Half-open connections keep nobody out."""

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
AT_ONCE = 2.5


def _answer(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Length", str(len(body) + 2))])
    return [b"ok", body]


class _Streaming:
    """Answers with pieces, and knows whether they have ended."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces
        self.ended = threading.Event()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        start_response("200 OK", [])
        return self._all()

    def _all(self) -> Iterator[bytes]:
        try:
            yield from self.pieces
        finally:
            self.ended.set()


@contextmanager
def served(application: Callable[..., Iterable[bytes]]) -> Iterator[tuple[str, int]]:
    server = PatientServer(("127.0.0.1", 0), application, THREADS)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server.address
    finally:
        server.stop()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with served(_answer) as found:
        yield found


def test_others_are_answered_at_once_beside_sixty_half_open_connections(
    address: tuple[str, int],
) -> None:
    with ExitStack() as stack:
        for number in range(60):
            link = stack.enter_context(socket.create_connection(address))
            if number % 2:
                link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        time.sleep(0.1)
        for _ in range(5):
            began = time.monotonic()
            assert (
                requests.get("http://{}:{}/".format(*address), timeout=5).text == "ok"
            )
            assert time.monotonic() - began < AT_ONCE


def test_who_sends_half_a_head_and_no_more_is_answered_at_once(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        link.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        while link.recv(1000):
            pass
        assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        "\N{GRINNING FACE}" * 10**4,
        "\0" * 10**4,
        '"' * 10**4,
        "\udc80" * 10**4,
    ],
)
def test_a_refusal_is_short_however_it_is_written(text: str) -> None:
    assert len(json.dumps({"error": refusal(text)})) < 5000
    assert refusal("a µ") == "a µ"


def answers(link: socket.socket, body: bytes, count: int = 1) -> bytes:
    """Return what a server sends, once so many answers with this body have come."""
    link.settimeout(20)
    received = b""
    while received.count(b"\r\n\r\n" + body) < count:
        received += link.recv(1000)
    return received


def test_a_head_may_come_in_pieces_and_requests_follow_on_one_connection(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as link:
        for piece in (
            b"POST / HT",
            b"TP/1.1\r\nHost: x\r\n",
            b"Content-Length: 3\r\n\r",
            b"\n",
            b"abc",
        ):
            link.sendall(piece)
            time.sleep(0.02)
        assert answers(link, b"okabc").endswith(b"okabc")
        link.sendall(2 * b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answers(link, b"ok", 2).count(b"200 OK") == 2
    with requests.Session() as session:
        for size in (0, 10, 100_000):
            assert (
                len(
                    session.post(
                        "http://{}:{}/".format(*address), data=b"x" * size, timeout=5
                    ).content
                )
                == size + 2
            )


@pytest.mark.parametrize(
    "begun",
    [
        b"GET / HTTP/1.1\r\n\tx",
        b"GET http://[x/ HTTP/1.1",
        b"GET http://]da>a? HTTP/1.1",
    ],
)
def test_a_header_that_continues_none_and_an_address_that_is_none_are_refused(
    address: tuple[str, int], begun: bytes
) -> None:
    with socket.create_connection(address) as link:
        link.sendall(begun + b"\r\nHost: x\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("length", ["9" * 20, "9" * 5000])
def test_a_body_that_is_longer_than_any_is_refused(
    address: tuple[str, int], length: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address) as link:
        link.sendall(
            f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nab".encode()
        )
        assert link.recv(1000).startswith(b"HTTP/1.1 4")
    assert "Traceback" not in capfd.readouterr().err


def test_a_head_that_does_not_come_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STALLED_AFTER", 0.2)
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(b"GET / HTTP/1.1\r\n")
        assert link.recv(100) == b""


def test_the_oldest_gives_way_to_more_than_may_wait(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_WAITING", 8)
    with ExitStack() as stack:
        links = [
            stack.enter_context(socket.create_connection(address, timeout=5))
            for _ in range(20)
        ]
        assert links[0].recv(100) == b""
        assert requests.get("http://{}:{}/".format(*address), timeout=5).text == "ok"


def test_an_address_that_begins_with_two_slashes_is_a_path(
    address: tuple[str, int],
) -> None:
    with socket.create_connection(address) as link:
        link.sendall(b"GET //]da>a? HTTP/1.1\r\nHost: x\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"G\0T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: ".ljust(serving.LARGEST_HEAD, b"x"),
    ],
)
def test_what_is_no_request_is_refused(address: tuple[str, int], wrong: bytes) -> None:
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(wrong)
        assert link.recv(1000).split()[1] in (b"400", b"431")


def test_a_body_is_asked_for_once_it_is_read(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as link:
        link.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        )
        assert link.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.sendall(b"abc")
        assert answers(link, b"okabc").startswith(b"HTTP/1.1 200 ")


def test_a_body_of_unknown_length_is_not_read_and_ends_the_connection(
    address: tuple[str, int],
) -> None:
    with (
        socket.create_connection(address, timeout=5) as link,
        link.makefile("rb") as answer,
    ):
        link.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        )
        assert answer.read().endswith(b"\r\n\r\nok")


def _refuse(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    start_response("401 Unauthorized", [("Content-Length", "2")])
    return [b"no"]


def test_a_body_that_is_refused_is_passed_over() -> None:
    size = 200 << 20
    with (
        served(_refuse) as address,
        socket.create_connection(address, timeout=5) as link,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        link.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        assert answers(link, b"no").startswith(b"HTTP/1.1 401 ")
        for _ in range(size >> 20):
            link.sendall(bytes(1 << 20))
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answers(link, b"no").startswith(b"HTTP/1.1 401 ")
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        ) - before < size / 4


def test_refused_bodies_that_do_not_come_keep_nobody_out() -> None:
    with served(_refuse) as address, ExitStack() as stack:
        for _ in range(10 * THREADS):
            link = stack.enter_context(socket.create_connection(address))
            link.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        began = time.monotonic()
        assert (
            requests.get("http://{}:{}/".format(*address), timeout=5).status_code == 401
        )
        assert time.monotonic() - began < AT_ONCE


def test_an_answer_of_any_size_is_sent_whole_without_a_copy_of_it() -> None:
    size = 200 << 20
    whole = bytes(size)

    def answer(
        environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", str(size))])
        return [whole]

    with (
        served(answer) as address,
        socket.create_connection(address, timeout=5) as link,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = 0
        while piece := link.recv(1 << 20):
            received += len(piece)
        assert size < received < size + 1000
        assert (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        ) - before < size / 4


def test_pieces_of_an_answer_are_sent_as_they_are_made() -> None:
    seen = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"first"
        assert seen.wait(5)
        yield b"second"

    with served(_Streaming(pieces())) as address, requests.Session() as session:
        found = session.get(
            "http://{}:{}/".format(*address), timeout=5, stream=True
        ).iter_content(None)
        assert next(found) == b"first"
        seen.set()
        assert b"".join(found) == b"second"


def test_who_leaves_ends_the_answer() -> None:
    application = _Streaming(time.sleep(0.02) or b"more" for _ in range(10**6))
    with served(application) as address:
        with socket.create_connection(address) as link:
            link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            link.recv(1000)
        assert application.ended.wait(5)


def test_who_does_not_read_is_waited_for_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "STALLED_AFTER", 1)
    made: list[int] = []
    application = _Streaming(made.append(1) or bytes(1 << 20) for _ in range(1000))
    with served(application) as address, socket.create_connection(address) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert application.ended.wait(10)
    assert len(made) < 100


def test_a_server_that_is_stopped_leaves_no_thread_and_no_connection() -> None:
    before = set(threading.enumerate())
    with served(
        _Streaming(time.sleep(0.02) or b"more" for _ in range(10**6))
    ) as address:
        link = socket.create_connection(address, timeout=5)
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        link.recv(1000)
        idle = socket.create_connection(address, timeout=5)
    with link, idle:
        assert idle.recv(1) == b""
    assert {
        each for each in threading.enumerate() if each.name.startswith("waitress")
    } <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
