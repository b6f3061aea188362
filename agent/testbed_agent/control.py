"""The control network's side of the agent.

``/health`` is answered without Flask, which is imported when anything else is first asked for: many agents start at
once on few processors, and what they are waited for is their health.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.wire.serving import refusal
from testbed.wire.token import authorised
from testbed_agent import lean
from testbed_agent.http import Environ, Refused, StartResponse, announced_length, read_body, respond

if TYPE_CHECKING:
    from flask import Flask, Response
    from werkzeug.exceptions import HTTPException

    from testbed_agent.runner import Runner

_LOG = logging.getLogger(__name__)

JSON_LIMIT = 48 << 20
"""Bytes of a deployment, at most: the files of a program are in it, 20 MB, in base 64."""
_SMALL = 4096
_UNUSED = (
    *("click", "flask.cli", "werkzeug.serving", "werkzeug.test"),  # commands, and what is for development
    *("jinja2", "jinja2.loaders"),  # templates
    *("decimal", "tempfile"),  # forms, and what JSON has no word for
    *("hashlib", "hmac", "itsdangerous", "secrets"),  # cookies; they bring OpenSSL
    *("http.server", "ssl", "urllib.error", "urllib.request", "wsgiref.simple_server"),  # what Prometheus is pushed by
)
"""What Flask and Prometheus's library import for what a device does not do: 13 MB. Only these two lack it."""


def resident_bytes() -> int:
    """Return the memory this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def memory_limit() -> int | None:
    """Return what the container may hold, where that is limited."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            # Version 1 writes "no limit" as the largest number of pages.
            return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


class ControlApplication:
    """WSGI: health at once, everything else through a Flask application made on first use."""

    def __init__(self, runner: Runner, renew: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._renew = renew
        self._flask: Flask | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if environ["PATH_INFO"] == "/health" and environ["REQUEST_METHOD"] == "GET":
            return respond(start_response, 200, health(self._runner))
        if not authorised(environ, self._runner.settings.token):
            error = {"error": "send the device's token as 'Authorization: Bearer <token>'"}
            return respond(start_response, 401, error)
        with lean.ALONE:
            if self._flask is None:
                self._flask = application(self._runner, self._renew)
        return self._flask(environ, start_response)


def health(runner: Runner) -> dict[str, Any]:
    """Return the device's state; when its program failed, with the traceback."""
    settings = runner.settings
    document = {"run": settings.run, "device": settings.device, "state": runner.state, "events": runner.log.count}
    return document if runner.error is None else {**document, "error": runner.error}


def facts(runner: Runner) -> dict[str, Any]:
    """Return what this device is, and its clock and memory now."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "flask", "waitress"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return {
        "run": runner.settings.run,
        "device": runner.settings.device,
        "versions": versions,
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "memory": {"resident": resident_bytes(), "limit": memory_limit()},
        "monotonic": time.monotonic(),
    }


def application(runner: Runner, renew: Callable[[], None]) -> Flask:
    """Make the Flask application; see docs/protocols.md."""
    with lean.without(*_UNUSED):
        from flask import Flask
        from werkzeug.exceptions import HTTPException

        from testbed_agent import metrics  # noqa: F401

    app = Flask("agent", static_folder=None)

    def put(what: str, take: Callable[[bytearray], None]) -> None:
        runner.needs_ready(what)  # before the body is read, which may be large
        take(_body(runner.body_limit))

    # What the controller has the device do; each is answered with its state.
    for method, path, act in (
        ("GET", "/health", lambda: None),
        ("PUT", "/deployment", lambda: runner.deploy(_body(JSON_LIMIT))),
        ("PUT", "/data", lambda: put("data", runner.put_data)),
        ("PUT", "/shard", lambda: put("a shard", runner.put_shard)),
        ("POST", "/start", lambda: runner.start(_number(_body(_SMALL), "origin", -1e12, 1e12))),
        ("POST", "/stop", runner.stop),
        ("POST", "/lease", renew),
        ("POST", "/leave", runner.leave),
        ("PUT", "/speed", lambda: runner.set_speed(_number(_body(_SMALL), "factor", 1e-6, 1e6))),
        ("PUT", "/links", lambda: runner.set_links(_body(JSON_LIMIT))),
    ):
        app.add_url_rule(path, path, partial(_done, runner, act), methods=[method])
    for path, content, kind in (
        ("/facts", lambda: json.dumps(facts(runner)) + "\n", "application/json"),
        ("/events", lambda: _events(runner), "application/x-ndjson"),
        ("/weights", lambda: _weights(runner), "application/octet-stream"),
        ("/metrics", lambda: _metrics(runner), "text/plain"),
    ):
        app.add_url_rule(path, path, partial(_read, content, kind))
    app.register_error_handler(Refused, _refused)
    app.register_error_handler(HTTPException, _unknown)
    app.register_error_handler(Exception, _broken)
    return app


def _done(runner: Runner, act: Callable[[], None]) -> Response:
    act()
    document = health(runner)
    if runner.computing is not None:
        document["computing"] = runner.computing
    return _answer(200, document)


def _read(content: Callable[[], str | bytes | Iterator[bytes]], kind: str) -> Response:
    from flask import Response

    return Response(content(), mimetype=kind)


def _metrics(runner: Runner) -> bytes:
    from testbed_agent.metrics import exposition

    return exposition(runner, resident_bytes())


def _weights(runner: Runner) -> bytes:
    from flask import request

    return runner.weights("part" in request.args)


def _events(runner: Runner) -> Iterator[bytes]:
    from flask import request

    after = request.args.get("after", "0")
    if not after.isdecimal() or len(after) > 15:
        raise Refused(400, f"after is a number of events, not '{after[:40]}'")
    return runner.log.follow(int(after))


def _body(most: int) -> bytearray:
    from flask import request

    length, encoding = request.headers.get("Content-Length", ""), request.headers.get("Transfer-Encoding", "")
    return read_body(request.environ, announced_length(length, encoding, most))


def _answer(status: int, document: object) -> Response:
    from flask import Response

    return Response(json.dumps(document) + "\n", status, mimetype="application/json")


def _refused(error: Refused) -> Response:
    _LOG.info("a request was refused: %s", error)
    return _answer(error.status, {"error": str(error)})


def _unknown(error: HTTPException) -> Response:
    from flask import request

    return _answer(error.code or 500, {"error": refusal(f"{request.method} {request.path}: {error.name}")})


def _broken(error: Exception) -> Response:
    from flask import current_app, request

    current_app.logger.exception("request failed")
    return _answer(500, {"error": refusal(f"{request.method} {request.path}: {error!r}")})


def _number(body: bytearray, key: str, least: float, most: float) -> float:
    """Read a body that holds one number."""
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'the body is JSON such as {{"{key}": 12.5}}') from error
    value = document.get(key) if isinstance(document, dict) and len(document) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refused(400, f"the body holds '{key}' alone, a number from {least:g} to {most:g}")
    return float(value)
