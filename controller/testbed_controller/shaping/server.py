"""The shaper over HTTP: a thin layer over `Shaping` and the probes. JSON in, JSON out."""

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


def application(shaping: Shaping, token: str, renew: Callable[[], None] = lambda: None) -> flask.Flask:
    """Return the WSGI application; every request but ``/health`` must bear the token."""
    app = flask.Flask("shaper")
    app.config["MAX_CONTENT_LENGTH"] = _LARGEST_REQUEST

    @app.before_request
    def authorise() -> Any:
        if flask.request.path != "/health" and not authorised(flask.request.environ, token):
            return {"error": "the token is missing or wrong"}, 401
        return None

    @app.errorhandler(TestbedError)
    def refused(error: TestbedError) -> Any:
        _LOG.error("a request failed", exc_info=error)
        return {"error": refusal(str(error))}, 400 if isinstance(error, InputError) else 500

    @app.errorhandler(ArithmeticError)
    @app.errorhandler(KeyError)
    @app.errorhandler(TypeError)
    @app.errorhandler(ValueError)
    @app.errorhandler(RecursionError)
    def malformed(error: Exception) -> Any:
        app.logger.exception("a request was not understood")
        return {"error": refusal(f"the request was not understood: {error!r}")}, 400

    for path, act in (
        ("/lease", lambda _: renew()),
        ("/attach", partial(_attach, shaping)),
        ("/release", lambda _: shaping.release_the_dead()),
        ("/set", lambda asked: shaping.set(links_from_json(asked["links"]))),
        ("/probe", lambda asked: {"measurements": [each.to_json() for each in shaping.probe(_pairs(asked))]}),
        ("/ends", lambda asked: {"ports": shaping.open_ends(str(asked["run"]), _pairs(asked))}),
        ("/half", partial(_half, shaping)),
    ):
        app.add_url_rule(path, path, partial(_done, act), methods=["POST"])
    app.get("/health", endpoint="health")(lambda: {"state": "ready"})
    app.get("/facts")(shaping.facts)
    app.get("/show")(shaping.show)
    for path, read in (("/load", shaping.host_load), ("/statistics", shaping.statistics)):
        app.get(path, endpoint=path)(lambda read=read: read(reset=flask.request.args.get("reset") == "1"))
    return app


def _done(act: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> dict[str, Any]:
    """Do what is asked by the JSON object that was sent, if any; raises InputError for any other value."""
    given = flask.request.get_json() if flask.request.content_length else {}
    if not isinstance(given, dict):
        raise InputError("the body of a request is a JSON object")
    return act(given) or {}


def _pairs(asked: Mapping[str, Any]) -> list[Pair]:
    return [(source, destination) for source, destination in asked["pairs"]]


def _attach(shaping: Shaping, asked: Mapping[str, Any]) -> None:
    shaping.seed = int(asked.get("seed", shaping.seed))
    cells = [Cell(tuple(each["devices"]), each["rate"]) for each in asked.get("cells", ())]
    shaping.attach([Endpoint(**each) for each in asked["endpoints"]], links_from_json(asked["links"]), cells)


def _half(shaping: Shaping, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"measurements": shaping.probe_half(str(asked["run"]), _pairs(asked), asked["ports"], float(asked["begin"]))}


def serve(shaping: Shaping, token: str, host: str, port: int, renew: Callable[[], None]) -> None:
    """Answer requests until the process is ended; ``renew`` is called when the controller says that it needs us."""
    listening = socket.create_server((host, port), backlog=128)
    server = PatientServer(("127.0.0.1", 0), application(shaping, token, renew), 8)

    def connect(device: str) -> socket.socket:
        return shaping.connect(device, CONTROL_PORT) if device else socket.create_connection(server.address)

    for work in (partial(_watch, shaping), partial(asyncio.run, proxy.serve(connect, listening))):
        threading.Thread(target=work, daemon=True).start()
    server.serve()


def _watch(shaping: Shaping) -> None:
    """Let go of devices that ended without anybody saying so."""
    while True:
        shaping.await_death(1.0)
