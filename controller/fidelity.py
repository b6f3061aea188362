"""How much the host itself may have bent a run: its processors, sampled while the run goes on."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.25
SATURATED = 0.95
"""Share of all processors busy from which a sample counts as saturated: work was then waiting for work."""


def _ticks() -> tuple[float, float]:
    """Return (busy, total) clock ticks of all processors since boot, from /proc/stat."""
    fields = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = fields[3] + fields[4]
    total = sum(fields[:8])
    return total - idle, total


class HostMonitor:
    """Samples the load of the host between `start` and `stop`. On hosts without /proc it reports nothing."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="host-monitor", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        if Path("/proc/stat").exists():
            self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Return the mean load and the share of samples in which the host was saturated."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._samples:
            return {}
        return {
            "host_cores": os.cpu_count(),
            "host_load": sum(self._samples) / len(self._samples),
            "host_saturated": sum(sample >= SATURATED for sample in self._samples) / len(self._samples),
        }

    def _sample(self) -> None:
        busy, total = _ticks()
        while not self._stopped.wait(SAMPLE_SECONDS):
            now_busy, now_total = _ticks()
            if now_total > total:
                self._samples.append((now_busy - busy) / (now_total - total))
            busy, total = now_busy, now_total
