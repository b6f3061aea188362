"""Who may ask agents, shaper and page, by tokens; and how long a container lives when nobody asks any more."""

from __future__ import annotations

import base64
import logging
import threading
import time

# What hmac calls by the same name where there is no OpenSSL, which takes a device that only compares 4 MB.
from _operator import _compare_digest as compare_digest
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

_LOG = logging.getLogger(__name__)


def authorised(environ: Mapping[str, Any], token: str) -> bool:
    """Say whether a WSGI request bears the token, compared in constant time.

    As ``Authorization: Bearer <token>``; what only reads may have it as ``token`` in its query instead.
    """
    given = environ.get("HTTP_AUTHORIZATION", "")
    if not given and environ.get("REQUEST_METHOD") == "GET":
        given = "Bearer " + parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
    return compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())


def derived(token: str, *purpose: str) -> str:
    """Return a token for one purpose alone, which says nothing of the one that it is made of.

    The token of a run makes one for the control of each device and of the shaper, and one for the messages from each
    device to each other. It has 32 characters, as that has, since they count on the wire.
    """
    import hmac

    digest = hmac.digest(token.encode(), "\0".join(purpose).encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:24]).decode()


def data_token(token: str, sender: str, receiver: str) -> str:
    """Return what messages from one device to another bear, made of the token of their run."""
    return derived(token, "data", sender, receiver)


LEASE = "TESTBED_LEASE"
"""The variable of a container's environment that holds the seconds of its lease; without it there is none."""
_TICK = 5.0


class Lease:
    """Calls ``end`` when it has not been renewed for some seconds.

    They are counted in short sleeps of this process: while it is paused, or waits for a processor, none of the lease is
    used up.
    """

    def __init__(self, environment: Mapping[str, str], end: Callable[[], None]) -> None:
        self._seconds = float(environment.get(LEASE) or "inf")
        self._left = self._seconds
        self._end = end
        if environment.get(LEASE):
            threading.Thread(target=self._count, name="lease", daemon=True).start()

    def renew(self) -> None:
        """Begin to count again."""
        self._left = self._seconds

    def _count(self) -> None:
        tick = min(_TICK, self._seconds / 4)
        while self._left > 0:
            time.sleep(tick)
            self._left -= tick
        _LOG.warning("nobody has renewed the lease of %g s: this container ends", self._seconds)
        self._end()
