"""The control network's side of the agent.

``/health`` is answered without Flask, which is imported when anything else is first asked for: many agents start at
once on few processors, and what they are waited for is their health.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.http import Environ, Refused, StartResponse, abandon_unread, announced_length, read_body, respond
from testbed.wire.serving import refusal
from testbed.wire.token import authorised

if TYPE_CHECKING:
    from flask import Flask, Response
    from werkzeug.exceptions import HTTPException

    from agent.device import RealDevice
    from agent.runner import Runner

_COUNTED = {
    "compute_seconds": "Time the program's work took on this device.",
    "deficit_seconds": "Time by which the host was slower than the device.",
    "late_seconds": "Time by which the host made the program's work late.",
    "sent_bytes": "Bytes of acknowledged messages and of casts.",
    "received_bytes": "Bytes of messages that arrived.",
    "sent_messages": "Messages acknowledged, and casts.",
    "received_messages": "Messages that arrived.",
    "steps": "Training steps that this device recorded.",
    "requests": "Inferences that this device recorded.",
}
_LEARNED = {
    "loss": "Loss of the last training step.",
    "accuracy": "Accuracy of the last test.",
    "test_loss": "Loss of the last test.",
}
STATES = ("idle", "ready", "running", "finished", "failed", "stopped")
JSON_LIMIT = 48 << 20
"""Bytes of a deployment, at most: the files of a program are in it, 20 MB, in base 64."""
_SMALL = 4096


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


def exposition(runner: Runner) -> bytes:
    """Return what the device did and holds."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(runner))
    return generate_latest(registry)


class _Metrics(Collector):
    """Reads the metrics of a device off its programs when they are asked for."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        runner = self._runner
        states = GaugeMetricFamily("testbed_state", "1 for the state the device is in.", labels=["state"])
        for state in STATES:
            states.add_metric([state], state == runner.state)
        yield states
        yield _gauge("resident_bytes", "Memory the agent holds.", resident_bytes())
        yield _gauge("speed_factor", "Share of its own speed that the processor goes at.", runner.pace.factor)
        yield _counter("events", "Events recorded.", runner.log.count)
        if runner.device is not None:
            yield from _of_program(runner.device)


def _of_program(device: RealDevice) -> Iterator[Metric]:
    totals = device.totals
    for name, text in _COUNTED.items():
        yield _counter(name, text, totals.counts.get(name, 0.0))
    for name, value in list(totals.learned.items()):
        yield _gauge(name, _LEARNED[name], value)
    yield _gauge("inbox_messages", "Messages that wait for the program.", device.waiting)
    yield _gauge("inbox_bytes", "Memory of messages that wait or arrive.", device.inbox.bytes)
    yield _gauge("compute_queue", "Pieces of work that wait for the processor.", device.processors.waiting)
    queues = GaugeMetricFamily("testbed_send_queue", "Messages on their way to each peer.", labels=["peer"])
    for peer, lane in list(device.lanes.items()):
        queues.add_metric([peer], lane.waiting)
    yield queues


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"testbed_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    """Return a counter; its sample is called ``<name>_total``."""
    return CounterMetricFamily(f"testbed_{name}", text, value=value)


class ControlApplication:
    """WSGI: health at once, everything else through a Flask application made on first use."""

    def __init__(self, runner: Runner, renew: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._renew = renew
        self._flask: Flask | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if environ["PATH_INFO"] == "/health" and environ["REQUEST_METHOD"] == "GET":
            return respond(environ, start_response, 200, health(self._runner))
        if not authorised(environ, self._runner.settings.token):
            error = {"error": "send the device's token as 'Authorization: Bearer <token>'"}
            return respond(environ, start_response, 401, error)
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
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "flask", "cheroot"):
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
    from flask import Flask
    from werkzeug.exceptions import HTTPException

    app = Flask("agent", static_folder=None)

    def put(what: str, take: Callable[[bytearray], None]) -> None:
        runner.needs_ready(what)  # before the body is read, which may be large
        take(_body(runner.settings.body_limit))

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
        ("PUT", "/speed", lambda: runner.pace.set(_number(_body(_SMALL), "factor", 1e-6, 1e6))),
        ("PUT", "/links", lambda: runner.set_message_loss(_body(JSON_LIMIT))),
    ):
        app.add_url_rule(path, path, partial(_done, runner, act), methods=[method])
    for path, content, kind in (
        ("/facts", lambda: json.dumps(facts(runner)) + "\n", "application/json"),
        ("/events", lambda: _events(runner), "application/x-ndjson"),
        ("/weights", runner.weights, "application/octet-stream"),
        ("/metrics", lambda: exposition(runner), "text/plain"),
    ):
        app.add_url_rule(path, path, partial(_read, content, kind))
    app.register_error_handler(Refused, lambda error: _answer(error.status, {"error": str(error)}))
    app.register_error_handler(HTTPException, _unknown)
    app.register_error_handler(Exception, _broken)
    return app


def _done(runner: Runner, act: Callable[[], None]) -> Response:
    act()
    return _answer(200, health(runner))


def _read(content: Callable[[], str | bytes | Iterator[bytes]], kind: str) -> Response:
    from flask import Response

    return Response(content(), mimetype=kind)


def _events(runner: Runner) -> Iterator[bytes]:
    from flask import request

    after = request.args.get("after", "0")
    if not after.isdecimal() or len(after) > 15:
        raise Refused(400, f"after is a number of events, not '{after[:40]}'")
    return runner.log.follow(int(after))


def _body(most: int) -> bytearray:
    from flask import request

    return read_body(request.environ, announced_length(request.environ, most))


def _answer(status: int, document: object) -> Response:
    from flask import Response, request

    abandon_unread(request.environ)
    return Response(json.dumps(document) + "\n", status, mimetype="application/json")


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
