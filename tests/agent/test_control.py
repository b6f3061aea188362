"""The requests of the control network, as a WSGI server passes them on."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from testbed_agent.control import ControlApplication
from testbed_agent.http import Refused


class Runner:
    """A device that remembers its requests."""

    settings = SimpleNamespace(run="r", device="d", token="t")
    state, error, device, computing = "idle", None, None, None
    body_limit = 10
    pace = SimpleNamespace(factor=1.0)
    log = SimpleNamespace(count=3, follow=lambda after: iter([b"event\n"] * (3 - after)))

    def __init__(self) -> None:
        self.done: list[Any] = []

    def require_ready(self, what: str) -> None:
        if what == "a shard":
            raise Refused(409, "deploy first")

    def put_data(self, body: bytearray) -> None:
        self.done.append(bytes(body))

    put_shard = put_data

    def start(self, origin: float) -> None:
        self.done.append(origin)

    def stop(self) -> None:
        raise RuntimeError("no program")

    def weights(self, part: bool) -> bytes:
        return b"part" if part else b"whole"


def ask(runner: Runner, method: str, path: str, body: bytes = b"", token: str = "t") -> tuple[str, bytes]:
    path, _, query = path.partition("?")
    answered = []
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_AUTHORIZATION": f"Bearer {token}",
        "wsgi.input": io.BytesIO(body),
    }
    application = ControlApplication(runner)  # type: ignore[arg-type]
    content = b"".join(application(environ, lambda status, headers: answered.append(status)))
    return answered[0], content


def test_changes_are_answered_with_the_state() -> None:
    runner = Runner()
    assert ask(runner, "PUT", "/data", b"12345") == ("200 OK", ask(runner, "GET", "/health")[1])
    assert ask(runner, "POST", "/start", b'{"origin": 2.5}')[0] == "200 OK"
    assert runner.done == [b"12345", 2.5]


@pytest.mark.parametrize(
    ("path", "content"),
    [("/events?after=1", b"event\nevent\n"), ("/weights", b"whole"), ("/weights?part", b"part")],
)
def test_reads_return_their_content(path: str, content: bytes) -> None:
    assert ask(Runner(), "GET", path) == ("200 OK", content)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/nothing", b"", "404 Not Found", "GET /nothing: Not Found"),
        ("GET", "/start", b"", "405 Method Not Allowed", "GET /start: Method Not Allowed"),
        ("PUT", "/data", b"x" * 11, "413 Request Entity Too Large", "the body of 11 bytes exceeds the limit of 10"),
        ("PUT", "/shard", b"", "409 Conflict", "deploy first"),
        ("POST", "/start", b"[]", "400 Bad Request", "the body must have the single key 'origin'"),
        ("GET", "/events?after=x", b"", "400 Bad Request", "'after' must be a number of events, not 'x'"),
        ("POST", "/stop", b"", "500 Internal Server Error", "POST /stop: RuntimeError('no program')"),
    ],
)
def test_refusals_name_their_reason(method: str, path: str, body: bytes, status: str, error: str) -> None:
    answered, content = ask(Runner(), method, path, body)
    assert answered == status
    assert json.loads(content)["error"].startswith(error)


def test_without_the_token_only_health_is_answered() -> None:
    assert ask(Runner(), "GET", "/health", token="")[0] == "200 OK"
    assert ask(Runner(), "GET", "/events", token="another")[0] == "401 Unauthorized"
