"""An asyncio event loop on a virtual clock: waiting costs nothing, and equal instants keep their order.

The package async-solipsism is similar, but counts time in whole microseconds (a 1 kB message lasts 8.7 µs at 1 gbit),
leaves the order of equal instants to a heap that is not stable, and cannot hold back the callbacks of one paused
device. This module contains only the scheduling; tasks, futures, locks, queues and time-outs are asyncio's own. The
module uses the interface that asyncio documents for event loops, so it works with any version.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar
from weakref import WeakSet

from testbed.simulation.event_queue import Callback, EventQueue, Timer

T = TypeVar("T")

_LOG = logging.getLogger("asyncio")

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class VirtualLoop(asyncio.AbstractEventLoop):
    """An asyncio event loop on the virtual clock of an event queue.

    There is one thread and no input or output: the methods of `asyncio.AbstractEventLoop` for threads, sockets and
    files raise NotImplementedError.

    >>> loop = VirtualLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time()
    3600.0
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.event_queue = EventQueue(limit, self._report_failure)
        # The event queue's own methods under asyncio's names: a method in between would double the calls.
        self.call_soon = self.call_soon_threadsafe = self.event_queue.soon  # type: ignore[assignment]  # one thread
        self.call_at = self.event_queue.timer  # type: ignore[assignment]
        self._running = self._closed = False
        self._task_factory: Callable[..., Any] | None = None
        self._exception_handler: ExceptionHandler | None = None
        self._generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()
        """Started asynchronous generators, closed at the end."""

    # Time

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.event_queue.now

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Timer:
        """Schedule a callback some seconds from now."""
        return self.event_queue.timer(
            self.event_queue.now + delay, callback, *args, context=context
        )

    # Tasks and futures

    def create_future(self) -> asyncio.Future[Any]:
        """Return a new future."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        """Schedule a coroutine; ``options`` are arguments of `asyncio.Task`."""
        if self._task_factory is None:
            return asyncio.Task(coro, loop=self, **options)
        task: asyncio.Task[T] = self._task_factory(self, coro, **options)
        return task

    def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
        """Set the factory ``factory(loop, coroutine, **options)`` of tasks."""
        self._task_factory = factory

    def get_task_factory(self) -> Callable[..., Any] | None:
        """Return the factory of tasks; None for asyncio's default."""
        return self._task_factory

    # Running

    def run_forever(self) -> None:
        """Run until `stop` is called; raise EmptySchedule or TimeLimit if nothing is left to run."""
        if self._closed:
            raise RuntimeError("the loop is closed")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("another loop is running in this thread")
        # A generator that is not exhausted is closed by the loop, as by asyncio's own loops.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._generators.add, finalizer=self._close_generator
        )
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self.event_queue.run()
        finally:
            self._running = self.event_queue.stopping = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _report_failure(self, handle: Callback, error: BaseException) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        message = f"exception in callback {handle.callback!r}"
        self.call_exception_handler(
            {"message": message, "exception": error, "handle": handle}
        )

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until a future is done and return its result. Raises RuntimeError for a loop stopped earlier."""
        is_new_task = not asyncio.isfuture(future)
        awaited: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        awaited.add_done_callback(self._stop_after)
        try:
            self.run_forever()
        except BaseException:
            if is_new_task and awaited.done() and not awaited.cancelled():
                # The error is raised here. Without this call, asyncio would log it as never retrieved.
                awaited.exception()
            raise
        finally:
            awaited.remove_done_callback(self._stop_after)
        if not awaited.done():
            raise RuntimeError("the loop was stopped before the future was done")
        return awaited.result()

    def _stop_after(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        # SystemExit and KeyboardInterrupt have left `run_forever` already.
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            self.stop()

    def stop(self) -> None:
        """Return from `run_forever` once nothing is ready."""
        self.event_queue.stopping = True

    def is_running(self) -> bool:
        """Return whether `run_forever` is under way."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Discard all scheduled callbacks. Raises RuntimeError for a running loop."""
        if self._running:
            raise RuntimeError("a running loop cannot be closed")
        self._closed = True
        self.event_queue.clear()

    async def shutdown_asyncgens(self) -> None:
        """Close all started asynchronous generators."""
        generators, self._generators = list(self._generators), WeakSet()
        for generator in generators:
            try:
                await generator.aclose()
            except Exception as error:  # noqa: BLE001 - as asyncio's own loops do
                message = f"exception when closing {generator!r}"
                self.call_exception_handler(
                    {"message": message, "exception": error, "asyncgen": generator}
                )

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    # Errors

    get_debug = bool
    """Returns False, since asyncio's debugging is about real time and threads; each future asks, so no Python code."""

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Set the handler ``handler(loop, context)`` of unawaited errors."""
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        """Return the handler of unawaited errors; None for `default_exception_handler`."""
        return self._exception_handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an unawaited error."""
        handler = self._exception_handler or VirtualLoop.default_exception_handler
        handler(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an unawaited error."""
        _LOG.error(
            context.get("message", "unhandled exception in the event loop"),
            exc_info=context.get("exception"),
        )
