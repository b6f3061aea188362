"""The shaper on bare network namespaces: what packets meet is what was asked for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
from networks import Network, is_root, network, one_way, tcp_rate, udp_rate

from controller.shaping.shaper import Shaping
from testbed.errors import HostError, InputError
from testbed.network.link import Link

pytestmark = [pytest.mark.root, pytest.mark.skipif(not is_root(), reason="needs root")]


@pytest.fixture
def net() -> Iterator[Network]:
    with network("a", "b", "c") as made:
        yield made


@pytest.fixture
def shaping() -> Iterator[Shaping]:
    made = Shaping("userspace", seed=1)
    yield made
    made.close()


def mesh(link: Link) -> dict[tuple[str, str], Link]:
    return {(source, destination): link for source in "abc" for destination in "abc" if source != destination}


def test_delay_is_one_way_and_by_direction(net: Network, shaping: Shaping) -> None:
    links = mesh(Link()) | {("a", "b"): Link(delay=0.02), ("c", "b"): Link(delay=0.005)}
    shaping.attach(net.endpoints.values(), links)
    assert statistics.median(one_way(net, "a", "b", 50, 0.002)) == pytest.approx(0.02, abs=0.0004)
    assert statistics.median(one_way(net, "c", "b", 50, 0.002)) == pytest.approx(0.005, abs=0.0003)
    assert statistics.median(one_way(net, "b", "a", 50, 0.002)) < 0.0003


def test_rate_is_charged_at_the_sender_per_pair(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=20e6, delay=0.005)))
    rate, lost = udp_rate(net, "a", "b", 0.6)
    assert 0.96 * 20e6 <= rate <= 1.01 * 20e6
    assert lost == 0
    assert tcp_rate(net, "a", "c", 1.5) >= 0.92 * 20e6


def test_loss_is_within_its_binomial_bounds(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()) | {("a", "b"): Link(loss=0.1)})
    lost = 2000 - len(one_way(net, "a", "b", 2000, 0.0002))
    assert 0.1 * 2000 - 2.58 * 13.5 <= lost <= 0.1 * 2000 + 2.58 * 13.5
    assert len(one_way(net, "b", "a", 500, 0.0002)) == 500


def test_down_drops_silently_and_up_again_within_50_ms(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    shaping.set({("a", "b"): Link(up=False), ("b", "a"): Link(up=False)})
    assert one_way(net, "a", "b", 5, 0.001) == []
    assert one_way(net, "b", "a", 5, 0.001) == []
    assert len(one_way(net, "a", "c", 5, 0.001)) == 5
    shaping.set({("a", "b"): Link(delay=0.001)})
    assert len(one_way(net, "a", "b", 5, 0.001)) == 5
    assert one_way(net, "b", "a", 5, 0.001) == []


def test_a_pair_without_a_link_cannot_talk(net: Network, shaping: Shaping) -> None:
    links = mesh(Link())
    del links["a", "b"]
    shaping.attach(net.endpoints.values(), links)
    assert one_way(net, "a", "b", 5, 0.001) == []
    assert len(one_way(net, "b", "a", 5, 0.001)) == 5


def test_a_change_spares_the_flows_of_others(net: Network, shaping: Shaping) -> None:
    import threading

    shaping.attach(net.endpoints.values(), mesh(Link(rate=100e6, delay=0.002)))
    arrived: list[float] = []
    flow = threading.Thread(target=lambda: arrived.extend(one_way(net, "c", "b", 2000, 0.0003)))
    flow.start()
    for step in range(8):
        shaping.set({("a", "b"): Link(rate=(step + 1) * 1e6, delay=step * 0.004, loss=0.01 * step, up=step % 4 != 3)})
        time.sleep(0.03)
    flow.join()
    assert len(arrived) == 2000


def test_a_change_takes_effect_within_50_ms(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.1)))
    before = time.monotonic()
    shaping.set({("a", "b"): Link(delay=0.001)})
    took = time.monotonic() - before
    assert statistics.median(one_way(net, "a", "b", 5, 0.001)) < 0.002
    assert took < 0.05


def test_a_device_that_restarts_is_shaped_again(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.01)))
    net.stop("b")
    shaping.set({("a", "c"): Link(delay=0.02), ("a", "b"): Link(delay=0.03)})
    again = net.add("b", "198.18.0.3")
    shaping.attach([again], {})
    assert statistics.median(one_way(net, "a", "b", 10, 0.002)) == pytest.approx(0.03, abs=0.0006)
    assert statistics.median(one_way(net, "b", "a", 10, 0.002)) == pytest.approx(0.01, abs=0.0004)


def test_what_the_kernel_holds_is_compared_with_what_was_asked(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=10e6, delay=0.01)))
    assert all(not device["differences"] for device in shaping.show()["devices"].values())
    net.sh("b", "tc class change dev data parent 1: classid 1:11 htb rate 3mbit; iptables-nft -F TESTBED || true")
    assert any("1:11" in text for text in shaping.show()["devices"]["b"]["differences"])


def test_bad_requests_name_what_is_wrong(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()))
    with pytest.raises(InputError, match="nobody"):
        shaping.set({("a", "nobody"): Link()})
    with pytest.raises(HostError, match="process"):
        shaping.attach([net.endpoints["a"].__class__("x", 2**22 + 1, "198.18.0.9")], {})
