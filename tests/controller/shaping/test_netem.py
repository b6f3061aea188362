"""tc commands of the netem backend, word for word."""

from __future__ import annotations

import pytest

from testbed.network.link import GilbertElliott, Link
from testbed_controller.shaping import netem
from tests.controller.shaping.plans import (
    BORROWS,
    CEILING,
    plan_incoming,
    plan_outgoing,
)

LEAF = "qdisc replace dev testbed-ifb parent 2:12 handle 12:"
"""Start of the command that sets the impairments of the link from b."""


def test_netem_tree_word_for_word() -> None:
    source = "u32 match ip src 198.18.0.3/32"
    assert netem.build(plan_outgoing()) == [
        "qdisc add dev eth1 ingress",
        "qdisc replace dev testbed-ifb root handle 2: htb default 1",
        f"class add dev testbed-ifb parent 2: classid 2:1 {CEILING}",
        f"class add dev testbed-ifb parent 2: classid 2:3 {CEILING}",
        f"class replace dev testbed-ifb parent 2:3 classid 2:12 {BORROWS} 32000000000bit cburst 800000 quantum 1514",
        f"{LEAF} netem limit 200000 delay 20000us loss random 1% corrupt 0%",
        f"filter add dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 {source} flowid 2:12",
        f"filter add dev eth1 parent ffff: protocol ip prio 1 handle 800::12 {source} "
        "action mirred egress redirect dev testbed-ifb",
    ]


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
        # A loss of 10 % with correlation 0.5: from good to bad 0.1 * (1 - 0.5) = 5 %, and back 0.9 * (1 - 0.5) = 45 %.
        (
            Link(loss=0.1, loss_correlation=0.5),
            "loss gemodel 5% 45% 100% 0% corrupt 0%",
        ),
        (Link(delay=0.01, loss=1e-5), "delay 10000us loss random 0.001% corrupt 0%"),
    ],
    ids=["jitter", "reorder", "duplicate", "bursts", "correlated loss", "loss"],
)
def test_netem_arguments(link: Link, arguments: str) -> None:
    line = plan_incoming(link).receivers[0]
    assert netem.netem_arguments(line) == f"netem limit {line.limit} {arguments}"


def test_duplicating_link_has_separate_ifb() -> None:
    plain = plan_incoming(Link(delay=0.02))
    duplicating = plan_incoming(Link(delay=0.02, duplicate=0.1))
    assert netem.ifbs_of(plain) == {"testbed-ifb"}
    assert netem.ifbs_of(duplicating) == {"testbed-ifb", "testbed-ifb2"}
    redirection = "filter add dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32 match ip src 198.18.0.3/32"
    assert netem.change(plain, duplicating) == [
        "qdisc replace dev testbed-ifb2 root handle 12: netem limit 200000 delay 20000us duplicate 10% corrupt 0%",
        "filter del dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32",
        "filter del dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 u32",
        f"{redirection} action mirred egress redirect dev testbed-ifb2",
    ]
    assert netem.change(duplicating, plain)[-1] == (
        f"{redirection} action mirred egress redirect dev testbed-ifb"
    )


def test_netem_names_unsupported_properties() -> None:
    correlated_jitter = Link(delay=1, jitter=0.1, jitter_correlation=0.5)
    problem = netem.unsupported_property(correlated_jitter, None)
    assert "correlate" in (problem or "")
    downlink = plan_incoming(Link(), downlink=1e6).downlink
    problem = netem.unsupported_property(Link(duplicate=0.5), downlink)
    assert "duplicate" in (problem or "")
    correlated_loss = Link(duplicate=0.5, loss=0.1, loss_correlation=0.5)
    assert netem.unsupported_property(correlated_loss, None) is None


def test_netem_tables_are_readable_by_tc() -> None:
    # tc accepts at most 16,384 numbers of 16 bits with sign.
    numbers = [int(word) for word in netem.distribution_table("pareto").split()]
    assert len(numbers) == 4096
    assert -(2**15) <= min(numbers) < max(numbers) < 2**15


def test_changed_delay_replaces_one_leaf() -> None:
    slow = plan_incoming(Link(delay=0.02))
    slower = plan_incoming(Link(delay=0.03))
    assert netem.change(slow, slower) == [
        f"{LEAF} netem limit 200000 delay 30000us corrupt 0%"
    ]


def test_down_link_loses_every_packet() -> None:
    slow = plan_incoming(Link(delay=0.02))
    assert netem.change(slow, plan_incoming(Link(up=False))) == [
        f"{LEAF} netem limit 1000 loss random 100% corrupt 0%"
    ]


def test_link_without_impairments_has_no_filters() -> None:
    slow, plain = plan_incoming(Link(delay=0.02)), plan_incoming(Link())
    assert netem.change(slow, plain) == [
        "filter del dev eth1 parent ffff: protocol ip prio 1 handle 800::12 u32",
        "filter del dev testbed-ifb parent 2: protocol ip prio 1 handle 800::12 u32",
    ]
    assert netem.change(plain, slow)[1] == (
        f"{LEAF} netem limit 200000 delay 20000us corrupt 0%"
    )


def test_links_wait_for_downlink_in_separate_queues() -> None:
    free = plan_incoming(Link(delay=0.02))
    limited = plan_incoming(Link(delay=0.02), downlink=8e6)
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
