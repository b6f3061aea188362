"""The order of link measurements, and measurements of delay and loss between loopback sockets."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from itertools import chain, pairwise, permutations

from testbed.network.link import Link
from testbed_controller.shaping import probes
from testbed_controller.shaping.plan import FRAME
from testbed_controller.shaping.probes import _assign_turns, split_into_rounds
from testbed_controller.shaping.trains import ProbedDevice, ProbeSockets


@dataclass
class SlowSender:
    """Socket of a busy host: each packet takes two milliseconds."""

    socket: socket.socket

    def sendto(self, content: bytes, address: tuple[str, int]) -> None:
        time.sleep(0.002)
        self.socket.sendto(content, address)


def open_sockets(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return a sender and a receiver of datagrams."""
    sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.bind(("127.0.0.1", 0))
    receiver.setblocking(False)
    return sender, receiver


def test_slow_host_sends_packets_later_and_loses_none() -> None:
    pairs = list(permutations("abcde", 2))
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in "abcde":
            sender, receiver = open_sockets(stack)
            ends[name] = ProbeSockets(SlowSender(sender), receiver, FRAME)
        tallies = [
            probes._Tally(pair, Link(), Link(), packet_count=15) for pair in pairs
        ]
        probes._measure_delays(tallies, ends, None, None)
    assert [tally.sent_count for tally in tallies] == [15] * 20
    assert [len(tally.delays) for tally in tallies] == [15] * 20


def test_packets_of_slow_link_keep_distance_after_stall() -> None:
    send_times: list[float] = []

    class StallingSender(SlowSender):
        def sendto(self, content: bytes, address: tuple[str, int]) -> None:
            send_times.append(time.monotonic())
            if len(send_times) == 3:
                time.sleep(0.3)
            self.socket.sendto(content, address)

    with contextlib.ExitStack() as stack:
        sender, receiver = open_sockets(stack)
        end = ProbeSockets(StallingSender(sender), receiver, FRAME)
        link = Link(rate=16e3)
        tally = probes._Tally(("a", "b"), link, link, packet_count=6)
        probes._measure_delays([tally], {"a": end, "b": end}, None, None)
    assert len(tally.delays) == 6
    # Packets in quick succession would wait for each other in the link's queue, and seem delayed.
    distances = [later - earlier for earlier, later in pairwise(send_times[1:])]
    assert min(distances) >= tally.min_gap * 0.95


def test_rounds_share_no_device() -> None:
    pairs = list(permutations("abcd", 2))
    rounds = split_into_rounds(pairs)
    measured_pairs = []
    for pairs_of_round in rounds:
        measured_pairs += pairs_of_round
        devices = [*chain.from_iterable(pairs_of_round)]
        assert len(devices) == len(set(devices))
    assert sorted(measured_pairs) == sorted(pairs)


def test_links_that_share_an_access_are_measured_in_turn() -> None:
    devices = {
        "a": ProbedDevice(None, "a"),
        "b": ProbedDevice(None, "b", uplink=1e6, downlink=1e6),
        "c": ProbedDevice(None, "c", uplink=1e6, downlink=1e6),
        "d": ProbedDevice(None, "d"),
    }
    pairs = list(permutations(devices, 2))
    turns, turn_counts = _assign_turns(pairs, devices, {})
    # Neither a nor d has an access limit, so that their links share no rate.
    assert ("a", "d") not in turns
    for name in "bc":
        outgoing = [turns[pair] for pair in pairs if pair[0] == name]
        incoming = [turns[pair] for pair in pairs if pair[1] == name]
        assert len(set(outgoing)) == len(outgoing) == 3
        assert len(set(incoming)) == len(incoming) == 3
    assert all(turns[pair] < turn_counts[pair] for pair in turns)
