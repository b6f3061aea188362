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


def make_application() -> flask.Flask:
    """Return an application responding with the length of a body."""
    application = flask.Flask("bodies")

    @application.put("/")
    def measure_body() -> dict[str, Any]:
        environ = flask.request.environ
        body = read_body(environ, int(environ["CONTENT_LENGTH"]))
        return {"length": len(body)}

    @application.errorhandler(Refused)
    def refuse(error: Refused) -> Any:
        return {"error": str(error)}, error.status

    return application


def receive_response(client: socket.socket) -> bytes:
    # Flask ends a JSON object with a line feed.
    response = b""
    while not response.endswith(b"}\n"):
        response += client.recv(1000)
    return response


@pytest.fixture
def client() -> Iterator[socket.socket]:
    """A connection with 9 of 100 bytes of a body sent."""
    server = PatientServer(("127.0.0.1", 0), make_application(), 1)
    threading.Thread(target=server.serve, daemon=True).start()
    with socket.create_connection(server.address, timeout=10) as client:
        client.sendall(
            b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nonly this"
        )
        yield client
    server.stop()


def test_slow_body_is_accepted(client: socket.socket) -> None:
    for _ in range(91):
        client.sendall(b"x")
    assert receive_response(client).endswith(b'{"length":100}\n')


def test_incomplete_body_is_refused(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    response = receive_response(client)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"after 9 of 100 bytes" in response


def test_stalled_body_is_refused(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # The server waits with the time-out as it is when the body stalls, so the fixture follows the change.
    monkeypatch.setattr(serving, "STALLED_AFTER", 0.2)
    client = request.getfixturevalue("client")
    assert receive_response(client).startswith(b"HTTP/1.1 408 ")
