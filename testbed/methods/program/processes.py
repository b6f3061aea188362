"""The process tree of a program: complete termination, and detection of out-of-memory kills."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_LOG = logging.getLogger(__name__)
_PR_SET_CHILD_SUBREAPER = 36
"""Constant of linux/prctl.h."""
_END_SECONDS = 2.0
"""Seconds allowed for killed processes to vanish."""
_OOM_COUNTERS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
"""Files with the kernel's count of out-of-memory kills, by version of cgroups."""


class ProcessTree:
    """The descendants of this process, except those of processes that run already.

    A process may leave its group and session, but not its ancestors: orphans come to this process, which collects them.
    Meanwhile this process must start only the program, since other children would be reaped and killed as well.
    """

    def __init__(self) -> None:
        # In a container this process is number 1 and receives orphans anyway; in tests, the system's first would.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._earlier = set(_own_descendants(frozenset()))
        """Numbers of processes that ran before; they are neither reaped nor killed."""

    def collect_orphans(self, program_pid: int) -> None:
        """Reap exited orphans; the program itself is awaited elsewhere."""
        own = os.getpid()
        processes = _visible_processes()
        # The kernel reuses the numbers of ended processes.
        self._earlier.intersection_update(processes)
        awaited_elsewhere = {program_pid, *self._earlier}
        for pid, (state, parent) in processes.items():
            is_other_child = parent == own and pid not in awaited_elsewhere
            if state == "Z" and is_other_child:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def kill(self, program_pid: int) -> None:
        """Kill a program and all its descendants, including those started meanwhile.

        Takes milliseconds, and `_END_SECONDS` at most; logs processes that still run then.
        """
        deadline = time.monotonic() + _END_SECONDS
        # Again and again, since a process may fork between the listing and its kill.
        while True:
            left = self._running_descendants(program_pid)
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.collect_orphans(program_pid)
            if time.monotonic() > deadline:
                numbers = ", ".join(map(str, left))
                _LOG.warning("processes %s of the program survive SIGKILL", numbers)
                return
            time.sleep(0.002)

    def _running_descendants(self, program_pid: int) -> list[int]:
        running = []
        for pid, state in _own_descendants(self._earlier).items():
            # The program's own exit status is collected elsewhere, so it stays as a zombie.
            is_over = pid == program_pid and state == "Z"
            if not is_over:
                running.append(pid)
        return running


def _visible_processes() -> dict[int, tuple[str, int]]:
    """Return state and parent of every visible process by process number."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        # The file is gone if the process has ended meanwhile.
        with contextlib.suppress(OSError):
            text = (entry / "stat").read_text(encoding="ascii", errors="replace")
            # The name, in parentheses, may contain any character.
            state, parent = text.rpartition(")")[2].split()[:2]
            processes[int(entry.name)] = state, int(parent)
    return processes


def _own_descendants(excluded: Collection[int]) -> dict[int, str]:
    """Return the state of each descendant of this process by process number, without the ``excluded`` and theirs."""
    processes = _visible_processes()
    children: dict[int, list[int]] = {}
    for pid, (_, parent) in processes.items():
        children.setdefault(parent, []).append(pid)
    descendants: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid in excluded:
                continue
            descendants[pid] = processes[pid][0]
            waiting.append(pid)
    return descendants


def count_memory_kills() -> int:
    """Return the number of out-of-memory kills in this container; 0 if unknown."""
    for name in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in Path(name).read_text(encoding="ascii").splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill":
                    return int(count)
    return 0
