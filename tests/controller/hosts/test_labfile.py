"""The lab's file: hosts, the places of devices, and faults of hosts as faults of the devices there."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.hosts.labfile import read
from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from tests.helpers import ROOT

PLACED = {"source": "a", "worker1": "a", "worker2": "b", "worker3": "b"}


def lab(folder: Path, text: str) -> Path:
    file = folder / "lab.yaml"
    file.write_text(text)
    return file


def struck(folder: Path, text: str) -> list[dict[str, object]]:
    trial = trials(load(ROOT / "scenarios/quickstart.yaml"))[0]
    changed = read(lab(folder, f"hosts: [a, b]\nfaults:\n{text}")).struck(trial, PLACED)
    assert changed.experiment.faults == changed.scenario.faults
    assert changed.scenario.faults[:1] == trial.scenario.faults
    prepare(changed)
    found = changed.scenario.model_dump(mode="json", by_alias=True, exclude_none=True)["faults"]
    return list(found[1:])


def test_hosts_and_places_are_those_of_the_file_and_then_those_given(tmp_path: Path) -> None:
    file = lab(tmp_path, "hosts: [a, b]\nplace: {source: a, worker1: b}\n")
    assert read(file).places == {"hosts": ("a", "b"), "place": {"source": "a", "worker1": "b"}}
    assert read(file, ("a", "c"), {"worker1": "c"}).places == {
        "hosts": ("a", "c"),
        "place": {"source": "a", "worker1": "c"},
    }
    assert not read(None).hosts


def test_a_host_is_killed_with_all_of_its_devices_and_boots_with_them(tmp_path: Path) -> None:
    found = struck(tmp_path, "- {kill_host: b, at: 5s}\n- {restart_host: b, after: 2s}\n")
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hosts: [a]\nnodes: 3\n", "nodes"),
        ("place: {worker1: b}\n", "need 'hosts'"),
        ("hosts: [a]\nfaults: [{kill: worker1, at: 1s}]\n", "kill"),
        ("hosts: [a]\nfaults: [{kill_host: a, restart_host: a, at: 1s}]\n", "exactly one of"),
        ("hosts: [a]\nfaults: [{kill_host: a, after: 1s}]\n", "no fault of hosts before the first one"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"lab\.yaml: .*{says}"):
        read(lab(tmp_path, text))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("{kill_host: c, at: 1s}", r"--lab: faults\.0: kill_host: no device is on 'c': a, b"),
        ("{kill_host: b}", "'at', 'when' and 'after'"),
        ("{kill_host: b, at: 9000s}", r"--lab: faults\.0: .*time_limit"),
        ("{restart_host: b, at: 1s}", "nothing to restart"),
    ],
)
def test_a_fault_of_hosts_is_checked_as_those_of_devices_are(tmp_path: Path, fault: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        struck(tmp_path, f"- {fault}\n")
