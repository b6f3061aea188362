"""Channels that carry one transmission at a time, against times computed by hand, and which packets wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping import medium
from testbed_controller.shaping.medium import (
    GATED_RATE,
    QUEUE,
    Media,
    Route,
    gate_rules,
)
from testbed_controller.shaping.plan import Endpoint

CELL = ("cell", 0)
SECOND = 1000
"""Bytes that take a second."""
RATE = SECOND * 8.0
AT_ONCE = {"all": Route((CELL,), RATE, 100)}


def media(*stations: str, route: Route = AT_ONCE["all"]) -> Media[str]:
    made: Media[str] = Media()
    for station in stations:
        made.set_routes(station, {"all": route}, 0.0)
    return made


def ends(made: Media[str], until: float = math.inf) -> list[tuple[str, float]]:
    return [(each.item, each.end) for each in made.finished(until)]


def test_transmissions_of_a_cell_follow_each_other_in_the_order_of_their_sending():
    made = media("a", "b")
    made.offer("a", "all", 0.0, SECOND, "first")
    made.offer("b", "all", 0.1, 2 * SECOND, "second")
    made.offer("a", "all", 0.2, SECOND, "third")
    assert made.next_end == 1.0
    assert made.finished(0.99) == []
    assert ends(made, 1.0) == [("first", 1.0)]
    assert ends(made) == [("second", 3.0), ("third", 4.0)]
    made.offer("b", "all", 9.0, SECOND, "after silence")
    assert ends(made) == [("after silence", 10.0)]
    assert made.next_end == math.inf


def test_channels_are_independent_and_a_gateway_needs_all_of_its_own():
    made = media("a")
    made.set_routes("b", {"all": Route(("other",), RATE, 100)}, 0.0)
    made.set_routes(
        "gate",
        {"all": Route((CELL, "other"), RATE, 100), "wire": Route((), RATE, 100)},
        0.0,
    )
    made.offer("a", "all", 0.0, SECOND, "a")
    made.offer("b", "all", 0.0, 3 * SECOND, "b")
    made.offer("gate", "all", 0.0, SECOND, "gate")
    made.offer("gate", "wire", 0.0, SECOND, "wire")
    made.offer("a", "all", 0.0, SECOND, "a again")
    assert ends(made) == [
        ("a", 1.0),
        ("wire", 1.0),
        ("b", 3.0),
        ("gate", 4.0),
        ("a again", 5.0),
    ]


def test_changed_rate_applies_to_later_transmissions():
    made = media("a", "b")
    made.offer("a", "all", 0.0, SECOND, "on air")
    made.offer("a", "all", 0.0, SECOND, "waits")
    made.set_routes("a", {"all": Route((CELL,), RATE / 4, 100)}, 0.5)
    made.offer("b", "all", 0.6, SECOND, "b")
    assert ends(made) == [("on air", 1.0), ("waits", 5.0), ("b", 6.0)]


def test_removed_station_frees_the_channel():
    made = media("a", "b")
    made.offer("a", "all", 0.0, SECOND, "on air")
    made.offer("a", "all", 0.0, 5 * SECOND, "never")
    made.offer("b", "all", 0.0, SECOND, "b")
    assert made.waiting("a") == 2
    made.forget("a", 0.5)
    assert made.waiting("a") == 0
    assert ends(made) == [("b", 2.0)]


def test_packets_without_a_route_leave_at_once():
    made = media("a")
    made.offer("a", "all", 0.0, SECOND, "slow")
    made.offer("a", "elsewhere", 0.5, SECOND, "free")
    assert ends(made, 0.5) == [("free", 0.5)]


def test_full_queue_refuses_packets_until_one_has_left():
    made = media("a", "b", route=Route((CELL,), RATE, 2))
    assert [
        made.offer("a", "all", 0.0, SECOND, str(number)) for number in range(3)
    ] == [True, True, False]
    assert made.offer("b", "all", 0.0, SECOND, "b")
    assert ends(made, 1.0) == [("0", 1.0)]
    assert made.offer("a", "all", 1.0, SECOND, "3")
    assert ends(made) == [("1", 2.0), ("b", 3.0), ("3", 4.0)]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 5), st.integers(1, 3000)),
        max_size=30,
    )
)
def test_transmissions_never_overlap_and_the_channel_never_idles(sends):
    made = media("a", "b", "c")
    free, now, expected = 0.0, 0.0, []
    for number, (station, gap, size) in enumerate(sends):
        now += gap
        made.offer(station, "all", now, size, str(number))
        free = max(free, now) + size * 8 / RATE
        expected.append((str(number), free))
        made.set_routes(
            "c", {"all": Route((CELL,), RATE, 100)}, now
        )  # that nothing changes must change nothing
    assert [(item, round(end, 9)) for item, end in ends(made)] == [
        (item, round(end, 9)) for item, end in expected
    ]


PEERS = {"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"}


def routes(
    device: str,
    broadcast: str | None,
    peers: dict[str, str],
    links: dict[Pair, Link],
    cells: Sequence[Cell],
    uplink: float | None = None,
    downlinks: dict[str, float] | None = None,
) -> dict[str, Route]:
    endpoints = {
        name: Endpoint(name, 1, each, None, (downlinks or {}).get(name))
        for name, each in peers.items()
    }
    return medium.routes_of(
        replace(endpoints[device], uplink=uplink), broadcast, endpoints, links, cells
    )


BROADCAST = "10.0.0.255"


def links(rate=None):
    return {
        (one, other): Link(rate=rate)
        for one in PEERS
        for other in PEERS
        if one != other
    }


def test_without_cells_and_with_fast_links_nothing_waits():
    assert routes("a", BROADCAST, PEERS, links(), ()) == {}
    assert routes("a", BROADCAST, PEERS, links(2 * GATED_RATE), ()) == {}


def test_slow_casts_have_a_channel_of_their_own():
    found = routes("a", BROADCAST, PEERS, links(20e6), ())
    assert set(found) == {BROADCAST}
    assert found[BROADCAST].channels == ("broadcasts of a",)
    assert found[BROADCAST].rate == 20e6


def test_slow_links_wait_for_the_end_of_their_time_each_for_itself():
    found = routes("a", None, PEERS, links(20e6) | {("a", "c"): Link(rate=250e3)}, ())
    assert found == {PEERS["c"]: Route(("link a -> c",), 250e3, 300)}


def test_a_slow_access_at_either_end_makes_a_link_slow():
    by_uplink = routes("a", None, PEERS, links(), (), uplink=1e6)
    assert {address: route.rate for address, route in by_uplink.items()} == {
        PEERS["b"]: 1e6,
        PEERS["c"]: 1e6,
    }
    assert len({route.channels for route in by_uplink.values()}) == 2, (
        "the uplink itself shares among them"
    )
    by_downlink = routes("a", None, PEERS, links(2e6), (), None, {"b": 64e3, "c": 50e6})
    assert {address: route.rate for address, route in by_downlink.items()} == {
        PEERS["b"]: 64e3,
        PEERS["c"]: 2e6,
    }


def test_casts_are_as_slow_as_the_slowest_link_and_the_access():
    uneven = links(10e6) | {("a", "c"): Link(rate=2e6), ("b", "a"): Link(rate=1e3)}
    assert routes("a", BROADCAST, PEERS, uneven, ())[BROADCAST].rate == 2e6
    assert routes("a", BROADCAST, PEERS, uneven, (), uplink=5e5)[BROADCAST].rate == 5e5


def test_links_within_a_cell_share_the_channel_with_broadcasts():
    found = routes("a", BROADCAST, PEERS, links(50e6), [Cell(("a", "b"), 30e6)])
    assert set(found) == {PEERS["b"], BROADCAST}
    assert {route.channels for route in found.values()} == {("cell of a, b",)}
    assert {route.rate for route in found.values()} == {
        30e6
    }  # the casts too, though they are fast


def test_a_link_slower_than_its_cell_keeps_its_rate():
    assert (
        routes("a", None, PEERS, links(1e6), [Cell(("a", "b"), 30e6)])[PEERS["b"]].rate
        == 1e6
    )


def test_a_cast_in_several_cells_takes_all_of_them():
    found = routes(
        "a", BROADCAST, PEERS, links(), [Cell(("a", "b"), 2e6), Cell(("a", "c"), 1e6)]
    )
    assert found[BROADCAST].channels == ("cell of a, b", "cell of a, c")
    assert found[BROADCAST].rate == 1e6


def test_rules_lead_exactly_these_addresses_into_the_queue():
    gated = routes("a", BROADCAST, PEERS, links(20e6), ())
    made = gate_rules("eth1", gated)
    assert made.rules == (f"-d {BROADCAST}/32 -j NFQUEUE --queue-num {QUEUE}",)
    assert ("OUTPUT", "-o", "eth1") in vars(made).values()
