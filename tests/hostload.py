"""How busy others keep this host, for tests that measure time: they can only be held to it where they have the time."""

from __future__ import annotations

import time

from controller.running.fidelity import HostMonitor

BUSY = 0.2
"""Share of the processors that others may use while time is measured."""


def load_by_others(seconds: float = 1.0) -> float:
    """Return the share of the processors that is busy now, with nothing of ours at work."""
    monitor = HostMonitor()
    monitor.start()
    time.sleep(seconds)
    return float(monitor.stop()["host_load"])


def await_quiet(seconds: float) -> bool:
    """Wait until others leave the host alone; say whether they did within so many seconds."""
    deadline = time.monotonic() + seconds
    while load_by_others() > BUSY:
        if time.monotonic() > deadline:
            return False
    return True
