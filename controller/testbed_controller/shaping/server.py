"""The HTTP API of the shaper: a thin layer over `Shaping` and the probes, with JSON bodies."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flask

from testbed.common.errors import InputError, TestbedError
from testbed.network.link import Cell, Pair, links_from_json
from testbed.wire.ports import CONTROL_PORT
from testbed.wire.serving import PatientServer, refusal
from testbed.wire.token import authorised
from testbed_controller.shaping import proxy
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.shaper import Shaping

_LOG = logging.getLogger(__name__)

_LARGEST_REQUEST = 16 << 20


def application(
    shaping: Shaping, token: str, renew: Callable[[], None] = lambda: None
) -> flask.Flask:
    """Return the WSGI application; every request except ``/health`` needs the token."""
    app = flask.Flask("shaper")
    app.config["MAX_CONTENT_LENGTH"] = _LARGEST_REQUEST

    @app.before_request
    def authorise() -> Any:
        if flask.request.path != "/health" and not authorised(
            flask.request.environ, token
        ):
            return {"error": "the token is missing or wrong"}, 401
        return None

    @app.errorhandler(TestbedError)
    def report_refusal(error: TestbedError) -> Any:
        _LOG.error("a request failed", exc_info=error)
        return {"error": refusal(str(error))}, 400 if isinstance(
            error, InputError
        ) else 500

    @app.errorhandler(ArithmeticError)
    @app.errorhandler(KeyError)
    @app.errorhandler(TypeError)
    @app.errorhandler(ValueError)
    @app.errorhandler(RecursionError)
    def report_malformed(error: Exception) -> Any:
        app.logger.exception("malformed request")
        return {"error": refusal(f"malformed request: {error!r}")}, 400

    for path, act in (
        ("/lease", lambda _: renew()),
        ("/attach", partial(_attach, shaping)),
        ("/release", lambda _: shaping.release_ended()),
        ("/set", lambda asked: shaping.set(links_from_json(asked["links"]))),
        (
            "/probe",
            lambda asked: {
                "measurements": [
                    each.to_json() for each in shaping.probe(_read_pairs(asked))
                ]
            },
        ),
        (
            "/ends",
            lambda asked: {
                "ports": shaping.open_ends(str(asked["run"]), _read_pairs(asked))
            },
        ),
        ("/half", partial(_probe_half, shaping)),
    ):
        app.add_url_rule(path, path, partial(_respond, act), methods=["POST"])
    app.get("/health", endpoint="health")(lambda: {"state": "ready"})
    app.get("/facts")(shaping.facts)
    app.get("/show")(shaping.show)
    for path, read in (
        ("/load", shaping.host_load),
        ("/statistics", shaping.statistics),
    ):
        app.get(path, endpoint=path)(
            lambda read=read: read(reset=flask.request.args.get("reset") == "1")
        )
    return app


def _respond(
    act: Callable[[Mapping[str, Any]], dict[str, Any] | None],
) -> dict[str, Any]:
    """Execute a function on the JSON object of the request, if any; raises InputError for other values."""
    document = flask.request.get_json() if flask.request.content_length else {}
    if not isinstance(document, dict):
        raise InputError("the body of a request must be a JSON object")
    return act(document) or {}


def _read_pairs(asked: Mapping[str, Any]) -> list[Pair]:
    return [(source, destination) for source, destination in asked["pairs"]]


def _attach(shaping: Shaping, asked: Mapping[str, Any]) -> None:
    shaping.seed = int(asked.get("seed", shaping.seed))
    cells = [
        Cell(tuple(cell["devices"]), cell["rate"]) for cell in asked.get("cells", ())
    ]
    shaping.attach(
        [Endpoint(**fields) for fields in asked["endpoints"]],
        links_from_json(asked["links"]),
        cells,
    )


def _probe_half(shaping: Shaping, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "measurements": shaping.probe_half(
            str(asked["run"]), _read_pairs(asked), asked["ports"], float(asked["begin"])
        )
    }


def serve(
    shaping: Shaping, token: str, host: str, port: int, renew: Callable[[], None]
) -> None:
    """Answer requests until the process ends; ``renew`` is called when the controller renews the lease."""
    listening = socket.create_server((host, port), backlog=128)
    server = PatientServer(("127.0.0.1", 0), application(shaping, token, renew), 8)

    def connect(device: str) -> socket.socket:
        return (
            shaping.connect(device, CONTROL_PORT)
            if device
            else socket.create_connection(server.address)
        )

    for work in (
        partial(_release_ended, shaping),
        partial(asyncio.run, proxy.serve(connect, listening)),
    ):
        threading.Thread(target=work, daemon=True).start()
    server.serve()


def _release_ended(shaping: Shaping) -> None:
    """Release devices that end without a request."""
    while True:
        shaping.wait_for_end(1.0)
