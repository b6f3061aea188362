"""The shaper over HTTP: who may ask, what is understood, and what an error becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from flask.testing import FlaskClient

from testbed.common.errors import HostError, InputError
from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.server import create_application


class Remembering:
    """What the server stands before, without a kernel."""

    seed = 1

    def __init__(self) -> None:
        self.done: list[Any] = []

    def attach(
        self, endpoints: list[Endpoint], links: Mapping[Pair, Link], cells: list[Cell]
    ) -> None:
        self.done.append((endpoints, links, cells))

    def set(self, links: Mapping[Pair, Link]) -> None:
        if ("a", "gone") in links:
            raise InputError("unknown device 'gone'")
        if ("a", "broken") in links:
            raise HostError("the kernel\x1b refuses")
        self.done.append(links)

    def release_ended(self) -> None:
        self.done.append("released")

    def facts(self) -> dict[str, Any]:
        return {"backend": "none"}

    def show(self) -> dict[str, Any]:
        return {"devices": {}}

    def host_load(self, reset: bool) -> dict[str, Any]:
        return {"host_load": 0.5} if not reset else {}

    def statistics(self, reset: bool) -> dict[str, Any]:
        return {"reset": reset}


@pytest.fixture
def shaping() -> Remembering:
    return Remembering()


@pytest.fixture
def client(shaping: Remembering) -> FlaskClient:
    renewed = shaping.done.append
    made = create_application(
        shaping, "secret", lambda: renewed("renewed")
    ).test_client()  # type: ignore[arg-type]
    made.environ_base["HTTP_AUTHORIZATION"] = "Bearer secret"
    return made


def link(destination: str) -> dict[str, Any]:
    return {
        "links": [
            {"source": "a", "destination": destination, **Link(delay=0.01).to_json()}
        ]
    }


def test_only_health_needs_no_token(client: FlaskClient) -> None:
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer wrong"
    assert client.get("/health").json == {"state": "ready"}
    assert [
        client.get(path).status_code
        for path in ("/facts", "/show", "/load", "/statistics")
    ] == [401] * 4
    assert client.post("/set", json=link("b")).status_code == 401


def test_requests_call_the_shaper(client: FlaskClient, shaping: Remembering) -> None:
    assert client.get("/facts").json == {"backend": "none"}
    assert client.get("/statistics?reset=1").json == {"reset": True}
    assert client.get("/statistics").json == {"reset": False}
    assert client.get("/load?reset=1").json == {}
    assert client.get("/load").json == {"host_load": 0.5}
    assert client.post("/lease").json == client.post("/release").json == {}
    endpoint = {"name": "a", "pid": 7, "address": "10.0.0.2"}
    cell = {"devices": ["a", "b"], "rate": 5e6}
    assert (
        client.post(
            "/attach",
            json={"endpoints": [endpoint], **link("b"), "seed": 4, "cells": [cell]},
        ).json
        == {}
    )
    assert client.post("/set", json=link("b")).json == {}
    assert shaping.seed == 4
    links = {("a", "b"): Link(delay=0.01)}
    attached = [Endpoint("a", 7, "10.0.0.2")], links, [Cell(("a", "b"), 5e6)]
    assert shaping.done == ["renewed", "released", attached, links]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (link("gone"), 400, "unknown device 'gone'"),
        (link("broken"), 500, "the kernel\\x1b refuses"),
        ([], 400, "the body of a request must be a JSON object"),
        ({}, 400, "malformed request: KeyError('links')"),
        ({"links": 1}, 400, "malformed request: TypeError"),
    ],
)
def test_invalid_requests_are_refused_with_status_and_reason(
    client: FlaskClient, body: Any, status: int, error: str
) -> None:
    answer = client.post("/set", json=body)
    assert answer.status_code == status
    assert error in (answer.json or {})["error"]
