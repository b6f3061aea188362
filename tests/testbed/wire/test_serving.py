"""Half-open connections keep nobody out."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from cheroot.wsgi import Server

from testbed.wire import serving
from testbed.wire.serving import PatientServer, refusal

THREADS = 4


def _answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Length", str(len(body) + 2))])
    return [b"ok", body]


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    server = PatientServer(("127.0.0.1", 0), _answer, numthreads=THREADS, timeout=10)
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    yield server.bind_addr
    server.stop()


def test_others_are_answered_at_once_beside_sixty_half_open_connections(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        for number in range(60):
            link = stack.enter_context(socket.create_connection(address))
            if number % 2:
                link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        time.sleep(0.1)
        for _ in range(5):
            began = time.monotonic()
            assert requests.get("http://{}:{}/".format(*address), timeout=5).text == "ok"
            assert time.monotonic() - began < serving.HEAD_SECONDS / 2


def test_who_sends_half_a_head_and_no_more_is_answered_at_once(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        link.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        while link.recv(1000):
            pass
        assert time.monotonic() - began < serving.HEAD_SECONDS / 2


@pytest.mark.parametrize(
    "text", ["a" * 10**6, "\N{GRINNING FACE}" * 10**4, "\0" * 10**4, '"' * 10**4, "\udc80" * 10**4]
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


def test_a_head_may_come_in_pieces_and_requests_follow_on_one_connection(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as link:
        for piece in (b"POST / HT", b"TP/1.1\r\nHost: x\r\n", b"Content-Length: 3\r\n\r", b"\n", b"abc"):
            link.sendall(piece)
            time.sleep(0.02)
        assert answers(link, b"okabc").endswith(b"okabc")
        link.sendall(2 * b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answers(link, b"ok", 2).count(b"200 OK") == 2
    with requests.Session() as session:
        for size in (0, 10, 100_000):
            assert len(session.post("http://{}:{}/".format(*address), data=b"x" * size, timeout=5).content) == size + 2


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\n\tx", b"GET //]da>a? HTTP/1.1", b"GET http://[x/ HTTP/1.1"])
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
        link.sendall(f"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nab".encode())
        assert link.recv(1000).startswith(b"HTTP/1.1 4")
    assert "Traceback" not in capfd.readouterr().err


def test_a_head_that_does_not_come_is_given_up(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PatientServer, "head_seconds", 0.2)
    with socket.create_connection(address, timeout=5) as link:
        link.sendall(b"GET / HTTP/1.1\r\n")
        assert link.recv(100) == b""


def test_the_oldest_gives_way_to_more_than_may_wait(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_WAITING", 8)
    with ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(20)]
        assert links[0].recv(100) == b""
        assert requests.get("http://{}:{}/".format(*address), timeout=5).text == "ok"


def test_cheroot_itself_would_wait() -> None:
    """Why this server is there: with the plain one, as many half-open connections as threads keep others out."""
    server = Server(("127.0.0.1", 0), _answer, numthreads=THREADS, timeout=10)
    server.prepare()
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        with ExitStack() as stack:
            for _ in range(2 * THREADS):
                stack.enter_context(socket.create_connection(server.bind_addr))
            time.sleep(0.1)
            with pytest.raises(requests.Timeout):
                requests.get("http://{}:{}/".format(*server.bind_addr), timeout=1)
    finally:
        server.stop()
