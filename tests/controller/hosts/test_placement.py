from __future__ import annotations

import pytest

from controller.hosts.placement import Capacity, loads, place
from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.network.link import Link

GB = 2**30
TWO = {"a": Capacity(2, 8 * GB), "b": Capacity(2, 8 * GB)}


def device(name: str, speed: float = 1e9, memory: float = GB / 4) -> DeviceSpec:
    return DeviceSpec(name, speed, memory)


def test_work_is_shared_by_the_cores_that_there_are() -> None:
    devices = [device(f"d{number}") for number in range(6)]
    hosts = {"a": Capacity(4, 8 * GB), "b": Capacity(2, 8 * GB)}
    placed = place(devices, {}, hosts, {})
    assert [sum(host == each for host in placed.values()) for each in hosts] == [4, 2]
    assert list(placed) == [each.name for each in devices]


def test_of_equally_loaded_hosts_the_one_with_fast_links_is_taken() -> None:
    devices = [device("p"), device("q"), device("r"), device("s")]
    fast, slow = Link(rate=1e9), Link(rate=1e6)
    links = {("p", "s"): fast, ("s", "p"): fast, ("q", "r"): fast, ("r", "q"): fast, ("p", "q"): slow}
    placed = place(devices, links, TWO, {})
    assert placed["p"] == placed["s"] != placed["q"] == placed["r"]


def test_what_is_given_is_kept_and_counted() -> None:
    placed = place([device("p"), device("q"), device("r")], {}, TWO, {"r": "a"})
    assert placed == {"p": "b", "q": "a", "r": "a"} or placed == {"p": "b", "q": "b", "r": "a"}
    assert placed["r"] == "a"
    assert placed["p"] == "b"


def test_devices_that_share_a_medium_stay_together() -> None:
    devices = [device(name) for name in "pqrs"]
    placed = place(devices, {}, TWO, {}, [("p", "q", "r")])
    assert placed["p"] == placed["q"] == placed["r"] != placed["s"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": "a"}, "there is no device 'x'"),
        ({"p": "c"}, "p is to be on 'c', which is not among the hosts a, b"),
        ({"p": "a", "q": "b"}, "p and q share a medium"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        place([device("p"), device("q")], {}, TWO, given, [("p", "q")])


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    devices = [device(f"d{number}", memory=8 * GB) for number in range(29)]
    with pytest.raises(InputError, match=r"a has 8GiB of memory, its 29 devices take at least 7.25GiB"):
        place(devices, {}, {"a": TWO["a"]}, {})
    assert place(devices[:28], {}, {"a": TWO["a"]}, {})


def test_a_host_with_room_takes_what_another_has_no_room_for() -> None:
    hosts = {"a": Capacity(8, GB), "b": Capacity(1, 64 * GB)}
    assert place([device("p", memory=4 * GB)], {}, hosts, {}) == {"p": "b"}


def test_the_load_is_the_speed_asked_over_what_a_core_gives() -> None:
    devices = {each.name: each for each in (device("p", 3e9), device("q", 1e9))}
    found = loads({"p": "a", "q": "a"}, devices, {"a": Capacity(2, 8 * GB, speed=2e9)})
    assert found["a"].cores == 2.0
