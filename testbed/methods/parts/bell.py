"""Waiting for news, but not for ever."""

from __future__ import annotations

import asyncio

from testbed.device import Device


class Bell:
    """Wakes whoever waits; nobody is told of what happened before he waited."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._waiters: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Wake everybody."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, seconds: float) -> bool:
        """Wait for the bell, at most so long on the device's clock; say whether it rang."""
        rung: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(rung)
        timer = asyncio.ensure_future(self._device.sleep(max(0.0, seconds)))
        try:
            await asyncio.wait({rung, timer}, return_when=asyncio.FIRST_COMPLETED)
            return rung.done()
        finally:
            timer.cancel()
            rung.cancel()
