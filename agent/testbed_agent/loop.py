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

from testbed_agent.pacing import request_precise_wakeups

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
    """An event loop that reports each fired timer, so that the device's time advances to the instant of the timer."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self.on_timer: Callable[[float], None] = lambda _: None
        """Function that is called with the monotonic instant of each fired timer, in seconds."""

    def run_until_exit(self) -> None:
        """Run until the process ends."""
        request_precise_wakeups()
        # Threads that transfer messages must not wait 5 ms for a thread that computes in Python.
        sys.setswitchinterval(0.0005)
        asyncio.set_event_loop(self)
        while True:
            # A program may raise these exceptions. They are stored in its task, and must not end the loop.
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
