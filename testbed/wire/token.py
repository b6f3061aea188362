"""Tokens that authorise requests to agents, shaper and web page, and leases that limit a container's life."""

from __future__ import annotations

import base64
import logging
import threading
import time

# The implementation behind hmac.compare_digest without OpenSSL, which would cost a device 4 MB of memory.
from _operator import _compare_digest as compare_digest
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

_LOG = logging.getLogger(__name__)


def authorised(environ: Mapping[str, Any], token: str) -> bool:
    """Return whether a WSGI request carries the token, compared in constant time.

    The token is sent as ``Authorization: Bearer <token>``; GET requests may send it as the query parameter ``token``
    instead, for links that a browser opens.
    """
    credentials = environ.get("HTTP_AUTHORIZATION", "")
    if not credentials and environ.get("REQUEST_METHOD") == "GET":
        query = parse_qs(environ.get("QUERY_STRING", ""))
        credentials = f"Bearer {query.get('token', [''])[0]}"
    # As bytes, since text other than ASCII cannot be compared in constant time.
    sent = credentials.encode("utf-8", "replace")
    return compare_digest(sent, f"Bearer {token}".encode())


def derived(token: str, *purpose: str) -> str:
    """Derive a token for one purpose; the original token cannot be computed from the derived one.

    The run's token yields one token for the control of each device and of the shaper, and one for the messages of each
    pair of devices.

    >>> len(derived("secret", "control", "worker1"))
    32
    """
    import hmac

    # 24 bytes give 32 characters of base64, the length of the run's token: tokens count as bytes on the wire.
    digest = hmac.digest(token.encode(), "\0".join(purpose).encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:24]).decode()


def data_token(token: str, sender: str, receiver: str) -> str:
    """Return the token of messages from ``sender`` to ``receiver``, derived from the token of their run."""
    return derived(token, "data", sender, receiver)


LEASE = "TESTBED_LEASE"
"""Environment variable with a container's lease in seconds; without the variable, the container has no lease."""
_MAX_TICK = 5.0
"""Maximum seconds between two checks of the remaining time."""


class Lease:
    """A timer that calls ``end`` unless renewed in time.

    Time is counted in short sleeps of this process, so a paused or starved process does not use up its lease.
    """

    def __init__(self, environment: Mapping[str, str], end: Callable[[], None]) -> None:
        self._seconds = float(environment.get(LEASE) or "inf")
        self._remaining = self._seconds
        self._end = end
        if environment.get(LEASE):
            threading.Thread(target=self._count_down, name="lease", daemon=True).start()

    def renew(self) -> None:
        """Restart the countdown."""
        self._remaining = self._seconds

    def _count_down(self) -> None:
        # The monotonic clock would also count the time during which the container is paused.
        # The lease ends up to a tick late, so a short lease has a shorter tick.
        tick = min(_MAX_TICK, self._seconds / 4)
        while self._remaining > 0:
            time.sleep(tick)
            self._remaining -= tick
        _LOG.warning(
            "the lease of %g s was not renewed: this container stops", self._seconds
        )
        self._end()
