"""An asyncio event loop on a virtual clock: waiting costs nothing, and equal instants keep their order.

async-solipsism offers the like, but counts time in whole microseconds (a 1 kB message lasts 8.7 µs at 1 gbit),
leaves the order of equal instants to a heap that is not stable, and cannot hold back the callbacks of one paused
device. Only the scheduling is written here; tasks, futures, locks, queues and time-outs are asyncio's own.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Whose code is running; inherited by the tasks and timers it starts."""


class Stillness(Exception):  # noqa: N818 - the end of a simulation, wanted or not
    """Nothing is scheduled any more, so nothing can ever happen again."""


class TimeLimit(Exception):  # noqa: N818
    """The next event lies beyond the time limit."""


class _Handle(asyncio.Handle):
    """asyncio's handle without what it keeps for debugging: most of the loop's time went there."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context | None
    ) -> None:
        self._context = context or copy_context()
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs whatever is ready, then jumps to the next instant that anything is due."""

    _stopping: bool

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit = limit
        self.now = 0.0
        """Virtual seconds; only the loop itself sets it."""
        self._ready: deque[Any] = deque()
        """Handles of asyncio; what is read of them below is private, as it is in asyncio's own loops."""
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._ties = count()
        self._frozen: dict[Hashable, list[asyncio.Handle]] = {}

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def at(self, when: float, action: Callable[[Any], object], argument: Any) -> None:
        """Call ``action(argument)`` at an instant; cheaper than `call_at`, and cannot be cancelled."""
        heapq.heappush(self._due, (when, next(self._ties), action, argument))

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback as asyncio does: ``asyncio.sleep`` and time-outs end up here."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.at(max(when, self.now), self._ready.append, timer)
        return timer

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback next, after those that are ready: asyncio's own, without its checks for misuse."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a callback some seconds from now."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def freeze(self, owner: Hashable) -> None:
        """Hold back every callback of this owner's code."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Hashable) -> None:
        """Run what was held back, in its order, and hold back nothing more."""
        self._ready.extend(self._frozen.pop(owner, ()))

    def _write_to_self(self) -> None:
        """Wake nobody: all is done in this thread, also what asyncio schedules as if from another."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays where it is and is skipped when its time comes."""

    def _run_once(self) -> None:
        """Run until the loop is told to stop. Called by ``run_forever``."""
        ready, due, frozen = self._ready, self._due, self._frozen
        while True:
            while ready:
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                if frozen:
                    owner = handle._context.get(OWNER)
                    if owner in frozen:
                        frozen[owner].append(handle)
                        continue
                handle._run()
            if self._stopping:
                return
            if not due:
                raise Stillness
            if due[0][0] > self.limit:
                raise TimeLimit
            when, _, action, argument = heapq.heappop(due)
            self.now = when
            action(argument)
