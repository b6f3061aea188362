"""Load of this host, for tests that measure time: their results count only while others leave the processors free."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from statistics import median

from testbed_controller.shaping.hostload import HostMonitor

MAX_LOAD = 0.2
"""Share of the processors that others may use while time is measured."""
MAX_STOLEN = 0.03
"""Share of processor time that the hypervisor may withhold meanwhile."""
MAX_SLOWDOWN = 1.3
"""Accepted duration of a fixed computation, as a multiple of its shortest duration so far."""

_shortest = float("inf")


def load_by_others(seconds: float = 1.0) -> float:
    """Return the share of busy processors while the test sleeps."""
    _, host = run_monitored(lambda: time.sleep(seconds))
    return float(host["host_load"])


def wait_until_quiet(seconds: float) -> bool:
    """Wait until the host is undisturbed; return False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while describe_disturbance({}) is not None:
        if time.monotonic() > deadline:
            return False
    return True


def describe_disturbance(host: dict[str, float]) -> str | None:
    """Return why measured times cannot be trusted, or None.

    ``host`` is the summary of a `HostMonitor` during the measurement; the present load counts as well.
    """
    if host.get("host_stolen", 0.0) > MAX_STOLEN:
        return "a hypervisor kept the processors for others"
    if load_by_others() > MAX_LOAD:
        return "others keep the host busy"
    if _slowdown() > MAX_SLOWDOWN:
        return "the host computes slower than before"
    return None


def _slowdown() -> float:
    """Return the median duration of a fixed computation over the shortest median so far."""
    global _shortest
    content = bytes(500_000)
    durations = []
    # One repetition takes about a millisecond, and a single preemption would distort it: take the median of many.
    for _ in range(41):
        start = time.perf_counter()
        hashlib.sha256(content).digest()
        durations.append(time.perf_counter() - start)
    typical = median(durations)
    _shortest = min(_shortest, typical)
    return typical / _shortest


def run_monitored(
    work: Callable[[], object],
) -> tuple[AssertionError | None, dict[str, float]]:
    """Call ``work``; return the failed assertion, if any, and the summary of the host's load."""
    monitor = HostMonitor()
    monitor.start()
    failure = None
    try:
        work()
    except AssertionError as error:
        failure = error
    finally:
        host = monitor.stop()
    return failure, host
