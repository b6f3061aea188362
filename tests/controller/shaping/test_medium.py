"""Channels that carry one transmission at a time, against hand-computed times, and the packets that use the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping import medium
from testbed_controller.shaping.medium import (
    GATED_BROADCAST_RATE,
    QUEUE,
    Media,
    Route,
    gate_rules,
)
from testbed_controller.shaping.plan import Endpoint

CELL = ("cell", 0)
SECOND = 1000
"""Bytes whose transmission takes a second."""
RATE = SECOND * 8.0
CELL_ROUTE = Route((CELL,), RATE, 100)


def make_media(*stations: str, route: Route = CELL_ROUTE) -> Media[str]:
    """Return channels of stations with one route, to the address "all"."""
    media: Media[str] = Media()
    for station in stations:
        media.set_routes(station, {"all": route}, 0.0)
    return media


def finish(media: Media[str], until: float = math.inf) -> list[tuple[str, float]]:
    """Return the finished transmissions as pairs of item and end."""
    return [
        (transmission.item, transmission.end)
        for transmission in media.pop_finished(until)
    ]


def test_transmissions_of_a_cell_follow_in_sending_order():
    media = make_media("a", "b")
    media.offer("a", "all", 0.0, SECOND, "first")
    media.offer("b", "all", 0.1, 2 * SECOND, "second")
    media.offer("a", "all", 0.2, SECOND, "third")
    assert media.next_end == 1.0
    assert media.pop_finished(0.99) == []
    assert finish(media, 1.0) == [("first", 1.0)]
    assert finish(media) == [("second", 3.0), ("third", 4.0)]
    media.offer("b", "all", 9.0, SECOND, "after silence")
    assert finish(media) == [("after silence", 10.0)]
    assert media.next_end == math.inf


def test_gateway_waits_for_all_channels():
    media = make_media("a")
    media.set_routes("b", {"all": Route(("other",), RATE, 100)}, 0.0)
    media.set_routes(
        "gate",
        {"all": Route((CELL, "other"), RATE, 100), "wire": Route((), RATE, 100)},
        0.0,
    )
    media.offer("a", "all", 0.0, SECOND, "a")
    media.offer("b", "all", 0.0, 3 * SECOND, "b")
    media.offer("gate", "all", 0.0, SECOND, "gate")
    media.offer("gate", "wire", 0.0, SECOND, "wire")
    media.offer("a", "all", 0.0, SECOND, "a again")
    # The gateway starts at 3 s with the end of b; a, which asked later than the gateway, starts afterwards.
    assert finish(media) == [
        ("a", 1.0),
        ("wire", 1.0),
        ("b", 3.0),
        ("gate", 4.0),
        ("a again", 5.0),
    ]


def test_changed_rate_applies_to_later_transmissions():
    media = make_media("a", "b")
    media.offer("a", "all", 0.0, SECOND, "on air")
    media.offer("a", "all", 0.0, SECOND, "waits")
    # At a quarter of the rate, a second of bytes takes 4 s.
    media.set_routes("a", {"all": Route((CELL,), RATE / 4, 100)}, 0.5)
    media.offer("b", "all", 0.6, SECOND, "b")
    assert finish(media) == [("on air", 1.0), ("waits", 5.0), ("b", 6.0)]


def test_removed_station_frees_the_channel():
    media = make_media("a", "b")
    media.offer("a", "all", 0.0, SECOND, "on air")
    media.offer("a", "all", 0.0, 5 * SECOND, "never")
    media.offer("b", "all", 0.0, SECOND, "b")
    assert media.waiting("a") == 2
    media.forget("a", 0.5)
    assert media.waiting("a") == 0
    # The transmission on air occupies the channel until its end at 1 s.
    assert finish(media) == [("b", 2.0)]


def test_packets_without_a_route_leave_at_once():
    media = make_media("a")
    media.offer("a", "all", 0.0, SECOND, "slow")
    media.offer("a", "elsewhere", 0.5, SECOND, "free")
    assert finish(media, 0.5) == [("free", 0.5)]


def test_full_queue_refuses_packets_until_one_has_left():
    media = make_media("a", "b", route=Route((CELL,), RATE, 2))
    accepted = [
        media.offer("a", "all", 0.0, SECOND, str(number)) for number in range(3)
    ]
    assert accepted == [True, True, False]
    assert media.offer("b", "all", 0.0, SECOND, "b")
    assert finish(media, 1.0) == [("0", 1.0)]
    assert media.offer("a", "all", 1.0, SECOND, "3")
    assert finish(media) == [("1", 2.0), ("b", 3.0), ("3", 4.0)]


def round_ends(ends: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(item, round(end, 9)) for item, end in ends]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(0, 5), st.integers(1, 3000)),
        max_size=30,
    )
)
def test_transmissions_never_overlap_and_the_channel_never_idles(sends):
    media = make_media("a", "b", "c")
    channel_free, now, expected = 0.0, 0.0, []
    for number, (station, gap, size) in enumerate(sends):
        now += gap
        media.offer(station, "all", now, size, str(number))
        channel_free = max(channel_free, now) + size * 8 / RATE
        expected.append((str(number), channel_free))
        # Equal routes must not affect waiting packets.
        media.set_routes("c", {"all": Route((CELL,), RATE, 100)}, now)
    assert round_ends(finish(media)) == round_ends(expected)


ADDRESSES = {"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"}
BROADCAST = "10.0.0.255"
ADDRESS_OF_B, ADDRESS_OF_C = ADDRESSES["b"], ADDRESSES["c"]


def make_links(rate: float | None = None) -> dict[Pair, Link]:
    return {pair: Link(rate=rate) for pair in permutations(ADDRESSES, 2)}


def routes_of_a(
    links: dict[Pair, Link],
    cells: Sequence[Cell] = (),
    broadcast: str | None = BROADCAST,
    uplink: float | None = None,
    downlinks: dict[str, float] | None = None,
) -> dict[str, Route]:
    """Return the gated routes of device a, by destination address."""
    endpoints = {}
    for name, address in ADDRESSES.items():
        downlink = (downlinks or {}).get(name)
        endpoints[name] = Endpoint(name, 1, address, None, downlink)
    source = replace(endpoints["a"], uplink=uplink)
    return medium.routes_of(source, broadcast, endpoints, links, cells)


def test_fast_links_without_cells_are_not_gated():
    assert routes_of_a(make_links()) == {}
    assert routes_of_a(make_links(2 * GATED_BROADCAST_RATE)) == {}


def test_slow_broadcasts_have_separate_channel():
    # 20 Mbit/s are below the limit of 25 for broadcasts, and above the limit of 5 for links.
    routes = routes_of_a(make_links(20e6))
    assert set(routes) == {BROADCAST}
    assert routes[BROADCAST].channels == ("broadcasts of a",)
    assert routes[BROADCAST].rate == 20e6


def test_slow_link_has_separate_channel():
    links = make_links(20e6) | {("a", "c"): Link(rate=250e3)}
    routes = routes_of_a(links, broadcast=None)
    assert routes == {ADDRESS_OF_C: Route(("link a -> c",), 250e3, 300)}


def rates(routes: dict[str, Route]) -> dict[str, float]:
    return {address: route.rate for address, route in routes.items()}


def test_slow_uplink_slows_all_links_from_device():
    routes = routes_of_a(make_links(), broadcast=None, uplink=1e6)
    assert rates(routes) == {ADDRESS_OF_B: 1e6, ADDRESS_OF_C: 1e6}
    # Each link has a channel of its own, since the kernel shares the uplink among links.
    assert len({route.channels for route in routes.values()}) == 2


def test_slow_downlink_slows_all_links_to_device():
    routes = routes_of_a(
        make_links(2e6), broadcast=None, downlinks={"b": 64e3, "c": 50e6}
    )
    assert rates(routes) == {ADDRESS_OF_B: 64e3, ADDRESS_OF_C: 2e6}


def test_broadcasts_have_the_rate_of_the_slowest_link_and_access():
    # The link from b to a is not used by broadcasts of a.
    links = make_links(10e6) | {("a", "c"): Link(rate=2e6), ("b", "a"): Link(rate=1e3)}
    assert routes_of_a(links)[BROADCAST].rate == 2e6
    assert routes_of_a(links, uplink=5e5)[BROADCAST].rate == 5e5


def test_links_within_a_cell_share_the_channel_with_broadcasts():
    # Links and broadcasts would be too fast for the gate without the cell.
    routes = routes_of_a(make_links(50e6), [Cell(("a", "b"), 30e6)])
    assert set(routes) == {ADDRESS_OF_B, BROADCAST}
    for route in routes.values():
        assert route.channels == ("cell of a, b",)
        assert route.rate == 30e6


def test_link_slower_than_cell_keeps_rate():
    routes = routes_of_a(make_links(1e6), [Cell(("a", "b"), 30e6)], broadcast=None)
    assert routes[ADDRESS_OF_B].rate == 1e6


def test_broadcast_in_several_cells_occupies_all_cells():
    cells = [Cell(("a", "b"), 2e6), Cell(("a", "c"), 1e6)]
    route = routes_of_a(make_links(), cells)[BROADCAST]
    assert route.channels == ("cell of a, b", "cell of a, c")
    assert route.rate == 1e6


def test_only_gated_addresses_have_a_rule_for_the_queue():
    routes = routes_of_a(make_links(20e6))
    chain = gate_rules("eth1", routes)
    assert chain.rules == (f"-d {BROADCAST}/32 -j NFQUEUE --queue-num {QUEUE}",)
    assert ("OUTPUT", "-o", "eth1") in vars(chain).values()
