"""Measurements of delay and loss, between sockets on the loopback."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from itertools import pairwise

from testbed.network.link import Link
from testbed_controller.shaping import probes
from testbed_controller.shaping.plan import FRAME
from testbed_controller.shaping.trains import Ends


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
            sender, receiver = (
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)
            )
            receiver.bind(("127.0.0.1", 0))
            receiver.setblocking(False)
            stack.enter_context(sender)
            stack.enter_context(receiver)
            ends[name] = Ends(SlowSender(sender), receiver, FRAME)
        tallies = [probes._Tally(pair, Link(), Link(), packets=15) for pair in pairs]
        probes._measure_delays(tallies, ends, None, None)
    assert [tally.sent for tally in tallies] == [15] * 20
    assert [len(tally.delays) for tally in tallies] == [15] * 20


def test_packets_of_a_slow_link_keep_their_distance_after_a_stall() -> None:
    sent: list[float] = []

    class Stalling(SlowSender):
        def sendto(self, content: bytes, address: tuple[str, int]) -> None:
            sent.append(time.monotonic())
            if len(sent) == 3:
                time.sleep(0.3)
            self.socket.sendto(content, address)

    with contextlib.ExitStack() as stack:
        sender, receiver = (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)
        )
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        stack.enter_context(sender)
        stack.enter_context(receiver)
        end = Ends(Stalling(sender), receiver, FRAME)
        link = Link(rate=16e3)
        tally = probes._Tally(("a", "b"), link, link, packets=6)
        probes._measure_delays([tally], {"a": end, "b": end}, None, None)
    assert len(tally.delays) == 6
    assert (
        min(later - earlier for earlier, later in pairwise(sent[1:]))
        >= tally.gap * 0.95
    )
