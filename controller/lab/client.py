"""HTTP to the containers of a run: what agents and the shaper are spoken to with."""

from __future__ import annotations

import threading
from typing import Any

import requests


class Client:
    """Requests with the token of a run to one container. Threads have a session each."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token
        self._local = threading.local()

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        """Make a request; raises what `requests` raises where nobody answers."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # no proxy stands between us and our own containers
            session.headers["Authorization"] = f"Bearer {self._token}"
        return session.request(method, self.url + path, **options)


def refusal(response: requests.Response) -> str:
    """Return why a request was refused."""
    try:
        return f"{response.json()['error']} ({response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"
