"""The event calendar of a simulation, and the virtual clock that it moves; `VirtualLoop` is the part asyncio sees."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from typing import Any

OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Whose code is running; inherited by the tasks and timers it starts."""


class Stillness(Exception):  # noqa: N818 - the end of a simulation, wanted or not
    """Nothing is scheduled any more, so nothing can ever happen again."""


class TimeLimit(Exception):  # noqa: N818
    """The next event lies beyond the time limit."""


class Callback:
    """What `asyncio.Handle` is to other loops: ``callback`` is None once it is cancelled."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object] | None, args: tuple[Any, ...], context: Context) -> None:
        self.callback = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        """Let nothing be called."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self.callback is None


class Timer(Callback):
    """What `asyncio.TimerHandle` is to other loops; cancelled, it is skipped when its time comes."""

    __slots__ = ("_when",)

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        super().__init__(callback, args, context)
        self._when = when

    def when(self) -> float:
        """Return the instant at which it goes off."""
        return self._when


class Calendar:
    """Runs whatever is ready, then jumps to the next instant at which anything is due.

    ``failed`` has each callback that raised, and what it raised.
    """

    def __init__(self, limit: float, failed: Callable[[Callback, BaseException], None]) -> None:
        self.limit = limit
        self.now: float = 0.0
        """Virtual seconds; only the calendar itself sets it."""
        self.stopping: bool = False
        """Whether `run` is to return once nothing is ready."""
        self._failed = failed
        self._ready: deque[Callback] = deque()
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._ties: int = 0
        self._frozen: dict[Hashable, list[Callback]] = {}

    def at(self, when: float, action: Callable[[Any], object], argument: Any) -> None:
        """Call ``action(argument)`` at an instant; cheaper than `timer`, and cannot be cancelled."""
        self._ties = ties = self._ties + 1
        heapq.heappush(self._due, (when, ties, action, argument))

    def timer(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Timer:
        """Run a callback at an instant, or next where that has passed."""
        timer = Timer(when, callback, args, copy_context() if context is None else context)
        self.at(max(when, self.now), self._ready.append, timer)
        return timer

    def soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Callback:
        """Run a callback next, after those that are ready."""
        ready = Callback(callback, args, copy_context() if context is None else context)
        self._ready.append(ready)
        return ready

    def freeze(self, owner: Hashable) -> None:
        """Hold back every callback of this owner's code."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Hashable) -> None:
        """Run what was held back, in its order, and hold back nothing more."""
        self._ready.extend(self._frozen.pop(owner, ()))

    def clear(self) -> None:
        """Forget all that is ready or due."""
        self._ready.clear()
        self._due.clear()

    def run(self) -> None:
        """Run until it is stopping; raise Stillness or TimeLimit where nothing is left to run."""
        due, frozen, following, pop = self._due, self._frozen, self._ready.popleft, heapq.heappop
        while True:
            while self._ready:
                handle = following()
                callback, context = handle.callback, handle.context
                if callback is None:
                    continue
                if frozen:
                    owner = context.get(OWNER)
                    if owner in frozen:
                        frozen[owner].append(handle)
                        continue
                try:
                    context.run(callback, *handle.args)
                except BaseException as error:  # noqa: BLE001 - the loop goes on, as asyncio's own loops do
                    self._failed(handle, error)
            if self.stopping:
                return
            if not due:
                raise Stillness
            if due[0][0] > self.limit:
                raise TimeLimit
            self.now, _, action, argument = pop(due)
            action(argument)
