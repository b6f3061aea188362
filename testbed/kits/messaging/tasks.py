"""Tasks beside a program's main one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Tasks:
    """A task group that ends with its program: the first task to fail fails the program, its end cancels the others.

    Used as ``async with Tasks() as tasks``; what is raised is the first failure itself, not a group of them.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run beside the program."""
        task = self._group.create_task(work)
        self._running[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in list(self._running):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
