"""Networks of a run and their addresses, with an engine that has some already and answers as Docker's does."""

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
"""What the engine gives to a network whose subnet nobody chose."""


class Engine:
    """Keeps networks as the engine does: no two overlap, no two of one name; ``refuses`` some options or all."""

    overlap = "Pool overlaps with other one on this address space"
    """What it says of a subnet that is taken."""

    def __init__(
        self, *taken: str, hidden: tuple[str, ...] = (), refuses: str = ""
    ) -> None:
        self.api = self
        self.made: dict[str, Any] = {}
        self._taken, self._hidden, self._refuses = list(taken), hidden, refuses

    def networks(self) -> list[dict[str, Any]]:
        shown = [{"Subnet": each} for each in self._taken]
        return [
            {"IPAM": {"Config": shown}},
            {"IPAM": {"Config": None}},
            {"IPAM": {"Config": [{}]}},
        ]

    def create_network(
        self, name: str, driver: str, ipam: Any, labels: dict[str, str], **options: Any
    ) -> None:
        if ipam is None and self._refuses == "pools":
            raise refused("all predefined address pools have been fully subnetted")
        subnet = IPv4Network(ipam["Config"][0]["Subnet"] if ipam else OWN_POOL)
        if self._refuses and (
            self._refuses == "all" or self._refuses in options.get("options", {})
        ):
            raise refused("no such option here")
        if name in self.made:
            raise refused(f"network with name {name} already exists")
        if any(
            subnet.overlaps(IPv4Network(each))
            for each in (*self._hidden, *self._taken)
            if ":" not in each
        ):
            raise refused(self.overlap)
        self.made[name] = SimpleNamespace(subnet=subnet, labels=labels, options=options)
        self._taken.append(str(subnet))

    def inspect_network(self, name: str) -> dict[str, Any]:
        return {"IPAM": {"Config": [{"Subnet": str(self.made[name].subnet)}]}}


def refused(text: str) -> APIError:
    return APIError("refused", response=requests.Response(), explanation=text)


@pytest.fixture(autouse=True)
def without_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    route = IPv4Network("198.18.1.0/24")
    monkeypatch.setattr(
        networks,
        "host_routes",
        lambda within: [route] if route.overlaps(IPv4Network(within)) else [],
    )


def test_a_run_has_a_network_for_control_that_leads_nowhere() -> None:
    engine = Engine("172.17.0.0/16", "198.18.0.0/24", "fd00::/64")
    make_control_network(engine, "run-1")
    [(name, made)] = engine.made.items()
    assert (name, made.labels) == ("testbed-run-1-control", {RUN: "run-1"})
    assert (
        made.options["options"]["com.docker.network.bridge.enable_ip_masquerade"]
        == "false"
    )
    assert made.subnet == IPv4Network("198.18.2.0/24"), (
        "the first that neither the engine nor this machine has"
    )


def test_the_data_network_of_a_run_is_the_same_whatever_else_there_is() -> None:
    assert (
        data_subnet("10.9.0.0/16", 5)
        == data_subnet("10.9.0.0/16", 6)
        == IPv4Network("10.9.0.0/24")
    )
    with pytest.raises(InputError, match="no room for 3 devices"):
        data_subnet("10.9.8.0/30", 3)


@pytest.mark.parametrize(
    "said",
    [
        Engine.overlap,
        "subnet 198.18.0.0/24 is already used on the host or by another config",
    ],
)
def test_subnet_taken_in_the_meantime_is_skipped(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(Engine, "overlap", said)
    engine = Engine(hidden=("198.18.0.0/24",))
    make_control_network(engine, "run-1")
    assert engine.made["testbed-run-1-control"].subnet == IPv4Network("198.18.2.0/24")


def test_repeated_creation_of_a_network_succeeds() -> None:
    engine = Engine()
    make_control_network(engine, "run-1")
    make_control_network(engine, "run-1")
    assert len(engine.made) == 1


def test_refusal_of_the_engine_is_reported_without_retries() -> None:
    with pytest.raises(
        HostError, match=r"cannot create the control network \(no such option here\)"
    ):
        make_control_network(Engine(refuses="all"), "run-1")


def test_a_range_without_a_free_subnet_is_left_to_the_pools_of_the_engine() -> None:
    engine = Engine("198.18.0.0/15")
    make_control_network(engine, "run-1")
    assert engine.made["testbed-run-1-control"].subnet == IPv4Network(OWN_POOL)


def test_refusal_names_the_obstacles_and_the_key_for_another_range() -> None:
    with pytest.raises(HostError) as refusal:
        make_control_network(Engine("198.18.0.0/15", refuses="pools"), "run-1")
    text = str(refusal.value)
    for cause in (
        "a route of this machine to 198.18.1.0/24",
        "the network 198.18.0.0/15 of the engine",
    ):
        assert cause in text
    assert "fully subnetted" in text
    assert text.endswith("choose a free range with network.control_subnet")


def test_a_chosen_range_is_kept_to() -> None:
    engine = Engine("10.77.0.0/24")
    make_control_network(engine, "run-1", "10.77.0.0/16")
    assert engine.made["testbed-run-1-control"].subnet == IPv4Network("10.77.1.0/24")
    with pytest.raises(
        HostError,
        match=r"10\.77\.0\.0/16 is taken by the network 10\.77\.0\.0/16 of the engine",
    ):
        make_control_network(Engine("10.77.0.0/16"), "run-1", "10.77.0.0/16")
    with pytest.raises(InputError, match="no room") as refusal:
        make_control_network(Engine(), "run-1", "10.77.0.0/31")
    assert refusal.value.key == ("network", "control_subnet")


def test_subnets_are_those_of_ipv4() -> None:
    assert subnets(Engine("172.17.0.0/16", "fd00::/64")) == [
        IPv4Network("172.17.0.0/16")
    ]


@pytest.mark.parametrize(
    ("devices", "prefix"),
    [(1, 24), (253, 24), (254, 23), (509, 23), (510, 22), (1000, 22)],
)
def test_a_subnet_is_as_large_as_its_devices_need(devices: int, prefix: int) -> None:
    assert prefix_for(devices) == prefix


def test_the_first_free_subnet_is_taken() -> None:
    taken = [
        IPv4Network("198.18.0.0/24"),
        IPv4Network("198.18.1.128/25"),
        IPv4Network("172.17.0.0/16"),
    ]
    subnets = list(islice(free_subnets(DEFAULT_RANGE, 4, taken), 2))
    assert subnets == [IPv4Network("198.18.2.0/24"), IPv4Network("198.18.3.0/24")]


def test_a_range_that_is_all_taken_yields_nothing() -> None:
    assert list(free_subnets("10.9.8.0/24", 4, [IPv4Network("10.0.0.0/8")])) == []


def test_a_range_smaller_than_usual_is_used_whole() -> None:
    assert list(free_subnets("10.9.8.0/28", 4, [])) == [IPv4Network("10.9.8.0/28")]


def test_a_range_without_room_is_refused_with_one_that_has() -> None:
    with pytest.raises(
        InputError, match=r"no room for 300 devices: write a range of /23"
    ):
        next(free_subnets("10.9.8.0/24", 300, []))


def test_addresses_follow_the_scenario_and_leave_the_bridge_its_own() -> None:
    addresses = device_addresses(IPv4Network("198.18.4.0/24"), ["source", "worker1"])
    assert addresses == {
        "source": IPv4Address("198.18.4.2"),
        "worker1": IPv4Address("198.18.4.3"),
    }


@given(st.integers(1, 1000))
def test_every_device_has_an_address_of_its_own_inside(count: int) -> None:
    subnet = next(free_subnets(DEFAULT_RANGE, count, []))
    addresses = device_addresses(subnet, [f"d{index}" for index in range(count)])
    assert len(set(addresses.values())) == count
    assert all(
        address in subnet and address != subnet.broadcast_address
        for address in addresses.values()
    )


def test_more_devices_than_addresses_are_refused() -> None:
    with pytest.raises(HostError, match="no room"):
        device_addresses(IPv4Network("10.0.0.0/29"), list("abcdef"))


@pytest.fixture
def routed() -> Iterator[Callable[[str], list[IPv4Network]]]:
    """Return a function that runs lines of ``ip`` in a namespace of its own and returns the routes in our range."""
    with contextlib.closing(Namespace.scratch()) as scratch:
        for line in (
            "link add tun0 type veth",
            "addr add 10.8.0.2/24 dev tun0",
            "link set tun0 up",
        ):
            scratch.run(partial(command, ["ip", *line.split()]))

        def routes_after(*lines: str) -> list[IPv4Network]:
            for line in lines:
                scratch.run(partial(command, ["ip", *line.split()]))
            return scratch.run(partial(host_routes, DEFAULT_RANGE))

        yield routes_after


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_routes_of_a_vpn_that_takes_everything_claim_nothing(
    routed: Callable[..., list[IPv4Network]],
) -> None:
    halves = [f"route add {half}/1 dev tun0" for half in ("0.0.0.0", "128.0.0.0")]
    assert (
        routed(*halves, "route add default dev tun0", "route add 198.0.0.0/8 dev tun0")
        == []
    )
    assert routed("route add 198.18.0.0/16 dev tun0") == [IPv4Network("198.18.0.0/16")]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_routes_of_other_tables_and_own_addresses_are_taken(
    routed: Callable[..., list[IPv4Network]],
) -> None:
    policy = [
        "route add 198.18.0.0/16 dev tun0 table 2022",
        "rule add to 198.18.0.0/16 lookup 2022 pref 9000",
    ]
    assert routed(*policy, "route add default dev tun0 table 51820") == [
        IPv4Network("198.18.0.0/16")
    ]
    assert IPv4Network("198.19.0.1/32") in routed("addr add 198.19.0.1/32 dev tun0")


def test_machines_without_routing_tables_of_linux_claim_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_routes(DEFAULT_RANGE) == []
