"""Shared channels and casts on bare network namespaces: who transmits, when, and how long it takes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from testbed.network.link import Cell, Link, Pair
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.shaper import Shaping
from tools.bench.bare import Network
from tools.bench.flows import measure_flows, tcp_rates

pytestmark = [
    pytest.mark.root,
    pytest.mark.timed,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

DEVICES = ("a", "b", "c", "d")
CELL = Cell(DEVICES, 250e3)
FRAME = 1514
PORT = 8702


@pytest.fixture
def net() -> Iterator[Network]:
    with contextlib.closing(Network(DEVICES)) as made:
        yield made


@pytest.fixture(params=["userspace", "netem"])
def shaping(request: pytest.FixtureRequest) -> Iterator[Shaping]:
    made = Shaping(request.param, seed=1)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    yield made
    os.setpriority(os.PRIO_PROCESS, 0, before)
    made.close()


def mesh(link: Link) -> dict[Pair, Link]:
    return dict.fromkeys(itertools.permutations(DEVICES, 2), link)


def broadcasts(
    net: Network, sources: str, count: int, gap: float, size: int = FRAME
) -> tuple[dict[tuple[str, int], float], dict[str, dict[tuple[str, int], float]]]:
    """Broadcast frames from each source at the same instants; return when each was sent, and when who heard it."""

    def bound() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        made.bind(("0.0.0.0", PORT))
        made.settimeout(1.0)
        return made

    sockets = {name: net.inside(name, bound) for name in DEVICES}
    sent: dict[tuple[str, int], float] = {}
    heard: dict[str, dict[tuple[str, int], float]] = {name: {} for name in DEVICES}

    def listen(name: str) -> None:
        with contextlib.suppress(TimeoutError):
            while len(heard[name]) < count * len(sources):
                source, number = struct.unpack_from("=cI", sockets[name].recv(2048))
                heard[name][source.decode(), number] = time.monotonic()

    threads = [threading.Thread(target=listen, args=(name,)) for name in DEVICES]
    for thread in threads:
        thread.start()
    start = time.monotonic() + 0.01
    for number in range(count):
        time.sleep(max(0.0, start + number * gap - time.monotonic()))
        for source in sources:
            content = struct.pack("=cI", source.encode(), number).ljust(size - 42, b".")
            sent[source, number] = time.monotonic()
            sockets[source].sendto(content, ("198.19.255.255", PORT))
    for thread in threads:
        thread.join()
    for each in sockets.values():
        each.close()
    return sent, heard


def test_a_cast_lasts_as_long_as_the_slowest_link_makes_it_and_is_charged_once(
    net: Network, shaping: Shaping
) -> None:
    links = mesh(Link(delay=0.005)) | {("a", "d"): Link(rate=250e3, delay=0.02)}
    shaping.attach(net.endpoints.values(), links)
    transmission = FRAME * 8 / 250e3
    sent, heard = broadcasts(net, "a", 8, 0.1)
    for name, delay in (("b", 0.005), ("c", 0.005), ("d", 0.02)):
        taken = [heard[name]["a", number] - sent["a", number] for number in range(8)]
        assert statistics.median(taken) == pytest.approx(
            transmission + delay, abs=0.0015
        )
    # Ten at once follow each other without a gap, however many hear them.
    sent, heard = broadcasts(net, "a", 10, 0)
    for name in "bcd":
        assert heard[name]["a", 9] - heard[name]["a", 0] == pytest.approx(
            9 * transmission, rel=0.01
        )


def test_receivers_lose_broadcasts_independently_and_a_partition_all(
    net: Network, shaping: Shaping
) -> None:
    lossy = {
        ("a", "b"): Link(loss=0.2),
        ("a", "c"): Link(loss=0.2),
        ("a", "d"): Link(up=False),
    }
    shaping.attach(net.endpoints.values(), mesh(Link()) | lossy)
    _, heard = broadcasts(net, "a", 2000, 0.0005, size=64)
    half = 2.58 * (2000 * 0.2 * 0.8) ** 0.5
    for name in "bc":
        assert abs(len(heard[name]) - 1600) <= half
    both = len(heard["b"].keys() & heard["c"].keys())
    assert abs(both - 2000 * 0.64) <= 2.58 * (2000 * 0.64 * 0.36) ** 0.5
    assert not heard["d"]
    shaping.set({("a", "d"): Link()})
    assert len(broadcasts(net, "a", 20, 0.001, size=64)[1]["d"]) == 20


def test_a_cell_carries_one_transmission_at_a_time(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.005)), [CELL])
    transmission = FRAME * 8 / CELL.rate
    # Three cast at the same instants; whoever listens hears one after the other.
    sent, heard = broadcasts(net, "abc", 4, 0.2)
    for number in range(4):
        arrivals = sorted(heard["d"][source, number] for source in "abc")
        assert arrivals[0] - sent["a", number] == pytest.approx(
            transmission + 0.005, abs=0.002
        )
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        assert gaps == pytest.approx([transmission] * 2, abs=0.002)


def test_all_transmissions_of_a_cell_share_its_rate(
    net: Network, shaping: Shaping
) -> None:
    cell = Cell(DEVICES, 2e6)
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)), [cell])
    _, heard = broadcasts(net, "abc", 30, 0)
    assert len(heard["d"]) == 90
    assert max(heard["d"].values()) - min(heard["d"].values()) == pytest.approx(
        89 * FRAME * 8 / 2e6, rel=0.01
    )
    alone = tcp_rates(net, [("a", "b")], 2.5, skip=0.5)["a", "b"]
    assert 0.90 * 2e6 <= alone <= 2e6
    both = tcp_rates(net, [("a", "b"), ("c", "d")], 3, skip=1)
    assert 0.88 * 2e6 <= sum(both.values()) <= 2e6
    assert min(both.values()) > 0.25 * 2e6
    assert shaping.statistics()["gate"]["dropped"] == {}


def test_links_of_a_cell_are_measured_as_they_are(
    net: Network, shaping: Shaping
) -> None:
    # Passing the gate takes 0.3 to 0.4 ms on a slow host: as much as is tolerated of 10 ms, half of what is of 40.
    shaping.attach(
        net.endpoints.values(), mesh(Link(delay=0.04)), [Cell(("a", "b", "c"), 250e3)]
    )
    measured = shaping.probe(list(mesh(Link())))
    assert [each.problem for each in measured] == [None] * 12
    rated = {
        (each.source, each.destination): each.rate
        for each in measured
        if each.rate is not None
    }
    [rate] = rated.values()
    assert rate is not None
    assert 0.96 * 250e3 <= rate <= 1.01 * 250e3
    assert all(
        not device["differences"] for device in shaping.show()["devices"].values()
    )


def test_a_cell_survives_the_restart_of_a_member_and_changes_live(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()), [CELL])
    net.stop("b")
    shaping.release_ended()
    again = net.add("b", net.endpoints["b"].address)
    shaping.attach([again], {}, [CELL])
    transmission = FRAME * 8 / CELL.rate
    taken = measure_flows(net, [("b", "c")], 3, 0.1, size=FRAME - 42)["b", "c"].delays
    assert taken == pytest.approx([transmission] * 3, abs=0.002)
    shaping.set({("b", "c"): Link(rate=125e3)})
    taken = measure_flows(net, [("b", "c")], 3, 0.2, size=FRAME - 42)["b", "c"].delays
    assert taken == pytest.approx([2 * transmission] * 3, abs=0.002)
    shaping.attach([], {}, [])
    assert (
        max(measure_flows(net, [("a", "c")], 3, 0.05)["a", "c"].delays)
        < transmission / 4
    )


def test_an_uplink_bounds_casts_too(net: Network, shaping: Shaping) -> None:
    a = net.endpoints["a"]
    limited = Endpoint("a", a.pid, a.address, uplink=500e3)
    others = [endpoint for name, endpoint in net.endpoints.items() if name != "a"]
    shaping.attach([limited, *others], mesh(Link()))
    _, heard = broadcasts(net, "a", 10, 0)
    assert heard["b"]["a", 9] - heard["b"]["a", 0] == pytest.approx(
        9 * FRAME * 8 / 500e3, rel=0.01
    )
