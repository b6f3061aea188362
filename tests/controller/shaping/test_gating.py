"""Which packets wait at the gate, at which rate, and the rules that lead them there."""

from controller.shaping.medium import GATED_RATE, QUEUE, gate_rules, routes
from testbed.network.link import Link
from testbed.network.topology import Cell

PEERS = {"a": "10.0.0.2", "b": "10.0.0.3", "c": "10.0.0.4"}
BROADCAST = "10.0.0.255"


def links(rate=None):
    return {(one, other): Link(rate=rate) for one in PEERS for other in PEERS if one != other}


def test_without_cells_and_with_fast_links_nothing_waits():
    assert routes("a", BROADCAST, PEERS, links(), ()) == {}
    assert routes("a", BROADCAST, PEERS, links(2 * GATED_RATE), ()) == {}


def test_slow_casts_have_a_channel_of_their_own():
    found = routes("a", BROADCAST, PEERS, links(1e6), ())
    assert set(found) == {BROADCAST}
    assert found[BROADCAST].channels == ("casts of a",)
    assert found[BROADCAST].rate == 1e6


def test_casts_are_as_slow_as_the_slowest_link_and_the_access():
    uneven = links(10e6) | {("a", "c"): Link(rate=2e6), ("b", "a"): Link(rate=1e3)}
    assert routes("a", BROADCAST, PEERS, uneven, ())[BROADCAST].rate == 2e6
    assert routes("a", BROADCAST, PEERS, uneven, (), uplink=5e5)[BROADCAST].rate == 5e5


def test_what_stays_in_a_cell_shares_its_channel_with_the_casts():
    found = routes("a", BROADCAST, PEERS, links(50e6), [Cell(("a", "b"), 30e6)])
    assert set(found) == {PEERS["b"], BROADCAST}
    assert {route.channels for route in found.values()} == {("cell of a, b",)}
    assert {route.rate for route in found.values()} == {30e6}  # the casts too, though they are fast


def test_a_link_slower_than_its_cell_keeps_its_rate():
    assert routes("a", None, PEERS, links(1e6), [Cell(("a", "b"), 30e6)])[PEERS["b"]].rate == 1e6


def test_a_cast_in_several_cells_takes_all_of_them():
    found = routes("a", BROADCAST, PEERS, links(), [Cell(("a", "b"), 2e6), Cell(("a", "c"), 1e6)])
    assert found[BROADCAST].channels == ("cell of a, b", "cell of a, c")
    assert found[BROADCAST].rate == 1e6


def test_rules_lead_exactly_these_addresses_into_the_queue():
    gated = routes("a", BROADCAST, PEERS, links(1e6), ())
    made = gate_rules("eth1", gated)
    assert made.rules == (f"-d {BROADCAST}/32 -j NFQUEUE --queue-num {QUEUE}",)
    assert ("OUTPUT", "-o", "eth1") in vars(made).values()
