"""The shaper between network namespaces without containers: properties of links, probes and changes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from testbed.common.errors import HostError, InputError
from testbed.network.link import GilbertElliott, Link, Pair
from testbed.trace.outcome import LinkMeasurement
from testbed.wire.framing import CONGESTION_CONTROL
from testbed.wire.ports import CONTROL_PORT
from testbed_controller.lab.clients import Shaper
from testbed_controller.lab.health import is_healthy
from testbed_controller.shaping.interfaces import interface_names
from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import Endpoint
from testbed_controller.shaping.shaper import Shaping
from testbed_controller.shaping.trains import HEADERS
from tools.bench.bare import Network
from tools.bench.flows import measure_flows, tcp_rates, udp_rates

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

# Tolerances in seconds and as a fraction. They only distinguish links, so that a busy host does not fail these tests;
# test_conformance.py checks exact values and repeats failed measurements.
DELAY = 0.002
RATE = 0.1
SO_SNDBUFFORCE = 32  # not in Python's socket module


@pytest.fixture
def net() -> Iterator[Network]:
    with contextlib.closing(Network(["a", "b", "c"])) as network:
        yield network


@pytest.fixture(params=["userspace", "netem"])
def shaping(request: pytest.FixtureRequest) -> Iterator[Shaping]:
    shaping = Shaping(request.param, seed=1)
    # These tests measure links, and a busy host would delay sender and receiver in this process.
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -10)
    yield shaping
    os.setpriority(os.PRIO_PROCESS, 0, priority)
    shaping.close()


def one_way_delays(
    net: Network, source: str, destination: str, count: int, gap: float
) -> list[float]:
    """Send datagrams, and return the one-way delays of all arrivals in seconds."""
    pair = source, destination
    return measure_flows(net, [pair], count, gap)[pair].delays


def median_delay(
    net: Network, source: str, destination: str, count: int, gap: float = 0.002
) -> float:
    return statistics.median(one_way_delays(net, source, destination, count, gap))


def count_arrivals(net: Network, source: str, destination: str, count: int = 5) -> int:
    return len(one_way_delays(net, source, destination, count, gap=0.001))


def mesh(link: Link) -> dict[Pair, Link]:
    return dict.fromkeys(itertools.permutations("abc", 2), link)


def assert_no_differences(shaping: Shaping) -> None:
    """Compare the kernel's configuration of all devices with the requested one."""
    for device in shaping.show()["devices"].values():
        assert not device["differences"]


def by_pair(measurements: Iterable[LinkMeasurement]) -> dict[Pair, LinkMeasurement]:
    """Return measured links by pair; all must be within tolerance."""
    links = {(link.source, link.destination): link for link in measurements}
    assert [link.problem for link in links.values()] == [None] * len(links)
    return links


@pytest.mark.timed
def test_delay_applies_to_one_direction(net: Network, shaping: Shaping) -> None:
    links = mesh(Link()) | {("a", "b"): Link(delay=0.02), ("c", "b"): Link(delay=0.005)}
    shaping.attach(net.endpoints.values(), links)
    assert median_delay(net, "a", "b", 50) == pytest.approx(0.02, abs=DELAY)
    assert median_delay(net, "c", "b", 50) == pytest.approx(0.005, abs=DELAY)
    assert median_delay(net, "b", "a", 50) < DELAY


@pytest.mark.timed
def test_rate_limits_each_pair_separately(net: Network, shaping: Shaping) -> None:
    links = mesh(Link(rate=20e6, delay=0.005))
    shaping.attach(net.endpoints.values(), links)
    both = {pair: links[pair] for pair in (("a", "b"), ("a", "c"))}
    for rate in udp_rates(net, both, 0.6, skip=0.1).values():
        assert rate == pytest.approx(20e6, rel=RATE)
    rate = tcp_rates(net, [("a", "c")], 1.5, skip=0.5)["a", "c"]
    assert rate == pytest.approx(20e6, rel=RATE)


@pytest.mark.timed
def test_frame_arrives_after_its_transmission_time_and_delay(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=250e3, delay=0.005)))
    frame, gap = (64 + HEADERS) * 8 / 250e3, 0.05
    # After a pause, a shaper that sends a frame at the start of its transmission time would deliver it after the delay
    # alone.
    delay = median_delay(net, "a", "b", 10, gap)
    assert delay == pytest.approx(0.005 + frame, abs=0.0007)
    shaping.attach([replace(net.endpoints["b"], downlink=100e3)], {})
    # At 100 kbit/s a frame takes 2.5 times as long as at 250 kbit/s.
    delay = median_delay(net, "a", "b", 10, gap)
    assert delay == pytest.approx(0.005 + 2.5 * frame, abs=0.0007)


@pytest.mark.timed
def test_loss_is_within_binomial_bounds(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()) | {("a", "b"): Link(loss=0.1)})
    lost = 2000 - len(one_way_delays(net, "a", "b", 2000, gap=0.0002))
    # The standard deviation is sqrt(2000 * 0.1 * 0.9) = 13.4, and 2.58 of them contain 99 % of all results.
    assert abs(lost - 0.1 * 2000) <= 2.58 * 13.5
    assert len(one_way_delays(net, "b", "a", 500, gap=0.0002)) == 500


def test_link_down_drops_packets_until_it_is_up(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    shaping.set({("a", "b"): Link(up=False), ("b", "a"): Link(up=False)})
    assert count_arrivals(net, "a", "b") == 0
    assert count_arrivals(net, "b", "a") == 0
    assert count_arrivals(net, "a", "c") == 5
    shaping.set({("a", "b"): Link(delay=0.001)})
    # Without a pause after the change.
    assert count_arrivals(net, "a", "b") == 5
    assert count_arrivals(net, "b", "a") == 0


def test_pair_without_link_cannot_communicate(net: Network, shaping: Shaping) -> None:
    links = mesh(Link())
    del links["a", "b"]
    shaping.attach(net.endpoints.values(), links)
    assert count_arrivals(net, "a", "b") == 0
    assert count_arrivals(net, "b", "a") == 5


def test_all_connections_use_configured_congestion_control(
    shaping: Shaping,
) -> None:
    with contextlib.closing(Network(["a", "b", "c"], plugged=False)) as net:
        shaping.attach(net.endpoints.values(), mesh(Link()))
        assert congestion_controls(net) == {CONGESTION_CONTROL}
        net.stop("b")
        shaping.wait_for_end(5)
        # A restarted device has a new namespace with the host's default.
        shaping.attach([net.add("b", "198.18.0.3")], {})
        assert congestion_controls(net) == {CONGESTION_CONTROL}
    assert shaping.statistics()["congestion_control"] == CONGESTION_CONTROL


def congestion_controls(net: Network) -> set[str]:
    """Return the congestion control of both ends of a connection from a to b."""
    address = net.endpoints["b"].address
    with net.inside("b", lambda: socket.create_server((address, 0))) as server:
        target = server.getsockname()
        client_end = net.inside("a", lambda: socket.create_connection(target, 5))
        server_end, _ = server.accept()
    names = set()
    with client_end, server_end:
        for end in (client_end, server_end):
            name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            names.add(name.rstrip(b"\0").decode())
    return names


@pytest.mark.timed
def test_devices_are_connected_to_isolated_bridge(
    shaping: Shaping,
) -> None:
    with contextlib.closing(Network(["a", "b", "c"], plugged=False)) as net:
        shaping.attach(net.endpoints.values(), mesh(Link(delay=0.005)))
        assert median_delay(net, "a", "b", 20) == pytest.approx(0.005, abs=DELAY)
        addresses = net.sh("a", "ip -o -4 address show scope global")
        assert addresses.split()[3] == "198.18.0.2/15"
        ipv6_lines = net.sh("a", "cat /proc/net/if_inet6").splitlines()
        assert {line.split()[-1] for line in ipv6_lines} <= {"lo"}
        # One request for the absent gateway's MAC address saves the time of three.
        net.sh("a", "echo 1 > /proc/sys/net/ipv4/neigh/eth0/mcast_solicit")
        with pytest.raises(OSError, match="No route to host"):
            net.inside("a", lambda: socket.create_connection(("198.18.0.1", 22), 5))
        assert len(bridge_ports(shaping)) == 3
        # With permanent entries no device sends ARP requests.
        expected = {"198.18.0.3": "PERMANENT", "198.18.0.4": "PERMANENT"}
        assert neighbours(net, "a") == expected
        port_of_c = shaping.registry.devices["c"].port
        assert f"02:42:c6:12:00:04 dev {port_of_c}" in forwarding_table(shaping)
        net.stop("b")
        shaping.wait_for_end(5)
        assert len(bridge_ports(shaping)) == 2
        shaping.attach([net.add("b", "198.18.0.3")], {})
        assert count_arrivals(net, "a", "b") == 5
        assert count_arrivals(net, "b", "c") == 5
        assert_no_differences(shaping)


def neighbours(net: Network, name: str) -> dict[str, str]:
    """Return the states of a device's reachable neighbours, by address."""
    states = {}
    for line in net.sh(name, "ip neigh show dev eth0").splitlines():
        address, *_, state = line.split()
        if state != "FAILED":
            states[address] = state
    return states


def forwarding_table(shaping: Shaping) -> str:
    assert shaping.registry.bridge is not None
    return shaping.registry.bridge.run(lambda: command(["bridge", "fdb", "show"]))


def bridge_ports(shaping: Shaping) -> set[str]:
    assert shaping.registry.bridge is not None
    return shaping.registry.bridge.run(interface_names) - {"lo", "data"}


@pytest.mark.timed
def test_link_changes_do_not_affect_other_flows(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=100e6, delay=0.002)))
    delays: list[float] = []

    def send_others() -> None:
        delays.extend(one_way_delays(net, "c", "b", 2000, gap=0.0003))

    flow = threading.Thread(target=send_others)
    flow.start()
    for step in range(8):
        link = Link(
            rate=(step + 1) * 1e6,
            delay=step * 0.004,
            loss=0.01 * step,
            up=step % 4 != 3,
        )
        shaping.set({("a", "b"): link})
        time.sleep(0.03)
    flow.join()
    assert len(delays) == 2000


@pytest.mark.timed
def test_restarted_device_gets_current_links(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.01)))
    net.stop("b")
    shaping.set({("a", "c"): Link(delay=0.02), ("a", "b"): Link(delay=0.03)})
    shaping.attach([net.add("b", "198.18.0.3")], {})
    # The link from a to b was changed while b was down.
    assert median_delay(net, "a", "b", 10) == pytest.approx(0.03, abs=DELAY)
    assert median_delay(net, "b", "a", 10) == pytest.approx(0.01, abs=DELAY)


def test_differences_between_kernel_and_request_are_reported(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=10e6, delay=0.01)))
    assert_no_differences(shaping)
    net.sh("b", "tc class change dev data parent 1:3 classid 1:11 htb rate 3mbit")
    differences = shaping.show()["devices"]["b"]["differences"]
    assert any("1:11" in text for text in differences)


def test_invalid_requests_name_device_or_process(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()))
    with pytest.raises(InputError, match="nobody"):
        shaping.set({("a", "nobody"): Link()})
    # Linux has no process ids above 2 ** 22.
    with pytest.raises(HostError, match="process"):
        shaping.attach([Endpoint("x", 2**22 + 1, "198.18.0.9")], {})


@pytest.mark.timed
def test_probes_measure_requested_links(net: Network, shaping: Shaping) -> None:
    links = {
        ("a", "b"): Link(rate=50e6, delay=0.005),
        ("b", "a"): Link(rate=1e6, delay=0.0005),
        ("a", "c"): Link(loss=0.05),
        ("c", "a"): Link(rate=1e9, delay=0.02),
        ("b", "c"): Link(up=False),
        ("c", "b"): Link(rate=50e6, delay=0.005),
    }
    shaping.attach(net.endpoints.values(), links)
    start = time.monotonic()
    measured = by_pair(shaping.probe(list(links)))
    assert time.monotonic() - start < 5
    assert list(measured) == list(links)
    assert measured["a", "b"].rate == pytest.approx(50e6, rel=RATE)
    # Of equal links only one rate is measured, here that of a -> b.
    assert measured["c", "b"].rate is None
    assert measured["a", "c"].packets >= 500
    assert measured["b", "c"].loss == 1


@pytest.mark.timed
def test_probes_verify_all_impairments_and_access_limits(
    net: Network, shaping: Shaping
) -> None:
    links = {
        ("a", "b"): Link(rate=20e6, delay=0.02, jitter=0.004, distribution="pareto"),
        ("b", "a"): Link(bursts=GilbertElliott(p=0.05, r=0.3), delay=0.005),
        ("a", "c"): Link(delay=0.005, loss=0.1, loss_correlation=0.3),
        ("c", "a"): Link(delay=0.005, duplicate=0.2, corrupt=0.05),
        ("b", "c"): Link(rate=30e6, delay=0.01, reorder=0.2),
        ("c", "b"): Link(rate=30e6, delay=0.01),
    }
    downlink = None if shaping.facts()["backend"] == "netem" else 15e6
    limited = [
        replace(net.endpoints["b"], uplink=10e6),
        replace(net.endpoints["c"], downlink=downlink),
    ]
    shaping.attach([net.endpoints["a"], *limited], links)
    measured = by_pair(shaping.probe(list(links)))
    assert len(measured) == 6
    assert_no_differences(shaping)
    # The uplink of b is slower than the link.
    assert measured["b", "c"].rate == pytest.approx(10e6, rel=RATE)
    assert measured["c", "b"].rate == pytest.approx(30e6, rel=RATE)


@pytest.mark.timed
def test_probes_report_link_with_wrong_rate(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=50e6, delay=0.005)))
    net.sh(
        "a",
        "tc class change dev data parent 1:3 classid 1:12 htb rate 30mbit burst 4000 cburst 4000",
    )
    [measurement] = shaping.probe([("a", "b")])
    assert "mbit instead of 50 mbit" in (measurement.problem or "")


@pytest.mark.timed
def test_probes_verify_rates_of_slow_sensor_links(
    net: Network, shaping: Shaping
) -> None:
    links = {
        ("a", "b"): Link(rate=8e3, delay=0.02),
        ("b", "a"): Link(rate=27e3, delay=0.02),
        ("b", "c"): Link(rate=64e3, delay=0.02),
        ("c", "b"): Link(rate=8e3, delay=0.02),
    }
    shaping.attach(net.endpoints.values(), links)
    measured = by_pair(shaping.probe(list(links)))
    assert len(measured) == 4
    for pair, rate in ((("a", "b"), 8e3), (("b", "a"), 27e3), (("b", "c"), 64e3)):
        assert measured[pair].rate == pytest.approx(rate, rel=0.01)


@pytest.mark.timed
def test_probes_verify_downlink_of_unlimited_sender(
    net: Network, shaping: Shaping
) -> None:
    limited = [
        replace(net.endpoints[name], uplink=50e6, downlink=50e6) for name in "bc"
    ]
    shaping.attach([net.endpoints["a"], *limited], mesh(Link(delay=0.005)))
    measured = by_pair(shaping.probe(list(mesh(Link()))))
    assert len(measured) == 6
    assert measured["a", "b"].rate == pytest.approx(50e6, rel=0.03)
    assert measured["a", "b"].limit == 50e6


def test_drops_of_queues_are_counted(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(rate=1e6, delay=0.001)))
    sender = net.inside("a", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    # Otherwise the sender's buffer would block before the queue is full.
    sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 16 << 20)
    for _ in range(400):
        sender.sendto(bytes(1000), ("198.18.0.3", 9))
    sender.close()
    assert shaping.statistics()["queues"]["a"]["sender_drops"] > 50


def test_datagrams_dropped_by_full_socket_are_counted(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link()))
    unread = net.inside("c", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    unread.bind((net.endpoints["c"].address, 9))
    sender = net.inside("a", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with unread, sender:
        for _ in range(200):
            sender.sendto(bytes(1400), (net.endpoints["c"].address, 9))
        time.sleep(0.2)
        queues = shaping.statistics()["queues"]
    # The buffer of 64 kB holds some of the 200 datagrams.
    assert 50 < queues["c"]["unread"] < 200
    assert queues["a"]["unread"] == 0


@pytest.fixture
def shaper_url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    environment = {
        **os.environ,
        "TESTBED_TOKEN": "secret",
        "TESTBED_HOST": "127.0.0.1",
        "TESTBED_PORT": str(port),
        "TESTBED_LINKS": "auto",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed_controller.shaping"], env=environment
    )
    url = f"http://127.0.0.1:{port}"
    while not is_healthy(url):
        assert process.poll() is None
        time.sleep(0.05)
    yield url
    process.terminate()
    assert process.wait(10) == 0


@pytest.mark.timed
def test_shaper_serves_requests_over_http(net: Network, shaper_url: str) -> None:
    shaper = Shaper(shaper_url, "secret")
    assert shaper.facts()["backend"] in ("userspace", "netem")
    shaper.attach(net.endpoints.values(), mesh(Link(delay=0.005)), seed=3)
    shaper.set({("a", "b"): Link(delay=0.01)})
    [measurement] = shaper.probe([("a", "b")])
    assert measurement.delay == pytest.approx(0.01, abs=DELAY)
    assert measurement.requested == Link(delay=0.01)
    links = {
        (link["source"], link["destination"]): link for link in shaper.show()["links"]
    }
    assert (links["a", "b"]["delay"], links["a", "b"]["up"]) == (0.01, True)
    assert set(shaper.statistics(reset=True)["queues"]) == {"a", "b", "c"}
    with pytest.raises(InputError, match="device 'x' is not attached"):
        shaper.set({("a", "x"): Link()})
    with pytest.raises(HostError, match="token"):
        Shaper(shaper_url, "wrong").facts()
    response = requests.post(
        f"{shaper_url}/set",
        json={"links": [{"nonsense": 1}]},
        headers={"Authorization": "Bearer secret"},
    )
    assert response.status_code == 400


def test_shaper_forwards_requests_to_devices(net: Network, shaper_url: str) -> None:
    Shaper(shaper_url, "secret").attach(net.endpoints.values(), mesh(Link()))
    received: list[tuple[str, bytes]] = []

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            length = int(self.headers["Content-Length"])
            received.append((self.path, self.rfile.read(length)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

    def serve() -> ThreadingHTTPServer:
        return ThreadingHTTPServer(("127.0.0.1", CONTROL_PORT), Echo)

    with (
        net.inside("a", serve) as a,
        net.inside("b", serve) as b,
        requests.Session() as session,
    ):
        for server in (a, b):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        large = os.urandom(1 << 20)
        for name, path, body in (
            ("a", "/x?y=1", b"1"),
            ("a", "/x", large),
            ("b", "/devices/a/z", b""),
            ("a", "/", b"2"),
        ):
            response = session.put(
                f"{shaper_url}/devices/{name}{path}",
                data=body,
                headers={"Content-Length": str(len(body))},
            )
            assert (response.text, received.pop()) == ("ok", (path, body))
        assert session.get(f"{shaper_url}/health").json() == {"state": "ready"}
        # c has no agent, and "nobody" does not exist.
        for name in ("c", "nobody"):
            response = session.get(f"{shaper_url}/devices/{name}/health")
            assert response.status_code == 502
        for server in (a, b):
            server.shutdown()


def test_ended_device_is_released(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    net.stop("b")
    shaping.release_ended()
    assert set(shaping.show()["devices"]) == {"a", "c"}
    with pytest.raises(InputError, match="'b' is not running"):
        shaping.probe([("a", "b")])
    assert count_arrivals(net, "a", "c") == 5


def test_partition_drops_packets_silently_in_both_directions(
    net: Network, shaping: Shaping
) -> None:
    down = {("a", "b"): Link(up=False), ("b", "a"): Link(up=False)}
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    address = net.endpoints["b"].address

    def connect(port: int, timeout: float) -> socket.socket:
        return net.inside(
            "a", lambda: socket.create_connection((address, port), timeout)
        )

    server = net.inside("b", lambda: socket.create_server((address, 4000)))
    with server, connect(4000, timeout=2) as established:
        shaping.set(down)
        # Existing and new connections get neither a refusal nor an ICMP message, to an open as to a closed port.
        established.settimeout(0.5)
        established.send(b"into the void")
        with pytest.raises(TimeoutError):
            established.recv(1)
        for port in (4000, 4001):
            with pytest.raises(TimeoutError):
                connect(port, timeout=0.3)
        shaping.set(dict.fromkeys(down, Link(delay=0.001)))
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(5)
            assert accepted.recv(100) == b"into the void"


@pytest.mark.timed
def test_invalid_links_are_refused_without_change(
    net: Network, shaping: Shaping
) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    with pytest.raises(InputError, match="a -> b: a jitter of 5ms is above the delay"):
        shaping.set({("a", "b"): Link(delay=0.001, jitter=0.005)})
    if shaping.facts()["backend"] == "netem":
        correlated = Link(delay=0.01, jitter=0.001, jitter_correlation=0.5)
        with pytest.raises(HostError, match="--links userspace"):
            shaping.set({("a", "b"): correlated})
    else:
        # The userspace backend injects copies, which this filter of source addresses would drop.
        net.sh("b", "echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter")
        with pytest.raises(HostError, match="rp_filter"):
            shaping.set({("a", "b"): Link(delay=0.01, duplicate=0.5)})
    assert median_delay(net, "a", "b", 20) == pytest.approx(0.001, abs=DELAY)
    # Valid links are still accepted.
    shaping.set({("a", "b"): Link(delay=0.002)})


def test_incomplete_device_is_set_up_again(net: Network, shaping: Shaping) -> None:
    shaping.attach(net.endpoints.values(), mesh(Link(delay=0.001)))
    net.sh("a", "tc qdisc del dev data root")
    with pytest.raises(HostError, match="tc"):
        shaping.set({("a", "b"): Link(rate=5e6, delay=0.001)})
    shaping.set({("a", "b"): Link(rate=5e6, delay=0.001)})
    assert_no_differences(shaping)


def test_device_without_its_address_is_refused(net: Network, shaping: Shaping) -> None:
    with pytest.raises(HostError, match=r"has the address 198\.18\.9\.9"):
        shaping.attach([Endpoint("a", net.endpoints["a"].pid, "198.18.9.9")], {})
