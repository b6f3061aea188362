"""Deployments: the part of a prepared run that each device receives."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from testbed import deployment
from testbed.common.errors import InputError
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from tests.helpers import ROOT
from tests.helpers.deployments import deployment_bodies, read_deployment

SMOKE_SCENARIOS = ROOT / "scenarios" / "smoke"
EXAMPLES = ROOT / "scenarios" / "examples"
SCENARIOS = [
    *sorted(SMOKE_SCENARIOS.glob("*.yaml")),
    EXAMPLES / "ring.yaml",
    EXAMPLES / "programs.yaml",
    EXAMPLES / "own.yaml",
]


def prepare_file(file: Path) -> Prepared:
    # A sweep has several trials.
    first_trial, *_ = trials(load(file))
    return prepare(first_trial)


def prepare_star(leaves: int) -> Prepared:
    """Prepare federated learning of a server and a number of devices in a star topology."""
    scenario = Scenario.model_validate(
        {
            "name": "star",
            "devices": {
                "server": {"speed": "1gflops"},
                "leaf": {"speed": "1gflops", "count": leaves},
            },
            "network": {
                "topology": "star",
                "link": {"rate": "10mbit", "delay": "1ms"},
            },
            "workload": {
                "model": {"name": "mlp", "hidden": [8]},
                "data": {
                    "name": "synthetic-1x8x8",
                    "train": 4 * leaves,
                    "test": 4,
                    "split": "iid",
                },
                "method": {"name": "federated"},
                "steps": 4,
                "batch_size": 4,
            },
        }
    )
    (trial,) = trials(scenario)
    return prepare(trial)


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_device_reads_problem_and_plan_selected_by_method(file: Path) -> None:
    prepared = prepare_file(file)
    for name, body in deployment_bodies(prepared).items():
        method, problem, plan = read_deployment(body)
        expected_problem, expected_plan = prepared.method.facts(
            prepared.problem, prepared.plan, name
        )
        assert method.name == prepared.method.name
        assert plan == expected_plan
        # The order of links must be the same as well; a comparison of dictionaries ignores it.
        assert list(problem.links.items()) == list(expected_problem.links.items())
        assert type(problem) is type(expected_problem)
        for field in fields(problem):
            if field.name != "links":
                expected = getattr(expected_problem, field.name)
                assert getattr(problem, field.name) == expected, field.name


def test_deployment_has_own_links_assignment_and_peers_only() -> None:
    bodies = deployment_bodies(prepare_star(3))
    _, problem, plan = read_deployment(bodies["leaf2"])
    assert set(problem.links) == {("server", "leaf2"), ("leaf2", "server")}
    assert ("leaf1", "server") not in problem.links
    assert [assignment.device for assignment in plan.assignments] == ["leaf2"]
    assert [*plan.details.clients] == ["leaf2"]
    document = json.loads(bodies["leaf2"])
    assert [*document["peers"]] == ["server"]


def test_only_coordinator_of_replanning_method_gets_all_links() -> None:
    prepared = prepare_file(SMOKE_SCENARIOS / "pause.yaml")
    for name, body in deployment_bodies(prepared).items():
        _, problem, _ = read_deployment(body)
        has_all_links = problem.links == prepared.problem.links
        assert has_all_links == (name == prepared.plan.coordinator)


def test_deployment_grows_by_names_of_other_devices_only() -> None:
    few_devices = deployment_bodies(prepare_star(10))["leaf1"]
    many_devices = deployment_bodies(prepare_star(110))["leaf1"]
    # At most 40 bytes for each of the hundred further devices.
    assert len(many_devices) - len(few_devices) < 100 * 40


def valid_document() -> dict[str, Any]:
    return json.loads(deployment_bodies(prepare_star(2))["leaf1"])


def read_document(document: dict[str, Any]) -> None:
    deployment.read(json.dumps(document).encode())


def test_other_schema_version_is_refused() -> None:
    with pytest.raises(
        InputError, match="reads version 1 of the schema, not 7: build the images again"
    ):
        read_document(valid_document() | {"version": 7})


@pytest.mark.parametrize("text", [b"[]", b"{}", b"null"])
def test_missing_schema_version_is_refused(text: bytes) -> None:
    with pytest.raises(InputError, match="not None"):
        deployment.read(text)


@pytest.mark.parametrize(
    "text", [b"{", b"\xff", b"[" * 100_000], ids=["truncated", "not UTF-8", "nested"]
)
def test_invalid_json_is_refused(text: bytes) -> None:
    with pytest.raises(InputError, match="invalid JSON"):
        deployment.read(text)


def test_rate_of_zero_is_refused() -> None:
    document = valid_document()
    document["kinds"][0]["rate"] = 0
    with pytest.raises(InputError, match="not above 0 bit/s"):
        read_document(document)


def test_agent_reads_deployments_without_scenario_modules(tmp_path: Path) -> None:
    for file in SCENARIOS:
        for name, body in deployment_bodies(prepare_file(file)).items():
            (tmp_path / f"{file.stem}-{name}").write_bytes(body)
    # None in sys.modules makes an import fail. Images of devices have no YAML library.
    program = """
import importlib, pkgutil, sys
from pathlib import Path

for blocked in ("yaml", "testbed.scenario", "testbed.prepare", "testbed.validation", "testbed.simulation"):
    sys.modules[blocked] = None

import testbed_agent, testbed.methods, testbed.ml
from testbed_agent.deployment import read_deployment
from testbed_agent.settings import Settings

for package in (testbed_agent, testbed.methods, testbed.ml):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # Devices do not prepare runs.
        if module.name != "testbed.ml.preparation":
            importlib.import_module(module.name)
files = sorted(Path(sys.argv[1]).iterdir())
for file in files:
    read_deployment(file.read_bytes(), Settings("run-00000000", file.name.rpartition("-")[2], "token"))
print(len(files))
"""
    process = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.stderr, process.returncode) == ("", 0)
    assert int(process.stdout) == len(list(tmp_path.iterdir()))


def test_stacked_numerics_are_replaced_for_containers() -> None:
    prepared = prepare_star(3)
    workload = prepared.problem.workload.model_copy(update={"numerics": "stacked"})
    stacked = replace(prepared, problem=replace(prepared.problem, workload=workload))
    _, problem, _ = read_deployment(deployment_bodies(stacked)["leaf2"])
    # A container runs one device, so it has no other computations to stack.
    assert problem.workload.numerics == "full"
