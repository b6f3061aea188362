"""Users' programs as a workload: devices, environment, files and events on standard output."""

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


def prepare_example(*changes: str) -> Prepared:
    return prepare(trials(load(EXAMPLE, changes))[0])


def test_role_expands_to_devices_without_separate_program() -> None:
    problem = prepare_example(
        "workload.programs.stage2={command: serve, background: true}", "devices.idle={}"
    ).problem
    devices = [device.name for device in problem.devices]
    programs = by_device(problem.workload.programs, devices)
    # Stage 2 has a program of its own, and no program names the idle device.
    assert programs.keys() == {"stage1", "stage2", "stage3"}
    assert programs["stage1"].command[0] == "python3"
    assert programs["stage2"].command[0] == "serve"
    assert programs["stage3"].command[0] == "python3"


def test_environment_has_variables_of_torch_distributed_and_scenario() -> None:
    problem = prepare_example().problem
    variables = environment(problem, "stage3", ["stage1", "stage2", "stage3"])
    assert variables["RANK"] == "2"
    assert variables["WORLD_SIZE"] == "3"
    assert variables["MASTER_ADDR"] == "stage1"
    # The example scenario sets this variable.
    assert variables["OMP_NUM_THREADS"] == "1"


STAR_DEVICES = "devices={hub: {}, leaf: {count: 2}}"
SERVING_HUB = (
    "workload.programs={hub: {command: serve, background: true}, leaf: {command: ask}}"
)


@pytest.mark.parametrize(
    "programs",
    [
        pytest.param(SERVING_HUB, id="background-program"),
        pytest.param("workload.programs={leaf: {command: ask}}", id="no-program"),
    ],
)
def test_hub_of_star_is_coordinator(programs: str) -> None:
    prepared = prepare_example("network.topology=star", STAR_DEVICES, programs)
    assert prepared.plan.coordinator == "hub"


def test_device_without_links_to_all_programs_cannot_coordinate() -> None:
    links = "network={topology: explicit, links: [{between: [leaf1, hub], rate: 1mbit, delay: 1ms}]}"
    with pytest.raises(
        InputError,
        match=r"one device must have links with all devices .* some of leaf1, leaf2",
    ):
        prepare_example(STAR_DEVICES, SERVING_HUB, links)


def test_deployment_contains_files_of_program() -> None:
    prepared = prepare_example()
    _, problem, _ = read_deployment(deployment_bodies(prepared)["stage1"])
    content = (EXAMPLE.parent / "programs.py").read_bytes()
    assert problem.files == {"programs.py": content}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("workload.programs.server={command: x}", "unknown device 'server'"),
        (
            "workload.programs.stage.background=true",
            "all programs stay in the background",
        ),
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
def test_invalid_programs_are_rejected(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare_example(change)


def test_large_file_is_rejected_before_later_files_are_read(tmp_path: Path) -> None:
    # A sparse file; the one after it does not exist.
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(InputError, match="more than 20 MB: use an image"):
        prepare_example(f"workload.programs.stage.files=[{large}, none.py]")


def test_simulation_of_programs_is_rejected() -> None:
    with pytest.raises(InputError, match="programs require containers"):
        simulate(prepare_example(), None)


def test_json_lines_with_event_are_events() -> None:
    # The testbed adds its own time.
    step = parse_event('{"event": "step", "step": 3, "time": 1}')
    assert step == {"event": "step", "step": 3}
    # Unknown names are events of the user.
    drift = parse_event('{"event": "drift", "value": [1]}')
    assert drift == {"event": "drift", "value": [1]}


@pytest.mark.parametrize(
    "line",
    [
        "plain",
        "3",
        '{"step": 3}',
        '{"event": 3}',
        # Events that only the testbed records.
        '{"event": "send"}',
        '{"event": "exit"}',
        # Known events with missing fields, or with fields of other types.
        '{"event": "step"}',
        '{"event": "step", "step": "3"}',
        '{"event": "step", "step": 3, "loss": "low"}',
        '{"event": "evaluate"}',
        '{"event": "request", "request": 1}',
        '{"event": "request", "request": 1, "latency": NaN}',
    ],
)
def test_other_lines_are_output(line: str) -> None:
    assert parse_event(line) is None
