"""Layers that a device reads from its disk for every token, since its memory has no room for all of them.

A device of a ring holds one window (consecutive layers) for each round; see `testbed_generation.ring`.
"""

from __future__ import annotations

from testbed.device import Device
from testbed_generation.ring import read_seconds


class Disk:
    """A disk reading windows of layers, if possible the next window while other devices compute.

    No bytes are read: a read only takes the time `testbed_generation.ring.read_seconds`.
    """

    def __init__(
        self,
        device: Device,
        disk_rate: float,
        memory: float,
        layer_bytes: float,
        *,
        prefetch: bool = True,
    ) -> None:
        """``disk_rate`` is in bytes per second; ``memory`` and ``layer_bytes`` are in bytes.

        Layers are read if all of them together need more than ``memory``. Without ``prefetch``, a window is read when
        it is used.
        """
        self._prefetch = prefetch
        self._device = device
        self._disk_rate = disk_rate
        self._memory = memory
        self._layer_bytes = layer_bytes
        self._windows: dict[int, int] = {}
        """Number of layers of each window, by its first layer."""
        self._next_window: int | None = None
        """First layer of the window that is being read ahead; None without such a window."""
        self._ready_time = 0.0
        """Time in seconds at which the window that is read ahead is in memory."""

    def add_window(self, start: int, layers: int) -> None:
        """Add a window of ``layers`` layers from layer ``start`` on, and drop all overlapping windows."""
        stop = start + layers
        # After a loss, new windows replace those of the former division.
        for other_start, other_layers in list(self._windows.items()):
            if other_start < stop and start < other_start + other_layers:
                del self._windows[other_start]
        # The last stage of a ring has no layers: the output matrix stays in memory.
        if layers:
            self._windows[start] = layers

    def drop_window(self, first_layer: int) -> None:
        """Drop the window beginning with a layer, if the window exists."""
        self._windows.pop(first_layer, None)
        if self._next_window == first_layer:
            self._next_window = None

    async def wait_for_window(self, first_layer: int) -> None:
        """Wait until the window beginning with a layer is in memory."""
        if first_layer not in self._windows:
            return
        # Reads are charged as sleeps, since the disk works beside the processor.
        wait = self._read_seconds(first_layer)
        if self._next_window == first_layer:
            wait = self._ready_time - self._device.now()
        self._next_window = None
        if wait > 0:
            await self._device.sleep(wait)

    def read_ahead(self, first_layer: int) -> None:
        """Begin to read the window after that of ``first_layer``, if memory has room for the whole window."""
        if not self._prefetch or first_layer not in self._windows:
            return
        # A token passes the windows in the order of their layers, and the next token begins with the first window.
        first_layers = sorted(self._windows)
        next_index = (first_layers.index(first_layer) + 1) % len(first_layers)
        next_window = first_layers[next_index]
        if self._windows[next_window] * self._layer_bytes <= self._memory:
            self._next_window = next_window
            self._ready_time = self._device.now() + self._read_seconds(next_window)

    def _read_seconds(self, first_layer: int) -> float:
        return read_seconds(
            self._windows[first_layer],
            held_layers=sum(self._windows.values()),
            layer_bytes=self._layer_bytes,
            memory=self._memory,
            disk_rate=self._disk_rate,
        )
