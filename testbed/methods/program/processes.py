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
    """The descendants of this process that start after the creation of this object, such as a program and its children.

    A process may leave its group and session, but not its ancestors: the kernel gives orphans to this process, which
    reaps them (reads their exit status, so that they vanish). Meanwhile this process must start only the program, since
    other children would be reaped and killed as well.
    """

    def __init__(self) -> None:
        # In a container this process is number 1 and receives orphans anyway; elsewhere, the system's first would.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._earlier = set(_own_descendants(frozenset()))
        """Numbers of descendants that ran before; this object neither reaps nor kills them."""

    def collect_orphans(self, program_pid: int) -> None:
        """Reap exited orphans, but not the program, whose exit status asyncio reads."""
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
        """Kill a program and all descendants, including processes started meanwhile.

        Takes milliseconds, and `_END_SECONDS` at most; logs processes that still run then.
        """
        deadline = time.monotonic() + _END_SECONDS
        # In a loop, since a process may fork between the listing and its kill.
        while True:
            remaining = self._running_descendants(program_pid)
            if not remaining:
                return
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.collect_orphans(program_pid)
            if time.monotonic() > deadline:
                numbers = ", ".join(map(str, remaining))
                _LOG.warning("processes %s of the program survive SIGKILL", numbers)
                return
            time.sleep(0.002)

    def _running_descendants(self, program_pid: int) -> list[int]:
        running = []
        for pid, state in _own_descendants(self._earlier).items():
            # The program's own exit status is collected elsewhere, so it stays as a zombie.
            is_ended_program = pid == program_pid and state == "Z"
            if not is_ended_program:
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
    """Return the state of each descendant by process number, without ``excluded`` processes and their descendants."""
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
    """Return the container's number of out-of-memory kills; 0 if unknown."""
    for name in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in Path(name).read_text(encoding="ascii").splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill":
                    return int(count)
    return 0
