"""The agent's HTTP API for the controller: a WSGI application without a framework, which would double its memory."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from testbed.wire.serving import refusal
from testbed.wire.token import authorised
from testbed_agent.http import Environ, Refused, StartResponse, announced_length, read_body, respond
from testbed_agent.metrics import exposition

if TYPE_CHECKING:
    from testbed_agent.runner import Runner

_LOG = logging.getLogger(__name__)

JSON_LIMIT = 48 << 20
"""Maximum size of a deployment in bytes; program files take up to 20 MB of it, in base 64."""
_SMALL = 4096


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def memory_limit() -> int | None:
    """Return the container's memory limit in bytes, or None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            # Version 1 writes "no limit" as the largest number of pages.
            return int(text) if text.isdecimal() and int(text) < 1 << 60 else None
    return None


class ControlApplication:
    """The WSGI application of the control network; see docs/protocols.md."""

    def __init__(self, runner: Runner, renew: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._changes: dict[tuple[str, str], Callable[[Environ], object]] = {
            ("GET", "/health"): lambda _environ: None,
            ("PUT", "/deployment"): lambda environ: runner.deploy(_read_body(environ, JSON_LIMIT)),
            ("PUT", "/data"): lambda environ: self._put(environ, "data", runner.put_data),
            ("PUT", "/shard"): lambda environ: self._put(environ, "a shard", runner.put_shard),
            ("POST", "/start"): lambda environ: runner.start(_read_number(environ, "origin", -1e12, 1e12)),
            ("POST", "/stop"): lambda _environ: runner.stop(),
            ("POST", "/lease"): lambda _environ: renew(),
            ("POST", "/leave"): lambda _environ: runner.leave(),
            ("PUT", "/speed"): lambda environ: runner.set_speed(_read_number(environ, "factor", 1e-6, 1e6)),
            ("PUT", "/links"): lambda environ: runner.set_links(_read_body(environ, JSON_LIMIT)),
        }
        """Requests that change the device; the response is the device's state."""
        self._reads: dict[str, tuple[str, Callable[[Environ], Iterable[bytes]]]] = {
            "/facts": ("application/json", lambda _environ: [json.dumps(facts(runner)).encode() + b"\n"]),
            "/events": ("application/x-ndjson", lambda environ: _follow_events(runner, environ)),
            "/weights": ("application/octet-stream", lambda environ: [runner.weights("part" in _parse_query(environ))]),
            "/metrics": ("text/plain; charset=utf-8", lambda _environ: [exposition(runner, resident_bytes())]),
        }

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if (method, path) == ("GET", "/health"):
            return respond(start_response, 200, health(self._runner))
        if not authorised(environ, self._runner.settings.token):
            error = {"error": "send the device's token as 'Authorization: Bearer <token>'"}
            return respond(start_response, 401, error)
        try:
            return self._answer(method, path, environ, start_response)
        except Refused as error:
            _LOG.info("refused a request: %s", error)
            return respond(start_response, error.status, {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - it is logged, and the caller is told
            _LOG.exception("request failed")
            return respond(start_response, 500, {"error": refusal(f"{method} {path}: {error!r}")})

    def _answer(self, method: str, path: str, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if method == "GET" and path in self._reads:
            kind, read = self._reads[path]
            content = read(environ)
            headers = [("Content-Type", kind)]
            if isinstance(content, list):
                headers.append(("Content-Length", str(sum(map(len, content)))))
            start_response("200 OK", headers)
            return content
        if (method, path) not in self._changes:
            paths = {changing for _, changing in self._changes} | self._reads.keys()
            status = HTTPStatus.METHOD_NOT_ALLOWED if path in paths else HTTPStatus.NOT_FOUND
            raise Refused(status, f"{method} {path}: {status.phrase}")
        self._changes[method, path](environ)
        document = health(self._runner)
        if self._runner.computing is not None:
            document["computing"] = self._runner.computing
        return respond(start_response, 200, document)

    def _put(self, environ: Environ, content: str, store: Callable[[bytearray], None]) -> None:
        # Check the state before reading the body, which may be large.
        self._runner.require_ready(content)
        store(_read_body(environ, self._runner.body_limit))


def health(runner: Runner) -> dict[str, Any]:
    """Return the device's state, with the traceback of a failed program."""
    settings = runner.settings
    document = {"run": settings.run, "device": settings.device, "state": runner.state, "events": runner.log.count}
    return document if runner.error is None else {**document, "error": runner.error}


def facts(runner: Runner) -> dict[str, Any]:
    """Return the device's software versions, processors, memory in bytes and monotonic clock in seconds."""
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


def _parse_query(environ: Environ) -> dict[str, list[str]]:
    return parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)


def _follow_events(runner: Runner, environ: Environ) -> Iterator[bytes]:
    after = _parse_query(environ).get("after", ["0"])[0]
    if not after.isdecimal() or len(after) > 15:
        raise Refused(400, f"'after' must be a number of events, not '{after[:40]}'")
    return runner.log.follow(int(after))


def _read_body(environ: Environ, limit: int) -> bytearray:
    length, encoding = environ.get("CONTENT_LENGTH", ""), environ.get("HTTP_TRANSFER_ENCODING", "")
    return read_body(environ, announced_length(length, encoding, limit))


def _read_number(environ: Environ, key: str, minimum: float, maximum: float) -> float:
    """Read a JSON body with a single number."""
    try:
        document = json.loads(bytes(_read_body(environ, _SMALL)))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'the body must be JSON such as {{"{key}": 12.5}}') from error
    value = document.get(key) if isinstance(document, dict) and len(document) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise Refused(400, f"the body must have the single key '{key}', a number from {minimum:g} to {maximum:g}")
    return float(value)
