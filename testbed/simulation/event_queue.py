"""The event queue of a simulation and its virtual clock; `VirtualLoop` is the asyncio interface."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from typing import Any

OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Owner of the running code, inherited by its tasks and timers."""


class EmptySchedule(Exception):  # noqa: N818 - the end of a simulation, as in SimPy
    """Raised when the event queue is empty: all programs wait for each other (deadlock)."""


class TimeLimit(Exception):  # noqa: N818
    """The next event lies beyond the time limit."""


class Callback:
    """Counterpart of `asyncio.Handle`; ``callback`` is None once cancelled."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self,
        callback: Callable[..., object] | None,
        args: tuple[Any, ...],
        context: Context,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        """Cancel the callback."""
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self.callback is None


class Timer(Callback):
    """Counterpart of `asyncio.TimerHandle`; a cancelled timer is skipped when due."""

    __slots__ = ("_when",)

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context,
    ) -> None:
        super().__init__(callback, args, context)
        self._when = when

    def when(self) -> float:
        """Return the scheduled time."""
        return self._when


class EventQueue:
    """The event queue of a simulation: runs all ready callbacks, then advances the clock to the next scheduled one.

    ``failed`` is called with each callback that raised, and its exception.

    >>> event_queue, happened = EventQueue(limit=10.0, failed=print), []
    >>> event_queue.at(2.5, happened.append, "an event")
    >>> event_queue.run()
    Traceback (most recent call last):
    ...
    testbed.simulation.event_queue.EmptySchedule
    >>> event_queue.now, happened
    (2.5, ['an event'])
    """

    def __init__(
        self, limit: float, failed: Callable[[Callback, BaseException], None]
    ) -> None:
        self.limit = limit
        self.now: float = 0.0
        """Virtual time in seconds; set only by the event queue."""
        self.stopping: bool = False
        """Whether `run` is to return once nothing is ready."""
        self._failed = failed
        self._ready: deque[Callback] = deque()
        """Callbacks of the present instant, in order."""
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        """Heap of (time, running number, action, argument)."""
        # A heap is not stable: the running number keeps equal instants in the order of the calls.
        self._ties: int = 0
        self._frozen: dict[Hashable, list[Callback]] = {}
        """Callbacks held back, by suspended owner."""

    def at(self, when: float, action: Callable[[Any], object], argument: Any) -> None:
        """Call ``action(argument)`` at an instant; cheaper than `timer`, and cannot be cancelled."""
        self._ties = ties = self._ties + 1
        heapq.heappush(self._due, (when, ties, action, argument))

    def timer(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Timer:
        """Schedule a callback at a time; a past time means next."""
        timer = Timer(
            when, callback, args, copy_context() if context is None else context
        )
        self.at(max(when, self.now), self._ready.append, timer)
        return timer

    def soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Callback:
        """Schedule a callback after all ready ones."""
        ready = Callback(callback, args, copy_context() if context is None else context)
        self._ready.append(ready)
        return ready

    def freeze(self, owner: Hashable) -> None:
        """Suspend all callbacks of an owner."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Hashable) -> None:
        """Release suspended callbacks in order and stop suspending."""
        self._ready.extend(self._frozen.pop(owner, ()))

    def clear(self) -> None:
        """Discard all callbacks and timers."""
        self._ready.clear()
        self._due.clear()

    def run(self) -> None:
        """Run until stopped. Raises EmptySchedule for an empty queue (deadlock), or TimeLimit."""
        # Local names, since a simulation spends most of its own time in this loop.
        due, frozen = self._due, self._frozen
        next_ready, pop = self._ready.popleft, heapq.heappop
        while True:
            while self._ready:
                handle = next_ready()
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
                raise EmptySchedule
            if due[0][0] > self.limit:
                raise TimeLimit
            self.now, _, action, argument = pop(due)
            action(argument)
