"""Programs of the user's: who runs what, what they are told, and which of their lines are events."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.methods.program import environment, parse_event
from testbed.methods.program.workload import MOST_BYTES, by_device
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.deployments import deployment_bodies, read_deployment

EXAMPLE = ROOT / "scenarios" / "examples" / "programs.yaml"


def prepared(*changes: str) -> Prepared:
    return prepare(trials(load(EXAMPLE, changes))[0])


def test_role_expands_to_devices_in_the_order_of_ranks() -> None:
    found = prepared(
        "workload.programs.stage2={command: serve, background: true}", "devices.idle={}"
    )
    workload = found.problem.workload
    programs = by_device(
        workload.programs, [device.name for device in found.problem.devices]
    )
    assert {name: part.command[0] for name, part in programs.items()} == {
        "stage1": "python3",
        "stage2": "serve",
        "stage3": "python3",
    }
    told = environment(found.problem, "stage3", [*programs])
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_ADDR"]) == (
        "2",
        "3",
        "stage1",
    )
    assert told["OMP_NUM_THREADS"] == "1"


STAR = ("network.topology=star", "devices={hub: {}, leaf: {count: 2}}")


def test_the_hub_of_a_star_waits_for_the_leaves_whether_its_program_ends_or_not() -> (
    None
):
    background = "workload.programs={hub: {command: serve, background: true}, leaf: {command: ask}}"
    assert prepared(*STAR, background).plan.coordinator == "hub"
    assert (
        prepared(*STAR, "workload.programs={leaf: {command: ask}}").plan.coordinator
        == "hub"
    )
    without_hub = "network={topology: explicit, links: [{between: [leaf1, hub], rate: 1mbit, delay: 1ms}]}"
    with pytest.raises(
        InputError,
        match="no device has links with all whose programs end, leaf1, leaf2, to know when",
    ):
        prepared(STAR[1], background, without_hub)


def test_files_travel_and_the_device_needs_none() -> None:
    found = prepared()
    _, problem, _ = read_deployment(deployment_bodies(found)["stage1"])
    assert problem.files == {
        "programs.py": (EXAMPLE.parent / "programs.py").read_bytes()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.programs.server={command: x}", "unknown device 'server'"),
        ("workload.programs.stage.background=true", "all stay in the background"),
        ("workload.programs.stage.files=[none.py]", r"none.py cannot be read"),
        ("workload.steps=3", "remove 'steps'"),
        (
            "workload.model={name: mlp}",
            "'model' is not a key of this task: remove the key",
        ),
        ("workload.programs={}", "programs: .*at least 1"),
        ("workload.programs.stage.command=[]", "too short"),
        (
            "workload.programs.stage={command: x, image: a, packages: [b]}",
            "takes one of 'image' and 'packages'",
        ),
    ],
)
def test_mistakes_are_reported(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared(change)


def test_large_files_are_refused_before_others_are_read(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(InputError, match="more than 20 MB: use an image"):
        prepared(f"workload.programs.stage.files=[{large}, none.py]")


def test_programs_are_not_simulated() -> None:
    with pytest.raises(InputError, match="programs require containers"):
        simulate(prepared(), None)


def test_lines_of_json_are_events() -> None:
    assert parse_event('{"event": "step", "step": 3, "time": 1}') == {
        "event": "step",
        "step": 3,
    }
    assert parse_event('{"event": "drift", "value": [1]}') == {
        "event": "drift",
        "value": [1],
    }
    for line in (
        *(
            "plain",
            "3",
            '{"step": 3}',
            '{"event": 3}',
            '{"event": "send"}',
            '{"event": "exit"}',
            '{"event": "step"}',
        ),
        *(
            '{"event": "step", "step": "3"}',
            '{"event": "step", "step": 3, "loss": "low"}',
            '{"event": "evaluate"}',
        ),
        *(
            '{"event": "request", "request": 1}',
            '{"event": "request", "request": 1, "latency": NaN}',
        ),
    ):
        assert parse_event(line) is None
