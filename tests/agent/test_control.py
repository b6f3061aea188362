"""The routes of the control network, by Flask's client."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client

from testbed_agent.control import create_application
from testbed_agent.http import Refused
from testbed_agent.starting import HealthFirst


class Runner:
    """A device that remembers its requests."""

    settings = SimpleNamespace(run="r", device="d", token="t")
    state, error, device, computing = "idle", None, None, None
    body_limit = 10
    pace = SimpleNamespace(factor=1.0)
    log = SimpleNamespace(
        count=3, follow=lambda after: iter([b"event\n"] * (3 - after))
    )

    def __init__(self) -> None:
        self.done: list[Any] = []

    def health(self) -> dict[str, Any]:
        return {"state": self.state}

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


def ask(
    runner: Runner, method: str, path: str, body: bytes = b"", token: str = "t"
) -> tuple[int, bytes]:
    client = create_application(runner).test_client()  # type: ignore[arg-type]
    answer = client.open(
        path, method=method, data=body, headers={"Authorization": f"Bearer {token}"}
    )
    return answer.status_code, answer.data


def test_changes_are_answered_with_the_state() -> None:
    runner = Runner()
    assert ask(runner, "PUT", "/data", b"12345") == (
        200,
        ask(runner, "GET", "/health")[1],
    )
    assert ask(runner, "POST", "/start", b'{"origin": 2.5}')[0] == 200
    assert runner.done == [b"12345", 2.5]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/events?after=1", b"event\nevent\n"),
        ("/weights", b"whole"),
        ("/weights?part", b"part"),
    ],
)
def test_reads_return_their_content(path: str, content: bytes) -> None:
    assert ask(Runner(), "GET", path) == (200, content)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        ("GET", "/nothing", b"", 404, "GET /nothing: Not Found"),
        ("GET", "/start", b"", 405, "GET /start: Method Not Allowed"),
        (
            "PUT",
            "/data",
            b"x" * 11,
            413,
            "the body of 11 bytes exceeds the limit of 10",
        ),
        ("PUT", "/shard", b"", 409, "deploy first"),
        ("POST", "/start", b"[]", 400, "the body must have the single key 'origin'"),
        (
            "GET",
            "/events?after=x",
            b"",
            400,
            "'after' must be a number of events, not 'x'",
        ),
        ("POST", "/stop", b"", 500, "POST /stop: RuntimeError('no program')"),
    ],
)
def test_refusals_name_their_reason(
    method: str, path: str, body: bytes, status: int, error: str
) -> None:
    answered, content = ask(Runner(), method, path, body)
    assert answered == status
    assert json.loads(content)["error"].startswith(error)


def test_without_the_token_only_health_is_answered() -> None:
    assert ask(Runner(), "GET", "/health", token="")[0] == 200
    assert ask(Runner(), "GET", "/events", token="another")[0] == 401


def test_health_is_the_same_before_and_after_flask_is_imported() -> None:
    client = Client(HealthFirst(Runner(), lambda: None))  # type: ignore[arg-type]
    token = {"Authorization": "Bearer t"}
    before = client.get("/health")
    assert client.get("/weights").status_code == 401
    assert client.get("/weights", headers=token).data == b"whole"
    after = client.get("/health")
    assert before.json == after.json == {"state": "idle"}
    assert before.headers["Content-Type"] == after.headers["Content-Type"]


def test_renewing_a_lease_reaches_it() -> None:
    renewals: list[str] = []
    client = Client(HealthFirst(Runner(), lambda: renewals.append("renewed")))  # type: ignore[arg-type]
    assert (
        client.post("/lease", headers={"Authorization": "Bearer t"}).status_code == 200
    )
    assert renewals == ["renewed"]
