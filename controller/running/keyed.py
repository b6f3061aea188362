"""Work on several things at once, on each of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, wait


class KeyedExecutor:
    """Runs the jobs of one key in the order of their submission; those of different keys side by side.

    A job that waits for its turn takes a worker of the pool; what it waits for has begun before it.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._last: dict[Hashable, Future[None]] = {}

    def submit(self, key: Hashable, job: Callable[[], None]) -> None:
        """Run a job as soon as all earlier ones of its key are over."""
        before = self._last.get(key)

        def in_turn() -> None:
            if before is not None:
                wait([before])
            job()

        self._last[key] = self._pool.submit(in_turn)
