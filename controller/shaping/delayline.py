"""The server's end of the delay line: starts its process (`engine.py`) and sends it what to do with each queue.

It is a process of its own so that no request ever makes a packet late. The server hands it sockets of the devices'
network namespaces over a local socket.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from controller.shaping.helper import Helper
from controller.shaping.plan import Access
from testbed.network.link import Link

_AT_ONCE = 64
"""Impairments in one request, each some 600 bytes."""


@dataclass(frozen=True)
class QueueImpairment:
    """What one queue does to its packets."""

    queue: int
    limit: int
    """Packets that it holds at most."""
    link: Link
    seed: str


class DelayLine(Helper):
    """The server's end. Its statistics also count, per device and queue, what passed and was dropped."""

    def __init__(self) -> None:
        super().__init__("controller.shaping.engine", "delay line")

    def open(self, device: str, netfilter: socket.socket, injector: socket.socket) -> None:
        """Hand over a device's netfilter socket and its packet socket on the loopback; the caller's are closed."""
        with netfilter, injector:
            self.ask({"do": "open", "device": device}, (netfilter.fileno(), injector.fileno()))

    def set(self, device: str, impairments: Sequence[QueueImpairment], downlink: Access | None) -> None:
        """Say what becomes of the packets of these queues from now on; raises HostError if the kernel refuses.

        ``downlink`` is what all queues of the device share.
        """
        shared = None if downlink is None else (downlink.rate, downlink.limit)
        for first in range(0, max(1, len(impairments)), _AT_ONCE):
            some = [asdict(each) for each in impairments[first : first + _AT_ONCE]]
            self.ask({"do": "set", "device": device, "impairments": some, "downlink": shared})
