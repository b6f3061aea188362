"""Work on several things at once, on each of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, wait


class Turns:
    """Does what concerns one thing in the order in which it was handed over; different things side by side.

    A job that waits for its turn takes a worker of the pool; what it waits for has begun before it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._last: dict[Hashable, Future[None]] = {}

    def submit(self, about: Hashable, job: Callable[[], None]) -> None:
        """Do a job as soon as all earlier ones about the same thing are done."""
        before = self._last.get(about)

        def in_turn() -> None:
            if before is not None:
                wait([before])
            job()

        self._last[about] = self._pool.submit(in_turn)
