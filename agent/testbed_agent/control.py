"""The agent's HTTP API for the controller: a Flask application with a route for each request of docs/protocols.md."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flask import Blueprint, Flask, Response, current_app, request
from werkzeug.exceptions import HTTPException

from testbed.wire.serving import refusal
from testbed.wire.token import authorised
from testbed_agent.http import Refused, announced_length, is_number, read_body
from testbed_agent.metrics import render_metrics

if TYPE_CHECKING:
    from testbed_agent.runner import Runner

_LOG = logging.getLogger(__name__)

JSON_LIMIT = 48 << 20
"""Maximum size of a deployment in bytes; program files take up to 20 MB of it, in base 64."""
_NUMBER_LIMIT = 4096
"""Maximum size in bytes of a request with a single number."""

routes = Blueprint("control", __name__)


def create_application(
    runner: Runner, renew: Callable[[], None] = lambda: None
) -> Flask:
    """Create the Flask application of a device; ``renew`` is called at each renewal of the lease."""
    app = Flask("agent", static_folder=None)
    app.extensions.update(runner=runner, renew=renew)
    app.register_blueprint(routes)
    app.register_error_handler(Refused, _respond_to_refusal)
    app.register_error_handler(HTTPException, _respond_to_http_error)
    app.register_error_handler(Exception, _respond_to_failure)
    return app


@routes.before_app_request
def authorise() -> Any:
    """Refuse every request without the device's token, except ``/health``."""
    # A process that waits for the device to boot needs no secret (`testbed_controller.lab.health.is_healthy`).
    if request.path == "/health":
        return None
    if authorised(request.environ, _runner().settings.token):
        return None
    return {"error": "send the device's token as 'Authorization: Bearer <token>'"}, 401


@routes.get("/health")
def get_health() -> dict[str, Any]:
    """Return the device's state, with the traceback of a failed program."""
    return _runner().health()


@routes.put("/deployment")
def put_deployment() -> dict[str, Any]:
    """Load the deployment: the device's part of the run."""
    _runner().deploy(_read_body(JSON_LIMIT))
    return _state()


@routes.put("/data")
def put_data() -> dict[str, Any]:
    """Store the device's samples."""
    # Check the state before reading the body, which may be large.
    _runner().require_ready("data")
    _runner().put_data(_read_body(_runner().body_limit))
    return _state()


@routes.put("/shard")
def put_shard() -> dict[str, Any]:
    """Load the weights of the device's shard of the model."""
    _runner().require_ready("a shard")
    _runner().put_shard(_read_body(_runner().body_limit))
    return _state()


@routes.post("/start")
def start() -> dict[str, Any]:
    """Start the program."""
    _runner().start(_read_number("origin", -1e12, 1e12))
    return _state()


@routes.post("/stop")
def stop() -> dict[str, Any]:
    """Stop the program."""
    _runner().stop()
    return _state()


@routes.post("/lease")
def renew_lease() -> dict[str, Any]:
    """Keep the device switched on for another term of the lease."""
    current_app.extensions["renew"]()
    return _state()


@routes.post("/leave")
def leave() -> dict[str, Any]:
    """Request a graceful shutdown: the program hands over its state and ends."""
    _runner().leave()
    return _state()


@routes.put("/speed")
def put_speed() -> dict[str, Any]:
    """Set the speed of computing, as a multiple of the device's speed in the scenario."""
    _runner().set_speed(_read_number("factor", 1e-6, 1e6))
    return _state()


@routes.put("/links")
def put_links() -> dict[str, Any]:
    """Adapt to changed links: the loss of broadcasts, and the round-trip times in time-outs."""
    _runner().set_links(_read_body(JSON_LIMIT))
    return _state()


@routes.get("/facts")
def get_facts() -> dict[str, Any]:
    """Return the device's software versions, processors, memory in bytes and monotonic clock in seconds."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "flask", "waitress"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    settings = _runner().settings
    return {
        "run": settings.run,
        "device": settings.device,
        "versions": versions,
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": {"resident": resident_bytes(), "limit": memory_limit()},
        "monotonic": time.monotonic(),
    }


@routes.get("/events")
def get_events() -> Response:
    """Stream the events from number ``after`` on, until the program ends."""
    after = request.args.get("after", "0")
    if not after.isdecimal() or len(after) > 15:
        raise Refused(400, f"'after' must be a number of events, not '{after[:40]}'")
    return Response(_runner().log.follow(int(after)), mimetype="application/x-ndjson")


@routes.get("/weights")
def get_weights() -> Response:
    """Return the weights exposed by the program; with ``part``, only the device's part of the model."""
    weights = _runner().weights(part="part" in request.args)
    return Response(weights, mimetype="application/octet-stream")


@routes.get("/metrics")
def get_metrics() -> Response:
    """Return the device's metrics as text for Prometheus."""
    return Response(render_metrics(_runner(), resident_bytes()), mimetype="text/plain")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    # The second field of statm is the number of resident pages, see proc(5).
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def memory_limit() -> int | None:
    """Return the container's memory limit in bytes; None for an unlimited container."""
    # The files of cgroups version 2 and version 1.
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            # Without a limit, version 2 writes "max", and version 1 the bytes of the largest number of pages.
            if not text.isdecimal() or int(text) >= 1 << 60:
                return None
            return int(text)
    return None


def _runner() -> Runner:
    return cast("Runner", current_app.extensions["runner"])


def _state() -> dict[str, Any]:
    """Return the response to a change: the device's state, and its compute kernels once torch is imported."""
    document = _runner().health()
    if _runner().computing is not None:
        document["computing"] = _runner().computing
    return document


def _read_body(limit: int) -> bytearray:
    length = request.headers.get("Content-Length", "")
    encoding = request.headers.get("Transfer-Encoding", "")
    return read_body(request.environ, announced_length(length, encoding, limit))


def _read_number(key: str, minimum: float, maximum: float) -> float:
    """Read a JSON body with a single number."""
    try:
        document = json.loads(bytes(_read_body(_NUMBER_LIMIT)))
    except (ValueError, RecursionError) as error:
        raise Refused(
            400, f'the body must be JSON such as {{"{key}": 12.5}}'
        ) from error
    value = None
    if isinstance(document, dict) and document.keys() == {key}:
        value = document[key]
    if not is_number(value, minimum, maximum):
        raise Refused(
            400,
            f"the body must have the single key '{key}', a number from {minimum:g} to {maximum:g}",
        )
    return float(value)


def _respond_to_refusal(error: Refused) -> Any:
    _LOG.info("refused a request: %s", error)
    return {"error": str(error)}, error.status


def _respond_to_http_error(error: HTTPException) -> Any:
    text = refusal(f"{request.method} {request.path}: {error.name}")
    return {"error": text}, error.code or 500


def _respond_to_failure(error: Exception) -> Any:
    _LOG.exception("request failed")
    text = refusal(f"{request.method} {request.path}: {error!r}")
    return {"error": text}, 500
