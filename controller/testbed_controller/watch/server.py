"""The HTTP server of the page that `testbed watch` opens: on loopback, with a token, closed to pages of other origins.

The page receives the events of a run from `testbed_controller.watch.feed` as server-sent events, and may inject faults.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import flask
from jinja2 import Environment, PackageLoader

from testbed.common.errors import InputError, TestbedError
from testbed.scenario.schema import Trial
from testbed.trace.events import LINES
from testbed.trace.metrics_spec import MetricsSpec
from testbed.wire.serving import PatientServer, refusal
from testbed.wire.token import authorised
from testbed_controller.report.thinning import MAX_SHOWN
from testbed_controller.results.declared import load_metrics_spec
from testbed_controller.results.files import trial_in
from testbed_controller.watch.feed import batches

Strike = Callable[[Mapping[str, object]], str]
"""Function that injects a fault, given as a mapping in the syntax of a scenario, and returns a summary."""
READERS = 64
"""Maximum number of open pages; each occupies a thread that waits for events."""
LARGEST_REQUEST = 1 << 16
"""Maximum request size in bytes; a fault is a few lines."""


def application(
    folder: Path,
    token: str,
    origin: str,
    strike: Strike | None = None,
    pace: float | None = None,
) -> flask.Flask:
    """Return the WSGI application for the page of the run in a results folder.

    Every request needs the token, in its query or as ``Authorization: Bearer``; a request with an ``origin`` other than
    the page's own, ``http://127.0.0.1:PORT``, is refused. Without ``strike``, the page cannot inject faults.
    """
    app = flask.Flask("watch")
    loader = PackageLoader("testbed_controller.watch", ".")
    template = Environment(loader=loader, autoescape=True).get_template("page.html")
    trial = trial_in(folder)
    facts = describe_run(trial, load_metrics_spec(folder, trial))
    facts |= {"token": token, "strikes": strike is not None}
    drawn_devices = frozenset(facts["devices"])
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_REQUEST
    app.before_request(lambda: _authorise(token, origin))
    app.register_error_handler(
        RecursionError,
        lambda _error: ({"error": "the request is nested too deeply"}, 400),
    )
    app.register_error_handler(
        TestbedError, lambda error: ({"error": refusal(str(error))}, 400)
    )
    app.get("/", endpoint="page")(lambda: template.render(facts=facts))
    app.get("/events", endpoint="events")(lambda: _stream(folder, drawn_devices, pace))
    if strike is not None:
        app.post("/strike", endpoint="strike")(
            lambda: {"done": strike(_check_fault(flask.request.get_json()))}
        )
    return app


def _check_fault(document: Any) -> Mapping[str, object]:
    if not isinstance(document, dict):
        raise InputError('a fault must be an object such as {"kill": "worker"}')
    return document


def _authorise(token: str, origin: str) -> tuple[dict[str, str], int] | None:
    request = flask.request
    if not authorised(request.environ, token):
        return {"error": "the token is missing or wrong: open the printed address"}, 401
    # DNS rebinding: a foreign host name that resolves to loopback must not pass as our own page.
    is_own_host = f"http://{request.host}" == origin
    if not is_own_host or request.headers.get("Origin", origin) != origin:
        return {"error": "requests from other origins are refused"}, 403
    return None


def _stream(
    folder: Path, devices: Collection[str], pace: float | None
) -> flask.Response:
    def messages() -> Iterator[str]:
        for batch in batches(folder, devices, pace):
            # An empty line ends a server-sent event.
            yield f"data: {LINES.encode(batch)}\n\n"

    return flask.Response(
        messages(), mimetype="text/event-stream", headers={"Cache-Control": "no-store"}
    )


def describe_run(trial: Trial, declared: MetricsSpec) -> dict[str, Any]:
    """Return the data needed by the page before the first event, with at most `MAX_SHOWN` devices.

    ``left_out`` is the number of further devices. ``pauses`` are the names of events at which the work stood still.
    """
    experiment = trial.experiment
    radio = experiment.radio
    drawn = [device.name for device in experiment.devices[:MAX_SHOWN]]
    # A set, since a mesh of `MAX_SHOWN` devices has a link for each pair.
    names = frozenset(drawn)
    links = []
    for (source, destination), link in experiment.links.items():
        if source in names and destination in names:
            ends = {"source": source, "destination": destination}
            links.append({**ends, "rate": link.rate, "delay": link.delay})
    positions = {}
    if radio is not None:
        positions = {name: list(radio.positions[name]) for name in drawn}
    return {
        "name": trial.scenario.name,
        "steps": trial.scenario.workload.total,
        "devices": drawn,
        "left_out": len(experiment.devices) - len(drawn),
        "positions": positions,
        "pauses": [each.name for each in declared.events if each.pause],
        "links": links,
    }


class PageServer:
    """A server for the page of the run in a results folder, in a separate thread, on a free port of 127.0.0.1.

    Without ``strike``, the page cannot inject faults; ``pace`` is that of `testbed_controller.watch.feed.batches`.
    """

    def __init__(
        self, folder: Path, strike: Strike | None = None, pace: float | None = None
    ) -> None:
        self._server = PatientServer(("127.0.0.1", 0), None, READERS)
        origin = f"http://127.0.0.1:{self._server.address[1]}"
        token = secrets.token_urlsafe(24)
        self._server.application = application(folder, token, origin, strike, pace)
        self.address = f"{origin}/?token={token}"
        """URL for the browser."""
        threading.Thread(target=self._server.serve, name="page", daemon=True).start()

    def show(self) -> None:
        """Open the page in a browser, unless only a text browser could run, which would take over the terminal."""
        has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if has_display or sys.platform == "darwin":
            webbrowser.open(self.address)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()
