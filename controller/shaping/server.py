"""The shaper over HTTP: a thin layer over `Shaping` and the probes. JSON in, JSON out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import flask

from controller.shaping.plan import Endpoint
from controller.shaping.shaper import Shaping
from testbed.common.errors import InputError, TestbedError
from testbed.network.link import links_from_json
from testbed.network.topology import Cell
from testbed.wire.serving import PatientServer, refusal
from testbed.wire.token import authorised

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
        return {"error": refusal(str(error))}, 400 if isinstance(error, InputError) else 500

    @app.errorhandler(ArithmeticError)
    @app.errorhandler(KeyError)
    @app.errorhandler(TypeError)
    @app.errorhandler(ValueError)
    @app.errorhandler(RecursionError)
    def malformed(error: Exception) -> Any:
        app.logger.exception("a request was not understood")
        return {"error": refusal(f"the request was not understood: {error!r}")}, 400

    app.get("/health", endpoint="health")(lambda: {"state": "ready"})
    app.get("/facts")(shaping.facts)
    app.post("/lease", endpoint="lease")(lambda: _lease(renew))
    app.post("/attach", endpoint="attach")(lambda: _attach(shaping, _object()))
    app.post("/set", endpoint="set")(lambda: _set(shaping, _object()))
    app.post("/probe", endpoint="probe")(lambda: _probe(shaping, _object()))
    app.post("/ends", endpoint="ends")(lambda: _ends(shaping, _object()))
    app.post("/half", endpoint="half")(lambda: _half(shaping, _object()))
    app.get("/show")(shaping.show)
    app.get("/statistics", endpoint="statistics")(
        lambda: shaping.statistics(reset=flask.request.args.get("reset") == "1")
    )
    return app


def _object() -> Mapping[str, Any]:
    """Return the JSON object that was sent; raises InputError for any other value."""
    given = flask.request.get_json()
    if not isinstance(given, dict):
        raise InputError("the body of a request is a JSON object")
    return given


def _lease(renew: Callable[[], None]) -> dict[str, Any]:
    renew()
    return {}


def _attach(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    shaping.seed = int(request.get("seed", shaping.seed))
    cells = [Cell(tuple(each["devices"]), each["rate"]) for each in request.get("cells", ())]
    shaping.attach([Endpoint(**each) for each in request["endpoints"]], links_from_json(request["links"]), cells)
    return {}


def _set(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    shaping.set(links_from_json(request["links"]))
    return {}


def _ends(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    return {"ports": shaping.open_ends(str(request["run"]), [(a, b) for a, b in request["pairs"]])}


def _half(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    pairs = [(source, destination) for source, destination in request["pairs"]]
    halves = shaping.probe_half(str(request["run"]), pairs, request["ports"], float(request["begin"]))
    return {"measurements": halves}


def _probe(shaping: Shaping, request: Mapping[str, Any]) -> dict[str, Any]:
    pairs = [(source, destination) for source, destination in request["pairs"]]
    return {"measurements": [each.to_json() for each in shaping.probe(pairs)]}


def serve(shaping: Shaping, token: str, host: str, port: int, renew: Callable[[], None]) -> None:
    """Answer requests until the process is ended; ``renew`` is called when the controller says that it needs us."""
    threading.Thread(target=_watch, args=(shaping,), name="watch", daemon=True).start()
    server = PatientServer((host, port), application(shaping, token, renew), numthreads=8)
    try:
        server.start()
    finally:
        server.stop()


def _watch(shaping: Shaping) -> None:
    """Let go of devices that ended without anybody saying so."""
    while True:
        time.sleep(1.0)
        shaping.release_the_dead()
