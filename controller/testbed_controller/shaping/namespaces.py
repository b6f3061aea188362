"""Execution of functions and programs in another process's network namespace."""

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
"""Constant of linux/sched.h: a network namespace."""

_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace, kept open by a file descriptor until `close`.

    Example::

        namespace = Namespace.of_process(pid)
        namespace.run(lambda: command(["ip", "link", "set", "lo", "up"]))
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.identity = os.fstat(descriptor).st_ino
        """Inode number, equal for all descriptors of one namespace."""

    @classmethod
    def of_process(cls, pid: int) -> Namespace:
        """Open the namespace of a process; raises HostError if the process does not exist."""
        try:
            return cls(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise HostError(
                f"cannot open the network namespace of process {pid} ({error.strerror}): the process has ended, "
                "or the shaper lacks 'pid: host' or CAP_SYS_PTRACE"
            ) from error

    @classmethod
    def scratch(cls) -> Namespace:
        """Create an empty namespace, which ends when it has neither processes nor open descriptors."""

        def create() -> int:
            if _libc.unshare(_CLONE_NEWNET) != 0:
                raise HostError(
                    f"cannot create a network namespace ({os.strerror(ctypes.get_errno())}): run as root"
                )
            # /proc/self would be the namespace of the main thread.
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        return cls(_in_thread(create))

    def run(self, work: Callable[[], T]) -> T:
        """Call a function in a new thread inside the namespace; return the result.

        Processes and sockets that the function creates belong to the namespace. A namespace is a property of a thread;
        the thread of the caller, which may be serving a request, stays in its own.
        """

        def enter() -> T:
            if _libc.setns(self.descriptor, _CLONE_NEWNET) != 0:
                raise HostError(
                    f"cannot enter a device's network namespace ({os.strerror(ctypes.get_errno())}): "
                    "the shaper needs CAP_SYS_ADMIN"
                )
            return work()

        return _in_thread(enter)

    def duplicate(self) -> Namespace:
        """Return a second handle of the namespace, to be closed separately."""
        return Namespace(os.dup(self.descriptor))

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self.descriptor)


def _in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a new thread: after entering a namespace, a thread must not be reused."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def command(
    arguments: Sequence[str],
    text: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program with ``text`` as input in the calling thread's namespace; return the output.

    Raises HostError if the program is missing, fails, or runs longer than 30 s; the message quotes its error output.
    """
    try:
        process = subprocess.run(
            arguments,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
            env=environment,
        )
    except FileNotFoundError as error:
        raise HostError(
            f"'{arguments[0]}' is not installed in the shaper: install iproute2 and iptables"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostError(f"'{' '.join(arguments)}' did not end within 30 s") from error
    if process.returncode != 0:
        complaint = " ".join(process.stderr.split())
        raise HostError(
            f"'{' '.join(arguments)}' failed: {complaint}{_failed_line(complaint, text)}"
        )
    return process.stdout


def _failed_line(complaint: str, text: str) -> str:
    """Quote the failed line of a batch, whose number is in iproute2's error (``Command failed -:3``); else empty."""
    _, separator, number = complaint.rpartition("Command failed -:")
    if not separator or not number.isdigit():
        return ""
    lines = text.splitlines()
    index = int(number) - 1
    return f" ({lines[index]})" if 0 <= index < len(lines) else ""


def read_proc(path: str) -> str:
    """Read a file below ``/proc/net`` in the calling thread's namespace."""
    return Path("/proc/thread-self/net", path).read_text()
