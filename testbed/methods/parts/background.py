"""Tasks beside a program's main one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Tasks that run beside a program: the first one to fail fails the program, its end cancels the others."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside the program."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    async def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Run the program to its end or to the first failure of any task, then cancel what is left."""
        main = asyncio.create_task(program)
        try:
            ends: set[asyncio.Future[Any]] = {main, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                self._failure.result()
            return main.result()
        finally:
            left = [task for task in (main, *self._tasks) if not task.done()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._failure.done():
            self._failure.set_exception(task.exception() or RuntimeError())
