"""A process of its own beside the shaper's server, spoken to over a local socket: no request makes a packet late."""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from testbed.common.errors import HostError

LARGEST_REQUEST = 1 << 20
"""Bytes of one request or answer, at most."""
_SO_SNDBUFFORCE = 32
_PR_SET_TIMERSLACK = 29
_CAPABILITY_VERSION = 0x20080522
"""linux/capability.h"""
_CAP_NET_ADMIN = 12


def prioritise() -> str:
    """Ask the kernel to wake this process at once; return what was granted."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        except OSError:
            return "normal"
        return "nice -20"
    return "real-time"


def give_up_capabilities() -> None:
    """Keep nothing of root's but what verdicts on packets need: these processes read what devices send.

    Raises OSError where the kernel refuses.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    kept = 1 << _CAP_NET_ADMIN
    # Effective, permitted and inheritable, of the lower 32 capabilities and then of the upper.
    wanted = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, wanted) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def run(loop: Callable[[socket.socket], Any], descriptor: int) -> None:
    """Run a loop on a control socket that was inherited."""
    control = socket.socket(fileno=descriptor)
    control.send(json.dumps({"priority": prioritise()}).encode())
    give_up_capabilities()
    # Nothing in these loops makes cycles, and a collection in the wrong moment would make packets late.
    gc.disable()
    loop(control).run()


def serve_request(
    control: socket.socket, carry_out: Callable[[dict[str, Any], list[int]], dict[str, Any] | None], descriptors: int
) -> bool:
    """Answer one request of the server by what carries it out, given it and at most this many file descriptors.

    Returns False when the server is gone. An OSError is the answer's ``error``.
    """
    data, received, _, _ = socket.recv_fds(control, LARGEST_REQUEST, descriptors)
    if not data:
        return False
    try:
        answer = carry_out(json.loads(data), received) or {}
    except OSError as error:
        answer = {"error": str(error)}
    control.send(json.dumps(answer).encode())
    return True


class Helper:
    """The server's end. Safe to use from several threads.

    The process runs the ``Loop`` of a module: it first sends a JSON object with its ``priority``, then answers
    each request, ends when the socket does, and reports what goes wrong under the key ``error``.
    """

    def __init__(self, module: str, what: str) -> None:
        self._what = what
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * LARGEST_REQUEST)
        self._control = ours
        self._control.settimeout(10)
        self._lock = threading.Lock()
        code = f"from {module} import Loop; from controller.shaping.helper import run; run(Loop, {theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.priority = str(self._answer()["priority"])
        """How the kernel schedules the process."""

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(LARGEST_REQUEST)
        except OSError as error:
            raise HostError(f"the {self._what} does not answer: {error}") from error
        if not data:
            raise HostError(f"the {self._what} has ended with status {self._process.wait()}; see the shaper's log")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Make a request, perhaps with file descriptors; raises HostError for one that cannot be met."""
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    self._control.sendmsg([data], [rights])
                else:
                    self._control.send(data)
            except OSError as error:
                raise HostError(f"the {self._what} has ended: {error}; see the shaper's log") from error
            return self._answer()

    def forget(self, device: str) -> None:
        """Forget a device; the kernel drops what is still queued for it."""
        self.ask({"do": "close", "device": device})

    def statistics(self) -> dict[str, Any]:
        """Return lateness percentiles and processor time, and what else the process counts."""
        return self.ask({"do": "statistics"})

    def reset(self) -> None:
        """Reset the lateness figures."""
        self.ask({"do": "reset"})

    def stop(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(5)
