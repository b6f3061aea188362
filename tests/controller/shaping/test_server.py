"""The shaper's HTTP server: authorisation, requests and error responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from flask.testing import FlaskClient

from testbed.common.errors import HostError, InputError
from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.server import create_application


class RecordingShaper:
    """A fake shaper, which records calls and leaves the kernel alone."""

    seed = 1

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def attach(
        self, endpoints: list[Endpoint], links: Mapping[Pair, Link], cells: list[Cell]
    ) -> None:
        self.calls.append((endpoints, links, cells))

    def set(self, links: Mapping[Pair, Link]) -> None:
        if ("a", "gone") in links:
            raise InputError("unknown device 'gone'")
        if ("a", "broken") in links:
            # Escape sequences of error messages must not reach a terminal.
            raise HostError("the kernel\x1b refuses")
        self.calls.append(links)

    def release_ended(self) -> None:
        self.calls.append("released")

    def facts(self) -> dict[str, Any]:
        return {"backend": "none"}

    def show(self) -> dict[str, Any]:
        return {"devices": {}}

    def host_load(self, reset: bool) -> dict[str, Any]:
        return {"host_load": 0.5} if not reset else {}

    def statistics(self, reset: bool) -> dict[str, Any]:
        return {"reset": reset}


@pytest.fixture
def shaper() -> RecordingShaper:
    return RecordingShaper()


@pytest.fixture
def client(shaper: RecordingShaper) -> FlaskClient:
    application = create_application(
        shaper,  # type: ignore[arg-type]
        "secret",
        lambda: shaper.calls.append("renewed"),
    )
    client = application.test_client()
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer secret"
    return client


def link_from_a(destination: str) -> dict[str, Any]:
    """Return a request body with one link."""
    link = {"source": "a", "destination": destination, **Link(delay=0.01).to_json()}
    return {"links": [link]}


def test_only_health_needs_no_token(client: FlaskClient) -> None:
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer wrong"
    assert client.get("/health").json == {"state": "ready"}
    for path in ("/facts", "/show", "/load", "/statistics"):
        assert client.get(path).status_code == 401
    assert client.post("/set", json=link_from_a("b")).status_code == 401


def test_requests_call_the_shaper(client: FlaskClient, shaper: RecordingShaper) -> None:
    assert client.get("/facts").json == {"backend": "none"}
    assert client.get("/statistics?reset=1").json == {"reset": True}
    assert client.get("/statistics").json == {"reset": False}
    assert client.get("/load?reset=1").json == {}
    assert client.get("/load").json == {"host_load": 0.5}
    assert client.post("/lease").json == {}
    assert client.post("/release").json == {}
    attachment = {
        "endpoints": [{"name": "a", "pid": 7, "address": "10.0.0.2"}],
        **link_from_a("b"),
        "seed": 4,
        "cells": [{"devices": ["a", "b"], "rate": 5e6}],
    }
    assert client.post("/attach", json=attachment).json == {}
    assert client.post("/set", json=link_from_a("b")).json == {}
    assert shaper.seed == 4
    links = {("a", "b"): Link(delay=0.01)}
    attached = [Endpoint("a", 7, "10.0.0.2")], links, [Cell(("a", "b"), 5e6)]
    assert shaper.calls == ["renewed", "released", attached, links]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (link_from_a("gone"), 400, "unknown device 'gone'"),
        (link_from_a("broken"), 500, "the kernel\\x1b refuses"),
        ([], 400, "the body of a request must be a JSON object"),
        ({}, 400, "malformed request: KeyError('links')"),
        ({"links": 1}, 400, "malformed request: TypeError"),
    ],
    ids=["unknown device", "kernel error", "list", "no links", "links of a wrong type"],
)
def test_invalid_requests_are_refused_with_status_and_reason(
    client: FlaskClient, body: Any, status: int, error: str
) -> None:
    response = client.post("/set", json=body)
    assert response.status_code == status
    assert error in (response.json or {})["error"]
