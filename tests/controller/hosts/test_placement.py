"""The placement of devices on hosts, and lab files."""

from __future__ import annotations

from collections import Counter
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
HOSTS = {"a": Capacity(2, 8 * GB), "b": Capacity(2, 8 * GB)}
"""Two hosts with two cores each."""


def device(name: str, speed: float = 1e9, memory: float = GB / 4) -> DeviceSpec:
    return DeviceSpec(name, speed, memory)


def test_devices_are_distributed_by_cores_of_hosts() -> None:
    devices = [device(f"d{number}") for number in range(6)]
    hosts = {"a": Capacity(4, 8 * GB), "b": Capacity(2, 8 * GB)}
    placed = place(devices, {}, hosts, {})
    assert Counter(placed.values()) == {"a": 4, "b": 2}
    assert list(placed) == [spec.name for spec in devices]


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
    placed = place(devices, links, HOSTS, {})
    assert placed["p"] == placed["s"] != placed["q"] == placed["r"]


def test_given_host_counts_in_the_load() -> None:
    placed = place([device("p"), device("q"), device("r")], {}, HOSTS, {"r": "a"})
    assert placed["r"] == "a"
    assert placed["p"] == "b"
    # With one device on each host, either host is right for the third one.
    assert placed["q"] in HOSTS
    assert set(placed) == {"p", "q", "r"}


def test_devices_that_share_a_medium_stay_together() -> None:
    devices = [device(name) for name in "pqrs"]
    placed = place(devices, {}, HOSTS, {}, [("p", "q", "r")])
    assert placed["p"] == placed["q"] == placed["r"] != placed["s"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"x": "a"}, "unknown device 'x'"),
        ({"p": "c"}, "unknown host 'c' of p; the hosts are a, b"),
        ({"p": "a", "q": "b"}, "p and q share a medium"),
    ],
    ids=["device", "host", "divided medium"],
)
def test_invalid_placements_are_refused(given: dict[str, str], error: str) -> None:
    with pytest.raises(InputError, match=error):
        place([device("p"), device("q")], {}, HOSTS, given, [("p", "q")])


def test_insufficient_memory_is_refused_with_the_sizes() -> None:
    # An agent with torch takes 172 MB, whatever the limit of its device: 50 agents take 8.6 GB, and 28 take 4.8 GB.
    devices = [device(f"d{number}", memory=8 * GB) for number in range(50)]
    host = {"a": HOSTS["a"]}
    with pytest.raises(
        InputError,
        match=r"a has 8.59 GB of memory, its 50 devices take at least 8.6 GB",
    ):
        place(devices, {}, host, {})
    assert place(devices[:28], {}, host, {})


def test_devices_move_to_a_host_with_enough_memory() -> None:
    hosts = {"a": Capacity(8, GB), "b": Capacity(1, 64 * GB)}
    assert place([device("p", memory=4 * GB)], {}, hosts, {}) == {"p": "b"}


def test_load_is_the_total_speed_divided_by_the_speed_of_a_core() -> None:
    devices = {"p": device("p", 3e9), "q": device("q", 1e9)}
    hosts = {"a": Capacity(2, 8 * GB, speed=2e9)}
    host_loads = loads({"p": "a", "q": "a"}, devices, hosts)
    assert host_loads["a"].cores == (3e9 + 1e9) / 2e9


PLACEMENT = {"source": "a", "worker1": "a", "worker2": "b", "worker3": "b"}


def write_lab_file(folder: Path, text: str) -> Path:
    file = folder / "lab.yaml"
    file.write_text(text)
    return file


def device_faults(folder: Path, text: str) -> list[dict[str, object]]:
    """Return the device faults of a scenario after adding the host faults of a lab file."""
    trial = trials(load(ROOT / "scenarios/quickstart.yaml"))[0]
    lab_file = write_lab_file(folder, f"hosts: [a, b]\nfaults:\n{text}")
    changed = read_lab(lab_file).add_faults(trial, PLACEMENT)
    assert changed.experiment.faults == changed.scenario.faults
    assert changed.scenario.faults[:1] == trial.scenario.faults
    prepare(changed)
    tree = changed.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)
    # The first fault is the scenario's own.
    return list(tree["faults"][1:])


def test_arguments_override_hosts_and_places_of_the_lab_file(tmp_path: Path) -> None:
    text = "hosts: [a, b]\nplace: {source: a, worker1: b}\n"
    file = write_lab_file(tmp_path, text)
    lab = read_lab(file)
    assert lab.hosts == ("a", "b")
    assert lab.place == {"source": "a", "worker1": "b"}
    changed = read_lab(file, ("a", "c"), {"worker1": "c"})
    assert changed.hosts == ("a", "c")
    assert changed.place == {"source": "a", "worker1": "c"}
    assert not read_lab(None).hosts


def test_host_faults_kill_and_restart_all_devices_of_the_host(tmp_path: Path) -> None:
    faults = device_faults(
        tmp_path, "- {kill_host: b, at: 5s}\n- {restart_host: b, after: 2s}\n"
    )
    # `after` counts from the previous fault, so that the last device restarts with the one before.
    assert faults == [
        {"kill": "worker2", "at": "5s"},
        {"kill": "worker3", "at": "5s"},
        {"restart": "worker2", "after": "2s"},
        {"restart": "worker3", "after": "0"},
    ]


def test_partition_of_hosts_separates_devices(tmp_path: Path) -> None:
    condition = "when: {device: source, event: step, batch: 3}"
    (fault,) = device_faults(
        tmp_path, f"- {{partition_hosts: [b], {condition}, for: 3s}}\n"
    )
    assert fault["partition"] == [["worker2", "worker3"]]
    assert fault["for"] == "3s"


def test_placement_of_another_type_in_a_lab_file_is_refused(tmp_path: Path) -> None:
    file = write_lab_file(tmp_path, "hosts: [a]\nplace: [worker1]\n")
    with pytest.raises(InputError, match=r"lab\.yaml: place"):
        read_lab(file, (), {"worker1": "a"})


@pytest.mark.parametrize(
    ("text", "error"),
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
    ids=["unknown key", "no hosts", "device fault", "two actions", "first after"],
)
def test_error_in_a_lab_file_names_the_file(
    tmp_path: Path, text: str, error: str
) -> None:
    with pytest.raises(InputError, match=rf"lab\.yaml: .*{error}"):
        read_lab(write_lab_file(tmp_path, text))


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            "{kill_host: c, at: 1s}",
            r"--lab: faults\.0: kill_host: no device is on 'c'; hosts with devices: a, b",
        ),
        ("{kill_host: b}", "'at', 'when' and 'after'"),
        ("{kill_host: b, at: 9000s}", r"--lab: faults\.0: .*time_limit"),
        ("{restart_host: b, at: 1s}", "nothing to restart"),
    ],
    ids=["unknown host", "no time", "after the time limit", "nothing to restart"],
)
def test_host_faults_are_validated_like_device_faults(
    tmp_path: Path, fault: str, error: str
) -> None:
    with pytest.raises(InputError, match=error):
        device_faults(tmp_path, f"- {fault}\n")
