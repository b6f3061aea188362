"""How much of this host is ours, for tests that measure time: they can only be held to it where they have the time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from statistics import median

from testbed_controller.shaping.hostload import HostMonitor

BUSY = 0.2
"""Share of the processors that others may use while time is measured."""
STOLEN = 0.03
"""Share of the processors' time that a hypervisor may keep for others meanwhile."""
SLOWER = 1.3
"""Times as long as at its best that the same work may take."""

_best = float("inf")


def load_by_others(seconds: float = 1.0) -> float:
    """Return the share of the processors that is busy now, with nothing of ours at work."""
    return float(run_monitored(lambda: time.sleep(seconds))[1]["host_load"])


def wait_until_quiet(seconds: float) -> bool:
    """Wait until others leave the host alone; say whether they did within this many seconds."""
    deadline = time.monotonic() + seconds
    while describe_disturbance({}) is not None:
        if time.monotonic() > deadline:
            return False
    return True


def describe_disturbance(seen: dict[str, float]) -> str | None:
    """Say what keeps this host from measuring time, or did while ``seen`` was (by a `HostMonitor`); None if nothing."""
    if seen.get("host_stolen", 0.0) > STOLEN:
        return "a hypervisor kept the processors for others"
    if load_by_others() > BUSY:
        return "others keep the host busy"
    if _slowdown() > SLOWER:
        return "the host computes slower than before"
    return None


def _slowdown() -> float:
    """Return how much longer a fixed piece of work takes now, the median of many, than when it took least."""
    global _best
    content = bytes(500_000)
    taken = []
    for _ in range(41):
        start = time.perf_counter()
        hashlib.sha256(content).digest()
        taken.append(time.perf_counter() - start)
    _best = min(_best, median(taken))
    return median(taken) / _best


def run_monitored(
    work: Callable[[], object],
) -> tuple[AssertionError | None, dict[str, float]]:
    """Do some work; return the assertion that it failed with, if any, and what became of the host meanwhile."""
    monitor = HostMonitor()
    monitor.start()
    failure = None
    try:
        work()
    except AssertionError as error:
        failure = error
    finally:
        seen = monitor.stop()
    return failure, seen
