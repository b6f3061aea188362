"""Processor load of this machine, for the verdict about a run."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.25
"""Interval of samples, in seconds."""
SATURATED = 0.95
"""Share of busy processors above which a sample counts as saturated, that is, tasks were waiting."""


@dataclass(frozen=True)
class _Ticks:
    """Clock ticks of all processors since boot."""

    busy: float
    stolen: float
    """Ticks in which a task was ready, but the hypervisor ran another virtual machine."""
    total: float

    @staticmethod
    def read() -> _Ticks:
        """Read the present ticks from /proc/stat."""
        line, _, _ = Path("/proc/stat").read_text().partition("\n")
        fields = [float(field) for field in line.split()[1:]]
        # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
        idle = fields[3] + fields[4]
        total = sum(fields[:8])
        return _Ticks(total - idle, fields[7], total)


class HostMonitor:
    """A sampler of the host's load between `start` and `stop`; the summary is empty without /proc."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        """Share of busy processors in each interval."""
        self._first = _Ticks(0.0, 0.0, 0.0)
        self._last = self._first
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._take_samples, name="host-monitor", daemon=True
        )

    def start(self) -> None:
        """Start sampling."""
        if Path("/proc/stat").exists():
            self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Stop sampling and return the summary."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """Return the number of processors, and the shares of busy, saturated and stolen time so far.

        Empty before the first sample.
        """
        if not self._samples:
            return {}
        stolen = self._last.stolen - self._first.stolen
        total = self._last.total - self._first.total
        saturated = sum(sample >= SATURATED for sample in self._samples)
        return {
            "host_cores": os.cpu_count(),
            "host_load": sum(self._samples) / len(self._samples),
            "host_saturated": saturated / len(self._samples),
            "host_stolen": stolen / total if total > 0 else 0.0,
        }

    def _take_samples(self) -> None:
        self._first = _Ticks.read()
        self._last = self._first
        while not self._stopped.wait(SAMPLE_SECONDS):
            ticks = _Ticks.read()
            busy = ticks.busy - self._last.busy
            total = ticks.total - self._last.total
            if total > 0:
                self._samples.append(busy / total)
            self._last = ticks
