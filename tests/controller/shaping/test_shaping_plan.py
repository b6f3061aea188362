"""tc and iptables commands for the links of a device, word for word."""

from __future__ import annotations

import json

from testbed.network.link import Link
from testbed_controller.shaping import sender
from testbed_controller.shaping.chain import receiving_chain
from testbed_controller.shaping.plan import (
    Endpoint,
    burst,
    line_limit,
    plan_interface,
    queue_limit,
)
from tests.controller.shaping.plans import (
    BORROWS,
    BROADCAST,
    CEILING,
    ENDPOINT_OF_A,
    PEERS,
    plan_outgoing,
)


def test_sender_tree_word_for_word() -> None:
    assert sender.build(plan_outgoing(b=Link(rate=50e6, delay=0.005))) == [
        "qdisc replace dev eth1 root handle 2: pfifo",
        "qdisc replace dev eth1 root handle 1: htb default 1",
        f"class add dev eth1 parent 1: classid 1:1 {CEILING}",
        f"class add dev eth1 parent 1: classid 1:3 {CEILING}",
        f"class add dev eth1 parent 1:3 classid 1:2 {BORROWS} 50000000bit cburst 1500 quantum 1514",
        "qdisc add dev eth1 parent 1:2 handle 2: pfifo limit 300",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::2 u32 match ip dst 198.18.255.255/32 flowid 1:2",
        f"class add dev eth1 parent 1:3 classid 1:12 {BORROWS} 50000000bit cburst 1500 quantum 1514",
        "qdisc add dev eth1 parent 1:12 handle 12: pfifo limit 300",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32 match ip dst 198.18.0.3/32 flowid 1:12",
    ]


def test_uplink_is_set_and_removed_in_one_class() -> None:
    limited = Endpoint("a", 1, "198.18.0.2", uplink=5e6)
    links = {("a", "b"): Link(rate=50e6)}
    with_uplink = plan_interface(limited, "eth1", None, PEERS, links)
    without_uplink = plan_interface(ENDPOINT_OF_A, "eth1", None, PEERS, links)
    shared = "class change dev eth1 parent 1: classid 1:3 htb"
    assert sender.change(without_uplink, with_uplink)[0] == (
        f"{shared} rate 5000000bit ceil 5000000bit burst 1500 cburst 1500 quantum 1514"
    )
    assert sender.change(with_uplink, without_uplink)[0] == (
        f"{shared} {CEILING.removeprefix('htb ')}"
    )


def test_queue_of_an_unlimited_link_is_limited_by_the_uplink() -> None:
    # A long queue, as for a link of 32 Gbit/s, would take the uplink a long time to send.
    limited = Endpoint("a", 1, "198.18.0.2", uplink=5e6)
    plan = plan_interface(limited, "eth1", None, PEERS, {("a", "b"): Link()})
    assert plan.senders[0].limit == 300


def test_broadcast_has_the_rate_of_the_slowest_link() -> None:
    [broadcast, *_] = plan_outgoing(b=Link(rate=50e6), c=Link(rate=1e6)).senders
    assert (broadcast.address, broadcast.rate) == (BROADCAST, 1_000_000)


def test_changed_rate_affects_one_class() -> None:
    old = plan_outgoing(b=Link(rate=50e6), c=Link(rate=50e6))
    new = plan_outgoing(b=Link(rate=80e6), c=Link(rate=50e6))
    assert sender.change(old, new) == [
        f"class change dev eth1 parent 1:3 classid 1:12 {BORROWS} 80000000bit cburst 2000 quantum 1514",
        "qdisc change dev eth1 parent 1:12 handle 12: pfifo limit 331",
    ]
    assert sender.change(old, old) == []


def test_changed_peer_address_affects_only_filter() -> None:
    links = {("a", "b"): Link(rate=1e6)}
    new_peers = PEERS | {"b": (2, "198.18.0.9")}
    old = plan_interface(ENDPOINT_OF_A, "eth1", None, PEERS, links)
    new = plan_interface(ENDPOINT_OF_A, "eth1", None, new_peers, links)
    assert sender.change(old, new) == [
        "filter del dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32 match ip dst 198.18.0.9/32 flowid 1:12",
    ]


def test_only_impaired_links_pass_through_a_queue() -> None:
    # Device b has the number 2, and so has the queue of packets from b.
    assert receiving_chain(plan_outgoing()).restore_input() == (
        "*filter\n:TESTBED - [0:0]\n-A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2\nCOMMIT\n"
    )


def test_packets_of_down_link_are_dropped() -> None:
    # The sender applies the rate of the link from c, so that the receiver needs no rule.
    links = {("b", "a"): Link(up=False, delay=0.02), ("c", "a"): Link(rate=1e6)}
    chain = receiving_chain(plan_interface(ENDPOINT_OF_A, "eth1", None, PEERS, links))
    assert chain.lines == ["-A TESTBED -s 198.18.0.3/32 -j DROP"]


def test_packets_without_a_link_are_dropped() -> None:
    links = {("b", "a"): Link()}
    chain = receiving_chain(plan_interface(ENDPOINT_OF_A, "eth1", None, PEERS, links))
    assert chain.lines == ["-A TESTBED -s 198.18.0.4/32 -j DROP"]


def test_downlink_queues_packets_of_every_up_link() -> None:
    limited = Endpoint("a", 1, "198.18.0.2", downlink=5e6)
    links = {("b", "a"): Link(), ("c", "a"): Link(up=False)}
    plan = plan_interface(limited, "eth1", None, PEERS, links)
    assert [line.queued for line in plan.receivers] == [True, False]
    assert plan.downlink is not None
    assert plan.downlink.rate == 5_000_000


def test_every_difference_of_the_sender_is_named() -> None:
    plan = plan_outgoing(b=Link(rate=50e6))
    classes = (
        "class htb 1:3 root rate 32Gbit ceil 32Gbit burst 800000b cburst 800000b \n"
        "class htb 1:2 parent 1:3 leaf 2: prio 0 rate 1Kbit ceil 50Mbit burst 1b cburst 1500b \n"
        "class htb 1:12 parent 1:3 leaf 12: prio 0 rate 1Kbit ceil 49Mbit burst 1b cburst 1500b \n"
    )
    qdiscs = [
        {"kind": "pfifo", "handle": "2:", "options": {"limit": 300}},
        {"kind": "pfifo", "handle": "12:", "options": {"limit": 300}},
    ]
    # c612ffff and c6120003 are 198.18.255.255 and 198.18.0.3, the addresses of broadcasts and of b.
    filters = json.loads(
        '[{"options":{"fh":"800:"}},'
        '{"options":{"flowid":"1:2","match":{"value":"c612ffff"}}},'
        '{"options":{"flowid":"1:2","match":{"value":"c6120003"}}}]'
    )
    assert sender.differences(plan, classes, qdiscs, filters) == [
        "class 1:12 has a rate of 49000000 bit/s instead of 50000000",
        "packets to 198.18.0.3 go to class 1:2 instead of 1:12",
    ]


def test_every_difference_of_the_receiver_is_named() -> None:
    chain = receiving_chain(plan_outgoing(b=Link(rate=50e6)))
    rules = "-A INPUT -i eth1 -j TESTBED\n-A TESTBED -s 1.2.3.4/32 -j DROP"
    assert chain.differences(rules) == [
        "missing rule: -A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2",
        "unexpected rule: -A TESTBED -s 1.2.3.4/32 -j DROP",
    ]


def test_tcp_pieces_fit_the_bucket_of_the_fastest_link() -> None:
    # The bucket of 1 Gbit/s has 25,000 bytes, 16 frames of 1514 bytes; 64 is the maximum.
    segments = {
        rate: plan_outgoing(b=Link(rate=rate)).segments
        for rate in (250e3, 100e6, 1e9, None)
    }
    assert segments == {250e3: 1, 100e6: 1, 1e9: 16, None: 64}
    assert plan_outgoing(b=Link(rate=250e3), c=Link(rate=1e9)).segments == 16


def test_sizes_of_buckets_and_queues() -> None:
    # A bucket of less than a frame releases one frame at once, and no second one.
    assert burst(250e3) == 1500
    assert burst(1e9) == 25_000
    assert queue_limit(Link(rate=1e9, delay=0.1)) == 20_000
    # 100 Mbit/s for 90 ms, two delays and a margin of 50 ms, are 1,125,000 bytes: 744 frames of 1514 bytes.
    assert queue_limit(Link(rate=100e6, delay=0.02)) == 744
    # 100 Mbit/s for 100 ms are 1,250,000 bytes, and a fifth more is 25,000 of the smallest frames of 60 bytes.
    assert line_limit(Link(rate=100e6, delay=0.1)) == 25_000
