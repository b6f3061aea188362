"""Bodies of requests to the agent, over a real connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import flask
import pytest

from testbed.wire import serving
from testbed.wire.serving import PatientServer
from testbed_agent.http import Refused, read_body


def _application() -> flask.Flask:
    app = flask.Flask("bodies")

    @app.put("/")
    def measure() -> dict[str, Any]:
        return {
            "length": len(
                read_body(
                    flask.request.environ, int(flask.request.environ["CONTENT_LENGTH"])
                )
            )
        }

    @app.errorhandler(Refused)
    def refuse(error: Refused) -> Any:
        return {"error": str(error)}, error.status

    return app


def _answered(link: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"}\n"):
        answer += link.recv(1000)
    return answer


@pytest.fixture
def link() -> Iterator[socket.socket]:
    server = PatientServer(("127.0.0.1", 0), _application(), 1)
    threading.Thread(target=server.serve, daemon=True).start()
    with socket.create_connection(server.address, timeout=10) as link:
        link.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nonly this"
        )
        yield link
    server.stop()


def test_slow_body_is_accepted(link: socket.socket) -> None:
    for _ in range(91):
        link.sendall(b"x")
    assert _answered(link).endswith(b'{"length":100}\n')


def test_a_body_that_ends_too_early_is_refused(link: socket.socket) -> None:
    link.shutdown(socket.SHUT_WR)
    answer = _answered(link)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"after 9 of 100 bytes" in answer


def test_a_body_that_stalls_is_refused(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(serving, "STALLED_AFTER", 0.2)
    link = request.getfixturevalue("link")
    assert _answered(link).startswith(b"HTTP/1.1 408 ")
