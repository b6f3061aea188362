"""Layers that a device reads from its disk for every token, since its memory has no room for all of them."""

from __future__ import annotations

from testbed.device import Device
from testbed_generation.ring import read_seconds


class Disk:
    """Reads windows of layers, the next one while other devices compute.

    The time of a read is that of `testbed_generation.ring.read_seconds`.
    """

    def __init__(
        self,
        device: Device,
        rate: float,
        memory: float,
        layer_bytes: float,
        *,
        prefetch: bool = True,
    ) -> None:
        """``rate`` is in bytes a second; ``memory`` and ``layer_bytes`` are in bytes.

        Layers are read if all of them need more than ``memory``; without ``prefetch``, a window is read at its use.
        """
        self._prefetch = prefetch
        self._device = device
        self._rate = rate
        self._memory = memory
        self._layer_bytes = layer_bytes
        self._windows: dict[int, int] = {}
        """Number of layers of each window, by its first layer."""
        self._next: int | None = None
        """First layer of the window that is being read ahead; None without such a window."""
        self._ready = 0.0
        """Time at which the window read ahead is in memory."""

    def hold(self, first: int, layers: int) -> None:
        """Add a window, and drop all windows with a layer in common."""
        # After a loss, new windows replace those of the former division.
        for other, number in list(self._windows.items()):
            if other < first + layers and first < other + number:
                del self._windows[other]
        # The output matrix of a ring is a stage without layers, which stays in memory.
        if layers:
            self._windows[first] = layers

    def drop(self, first: int) -> None:
        """Drop the window with the first layer ``first``, if the device still has such a window."""
        self._windows.pop(first, None)
        if self._next == first:
            self._next = None

    async def fetch(self, first: int) -> None:
        """Wait until the window with the first layer ``first`` is in memory."""
        if first not in self._windows:
            return
        # Reads are charged as sleeps: the disk works beside the processor.
        wait = self._seconds(first)
        if self._next == first:
            wait = self._ready - self._device.now()
        self._next = None
        if wait > 0:
            await self._device.sleep(wait)

    def read_ahead(self, first: int) -> None:
        """Begin to read the following window, if memory has room for a whole window."""
        if not self._prefetch or first not in self._windows:
            return
        # A token passes the windows in the order of their layers, and the next token begins with the first one.
        order = sorted(self._windows)
        following = order[(order.index(first) + 1) % len(order)]
        if self._windows[following] * self._layer_bytes <= self._memory:
            self._next = following
            self._ready = self._device.now() + self._seconds(following)

    def _seconds(self, first: int) -> float:
        held = sum(self._windows.values())
        window = self._windows[first]
        return read_seconds(window, held, self._layer_bytes, self._memory, self._rate)
