"""An asyncio event loop on a virtual clock: waiting costs nothing, and equal instants keep their order.

async-solipsism offers the like, but counts time in whole microseconds (a 1 kB message lasts 8.7 µs at 1 gbit),
leaves the order of equal instants to a heap that is not stable, and cannot hold back the callbacks of one paused
device. Only the scheduling is written here; tasks, futures, locks, queues and time-outs are asyncio's own. Of asyncio
it uses what is documented for those who write event loops, so it works with any version.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Hashable
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

OWNER: ContextVar[Hashable] = ContextVar("owner", default=None)
"""Whose code is running; inherited by the tasks and timers it starts."""

_LOG = logging.getLogger("asyncio")

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Stillness(Exception):  # noqa: N818 - the end of a simulation, wanted or not
    """Nothing is scheduled any more, so nothing can ever happen again."""


class TimeLimit(Exception):  # noqa: N818
    """The next event lies beyond the time limit."""


class _Callback(list[Any]):
    """What `asyncio.Handle` is to other loops: callback, arguments and context, None once it is cancelled.

    A list, because one is made for each step of each task, and a list is made without any Python code.
    """

    __slots__ = ()

    def cancel(self) -> None:
        """Let nothing be called."""
        self[:] = (None, (), None)

    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self[0] is None


class _Timer(_Callback):
    """What `asyncio.TimerHandle` is to other loops; cancelled, it is skipped when its time comes."""

    __slots__ = ("_when",)
    _when: float

    def when(self) -> float:
        """Return the instant at which it goes off."""
        return self._when


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs whatever is ready, then jumps to the next instant that anything is due.

    There is one thread and no input or output: methods of `asyncio.AbstractEventLoop` that are about those raise
    NotImplementedError.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.now = 0.0
        """Virtual seconds; only the loop itself sets it."""
        self._ready: deque[_Callback] = deque()
        self._due: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._ties = count()
        self._frozen: dict[Hashable, list[_Callback]] = {}
        self._running = self._stopping = self._closed = False
        self._task_factory: Callable[..., Any] | None = None
        self._exception_handler: ExceptionHandler | None = None
        self._generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()
        """Asynchronous ones that have begun and are to be closed at the end."""

    # Time

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def at(self, when: float, action: Callable[[Any], object], argument: Any) -> None:
        """Call ``action(argument)`` at an instant; cheaper than `call_at`, and cannot be cancelled."""
        heapq.heappush(self._due, (when, next(self._ties), action, argument))

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Timer:
        """Schedule a callback as asyncio does: ``asyncio.sleep`` and time-outs end up here."""
        timer = _Timer((callback, args, copy_context() if context is None else context))
        timer._when = when
        self.at(max(when, self.now), self._ready.append, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Timer:
        """Schedule a callback some seconds from now."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Run a callback next, after those that are ready."""
        ready = _Callback((callback, args, copy_context() if context is None else context))
        self._ready.append(ready)
        return ready

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # all is done in one thread

    def freeze(self, owner: Hashable) -> None:
        """Hold back every callback of this owner's code."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: Hashable) -> None:
        """Run what was held back, in its order, and hold back nothing more."""
        self._ready.extend(self._frozen.pop(owner, ()))

    # Tasks and futures

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        """Schedule a coroutine; ``options`` are those of `asyncio.Task`."""
        if self._task_factory is None:
            return asyncio.Task(coro, loop=self, **options)
        task: asyncio.Task[T] = self._task_factory(self, coro, **options)
        return task

    def set_task_factory(self, factory: Callable[..., Any] | None) -> None:
        """Let ``factory(loop, coroutine, **options)`` make the tasks."""
        self._task_factory = factory

    def get_task_factory(self) -> Callable[..., Any] | None:
        """Return what makes the tasks; None where they are asyncio's own."""
        return self._task_factory

    # Running

    def run_forever(self) -> None:
        """Run until `stop` is called; raise Stillness or TimeLimit where nothing is left to run."""
        if self._closed:
            raise RuntimeError("the loop is closed")
        if asyncio._get_running_loop() is not None:
            raise RuntimeError("another loop is running in this thread")
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            self._run()
        finally:
            self._running = self._stopping = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run(self) -> None:
        ready, due, frozen, pop = self._ready, self._due, self._frozen, heapq.heappop
        while True:
            while ready:
                handle = ready.popleft()
                callback, args, context = handle
                if callback is None:
                    continue
                if frozen:
                    owner = context.get(OWNER)
                    if owner in frozen:
                        frozen[owner].append(handle)
                        continue
                try:
                    context.run(callback, *args)
                except BaseException as error:  # noqa: BLE001 - the loop goes on, as asyncio's own loops do
                    self._failed(handle, error)
            if self._stopping:
                return
            if not due:
                raise Stillness
            if due[0][0] > self.limit:
                raise TimeLimit
            self.now, _, action, argument = pop(due)
            action(argument)

    def _failed(self, handle: _Callback, error: BaseException) -> None:
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        message = f"exception in callback {handle[0]!r}"
        self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until a future is done, and return its result; raises RuntimeError where the loop is stopped before."""
        made = not asyncio.isfuture(future)
        awaited: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        awaited.add_done_callback(self._stop_after)
        try:
            self.run_forever()
        except BaseException:
            if made and awaited.done() and not awaited.cancelled():
                awaited.exception()  # which is raised here already
            raise
        finally:
            awaited.remove_done_callback(self._stop_after)
        if not awaited.done():
            raise RuntimeError("the loop was stopped before the future was done")
        return awaited.result()

    def _stop_after(self, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or not isinstance(done.exception(), SystemExit | KeyboardInterrupt):
            self.stop()  # which those have done already, on their way out of `run_forever`

    def stop(self) -> None:
        """Return from `run_forever` once nothing is ready."""
        self._stopping = True

    def is_running(self) -> bool:
        """Return whether `run_forever` is under way."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Forget what is scheduled; the loop cannot run again. Raises RuntimeError while it runs."""
        if self._running:
            raise RuntimeError("a running loop cannot be closed")
        self._closed = True
        self._ready.clear()
        self._due.clear()

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that have begun and not ended."""
        generators, self._generators = list(self._generators), WeakSet()
        for generator in generators:
            try:
                await generator.aclose()
            except Exception as error:  # noqa: BLE001 - as asyncio's own loops do
                message = f"exception when closing {generator!r}"
                self.call_exception_handler({"message": message, "exception": error, "asyncgen": generator})

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    # Errors

    get_debug = bool
    """Returns False, since asyncio's debugging is about real time and threads; each future asks, so no Python code."""

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Let ``handler(loop, context)`` have the errors that nobody awaits."""
        self._exception_handler = handler

    def get_exception_handler(self) -> ExceptionHandler | None:
        """Return what has the errors that nobody awaits; None where `default_exception_handler` does."""
        return self._exception_handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Hand on an error that nobody awaits."""
        handler = self._exception_handler or VirtualLoop.default_exception_handler
        handler(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an error that nobody awaits."""
        _LOG.error(context.get("message", "unhandled exception in the event loop"), exc_info=context.get("exception"))
