"""What the shaper is going to tell the kernel, word for word."""

from __future__ import annotations

import json
import struct

import pytest

from controller.shaping import nfqueue, receiver, sender, tolerance
from controller.shaping.delayline import Lateness
from controller.shaping.plan import Plan, burst, line_limit, plan, queue_limit
from controller.shaping.probes import rounds
from testbed.network.link import Link

PEERS = {"a": (1, "198.18.0.2"), "b": (2, "198.18.0.3"), "c": (3, "198.18.0.4")}


def plan_of_a(**outgoing: Link) -> Plan:
    links = {("a", peer): link for peer, link in outgoing.items()}
    links |= {("b", "a"): Link(delay=0.02, loss=0.01), ("c", "a"): Link()}
    return plan("a", "eth1", "198.18.255.255", PEERS, links)


def test_sender_tree_word_for_word() -> None:
    assert sender.build(plan_of_a(b=Link(rate=50e6, delay=0.005))) == [
        "qdisc replace dev eth1 root handle 1: htb default 1",
        "class add dev eth1 parent 1: classid 1:1 "
        "htb rate 32000000000bit ceil 32000000000bit burst 4000000 cburst 4000000 quantum 60000",
        "class add dev eth1 parent 1: classid 1:2 "
        "htb rate 50000000bit ceil 50000000bit burst 6250 cburst 6250 quantum 6250",
        "qdisc add dev eth1 parent 1:2 handle 2: pfifo limit 300",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::2 u32 match ip dst 198.18.255.255/32 flowid 1:2",
        "class add dev eth1 parent 1: classid 1:12 "
        "htb rate 50000000bit ceil 50000000bit burst 6250 cburst 6250 quantum 6250",
        "qdisc add dev eth1 parent 1:12 handle 12: pfifo limit 300",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32 match ip dst 198.18.0.3/32 flowid 1:12",
    ]


def test_a_broadcast_goes_at_the_rate_of_the_slowest_link() -> None:
    [broadcast, *_] = plan_of_a(b=Link(rate=50e6), c=Link(rate=1e6)).senders
    assert (broadcast.addresses, broadcast.rate) == (("198.18.255.255",), 1_000_000)


def test_a_change_touches_one_leaf() -> None:
    old = plan_of_a(b=Link(rate=50e6), c=Link(rate=50e6))
    new = plan_of_a(b=Link(rate=80e6), c=Link(rate=50e6))
    assert sender.change(old, new) == [
        "class change dev eth1 parent 1: classid 1:12 "
        "htb rate 80000000bit ceil 80000000bit burst 10000 cburst 10000 quantum 10000",
        "qdisc change dev eth1 parent 1:12 handle 12: pfifo limit 331",
    ]
    assert sender.change(old, old) == []


def test_a_peer_with_a_new_address_gets_a_new_filter_only() -> None:
    links = {("a", "b"): Link(rate=1e6)}
    old = plan("a", "eth1", None, PEERS, links)
    new = plan("a", "eth1", None, PEERS | {"b": (2, "198.18.0.9")}, links)
    assert sender.change(old, new) == [
        "filter del dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32 match ip dst 198.18.0.9/32 flowid 1:12",
    ]


def test_only_impaired_links_pass_through_a_queue() -> None:
    assert receiver.restore(plan_of_a()) == (
        "*filter\n:TESTBED - [0:0]\n-A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2\nCOMMIT\n"
    )
    down = plan("a", "eth1", None, PEERS, {("b", "a"): Link(up=False, delay=0.02), ("c", "a"): Link(rate=1e6)})
    assert receiver.chain_rules(down) == ["-A TESTBED -s 198.18.0.3/32 -j DROP"]


def test_a_pair_without_a_link_is_dropped() -> None:
    assert receiver.chain_rules(plan("a", "eth1", None, PEERS, {("b", "a"): Link()})) == [
        "-A TESTBED -s 198.18.0.4/32 -j DROP"
    ]


def test_netem_tree_word_for_word() -> None:
    ceiling = "htb rate 32000000000bit ceil 32000000000bit burst 4000000 cburst 4000000 quantum 60000"
    assert receiver.netem_build(plan_of_a()) == [
        "qdisc add dev eth1 ingress",
        "qdisc replace dev testbed-ifb root handle 1: htb default 1",
        f"class add dev testbed-ifb parent 1: classid 1:1 {ceiling}",
        f"class replace dev testbed-ifb parent 1: classid 1:12 {ceiling}",
        "qdisc replace dev testbed-ifb parent 1:12 handle 12: netem limit 200000 delay 20000us loss random 1.000000%",
        "filter add dev testbed-ifb parent 1: protocol ip prio 1 handle 800::12 "
        "u32 match ip src 198.18.0.3/32 flowid 1:12",
        "filter add dev eth1 parent ffff: protocol ip prio 1 handle 800::12 "
        "u32 match ip src 198.18.0.3/32 action mirred egress redirect dev testbed-ifb",
    ]


def test_netem_changes_one_leaf_and_drops_by_losing_all() -> None:
    def towards_a(link: Link) -> Plan:
        return plan("a", "eth1", None, PEERS, {("b", "a"): link, ("c", "a"): Link(delay=0.001)})

    leaf = "qdisc replace dev testbed-ifb parent 1:12 handle 12:"
    slow, slower, plain = (towards_a(Link(delay=delay)) for delay in (0.02, 0.03, 0.0))
    assert receiver.netem_change(slow, slower) == [f"{leaf} netem limit 200000 delay 30000us"]
    assert receiver.netem_change(slow, towards_a(Link(up=False))) == [f"{leaf} netem loss 100%"]
    assert receiver.netem_change(slow, plain) == [
        "filter del dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32",
        "filter del dev testbed-ifb parent 1: protocol ip prio 1 handle 800::12 u32",
    ]
    assert receiver.netem_change(plain, slow)[1] == f"{leaf} netem limit 200000 delay 20000us"


def test_reading_back_names_every_difference() -> None:
    wanted = plan_of_a(b=Link(rate=50e6))
    classes = (
        "class htb 1:2 root leaf 2: prio 0 rate 50Mbit ceil 50Mbit burst 6250b cburst 6250b \n"
        "class htb 1:12 root leaf 12: prio 0 rate 49Mbit ceil 49Mbit burst 6250b cburst 6250b \n"
    )
    qdiscs = [{"kind": "pfifo", "handle": f"{number}:", "options": {"limit": 300}} for number in (2, 12)]
    filters = json.loads(
        '[{"options":{"fh":"800:"}},'
        '{"options":{"flowid":"1:2","match":{"value":"c612ffff"}}},'
        '{"options":{"flowid":"1:2","match":{"value":"c6120003"}}}]'
    )
    assert sender.differences(wanted, classes, qdiscs, filters) == [
        "class 1:12 has a rate of 49000000 bit/s instead of 50000000",
        "packets to 198.18.0.3 go to class 1:2 instead of 1:12",
    ]
    assert receiver.chain_differences(wanted, "-A INPUT -i eth1 -j TESTBED\n-A TESTBED -s 1.2.3.4/32 -j DROP") == [
        "rule is missing: -A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2",
        "rule is too many: -A TESTBED -s 1.2.3.4/32 -j DROP",
    ]


def test_sizes() -> None:
    assert burst(250e3) == 1500  # one frame at once, never two
    assert burst(1e9) == 125_000
    assert queue_limit(Link(rate=1e9, delay=0.1)) == 20_000
    assert queue_limit(Link(rate=100e6, delay=0.02)) == 744  # 90 ms of full frames
    assert line_limit(Link(rate=10e6, delay=0.1)) == 2500  # 100 ms of the smallest frames, and a fifth


def test_netfilter_messages_byte_for_byte() -> None:
    verdict = nfqueue.verdict_prefix(7, nfqueue.ACCEPT) + struct.pack(">I", 0x01020304)
    assert verdict == bytes.fromhex("20000000 0103 0100 00000000 00000000 00 00 0007 0c00 0200 00000001 01020304")
    first, *_ = nfqueue.bind(7, 1000, 5)
    assert first == bytes.fromhex("1c000000 0203 0500 05000000 00000000 00 00 0007 0800 0100 01 00 0002")


def test_arrival_is_found_wherever_it_stands_in_the_message() -> None:
    header = bytes(16 + 4) + struct.pack("=HH", 11, 1) + bytes(8)
    stamp = struct.pack("=HHQQ", 20, 4, 0, 0)[:4] + struct.pack(">QQ", 1_700_000_000, 250_000)
    other = struct.pack("=HHI", 8, 5, 3)
    stamps = nfqueue.Stamps()
    for attributes in (other + stamp, stamp, other + other + stamp + other):
        data = bytearray(header + attributes)
        assert stamps.read(data, len(data)) == pytest.approx(1_700_000_000.25)
    assert stamps.read(bytearray(header + other), len(header + other)) is None


def test_lateness_percentiles() -> None:
    lateness = Lateness()
    lateness.add(20e-6, 990)
    lateness.add(0.5, 10)
    summary = lateness.summary()
    assert summary["p50"] == pytest.approx(30e-6)
    assert (summary["p999"], summary["max"]) == (0.5, 0.5)
    assert Lateness().summary()["p99"] == 0


@pytest.mark.parametrize(
    ("packets", "probability", "expected"),
    # scipy.stats.binom.ppf([.005, .995], n, p)
    [(1000, 0.01, (3, 19)), (30, 0.05, (0, 5)), (20_000, 0.5, (9818, 10182)), (100, 0.0, (0, 0)), (7, 1.0, (7, 7))],
)
def test_binomial_interval(packets: int, probability: float, expected: tuple[int, int]) -> None:
    assert tolerance.binomial_interval(packets, probability) == expected


def test_tolerances() -> None:
    link = Link(rate=10e6, delay=0.02, loss=0.01)
    assert tolerance.problem(link, 9.7e6, 0.0203, 1000, 12) is None
    assert "carries 9.5 mbit instead of 10 mbit" in (tolerance.problem(link, 9.5e6, 0.02, 1000, 12) or "")
    assert "delays by 20.50 ms instead of 20 ms" in (tolerance.problem(link, 10e6, 0.0205, 1000, 12) or "")
    assert "loses 40 of 1000" in (tolerance.problem(link, 10e6, 0.02, 1000, 40) or "")
    assert "none of 30" in (tolerance.problem(link, None, None, 30, 30) or "")
    assert tolerance.problem(Link(up=False), None, None, 30, 30) is None
    assert "is down, yet 1 of 30" in (tolerance.problem(Link(up=False), None, 0.1, 30, 29) or "")


def test_rounds_share_no_device() -> None:
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    made = rounds(pairs)
    assert sorted(pair for each in made for pair in each) == sorted(pairs)
    for each in made:
        names = [name for pair in each for name in pair]
        assert len(names) == len(set(names))
