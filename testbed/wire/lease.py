"""The lease of a container: how long it lives when nobody says any more that it is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

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
        print(f"nobody has renewed the lease of {self._seconds:g} s: this container ends", flush=True)
        self._end()
