"""What a device has of the values of one request, piece by piece as they are made or arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from testbed.methods.distributed.ledger import Ledger
from testbed.methods.distributed.partition.dataflow import Origin
from testbed.methods.distributed.partition.ranges import Range, common

if TYPE_CHECKING:
    import torch

Block = tuple[Range, "torch.Tensor"]
"""Elements of a layer's input, and their values as (samples, elements)."""


class Store:
    """Pieces of values, and sums that others have sent, until nobody needs them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pieces: dict[int, list[tuple[Range, torch.Tensor]]] = {}
        self._sums: dict[tuple[int, Range], dict[int, torch.Tensor]] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, value: int, first: int, tensor: torch.Tensor) -> None:
        """Take in elements of a value from ``first`` on."""
        part = Range(first, first + tensor.shape[1])
        self._pieces.setdefault(value, []).append((part, self._ledger.hold(tensor)))
        self._wake()

    def put_sums(self, layer: int, made: Range, device: int, tensor: torch.Tensor) -> None:
        """Take in a device's sums for some output channels of a layer."""
        self._sums.setdefault((layer, made), {})[device] = self._ledger.hold(tensor)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until something more is put in."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def blocks(self, origins: Iterable[Origin]) -> list[Block]:
        """Return what is here of a layer's input."""
        found: list[Block] = []
        for origin in origins:
            for part, tensor in self._pieces.get(origin.value, ()):
                here = common(part, origin.part)
                if here.size:
                    at = origin.at - origin.part.first
                    taken = tensor[:, here.first - part.first : here.last - part.first]
                    found.append((Range(here.first + at, here.last + at), taken))
        return sorted(found, key=lambda block: block[0])

    async def all_of(self, origins: tuple[Origin, ...]) -> list[Block]:
        """Wait until a layer's input is here; return it in its order."""
        wanted = sum(origin.part.size for origin in origins)
        found = self.blocks(origins)
        while sum(part.size for part, _ in found) < wanted:
            await self.news()
            found = self.blocks(origins)
        return found

    async def sums(self, layer: int, made: Range, count: int) -> list[torch.Tensor]:
        """Wait for the sums of ``count`` devices; return them in the order of the devices, counted as held no more."""
        while len(self._sums.get((layer, made), {})) < count:
            await self.news()
        found = self._sums.pop((layer, made))
        for tensor in found.values():
            self._ledger.drop(tensor)
        return [found[device] for device in sorted(found)]

    def forget(self, value: int) -> None:
        """Drop a value."""
        for _, tensor in self._pieces.pop(value, ()):
            self._ledger.drop(tensor)

    def clear(self) -> None:
        """Drop everything."""
        for value in list(self._pieces):
            self.forget(value)
        for sums in self._sums.values():
            for tensor in sums.values():
                self._ledger.drop(tensor)
        self._sums.clear()
