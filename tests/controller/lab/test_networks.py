"""Networks of a run and their addresses, with an engine that has some already and answers as Docker's does."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from docker.errors import APIError
from hypothesis import given
from hypothesis import strategies as st

from controller.lab import networks
from controller.lab.networks import (
    DEFAULT_RANGE,
    data_subnet,
    device_addresses,
    free_subnets,
    host_routes,
    make_control_network,
    subnets,
)
from controller.lab.removal import RUN
from testbed.common.errors import HostError, InputError
from testbed.network.checks import prefix_for


class Engine:
    """Keeps networks as the engine does: no two overlap, no two of one name; ``refuses`` some options or all."""

    overlap = "Pool overlaps with other one on this address space"
    """What it says of a subnet that is taken."""

    def __init__(self, *taken: str, hidden: tuple[str, ...] = (), refuses: str = "") -> None:
        self.api = self
        self.made: dict[str, Any] = {}
        self._taken, self._hidden, self._refuses = list(taken), hidden, refuses

    def networks(self) -> list[dict[str, Any]]:
        shown = [{"Subnet": each} for each in self._taken]
        return [{"IPAM": {"Config": shown}}, {"IPAM": {"Config": None}}, {"IPAM": {"Config": [{}]}}]

    def create_network(self, name: str, driver: str, ipam: Any, labels: dict[str, str], **options: Any) -> None:
        subnet = IPv4Network(ipam["Config"][0]["Subnet"])
        if self._refuses and (self._refuses == "all" or self._refuses in options.get("options", {})):
            raise refused("no such option here")
        if name in self.made:
            raise refused(f"network with name {name} already exists")
        if any(subnet.overlaps(IPv4Network(each)) for each in (*self._hidden, *self._taken) if ":" not in each):
            raise refused(self.overlap)
        self.made[name] = SimpleNamespace(subnet=subnet, labels=labels, options=options)
        self._taken.append(str(subnet))

    def inspect_network(self, name: str) -> dict[str, Any]:
        return {"IPAM": {"Config": [{"Subnet": str(self.made[name].subnet)}]}}


def refused(text: str) -> APIError:
    return APIError("refused", response=requests.Response(), explanation=text)


@pytest.fixture(autouse=True)
def without_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "host_routes", lambda: [IPv4Network("198.18.1.0/24")])


def test_a_run_has_a_network_for_control_that_leads_nowhere() -> None:
    engine = Engine("172.17.0.0/16", "198.18.0.0/24", "fd00::/64")
    make_control_network(engine, "run-1")
    [(name, made)] = engine.made.items()
    assert (name, made.labels) == ("testbed-run-1-control", {RUN: "run-1"})
    assert made.options["options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    assert made.subnet == IPv4Network("198.18.2.0/24"), "the first that neither the engine nor this machine has"


def test_the_data_network_of_a_run_is_the_same_whatever_else_there_is() -> None:
    assert data_subnet("10.9.0.0/16", 5) == data_subnet("10.9.0.0/16", 6) == IPv4Network("10.9.0.0/24")
    with pytest.raises(InputError, match="no room for 3 devices"):
        data_subnet("10.9.8.0/30", 3)


@pytest.mark.parametrize(
    "said", [Engine.overlap, "subnet 198.18.0.0/24 is already used on the host or by another config"]
)
def test_a_subnet_that_another_takes_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr(Engine, "overlap", said)
    engine = Engine(hidden=("198.18.0.0/24",))
    make_control_network(engine, "run-1")
    assert engine.made["testbed-run-1-control"].subnet == IPv4Network("198.18.2.0/24")


def test_a_request_that_was_repeated_finds_what_the_first_one_made() -> None:
    engine = Engine()
    make_control_network(engine, "run-1")
    make_control_network(engine, "run-1")
    assert len(engine.made) == 1


def test_what_the_engine_says_is_said_and_nothing_tried_again() -> None:
    with pytest.raises(HostError, match=r"the control network cannot be made \(no such option here\)"):
        make_control_network(Engine(refuses="all"), "run-1")
    with pytest.raises(HostError, match=r"every subnet of 198\.18\.0\.0/15 that would do is taken"):
        make_control_network(Engine("198.18.0.0/15"), "run-1")


def test_subnets_are_those_of_ipv4() -> None:
    assert subnets(Engine("172.17.0.0/16", "fd00::/64")) == [IPv4Network("172.17.0.0/16")]


@pytest.mark.parametrize(("devices", "prefix"), [(1, 24), (253, 24), (254, 23), (509, 23), (510, 22), (1000, 22)])
def test_a_subnet_is_as_large_as_its_devices_need(devices: int, prefix: int) -> None:
    assert prefix_for(devices) == prefix


def test_the_first_free_subnet_is_taken() -> None:
    taken = [IPv4Network("198.18.0.0/24"), IPv4Network("198.18.1.128/25"), IPv4Network("172.17.0.0/16")]
    subnets = list(islice(free_subnets(DEFAULT_RANGE, 4, taken), 2))
    assert subnets == [IPv4Network("198.18.2.0/24"), IPv4Network("198.18.3.0/24")]


def test_a_range_that_is_all_taken_yields_nothing() -> None:
    assert list(free_subnets("10.9.8.0/24", 4, [IPv4Network("10.0.0.0/8")])) == []


def test_a_range_smaller_than_usual_is_used_whole() -> None:
    assert list(free_subnets("10.9.8.0/28", 4, [])) == [IPv4Network("10.9.8.0/28")]


def test_a_range_without_room_is_refused_with_one_that_has() -> None:
    with pytest.raises(InputError, match=r"no room for 300 devices: write a range of /23"):
        next(free_subnets("10.9.8.0/24", 300, []))


def test_addresses_follow_the_scenario_and_leave_the_bridge_its_own() -> None:
    addresses = device_addresses(IPv4Network("198.18.4.0/24"), ["source", "worker1"])
    assert addresses == {"source": IPv4Address("198.18.4.2"), "worker1": IPv4Address("198.18.4.3")}


@given(st.integers(1, 1000))
def test_every_device_has_an_address_of_its_own_inside(count: int) -> None:
    subnet = next(free_subnets(DEFAULT_RANGE, count, []))
    addresses = device_addresses(subnet, [f"d{index}" for index in range(count)])
    assert len(set(addresses.values())) == count
    assert all(address in subnet and address != subnet.broadcast_address for address in addresses.values())


def test_more_devices_than_addresses_are_refused() -> None:
    with pytest.raises(HostError, match="no room"):
        device_addresses(IPv4Network("10.0.0.0/29"), list("abcdef"))


def test_routes_of_the_host_are_read_without_the_default(tmp_path: Path) -> None:
    table = tmp_path / "route"
    table.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
        "tun0\t000012C6\t00000000\t0001\t0\t0\t0\t0000FEFF\t0\t0\t0\n"
    )
    assert host_routes(table) == [IPv4Network("172.17.0.0/16"), IPv4Network("198.18.0.0/15")]
    assert host_routes(tmp_path / "elsewhere") == []
