"""Networks of a run, with an engine that has some already and answers as Docker's does."""

from __future__ import annotations

from ipaddress import IPv4Network
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from docker.errors import APIError

from controller.lab import networks
from controller.lab.networks import make_networks, subnets
from controller.lab.removal import RUN
from testbed.common.errors import HostError


class Engine:
    """Keeps networks as the engine does: no two overlap, no two of one name; ``refuses`` some options or all."""

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
            raise refused("Pool overlaps with other one on this address space")
        self.made[name] = SimpleNamespace(subnet=subnet, labels=labels, options=options)
        self._taken.append(str(subnet))

    def inspect_network(self, name: str) -> dict[str, Any]:
        return {"IPAM": {"Config": [{"Subnet": str(self.made[name].subnet)}]}}


def refused(text: str) -> APIError:
    return APIError("refused", response=requests.Response(), explanation=text)


@pytest.fixture(autouse=True)
def without_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "host_routes", lambda: [IPv4Network("10.9.0.0/24")])


def test_a_run_has_a_network_for_data_and_a_closed_one_for_control() -> None:
    engine = Engine("172.17.0.0/16", "fd00::/64")
    subnet = make_networks(engine, "run-1", "10.9.0.0/16", 5)
    assert subnet == engine.made["testbed-run-1-data"].subnet
    assert subnet.subnet_of(IPv4Network("10.9.0.0/16"))
    assert not subnet.overlaps(IPv4Network("10.9.0.0/24")), "this machine routes there"
    assert engine.made["testbed-run-1-data"].options["internal"] is True
    control = engine.made["testbed-run-1-control"]
    assert control.options["options"]["com.docker.network.bridge.enable_icc"] == "false"
    assert [each.labels for each in engine.made.values()] == [{RUN: "run-1"}] * 2


def test_where_an_engine_cannot_close_a_network_it_is_made_open() -> None:
    engine = Engine(refuses="com.docker.network.bridge.enable_icc")
    make_networks(engine, "run-1", "10.8.0.0/16", 5)
    assert "options" not in engine.made["testbed-run-1-control"].options


def test_a_subnet_that_another_takes_meanwhile_is_passed_over() -> None:
    free = make_networks(Engine(), "run-1", "10.8.0.0/16", 5)
    engine = Engine(hidden=(str(free),))
    assert make_networks(engine, "run-1", "10.8.0.0/16", 5).network_address == free.broadcast_address + 1


def test_a_request_that_was_repeated_finds_what_the_first_one_made() -> None:
    engine = Engine()
    first = make_networks(engine, "run-1", "10.8.0.0/16", 5)
    assert make_networks(engine, "run-1", "10.8.0.0/16", 5) == first


def test_what_the_engine_says_is_said_and_nothing_tried_again() -> None:
    with pytest.raises(HostError, match=r"the data network cannot be made \(no such option here\)"):
        make_networks(Engine(refuses="all"), "run-1", "10.8.0.0/16", 5)
    with pytest.raises(HostError, match=r"every subnet of 10\.8\.0\.0/28 that would do is taken"):
        make_networks(Engine("10.8.0.0/24"), "run-1", "10.8.0.0/28", 5)


def test_subnets_are_those_of_ipv4() -> None:
    assert subnets(Engine("172.17.0.0/16", "fd00::/64")) == [IPv4Network("172.17.0.0/16")]
