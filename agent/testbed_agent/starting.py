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

    The import of Flask takes half of an agent's start, and a run continues only when all agents are healthy. Without
    this class, 20 agents that start at once on two cores would be healthy after twice the time.
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

            # Two concurrent requests may each create an application, which is harmless, since it has no state.
            self._application = create_application(self._runner, self._renew)
        return self._application(environ, start_response)
