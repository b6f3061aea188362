"""The event loop that a device's program runs in; imported when there is something to run, as asyncio takes memory."""

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
    """Waits as finely as the kernel's timers: epoll would round every wait up to a millisecond."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for what is registered, at most so many seconds."""
        if timeout is None or timeout > 0:
            select.select([self], [], [], timeout)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """A loop that notifies the device when a timer of its program fires: what the program does next, it does then."""

    def __init__(self) -> None:
        super().__init__(_Selector())
        self.on_timer: Callable[[float], None] = lambda _: None

    def live(self) -> None:
        """Run for good."""
        precise_sleep()
        # Threads that move messages must not wait 5 ms for one that computes in Python.
        sys.setswitchinterval(0.0005)
        asyncio.set_event_loop(self)
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # a program's, of which its task notifies too
                self.run_forever()

    def call_at(
        self, when: float, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Like the loop's own, whose clock is the monotonic one."""

        def go_off(*args: *_Arguments) -> None:
            self.on_timer(when)
            callback(*args)

        return super().call_at(when, go_off, *args, context=context)
