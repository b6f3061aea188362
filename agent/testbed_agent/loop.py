"""The event loop of a device's program; imported on demand, since asyncio takes memory."""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import sys
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

from testbed_agent.pacing import precise_sleep

_Arguments = TypeVarTuple("_Arguments")


class _Selector(selectors.EpollSelector):
    """A selector with the resolution of kernel timers; epoll rounds time-outs up to a millisecond."""

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for registered files, at most ``timeout`` seconds."""
        if timeout is None or timeout > 0:
            select.select([self], [], [], timeout)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop with reports of fired timers, which advance the device's time to the instant of the timer."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self.on_timer: Callable[[float], None] = lambda _: None

    def live(self) -> None:
        """Run until the process ends."""
        precise_sleep()
        # Threads that transfer messages must not wait 5 ms for a thread that computes in Python.
        sys.setswitchinterval(0.0005)
        asyncio.set_event_loop(self)
        while True:
            # Raised by a program, and reported by its task.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.run_forever()

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Arguments], object],
        *args: *_Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback at a monotonic instant, and report the instant to `on_timer` when the timer fires."""

        def fire(*args: *_Arguments) -> None:
            self.on_timer(when)
            callback(*args)

        return super().call_at(when, fire, *args, context=context)
