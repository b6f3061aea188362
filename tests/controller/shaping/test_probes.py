"""Measurements of delay and loss, between sockets on the loopback."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass

from controller.shaping import probes
from controller.shaping.plan import FRAME
from controller.shaping.trains import Ends
from testbed.network.link import Link


@dataclass
class SlowSender:
    """A socket on a host that takes two milliseconds for each packet."""

    socket: socket.socket

    def sendto(self, content: bytes, address: tuple[str, int]) -> None:
        time.sleep(0.002)
        self.socket.sendto(content, address)


def test_a_host_that_falls_behind_sends_later_and_loses_nothing() -> None:
    pairs = [(a, b) for a in "abcde" for b in "abcde" if a != b]
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in "abcde":
            sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
            receiver.bind(("127.0.0.1", 0))
            receiver.setblocking(False)
            stack.enter_context(sender)
            stack.enter_context(receiver)
            ends[name] = Ends(SlowSender(sender), receiver, FRAME)
        tallies = [probes._Tally(pair, Link(), Link(), packets=15) for pair in pairs]
        probes._measure_delays(tallies, ends, None, None)
    assert [tally.sent for tally in tallies] == [15] * 20
    assert [len(tally.delays) for tally in tallies] == [15] * 20
