"""The health of an agent that has not imported Flask yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask import Flask

    from testbed_agent.runner import Runner


class HealthFirst:
    """A WSGI application that answers ``/health`` itself and creates the Flask application on the first other request.

    Importing Flask takes an agent as long as all else together. Where 20 agents start at once on two cores and each
    imports it, all are healthy after twice the time, and a run can shape its links only then.
    """

    def __init__(self, runner: Runner, renew: Callable[[], None]) -> None:
        self._runner = runner
        self._renew = renew
        self._application: Flask | None = None

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer one request."""
        if self._application is None:
            if environ["PATH_INFO"] == "/health":
                body = json.dumps(self._runner.health()).encode()
                headers = [
                    ("Content-Type", "application/json"),
                    ("Content-Length", str(len(body))),
                ]
                start_response("200 OK", headers)
                return [body]
            from testbed_agent.control import create_application

            # Two first requests at once may each create one: an application has no state of its own.
            self._application = create_application(self._runner, self._renew)
        return self._application(environ, start_response)
