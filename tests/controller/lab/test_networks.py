"""Networks of a run and their addresses, with a replacement of the engine that answers like Docker."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from docker.errors import APIError
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import HostError, InputError
from testbed.network.checks import prefix_for
from testbed_controller.lab import networks
from testbed_controller.lab.networks import (
    DEFAULT_RANGE,
    data_subnet,
    device_addresses,
    free_subnets,
    host_routes,
    make_control_network,
    subnets,
)
from testbed_controller.lab.removal import RUN
from testbed_controller.shaping.namespaces import Namespace, command

OWN_POOL = "172.30.0.0/16"
"""The subnet of networks without a chosen subnet."""
CONTROL = "testbed-run-1-control"
"""Name of the control network of the run ``run-1``."""


class Engine:
    """A container engine with networks of different names and disjoint subnets.

    Networks in ``hidden`` are not listed. ``refuses`` is an option, "pools" or "all".
    """

    overlap = "Pool overlaps with other one on this address space"
    """Error message for a subnet in use."""

    def __init__(
        self, *used: str, hidden: tuple[str, ...] = (), refuses: str = ""
    ) -> None:
        self.api = self
        self.created: dict[str, Any] = {}
        self._used = list(used)
        self._hidden = hidden
        self._refuses = refuses

    def networks(self) -> list[dict[str, Any]]:
        # Networks of other drivers have no configuration, or an empty one.
        return [
            {"IPAM": {"Config": [{"Subnet": subnet} for subnet in self._used]}},
            {"IPAM": {"Config": None}},
            {"IPAM": {"Config": [{}]}},
        ]

    def create_network(
        self, name: str, driver: str, ipam: Any, labels: dict[str, str], **options: Any
    ) -> None:
        if ipam is None and self._refuses == "pools":
            raise api_error("all predefined address pools have been fully subnetted")
        subnet = IPv4Network(ipam["Config"][0]["Subnet"] if ipam else OWN_POOL)
        if self._refuses == "all" or self._refuses in options.get("options", {}):
            raise api_error("no such option here")
        if name in self.created:
            raise api_error(f"network with name {name} already exists")
        for used in (*self._hidden, *self._used):
            # IPv6 networks contain a colon.
            if ":" not in used and subnet.overlaps(IPv4Network(used)):
                raise api_error(self.overlap)
        network = SimpleNamespace(subnet=subnet, labels=labels, options=options)
        self.created[name] = network
        self._used.append(str(subnet))

    def inspect_network(self, name: str) -> dict[str, Any]:
        return {"IPAM": {"Config": [{"Subnet": str(self.created[name].subnet)}]}}

    def control_subnet(self) -> IPv4Network:
        subnet: IPv4Network = self.created[CONTROL].subnet
        return subnet


def api_error(text: str) -> APIError:
    return APIError("refused", response=requests.Response(), explanation=text)


@pytest.fixture(autouse=True)
def _one_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the routes of the machine by a single one, to 198.18.1.0/24."""
    route = IPv4Network("198.18.1.0/24")
    monkeypatch.setattr(
        networks,
        "host_routes",
        lambda within: [route] if route.overlaps(IPv4Network(within)) else [],
    )


def test_control_network_uses_first_free_subnet_without_masquerading() -> None:
    engine = Engine("172.17.0.0/16", "198.18.0.0/24", "fd00::/64")
    make_control_network(engine, "run-1")
    [(name, network)] = engine.created.items()
    assert name == CONTROL
    assert network.labels == {RUN: "run-1"}
    # Without masquerading, containers do not reach other networks.
    options = network.options["options"]
    assert options["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    # The engine has 198.18.0.0/24, and this machine has a route to 198.18.1.0/24.
    assert network.subnet == IPv4Network("198.18.2.0/24")


def test_data_subnet_depends_only_on_range_and_size() -> None:
    # Data networks of different runs are isolated, and may have equal addresses.
    first = IPv4Network("10.9.0.0/24")
    assert data_subnet("10.9.0.0/16", 5) == first
    assert data_subnet("10.9.0.0/16", 6) == first
    with pytest.raises(InputError, match="no room for 3 devices"):
        data_subnet("10.9.8.0/30", 3)


@pytest.mark.parametrize(
    "message",
    [
        Engine.overlap,
        "subnet 198.18.0.0/24 is already used on the host or by another config",
    ],
)
def test_subnet_taken_in_the_meantime_is_skipped(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr(Engine, "overlap", message)
    # Another run created this network after the networks were listed.
    engine = Engine(hidden=("198.18.0.0/24",))
    make_control_network(engine, "run-1")
    assert engine.control_subnet() == IPv4Network("198.18.2.0/24")


def test_repeated_creation_of_network_succeeds() -> None:
    engine = Engine()
    make_control_network(engine, "run-1")
    make_control_network(engine, "run-1")
    assert len(engine.created) == 1


def test_refusal_by_engine_is_reported_without_retries() -> None:
    message = r"cannot create the control network \(no such option here\)"
    with pytest.raises(HostError, match=message):
        make_control_network(Engine(refuses="all"), "run-1")


def test_engine_chooses_subnet_if_default_range_is_full() -> None:
    engine = Engine("198.18.0.0/15")
    make_control_network(engine, "run-1")
    assert engine.control_subnet() == IPv4Network(OWN_POOL)


def test_refusal_names_obstacles_and_key_for_another_range() -> None:
    with pytest.raises(HostError) as raised:
        make_control_network(Engine("198.18.0.0/15", refuses="pools"), "run-1")
    text = str(raised.value)
    for cause in (
        "a route of this machine to 198.18.1.0/24",
        "the network 198.18.0.0/15 of the engine",
    ):
        assert cause in text
    assert "fully subnetted" in text
    assert text.endswith("choose a free range with network.control_subnet")


def test_subnet_outside_chosen_range_is_never_used() -> None:
    engine = Engine("10.77.0.0/24")
    make_control_network(engine, "run-1", "10.77.0.0/16")
    assert engine.control_subnet() == IPv4Network("10.77.1.0/24")
    message = r"10\.77\.0\.0/16 is taken by the network 10\.77\.0\.0/16 of the engine"
    with pytest.raises(HostError, match=message):
        make_control_network(Engine("10.77.0.0/16"), "run-1", "10.77.0.0/16")
    with pytest.raises(InputError, match="no room") as raised:
        make_control_network(Engine(), "run-1", "10.77.0.0/31")
    assert raised.value.key == ("network", "control_subnet")


def test_ipv6_subnets_are_ignored() -> None:
    engine = Engine("172.17.0.0/16", "fd00::/64")
    assert subnets(engine) == [IPv4Network("172.17.0.0/16")]


@pytest.mark.parametrize(
    ("devices", "prefix"),
    [(1, 24), (253, 24), (254, 23), (509, 23), (510, 22), (1000, 22)],
)
def test_subnet_has_room_for_devices(devices: int, prefix: int) -> None:
    # A /24 has 256 addresses: the network, the bridge, 253 devices and the broadcast.
    assert prefix_for(devices) == prefix


def test_first_free_subnets_are_chosen() -> None:
    used = [
        IPv4Network("198.18.0.0/24"),
        # Half of a subnet makes the whole subnet unusable.
        IPv4Network("198.18.1.128/25"),
        IPv4Network("172.17.0.0/16"),
    ]
    subnets = list(islice(free_subnets(DEFAULT_RANGE, 4, used), 2))
    assert subnets == [IPv4Network("198.18.2.0/24"), IPv4Network("198.18.3.0/24")]


def test_range_in_use_has_no_free_subnets() -> None:
    assert list(free_subnets("10.9.8.0/24", 4, [IPv4Network("10.0.0.0/8")])) == []


def test_range_smaller_than_default_subnet_is_one_subnet() -> None:
    assert list(free_subnets("10.9.8.0/28", 4, [])) == [IPv4Network("10.9.8.0/28")]


def test_range_too_small_is_refused_with_size_needed() -> None:
    message = r"no room for 300 devices: write a range of /23"
    with pytest.raises(InputError, match=message):
        next(free_subnets("10.9.8.0/24", 300, []))


def test_addresses_are_in_order_of_scenario_after_bridge() -> None:
    # The bridge has 198.18.4.1.
    addresses = device_addresses(IPv4Network("198.18.4.0/24"), ["source", "worker1"])
    assert addresses == {
        "source": IPv4Address("198.18.4.2"),
        "worker1": IPv4Address("198.18.4.3"),
    }


@given(st.integers(1, 1000))
def test_devices_have_different_addresses_within_subnet(count: int) -> None:
    subnet = next(free_subnets(DEFAULT_RANGE, count, []))
    names = [f"d{index}" for index in range(count)]
    addresses = set(device_addresses(subnet, names).values())
    assert len(addresses) == count
    for address in addresses:
        assert address in subnet
        assert address != subnet.broadcast_address


def test_more_devices_than_addresses_are_refused() -> None:
    # Of eight addresses, five are left for devices.
    with pytest.raises(HostError, match="no room"):
        device_addresses(IPv4Network("10.0.0.0/29"), list("abcdef"))


@pytest.fixture
def routes_after() -> Iterator[Callable[..., list[IPv4Network]]]:
    """Return a function: run commands of ``ip`` in a new namespace, and return routes within the default range."""
    with contextlib.closing(Namespace.scratch()) as scratch:
        for line in (
            "link add tun0 type veth",
            "addr add 10.8.0.2/24 dev tun0",
            "link set tun0 up",
        ):
            scratch.run(partial(command, ["ip", *line.split()]))

        def run(*lines: str) -> list[IPv4Network]:
            for line in lines:
                scratch.run(partial(command, ["ip", *line.split()]))
            return scratch.run(partial(host_routes, DEFAULT_RANGE))

        yield run


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_routes_larger_than_range_are_ignored(
    routes_after: Callable[..., list[IPv4Network]],
) -> None:
    # A VPN for all traffic adds two halves of the default route. The route of a new network would be more specific.
    routes = routes_after(
        "route add 0.0.0.0/1 dev tun0",
        "route add 128.0.0.0/1 dev tun0",
        "route add default dev tun0",
        "route add 198.0.0.0/8 dev tun0",
    )
    assert routes == []
    routes = routes_after("route add 198.18.0.0/16 dev tun0")
    assert routes == [IPv4Network("198.18.0.0/16")]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_routes_of_other_tables_and_addresses_are_included(
    routes_after: Callable[..., list[IPv4Network]],
) -> None:
    # VPNs have routing tables of their own; WireGuard's is 51820.
    routes = routes_after(
        "route add 198.18.0.0/16 dev tun0 table 2022",
        "rule add to 198.18.0.0/16 lookup 2022 pref 9000",
        "route add default dev tun0 table 51820",
    )
    assert routes == [IPv4Network("198.18.0.0/16")]
    routes = routes_after("addr add 198.19.0.1/32 dev tun0")
    assert IPv4Network("198.19.0.1/32") in routes


def test_machines_other_than_linux_have_no_known_routes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only Linux has netlink, from which the routing tables are read.
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_routes(DEFAULT_RANGE) == []
