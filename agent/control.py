"""The control network's side of the agent: what the controller asks of a device.

A table of requests, and nothing imported before it is needed: many agents start at once on few processors.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from agent.http import Environ, Refused, StartResponse, announced_length, read_body, respond
from testbed.wire.serving import refusal
from testbed.wire.token import authorised

if TYPE_CHECKING:
    from agent.runner import Runner

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


class ControlApplication:
    """WSGI: what the controller asks of the device; see docs/protocols.md."""

    def __init__(self, runner: Runner, renew: Callable[[], None] = lambda: None) -> None:
        self._runner = runner

        def put(what: str, take: Callable[[bytearray], None]) -> Callable[[Environ], None]:
            def act(environ: Environ) -> None:
                runner.needs_ready(what)  # before the body is read, which may be large
                take(_body(environ, runner.settings.body_limit))

            return act

        # What the controller has the device do; each is answered with its state.
        self._acts: dict[tuple[str, str], Callable[[Environ], None]] = {
            ("GET", "/health"): lambda _: None,
            ("PUT", "/deployment"): lambda environ: runner.deploy(_body(environ, JSON_LIMIT)),
            ("PUT", "/data"): put("data", runner.put_data),
            ("PUT", "/shard"): put("a shard", runner.put_shard),
            ("POST", "/start"): lambda environ: runner.start(_number(environ, "origin", -1e12, 1e12)),
            ("POST", "/stop"): lambda _: runner.stop(),
            ("POST", "/lease"): lambda _: renew(),
            ("POST", "/leave"): lambda _: runner.leave(),
            ("PUT", "/speed"): lambda environ: runner.pace.set(_number(environ, "factor", 1e-6, 1e6)),
            ("PUT", "/links"): lambda environ: runner.set_message_loss(_body(environ, JSON_LIMIT)),
        }
        self._contents: dict[str, tuple[str, Callable[[Environ], Iterable[bytes]]]] = {
            "/facts": ("application/json", lambda _: [json.dumps(facts(runner)).encode() + b"\n"]),
            "/events": ("application/x-ndjson", lambda environ: runner.log.follow(_after(environ))),
            "/weights": ("application/octet-stream", lambda _: [runner.weights()]),
            "/metrics": ("text/plain", lambda _: [_metrics(runner)]),
        }
        self._methods: dict[str, str] = {path: method for method, path in self._acts} | dict.fromkeys(
            self._contents, "GET"
        )

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        try:
            return self._answer(environ, start_response)
        except Refused as error:
            status, text = error.status, str(error)
        except Exception as error:  # noqa: BLE001 - the controller is told
            traceback.print_exc()
            status, text = 500, refusal(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}: {error!r}")
        return respond(environ, start_response, status, {"error": text})

    def _answer(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        asked = method, path
        if asked != ("GET", "/health") and not authorised(environ, self._runner.settings.token):
            raise Refused(401, "send the device's token as 'Authorization: Bearer <token>'")
        if self._methods.get(path) != method:
            raise Refused(405 if path in self._methods else 404, f"{method} {path} is nothing that an agent does")
        if asked in self._acts:
            self._acts[asked](environ)
            return respond(environ, start_response, 200, health(self._runner))
        kind, content = self._contents[path]
        found = content(environ)
        start_response("200 OK", [("Content-Type", kind)])
        return found


def health(runner: Runner) -> dict[str, Any]:
    """Return the device's state; when its program failed, with the traceback."""
    settings = runner.settings
    document = {"run": settings.run, "device": settings.device, "state": runner.state, "events": runner.log.count}
    return document if runner.error is None else {**document, "error": runner.error}


def facts(runner: Runner) -> dict[str, Any]:
    """Return what this device is, and its clock and memory now."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "cheroot"):
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


def _metrics(runner: Runner) -> bytes:
    from agent.metrics import exposition

    return exposition(runner, resident_bytes())


def _after(environ: Environ) -> int:
    after = parse_qs(environ["QUERY_STRING"]).get("after", ["0"])[0]
    if not after.isdecimal() or len(after) > 15:
        raise Refused(400, f"after is a number of events, not '{after[:40]}'")
    return int(after)


def _body(environ: Environ, most: int) -> bytearray:
    return read_body(environ, announced_length(environ, most))


def _number(environ: Environ, key: str, least: float, most: float) -> float:
    """Read a body that holds one number."""
    try:
        document = json.loads(bytes(_body(environ, _SMALL)))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f'the body is JSON such as {{"{key}": 12.5}}') from error
    value = document.get(key) if isinstance(document, dict) and len(document) == 1 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refused(400, f"the body holds '{key}' alone, a number from {least:g} to {most:g}")
    return float(value)
