"""Things that arrive in any order, waited for by name."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any


class Mailbox:
    """Holds each thing until somebody takes it, and each taker until the thing is there."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, asyncio.Future[Any]] = {}

    def _slot(self, key: Hashable) -> asyncio.Future[Any]:
        if key not in self._slots:
            self._slots[key] = asyncio.get_running_loop().create_future()
        return self._slots[key]

    def put(self, key: Hashable, thing: object) -> None:
        """Leave a thing; a second one of the same name is a repetition and is dropped."""
        slot = self._slot(key)
        if not slot.done():
            slot.set_result(thing)

    async def take(self, key: Hashable) -> Any:
        """Return the thing of that name as soon as it is there, once."""
        thing = await self._slot(key)
        del self._slots[key]
        return thing
