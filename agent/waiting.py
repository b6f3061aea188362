"""What the host kept this device waiting for: time its threads could have run and no processor was free.

The kernel counts it for each thread (run delay, ``schedstat``). The threads that compute are left out: waiting there
shows in how late their work is (`agent.pacing.WorkTimes.late`). What the others wait delays messages.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

_TASKS = Path("/proc/self/task")


class WaitingTime:
    """Reads the counters; each call of `since_last` returns what came to them since the call before."""

    def __init__(self, without: Collection[int] = ()) -> None:
        """``without`` are the kernel's numbers of threads to leave out."""
        self._without = frozenset(map(str, without))
        self._known = self._read()

    def since_last(self) -> float:
        """Return seconds, summed over the threads that run now; 0 where the kernel does not count."""
        now = self._read()
        waited = sum(nanoseconds - self._known.get(thread, 0) for thread, nanoseconds in now.items())
        self._known = now
        return waited * 1e-9

    def _read(self) -> dict[str, int]:
        found = {}
        for task in _TASKS.iterdir():
            if task.name not in self._without:
                try:
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
                except (OSError, IndexError):  # the thread has ended, or the kernel does not count
                    continue
        return found
