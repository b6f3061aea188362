"""The page over HTTP: on loopback, for who has the token, and for no page of another origin."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable, Collection, Mapping
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
from testbed_controller.report.thinning import MOST
from testbed_controller.results.declared import declared_in
from testbed_controller.results.files import begun
from testbed_controller.watch.feed import batches

Strike = Callable[[Mapping[str, object]], str]
"""Carries out a fault, given as a scenario writes it, and says what it did."""
READERS = 64
"""Pages that may be open at once, each with a thread that waits for events."""
LARGEST_REQUEST = 1 << 16
"""Bytes; a fault is a few lines."""


def application(
    folder: Path, token: str, origin: str, strike: Strike | None = None, pace: float | None = None
) -> flask.Flask:
    """Return the WSGI application of the page of one run.

    Every request must bear the token, in its query or as ``Authorization: Bearer``; one that names another ``origin``
    than ``http://127.0.0.1:PORT``, the page's own, is refused. Without ``strike`` the run cannot be struck.
    """
    app = flask.Flask("watch")
    page = Environment(loader=PackageLoader("testbed_controller.watch", "."), autoescape=True).get_template("page.html")
    facts = {"token": token, "strikes": strike is not None}
    trial = begun(folder)
    shown = described(trial, declared_in(folder, trial))
    drawn = frozenset(shown["devices"])
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_REQUEST
    app.before_request(lambda: _authorise(token, origin))
    app.register_error_handler(RecursionError, lambda _error: ({"error": "the request is nested too deeply"}, 400))
    app.register_error_handler(TestbedError, lambda error: ({"error": refusal(str(error))}, 400))
    app.get("/", endpoint="page")(lambda: page.render(facts=shown | facts))
    app.get("/events", endpoint="events")(lambda: _stream(folder, drawn, pace))
    if strike is not None:
        app.post("/strike", endpoint="strike")(lambda: {"done": strike(_fault(flask.request.get_json()))})
    return app


def _fault(given: Any) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise InputError('a fault is an object such as {"kill": "worker"}')
    return given


def _authorise(token: str, origin: str) -> tuple[dict[str, str], int] | None:
    request = flask.request
    if not authorised(request.environ, token):
        return {"error": "the token is missing or wrong: open the address that was printed"}, 401
    # A name that resolves to loopback must not make a foreign page look like ours.
    if f"http://{request.host}" != origin or request.headers.get("Origin", origin) != origin:
        return {"error": "another origin may not ask"}, 403
    return None


def _stream(folder: Path, drawn: Collection[str], pace: float | None) -> flask.Response:
    lines = (f"data: {LINES.encode(batch)}\n\n" for batch in batches(folder, drawn, pace))
    return flask.Response(lines, mimetype="text/event-stream", headers={"Cache-Control": "no-store"})


def described(trial: Trial, declared: MetricsSpec) -> dict[str, Any]:
    """Return what the page must know of a run before its first event; of very many devices it draws the first."""
    experiment, radio = trial.experiment, trial.experiment.radio
    drawn = [device.name for device in experiment.devices[:MOST]]
    known = frozenset(drawn)
    links = [(pair, link) for pair, link in experiment.links.items() if known.issuperset(pair)]
    return {
        "name": trial.scenario.name,
        "steps": trial.scenario.workload.total,
        "devices": drawn,
        "left_out": len(experiment.devices) - len(drawn),
        "positions": {} if radio is None else {name: list(radio.positions[name]) for name in drawn},
        "pauses": [each.name for each in declared.events if each.pause],
        "links": [{"source": a, "destination": b, "rate": link.rate, "delay": link.delay} for (a, b), link in links],
    }


class PageServer:
    """Serves the page of a run from a thread of its own, on a free port of 127.0.0.1."""

    def __init__(self, folder: Path, strike: Strike | None = None, pace: float | None = None) -> None:
        self._server = PatientServer(("127.0.0.1", 0), None, READERS)
        origin = f"http://127.0.0.1:{self._server.address[1]}"
        token = secrets.token_urlsafe(24)
        self._server.application = application(folder, token, origin, strike, pace)
        self.address = f"{origin}/?token={token}"
        """To be opened in a browser."""
        threading.Thread(target=self._server.serve, name="page", daemon=True).start()

    def show(self) -> None:
        """Open the page where there is a desktop; a browser in the terminal would take that over."""
        if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(self.address)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()
