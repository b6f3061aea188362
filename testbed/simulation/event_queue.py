"""The event queue of a simulation and its virtual clock; `VirtualLoop` is the asyncio interface."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import Context, ContextVar, copy_context
from typing import Any

OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Owner of the running code, usually a device; inherited by tasks and timers that the code starts."""


class EmptySchedule(Exception):  # noqa: N818 - the end of a simulation, as in SimPy
    """Raised when the event queue is empty: all programs wait for each other (deadlock)."""


class TimeLimit(Exception):  # noqa: N818
    """Raised when the next event lies beyond the time limit."""


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
    """The event queue of a simulation: runs all ready callbacks, then advances the clock to the next scheduled entry.

    An entry is an action with one argument at a time (`at`). A ready callback waits for its turn at the present time;
    only callbacks can be cancelled, and suspended with their owner (`freeze`). ``limit`` is the last time in seconds.
    ``on_failure`` is called with each callback that raised an exception, and with the exception.

    >>> event_queue, happened = EventQueue(limit=10.0, on_failure=print), []
    >>> event_queue.at(2.5, happened.append, "an event")
    >>> event_queue.run()
    Traceback (most recent call last):
    ...
    testbed.simulation.event_queue.EmptySchedule
    >>> event_queue.now, happened
    (2.5, ['an event'])
    """

    def __init__(
        self, limit: float, on_failure: Callable[[Callback, BaseException], None]
    ) -> None:
        self.limit = limit
        self.now: float = 0.0
        """Virtual time in seconds; set only by the event queue."""
        self.stopping: bool = False
        """Whether `run` returns as soon as no callback is ready."""
        self._on_failure = on_failure
        self._ready: deque[Callback] = deque()
        """Callbacks of the present time, in order."""
        self._scheduled: list[tuple[float, int, Callable[[Any], object], Any]] = []
        """Heap of (time, number of the entry, action, argument)."""
        # A heap is not stable: the number keeps entries of equal times in the order of the calls.
        self._last_number: int = 0
        self._frozen: dict[Hashable, list[Callback]] = {}
        """Suspended callbacks, by owner."""

    def at(self, when: float, action: Callable[[Any], object], argument: Any) -> None:
        """Schedule ``action(argument)`` at a time in seconds; cheaper than `timer`, and cannot be cancelled."""
        self._last_number += 1
        heapq.heappush(self._scheduled, (when, self._last_number, action, argument))

    def timer(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Timer:
        """Schedule a callback at a time in seconds; a past time counts as the present."""
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
        self._scheduled.clear()

    def run(self) -> None:
        """Run until stopped. Raises EmptySchedule for an empty queue (deadlock), or TimeLimit."""
        # Local names, since a simulation spends most of its time in this loop.
        scheduled, frozen = self._scheduled, self._frozen
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
                except BaseException as error:  # noqa: BLE001 - the loop continues, as asyncio's own loops do
                    self._on_failure(handle, error)
            if self.stopping:
                return
            if not scheduled:
                raise EmptySchedule
            if scheduled[0][0] > self.limit:
                raise TimeLimit
            self.now, _, action, argument = pop(scheduled)
            action(argument)
