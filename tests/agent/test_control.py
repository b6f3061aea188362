"""Requests to an agent over the control network."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.test import Client

from testbed_agent.control import create_application
from testbed_agent.http import Refused
from testbed_agent.starting import HealthFirst


class FakeRunner:
    """A device without a program, which records requests."""

    settings = SimpleNamespace(run="r", device="d", token="t")
    state, error, device, computing = "idle", None, None, None
    body_limit = 10
    pace = SimpleNamespace(factor=1.0)
    log = SimpleNamespace(
        count=3, follow=lambda after: iter([b"event\n"] * (3 - after))
    )

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def health(self) -> dict[str, Any]:
        return {"state": self.state}

    def require_ready(self, what: str) -> None:
        if what == "a shard":
            raise Refused(409, "deploy first")

    def put_data(self, body: bytearray) -> None:
        self.calls.append(bytes(body))

    put_shard = put_data

    def start(self, origin: float) -> None:
        self.calls.append(origin)

    def stop(self) -> None:
        raise RuntimeError("no program")

    def weights(self, part: bool) -> bytes:
        return b"part" if part else b"whole"


def send_request(
    runner: FakeRunner, method: str, path: str, body: bytes = b"", token: str = "t"
) -> tuple[int, bytes]:
    """Return the status and the body of the response."""
    client = create_application(runner).test_client()  # type: ignore[arg-type]
    response = client.open(
        path, method=method, data=body, headers={"Authorization": f"Bearer {token}"}
    )
    return response.status_code, response.data


def test_response_to_a_change_is_the_state() -> None:
    runner = FakeRunner()
    _, health = send_request(runner, "GET", "/health")
    assert send_request(runner, "PUT", "/data", b"12345") == (200, health)
    status, _ = send_request(runner, "POST", "/start", b'{"origin": 2.5}')
    assert status == 200
    assert runner.calls == [b"12345", 2.5]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/events?after=1", b"event\nevent\n"),
        ("/weights", b"whole"),
        ("/weights?part", b"part"),
    ],
)
def test_reads_return_content(path: str, content: bytes) -> None:
    assert send_request(FakeRunner(), "GET", path) == (200, content)


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
    ids=[
        "unknown path",
        "unknown method",
        "large body",
        "wrong state",
        "wrong type",
        "wrong query",
        "bug",
    ],
)
def test_refusals_name_reason(
    method: str, path: str, body: bytes, status: int, error: str
) -> None:
    response_status, content = send_request(FakeRunner(), method, path, body)
    assert response_status == status
    assert json.loads(content)["error"].startswith(error)


def test_only_health_is_available_without_the_token() -> None:
    health_status, _ = send_request(FakeRunner(), "GET", "/health", token="")
    events_status, _ = send_request(FakeRunner(), "GET", "/events", token="another")
    assert (health_status, events_status) == (200, 401)


def test_health_is_equal_before_and_after_the_import_of_flask() -> None:
    # The first request with another path imports Flask, which takes too long for the start of many devices.
    client = Client(HealthFirst(FakeRunner(), lambda: None))  # type: ignore[arg-type]
    headers = {"Authorization": "Bearer t"}
    before = client.get("/health")
    assert client.get("/weights").status_code == 401
    assert client.get("/weights", headers=headers).data == b"whole"
    after = client.get("/health")
    assert before.json == after.json == {"state": "idle"}
    assert before.headers["Content-Type"] == after.headers["Content-Type"]


def test_lease_request_renews_the_lease() -> None:
    renewals: list[str] = []
    application = HealthFirst(
        FakeRunner(),  # type: ignore[arg-type]
        lambda: renewals.append("renewed"),
    )
    headers = {"Authorization": "Bearer t"}
    assert Client(application).post("/lease", headers=headers).status_code == 200
    assert renewals == ["renewed"]
