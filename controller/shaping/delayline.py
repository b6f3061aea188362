"""The server's end of the delay line: starts its process (`engine.py`) and tells it what to do with each queue.

It is a process of its own so that no request ever makes a packet late. The server hands it sockets of the devices'
network namespaces over a local socket.
"""

from __future__ import annotations

import array
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.shaping.engine import LARGEST_REQUEST
from testbed.errors import HostError
from testbed.network.link import Link

_SO_SNDBUFFORCE = 32
_AT_ONCE = 64
"""Impairments in one request, each some 600 bytes."""


@dataclass(frozen=True)
class Impairment:
    """What one queue does to its packets."""

    queue: int
    limit: int
    """Packets that it holds at most."""
    link: Link
    seed: str


class DelayLine:
    """The server's end. Safe to use from several threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * LARGEST_REQUEST)
        self._control = ours
        self._control.settimeout(10)
        self._lock = threading.Lock()
        code = f"from controller.shaping.engine import main; main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.priority = str(self._answer()["priority"])

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(LARGEST_REQUEST)
        except OSError as error:
            raise HostError(f"the delay line does not answer: {error}") from error
        if not data:
            raise HostError(f"the delay line has ended with status {self._process.wait()}; see the shaper's log")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    self._control.sendmsg([data], [rights])
                else:
                    self._control.send(data)
            except OSError as error:
                raise HostError(f"the delay line has ended: {error}; see the shaper's log") from error
            return self._answer()

    def open(self, device: str, netfilter: socket.socket, injector: socket.socket) -> None:
        """Hand over a device's netfilter socket and its packet socket on the loopback; the caller's are closed."""
        with netfilter, injector:
            self._ask({"do": "open", "device": device}, (netfilter.fileno(), injector.fileno()))

    def close(self, device: str) -> None:
        """Forget a device; the kernel drops what is still queued for it."""
        self._ask({"do": "close", "device": device})

    def set(self, device: str, impairments: Sequence[Impairment], downlink: tuple[float, int] | None) -> None:
        """Say what becomes of the packets of these queues from now on; raises HostError if the kernel refuses.

        ``downlink`` is the rate (bit/s) that all queues of the device share and the packets of each that may wait.
        """
        for first in range(0, max(1, len(impairments)), _AT_ONCE):
            some = [asdict(each) for each in impairments[first : first + _AT_ONCE]]
            self._ask({"do": "set", "device": device, "impairments": some, "downlink": downlink})

    def statistics(self) -> dict[str, Any]:
        """Return lateness percentiles, processor time, and per device and queue what passed and was dropped."""
        return self._ask({"do": "statistics"})

    def reset(self) -> None:
        """Start the lateness figures anew."""
        self._ask({"do": "reset"})

    def alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(5)
