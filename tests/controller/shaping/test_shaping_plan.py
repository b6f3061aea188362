"""What the shaper is going to tell the kernel, word for word."""

from __future__ import annotations

import json
import struct

import pytest

from testbed.network.link import GilbertElliott, Link
from testbed_controller.shaping import netem, nfqueue, sender, tolerance
from testbed_controller.shaping.chain import receiving_chain
from testbed_controller.shaping.helper import LatenessHistogram
from testbed_controller.shaping.plan import (
    Endpoint,
    InterfacePlan,
    burst,
    line_limit,
    plan_interface,
    queue_limit,
)
from testbed_controller.shaping.probes import _assign_turns, split_into_rounds
from testbed_controller.shaping.trains import Site

A = Endpoint("a", 1, "198.18.0.2")
PEERS = {"a": (1, "198.18.0.2"), "b": (2, "198.18.0.3"), "c": (3, "198.18.0.4")}


def plan_of_a(**outgoing: Link) -> InterfacePlan:
    links = {("a", peer): link for peer, link in outgoing.items()}
    links |= {("b", "a"): Link(delay=0.02, loss=0.01), ("c", "a"): Link()}
    return plan_interface(A, "eth1", "198.18.255.255", PEERS, links)


CEILING = "htb rate 32000000000bit ceil 32000000000bit burst 800000 cburst 800000 quantum 1514"
BORROWS = "htb rate 1000bit burst 1 ceil"


def test_sender_tree_word_for_word() -> None:
    assert sender.build(plan_of_a(b=Link(rate=50e6, delay=0.005))) == [
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


def test_an_uplink_is_set_and_lifted_in_one_class() -> None:
    limited = Endpoint("a", 1, "198.18.0.2", uplink=5e6)
    with_it, without = (
        plan_interface(each, "eth1", None, PEERS, {("a", "b"): Link(rate=50e6)})
        for each in (limited, A)
    )
    shared = "class change dev eth1 parent 1: classid 1:3 htb"
    assert sender.change(without, with_it)[0] == (
        f"{shared} rate 5000000bit ceil 5000000bit burst 1500 cburst 1500 quantum 1514"
    )
    assert (
        sender.change(with_it, without)[0] == f"{shared} {CEILING.removeprefix('htb ')}"
    )
    # Nothing may pile up that the uplink takes long to send.
    slow = plan_interface(limited, "eth1", None, PEERS, {("a", "b"): Link()})
    assert slow.senders[0].limit == 300


def test_a_broadcast_goes_at_the_rate_of_the_slowest_link() -> None:
    [broadcast, *_] = plan_of_a(b=Link(rate=50e6), c=Link(rate=1e6)).senders
    assert (broadcast.address, broadcast.rate) == ("198.18.255.255", 1_000_000)


def test_a_change_touches_one_leaf() -> None:
    old = plan_of_a(b=Link(rate=50e6), c=Link(rate=50e6))
    new = plan_of_a(b=Link(rate=80e6), c=Link(rate=50e6))
    assert sender.change(old, new) == [
        f"class change dev eth1 parent 1:3 classid 1:12 {BORROWS} 80000000bit cburst 2000 quantum 1514",
        "qdisc change dev eth1 parent 1:12 handle 12: pfifo limit 331",
    ]
    assert sender.change(old, old) == []


def test_a_peer_with_a_new_address_gets_a_new_filter_only() -> None:
    links = {("a", "b"): Link(rate=1e6)}
    old = plan_interface(A, "eth1", None, PEERS, links)
    new = plan_interface(A, "eth1", None, PEERS | {"b": (2, "198.18.0.9")}, links)
    assert sender.change(old, new) == [
        "filter del dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32",
        "filter add dev eth1 parent 1: protocol ip prio 1 handle 800::12 u32 match ip dst 198.18.0.9/32 flowid 1:12",
    ]


def test_only_impaired_links_pass_through_a_queue() -> None:
    assert receiving_chain(plan_of_a()).restore_input() == (
        "*filter\n:TESTBED - [0:0]\n-A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2\nCOMMIT\n"
    )
    down = plan_interface(
        A,
        "eth1",
        None,
        PEERS,
        {("b", "a"): Link(up=False, delay=0.02), ("c", "a"): Link(rate=1e6)},
    )
    assert receiving_chain(down).lines == ["-A TESTBED -s 198.18.0.3/32 -j DROP"]


def test_a_pair_without_a_link_is_dropped() -> None:
    chain = receiving_chain(
        plan_interface(A, "eth1", None, PEERS, {("b", "a"): Link()})
    )
    assert chain.lines == ["-A TESTBED -s 198.18.0.4/32 -j DROP"]


def test_a_downlink_counts_the_packets_of_every_link() -> None:
    limited = Endpoint("a", 1, "198.18.0.2", downlink=5e6)
    made = plan_interface(
        limited, "eth1", None, PEERS, {("b", "a"): Link(), ("c", "a"): Link(up=False)}
    )
    assert [line.queued for line in made.receivers] == [True, False]
    assert made.downlink is not None
    assert made.downlink.rate == 5_000_000


def test_netem_tree_word_for_word() -> None:
    leads = "u32 match ip src 198.18.0.3/32"
    assert netem.build(plan_of_a()) == [
        "qdisc add dev eth1 ingress",
        "qdisc replace dev testbed-ifb root handle 2: htb default 1",
        f"class add dev testbed-ifb parent 2: classid 2:1 {CEILING}",
        f"class add dev testbed-ifb parent 2: classid 2:3 {CEILING}",
        f"class replace dev testbed-ifb parent 2:3 classid 2:12 {BORROWS} 32000000000bit cburst 800000 quantum 1514",
        "qdisc replace dev testbed-ifb parent 2:12 handle 12: "
        "netem limit 200000 delay 20000us loss random 1% corrupt 0%",
        f"filter add dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 {leads} flowid 2:12",
        f"filter add dev eth1 parent ffff: protocol ip prio 1 handle 800::12 {leads} "
        "action mirred egress redirect dev testbed-ifb",
    ]


def towards_a(link: Link, downlink: float | None = None) -> InterfacePlan:
    links = {("b", "a"): link, ("c", "a"): Link(delay=0.001)}
    return plan_interface(
        Endpoint("a", 1, "198.18.0.2", downlink=downlink), "eth1", None, PEERS, links
    )


@pytest.mark.parametrize(
    ("link", "arguments"),
    [
        (
            Link(delay=0.02, jitter=0.003),
            "delay 20000us 3000us distribution normal corrupt 0%",
        ),
        (
            Link(delay=0.02, reorder=0.25, corrupt=0.001),
            "delay 20000us reorder 25% corrupt 0.1%",
        ),
        (Link(delay=0.001, duplicate=0.05), "delay 1000us duplicate 5% corrupt 0%"),
        (
            Link(bursts=GilbertElliott(0.01, 0.2)),
            "loss gemodel 1% 20% 100% 0% corrupt 0%",
        ),
        # A share of 10 % whose neighbours correlate by a half: from good to bad 5 %, back 45 %.
        (
            Link(loss=0.1, loss_correlation=0.5),
            "loss gemodel 5% 45% 100% 0% corrupt 0%",
        ),
        (Link(delay=0.01, loss=1e-5), "delay 10000us loss random 0.001% corrupt 0%"),
    ],
)
def test_netem_arguments(link: Link, arguments: str) -> None:
    line = towards_a(link).receivers[0]
    assert netem.netem_arguments(line) == f"netem limit {line.limit} {arguments}"


def test_a_link_that_duplicates_has_a_device_of_its_own() -> None:
    plain, doubling = (
        towards_a(Link(delay=0.02)),
        towards_a(Link(delay=0.02, duplicate=0.1)),
    )
    assert netem.ifbs_of(plain) == {"testbed-ifb"}
    assert netem.ifbs_of(doubling) == {"testbed-ifb", "testbed-ifb2"}
    leads = "filter add dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32 match ip src 198.18.0.3/32"
    assert netem.change(plain, doubling) == [
        "qdisc replace dev testbed-ifb2 root handle 12: netem limit 200000 delay 20000us duplicate 10% corrupt 0%",
        "filter del dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32",
        "filter del dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 u32",
        f"{leads} action mirred egress redirect dev testbed-ifb2",
    ]
    assert (
        netem.change(doubling, plain)[-1]
        == f"{leads} action mirred egress redirect dev testbed-ifb"
    )


def test_netem_names_unsupported_properties() -> None:
    assert "correlate" in (
        netem.unsupported_property(
            Link(delay=1, jitter=0.1, jitter_correlation=0.5), None
        )
        or ""
    )
    limited = towards_a(Link(), downlink=1e6)
    assert "duplicate" in (
        netem.unsupported_property(Link(duplicate=0.5), limited.downlink) or ""
    )
    assert (
        netem.unsupported_property(
            Link(duplicate=0.5, loss=0.1, loss_correlation=0.5), None
        )
        is None
    )


def test_netem_tables_are_readable_by_tc() -> None:
    numbers = [int(word) for word in netem.distribution_table("pareto").split()]
    assert len(numbers) == 4096
    assert -(2**15) <= min(numbers) < max(numbers) < 2**15


def test_netem_changes_one_leaf_and_drops_by_losing_all() -> None:
    leaf = "qdisc replace dev testbed-ifb parent 2:12 handle 12:"
    slow, slower, plain = (towards_a(Link(delay=delay)) for delay in (0.02, 0.03, 0.0))
    assert netem.change(slow, slower) == [
        f"{leaf} netem limit 200000 delay 30000us corrupt 0%"
    ]
    assert netem.change(slow, towards_a(Link(up=False))) == [
        f"{leaf} netem limit 1000 loss random 100% corrupt 0%"
    ]
    assert netem.change(slow, plain) == [
        "filter del dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32",
        "filter del dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 u32",
    ]
    assert (
        netem.change(plain, slow)[1]
        == f"{leaf} netem limit 200000 delay 20000us corrupt 0%"
    )


def test_netem_lines_wait_for_a_downlink_in_queues_of_their_own() -> None:
    free, limited = (
        towards_a(Link(delay=0.02)),
        towards_a(Link(delay=0.02), downlink=8e6),
    )
    shared = "class change dev testbed-ifb parent 2: classid 2:3 htb"
    assert netem.change(free, limited) == [
        f"{shared} rate 8000000bit ceil 8000000bit burst 1500 cburst 1500 quantum 1514",
        "qdisc replace dev testbed-ifb parent 12:1 handle 2012: pfifo limit 300",
        "qdisc replace dev testbed-ifb parent 13:1 handle 2013: pfifo limit 300",
    ]
    assert netem.change(limited, free) == [
        f"{shared} {CEILING.removeprefix('htb ')}",
        "qdisc replace dev testbed-ifb parent 12:1 handle 2012: pfifo limit 20000",
        "qdisc replace dev testbed-ifb parent 13:1 handle 2013: pfifo limit 20000",
    ]


def test_reading_back_names_every_difference() -> None:
    wanted = plan_of_a(b=Link(rate=50e6))
    classes = (
        "class htb 1:3 root rate 32Gbit ceil 32Gbit burst 800000b cburst 800000b \n"
        "class htb 1:2 parent 1:3 leaf 2: prio 0 rate 1Kbit ceil 50Mbit burst 1b cburst 1500b \n"
        "class htb 1:12 parent 1:3 leaf 12: prio 0 rate 1Kbit ceil 49Mbit burst 1b cburst 1500b \n"
    )
    qdiscs = [
        {"kind": "pfifo", "handle": f"{number}:", "options": {"limit": 300}}
        for number in (2, 12)
    ]
    filters = json.loads(
        '[{"options":{"fh":"800:"}},'
        '{"options":{"flowid":"1:2","match":{"value":"c612ffff"}}},'
        '{"options":{"flowid":"1:2","match":{"value":"c6120003"}}}]'
    )
    assert sender.differences(wanted, classes, qdiscs, filters) == [
        "class 1:12 has a rate of 49000000 bit/s instead of 50000000",
        "packets to 198.18.0.3 go to class 1:2 instead of 1:12",
    ]
    assert receiving_chain(wanted).differences(
        "-A INPUT -i eth1 -j TESTBED\n-A TESTBED -s 1.2.3.4/32 -j DROP"
    ) == [
        "missing rule: -A TESTBED -s 198.18.0.3/32 -j NFQUEUE --queue-num 2",
        "unexpected rule: -A TESTBED -s 1.2.3.4/32 -j DROP",
    ]


def test_pieces_of_tcp_are_no_longer_than_a_bucket_of_the_fastest_link() -> None:
    assert [
        plan_of_a(b=Link(rate=rate)).segments for rate in (250e3, 100e6, 1e9, None)
    ] == [1, 1, 16, 64]
    assert plan_of_a(b=Link(rate=250e3), c=Link(rate=1e9)).segments == 16


def test_sizes() -> None:
    assert burst(250e3) == 1500  # one frame at once, never two
    assert burst(1e9) == 25_000
    assert queue_limit(Link(rate=1e9, delay=0.1)) == 20_000
    assert queue_limit(Link(rate=100e6, delay=0.02)) == 744  # 90 ms of full frames
    assert (
        line_limit(Link(rate=100e6, delay=0.1)) == 25_000
    )  # 100 ms of the smallest frames, and a fifth


def test_netfilter_messages_byte_for_byte() -> None:
    verdict = nfqueue.make_verdict_prefix(7, nfqueue.ACCEPT) + struct.pack(
        ">I", 0x01020304
    )
    assert verdict == bytes.fromhex(
        "20000000 0103 0100 00000000 00000000 00 00 0007 0c00 0200 00000001 01020304"
    )
    assert nfqueue.make_bind_message(7, 5) == bytes.fromhex(
        "1c000000 0203 0500 05000000 00000000 00 00 0007 0800 0100 01 00 0002"
    )
    altered = nfqueue.make_altered_verdict(7, b"\1\2\3\4", b"abcde")
    assert (
        altered[20:]
        == bytes.fromhex("0c000200 00000001 01020304 0900 0a00") + b"abcde\0\0\0"
    )


def test_arrival_time_is_read_at_any_position() -> None:
    header = bytes(16 + 4) + struct.pack("=HH", 11, 1) + bytes(8)
    stamp = struct.pack("=HHQQ", 20, 4, 0, 0)[:4] + struct.pack(
        ">QQ", 1_700_000_000, 250_000
    )
    other = struct.pack("=HHI", 8, 5, 3)
    stamps = nfqueue.TimestampReader()
    for attributes in (other + stamp, stamp, other + other + stamp + other):
        data = bytearray(header + attributes)
        assert stamps.read(data, len(data)) == pytest.approx(1_700_000_000.25)
    assert stamps.read(bytearray(header + other), len(header + other)) is None


def test_lateness_percentiles() -> None:
    lateness = LatenessHistogram()
    lateness.add(20e-6, 990)
    lateness.add(0.5, 10)
    summary = lateness.summary()
    assert summary["p50"] == pytest.approx(30e-6)
    assert (summary["p999"], summary["max"]) == (0.5, 0.5)
    assert LatenessHistogram().summary()["p99"] == 0


@pytest.mark.parametrize(
    ("packets", "probability", "expected"),
    # scipy.stats.binom.ppf([.005, .995], n, p)
    [
        (1000, 0.01, (3, 19)),
        (30, 0.05, (0, 5)),
        (20_000, 0.5, (9818, 10182)),
        (100, 0.0, (0, 0)),
        (7, 1.0, (7, 7)),
    ],
)
def test_binomial_interval(
    packets: int, probability: float, expected: tuple[int, int]
) -> None:
    assert tolerance.binomial_interval(packets, probability) == expected


def test_tolerances() -> None:
    link = Link(rate=10e6, delay=0.02, loss=0.01)
    assert tolerance.describe_deviations(link, 9.7e6, 0.0203, 1000, 12) is None
    assert "carries 9.5 mbit instead of 10 mbit" in (
        tolerance.describe_deviations(link, 9.5e6, 0.02, 1000, 12) or ""
    )
    assert "delays by 20.50 ms instead of 20 ms" in (
        tolerance.describe_deviations(link, 10e6, 0.0205, 1000, 12) or ""
    )
    assert "loses 40 of 1000" in (
        tolerance.describe_deviations(link, 10e6, 0.02, 1000, 40) or ""
    )
    assert "none of 30" in (
        tolerance.describe_deviations(link, None, None, 30, 30) or ""
    )
    assert tolerance.describe_deviations(Link(up=False), None, None, 30, 30) is None
    assert "is down, yet 1 of 30" in (
        tolerance.describe_deviations(Link(up=False), None, 0.1, 30, 29) or ""
    )
    slow = Link(rate=8e3, delay=0.005)
    assert tolerance.describe_deviations(slow, 8e3, 0.006, 10, 0, gate=0.066) is None, (
        "2 % of 71 ms that were measured"
    )
    assert "delays by 6.50 ms" in (
        tolerance.describe_deviations(slow, 8e3, 0.0065, 10, 0, gate=0.066) or ""
    )


def test_rounds_share_no_device() -> None:
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    made = split_into_rounds(pairs)
    assert sorted(pair for each in made for pair in each) == sorted(pairs)
    for each in made:
        names = [name for pair in each for name in pair]
        assert len(names) == len(set(names))


def test_links_that_share_an_access_are_probed_in_turn() -> None:
    sites = {
        name: Site(None, name, uplink, downlink) for name, uplink, downlink in ACCESSES
    }
    pairs = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    turns, crowds = _assign_turns(pairs, sites, {})
    assert ("a", "d") not in turns, "it shares nothing"
    for name in "bc":
        out = [turns[pair] for pair in pairs if pair[0] == name]
        into = [turns[pair] for pair in pairs if pair[1] == name]
        assert len(set(out)) == len(out) == 3
        assert len(set(into)) == len(into) == 3
    assert all(turns[pair] < crowds[pair] for pair in turns)


ACCESSES = (("a", None, None), ("b", 1e6, 1e6), ("c", 1e6, 1e6), ("d", None, None))
