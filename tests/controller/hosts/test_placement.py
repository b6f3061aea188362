"""Which device runs on which host, and what the file of a lab says."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.hosts.placement import Capacity, loads, place, read_lab
from tests.helpers import ROOT

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


def test_equally_loaded_hosts_are_chosen_by_link_rate() -> None:
    devices = [device("p"), device("q"), device("r"), device("s")]
    fast, slow = Link(rate=1e9), Link(rate=1e6)
    links = {
        ("p", "s"): fast,
        ("s", "p"): fast,
        ("q", "r"): fast,
        ("r", "q"): fast,
        ("p", "q"): slow,
    }
    placed = place(devices, links, TWO, {})
    assert placed["p"] == placed["s"] != placed["q"] == placed["r"]


def test_inbox_keeps_and_counts_messages() -> None:
    placed = place([device("p"), device("q"), device("r")], {}, TWO, {"r": "a"})
    assert placed == {"p": "b", "q": "a", "r": "a"} or placed == {
        "p": "b",
        "q": "b",
        "r": "a",
    }
    assert placed["r"] == "a"
    assert placed["p"] == "b"


def test_devices_that_share_a_medium_stay_together() -> None:
    devices = [device(name) for name in "pqrs"]
    placed = place(devices, {}, TWO, {}, [("p", "q", "r")])
    assert placed["p"] == placed["q"] == placed["r"] != placed["s"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": "a"}, "unknown device 'x'"),
        ({"p": "c"}, "unknown host 'c' of p; the hosts are a, b"),
        ({"p": "a", "q": "b"}, "p and q share a medium"),
    ],
)
def test_invalid_placements_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        place([device("p"), device("q")], {}, TWO, given, [("p", "q")])


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    devices = [device(f"d{number}", memory=8 * GB) for number in range(50)]
    with pytest.raises(
        InputError,
        match=r"a has 8.59 GB of memory, its 50 devices take at least 8.6 GB",
    ):
        place(devices, {}, {"a": TWO["a"]}, {})
    assert place(devices[:28], {}, {"a": TWO["a"]}, {})


def test_devices_move_to_a_host_with_enough_memory() -> None:
    hosts = {"a": Capacity(8, GB), "b": Capacity(1, 64 * GB)}
    assert place([device("p", memory=4 * GB)], {}, hosts, {}) == {"p": "b"}


def test_the_load_is_the_speed_asked_over_what_a_core_gives() -> None:
    devices = {each.name: each for each in (device("p", 3e9), device("q", 1e9))}
    found = loads({"p": "a", "q": "a"}, devices, {"a": Capacity(2, 8 * GB, speed=2e9)})
    assert found["a"].cores == 2.0


PLACED = {"source": "a", "worker1": "a", "worker2": "b", "worker3": "b"}


def lab(folder: Path, text: str) -> Path:
    file = folder / "lab.yaml"
    file.write_text(text)
    return file


def struck(folder: Path, text: str) -> list[dict[str, object]]:
    trial = trials(load(ROOT / "scenarios/quickstart.yaml"))[0]
    changed = read_lab(lab(folder, f"hosts: [a, b]\nfaults:\n{text}")).add_faults(
        trial, PLACED
    )
    assert changed.experiment.faults == changed.scenario.faults
    assert changed.scenario.faults[:1] == trial.scenario.faults
    prepare(changed)
    found = changed.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)[
        "faults"
    ]
    return list(found[1:])


def test_hosts_and_places_are_those_of_the_file_and_then_those_given(
    tmp_path: Path,
) -> None:
    file = lab(tmp_path, "hosts: [a, b]\nplace: {source: a, worker1: b}\n")
    assert (read_lab(file).hosts, read_lab(file).place) == (
        ("a", "b"),
        {"source": "a", "worker1": "b"},
    )
    given = read_lab(file, ("a", "c"), {"worker1": "c"})
    assert (given.hosts, given.place) == (("a", "c"), {"source": "a", "worker1": "c"})
    assert not read_lab(None).hosts


def test_a_host_is_killed_with_all_of_its_devices_and_boots_with_them(
    tmp_path: Path,
) -> None:
    found = struck(
        tmp_path, "- {kill_host: b, at: 5s}\n- {restart_host: b, after: 2s}\n"
    )
    assert found == [
        {"kill": "worker2", "at": "5s"},
        {"kill": "worker3", "at": "5s"},
        {"restart": "worker2", "after": "2s"},
        {"restart": "worker3", "after": "0"},
    ]


def test_hosts_are_cut_off_by_their_devices_for_a_while(tmp_path: Path) -> None:
    moment = "when: {device: source, event: step, batch: 3}"
    (found,) = struck(tmp_path, f"- {{partition_hosts: [b], {moment}, for: 3s}}\n")
    assert found["partition"] == [["worker2", "worker3"]]
    assert found["for"] == "3s"


def test_placement_of_another_type_in_a_lab_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("hosts: [a]\nplace: [worker1]\n")
    with pytest.raises(InputError, match=r"lab\.yaml: place"):
        read_lab(file, (), {"worker1": "a"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: [a]\nnodes: 3\n", "nodes"),
        ("place: {worker1: b}\n", "need 'hosts'"),
        ("hosts: [a]\nfaults: [{kill: worker1, at: 1s}]\n", "kill"),
        (
            "hosts: [a]\nfaults: [{kill_host: a, restart_host: a, at: 1s}]\n",
            "exactly one of",
        ),
        (
            "hosts: [a]\nfaults: [{kill_host: a, after: 1s}]\n",
            "the first host fault cannot",
        ),
    ],
)
def test_error_in_a_lab_file_names_the_file(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(InputError, match=rf"lab\.yaml: .*{says}"):
        read_lab(lab(tmp_path, text))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "{kill_host: c, at: 1s}",
            r"--lab: faults\.0: kill_host: no device is on 'c'; hosts with devices: a, b",
        ),
        ("{kill_host: b}", "'at', 'when' and 'after'"),
        ("{kill_host: b, at: 9000s}", r"--lab: faults\.0: .*time_limit"),
        ("{restart_host: b, at: 1s}", "nothing to restart"),
    ],
)
def test_a_fault_of_hosts_is_checked_as_those_of_devices_are(
    tmp_path: Path, fault: str, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        struck(tmp_path, f"- {fault}\n")
