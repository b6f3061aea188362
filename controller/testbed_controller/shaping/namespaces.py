"""Work inside another process's network namespace, without leaving one's own for longer than a call."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from testbed.common.errors import HostError

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace, held open by a file descriptor until `close`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.identity = os.fstat(descriptor).st_ino
        """The same for two descriptors of one namespace."""

    @classmethod
    def of_process(cls, pid: int) -> Namespace:
        """Open the namespace that a process lives in; raises HostError when there is no such process."""
        try:
            return cls(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise HostError(
                f"the network namespace of process {pid} cannot be opened ({error.strerror}): the process is gone, "
                "or the shaper lacks 'pid: host' or CAP_SYS_PTRACE"
            ) from error

    @classmethod
    def scratch(cls) -> Namespace:
        """Make a new, empty namespace, which ends with its last descriptor."""

        def enter() -> int:
            if _libc.unshare(_CLONE_NEWNET) != 0:
                raise HostError(f"no network namespace can be made ({os.strerror(ctypes.get_errno())}): be root")
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        return cls(_in_thread(enter))

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a thread inside the namespace; processes and sockets that it makes belong to it."""

        def enter() -> T:
            if _libc.setns(self.descriptor, _CLONE_NEWNET) != 0:
                raise HostError(
                    f"a device's network namespace cannot be entered ({os.strerror(ctypes.get_errno())}): "
                    "the shaper needs CAP_SYS_ADMIN"
                )
            return work()

        return _in_thread(enter)

    def again(self) -> Namespace:
        """Return a second hold on the namespace, to be closed by itself."""
        return Namespace(os.dup(self.descriptor))

    def close(self) -> None:
        """Let go of the namespace."""
        os.close(self.descriptor)


def _in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread of its own, which ends with it: a thread that has entered a namespace is not reused."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def command(arguments: Sequence[str], text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Run a program with ``text`` as its input, in the namespace of the calling thread; return what it prints.

    Raises HostError with what the program complained about when its exit status is not zero.
    """
    try:
        done = subprocess.run(
            arguments, input=text, capture_output=True, text=True, check=False, timeout=30, env=environment
        )
    except FileNotFoundError as error:
        raise HostError(
            f"'{arguments[0]}' is not installed where the links are shaped: install iproute2 and iptables"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostError(f"'{' '.join(arguments)}' did not end within 30 s") from error
    if done.returncode != 0:
        complaint = " ".join(done.stderr.split())
        raise HostError(f"'{' '.join(arguments)}' failed: {complaint}{_failed_line(complaint, text)}")
    return done.stdout


def _failed_line(complaint: str, text: str) -> str:
    """Quote the line of a batch that iproute2 says (``Command failed -:3``) it failed at."""
    _, found, number = complaint.rpartition("Command failed -:")
    lines = text.splitlines()
    if not found or not number.isdigit() or not 0 < int(number) <= len(lines):
        return ""
    return f" ({lines[int(number) - 1]})"


def read_proc(path: str) -> str:
    """Read a file below ``/proc/net`` of the calling thread's namespace."""
    return Path("/proc/thread-self/net", path).read_text()
