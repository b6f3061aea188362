from ipaddress import IPv4Address, IPv4Network
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.lab.addresses import DEFAULT_RANGE, device_addresses, free_subnets, host_routes
from testbed.common.errors import HostError, InputError
from testbed.network.checks import prefix_for


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
