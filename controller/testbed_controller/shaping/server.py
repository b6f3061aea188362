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
"""Maximum size of a request in bytes: a mesh of 1,000 devices has many links."""

_Action = Callable[[Mapping[str, Any]], dict[str, Any] | None]
"""Function from the JSON object of a request to that of the response, if any."""


def create_application(
    shaping: Shaping, token: str, renew: Callable[[], None] = lambda: None
) -> flask.Flask:
    """Create the WSGI application; every request except ``/health`` needs the token."""
    app = flask.Flask("shaper")
    app.config["MAX_CONTENT_LENGTH"] = _LARGEST_REQUEST

    @app.before_request
    def authorise() -> Any:
        # The response contains nothing about the run.
        if flask.request.path == "/health":
            return None
        if authorised(flask.request.environ, token):
            return None
        return {"error": "send the run's token as 'Authorization: Bearer <token>'"}, 401

    @app.errorhandler(TestbedError)
    def report_refusal(error: TestbedError) -> Any:
        _LOG.error("a request failed", exc_info=error)
        status = 400 if isinstance(error, InputError) else 500
        return {"error": refusal(str(error))}, status

    @app.errorhandler(ArithmeticError)
    @app.errorhandler(KeyError)
    @app.errorhandler(TypeError)
    @app.errorhandler(ValueError)
    @app.errorhandler(RecursionError)
    def report_malformed(error: Exception) -> Any:
        app.logger.exception("malformed request")
        return {"error": refusal(f"malformed request: {error!r}")}, 400

    actions: Mapping[str, _Action] = {
        "/lease": lambda _: renew(),
        "/attach": partial(_attach, shaping),
        "/release": lambda _: shaping.release_ended(),
        "/set": partial(_set, shaping),
        "/probe": partial(_probe, shaping),
        "/ends": partial(_open_ends, shaping),
        "/half": partial(_probe_half, shaping),
    }
    for path, act in actions.items():
        app.add_url_rule(path, path, partial(_respond, act), methods=["POST"])
    app.get("/health", endpoint="health")(lambda: {"state": "ready"})
    app.get("/facts")(shaping.facts)
    app.get("/show")(shaping.show)
    app.get("/load")(lambda: shaping.host_load(reset=_wants_reset()))
    app.get("/statistics", endpoint="statistics")(
        lambda: shaping.statistics(reset=_wants_reset())
    )
    return app


def _wants_reset() -> bool:
    return flask.request.args.get("reset") == "1"


def _respond(act: _Action) -> dict[str, Any]:
    """Call a function with the JSON object of the request, empty without a body; raises InputError for other values."""
    document = flask.request.get_json() if flask.request.content_length else {}
    if not isinstance(document, dict):
        raise InputError("the body of a request must be a JSON object")
    return act(document) or {}


def _read_pairs(request: Mapping[str, Any]) -> list[Pair]:
    # JSON has lists instead of tuples, and links are found by tuples.
    return [(source, destination) for source, destination in request["pairs"]]


def _attach(shaping: Shaping, request: Mapping[str, Any]) -> None:
    shaping.seed = int(request.get("seed", shaping.seed))
    cells = []
    for fields in request.get("cells", ()):
        cells.append(Cell(tuple(fields["devices"]), fields["rate"]))
    endpoints = [Endpoint(**fields) for fields in request["endpoints"]]
    shaping.attach(endpoints, links_from_json(request["links"]), cells)


def _set(shaping: Shaping, request: Mapping[str, Any]) -> None:
    shaping.set(links_from_json(request["links"]))


def _probe(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    measurements = shaping.probe(_read_pairs(request))
    return {"measurements": [measurement.to_json() for measurement in measurements]}


def _open_ends(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"ports": shaping.open_ends(str(request["run"]), _read_pairs(request))}


def _probe_half(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    measurements = shaping.probe_half(
        str(request["run"]),
        _read_pairs(request),
        request["ports"],
        float(request["begin"]),
    )
    return {"measurements": measurements}


def serve(
    shaping: Shaping, token: str, host: str, port: int, renew: Callable[[], None]
) -> None:
    """Answer requests until the process ends; ``renew`` is called for each request to renew the lease."""
    listening = socket.create_server((host, port), backlog=128)
    # The HTTP server is on the loopback. Only the proxy is reachable from outside: it forwards each request to this
    # server or to a device.
    application = create_application(shaping, token, renew)
    server = PatientServer(("127.0.0.1", 0), application, 8)

    def connect(device: str) -> socket.socket:
        if device:
            return shaping.connect(device, CONTROL_PORT)
        return socket.create_connection(server.address)

    forward = partial(asyncio.run, proxy.serve(connect, listening))
    for work in (partial(_release_ended, shaping), forward):
        threading.Thread(target=work, daemon=True).start()
    server.serve()


def _release_ended(shaping: Shaping) -> None:
    """Release ended devices immediately, without a request of the controller."""
    while True:
        shaping.wait_for_end(1.0)
