"""What devices are given to know: enough for their programs, nothing of a scenario, and little of each other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from testbed import deployment
from testbed.common.errors import InputError
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import Scenario
from tests.helpers import ROOT
from tests.helpers.deployments import deployment_bodies, read_deployment

SCENARIOS = sorted(ROOT.glob("scenarios/smoke/*.yaml")) + [
    ROOT / "scenarios" / "examples" / name
    for name in ("ring.yaml", "programs.yaml", "own.yaml")
]


def prepared(file: Path) -> Prepared:
    return prepare(trials(load(file))[0])


def star(leaves: int) -> Prepared:
    return prepare(
        trials(
            Scenario.model_validate(
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
        )[0]
    )


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_devices_read_what_the_method_says_that_they_know(file: Path) -> None:
    found = prepared(file)
    for name, body in deployment_bodies(found).items():
        method, problem, plan = read_deployment(body)
        expected, part = found.method.facts(found.problem, found.plan, name)
        assert method.name == found.method.name
        assert plan == part
        assert list(problem.links.items()) == list(expected.links.items())
        assert type(problem) is type(expected)
        for field in fields(problem):
            if field.name != "links":
                assert getattr(problem, field.name) == getattr(expected, field.name), (
                    field.name
                )


def test_a_device_knows_no_links_but_its_own_and_no_part_of_the_plan() -> None:
    found = star(3)
    _, problem, plan = read_deployment(deployment_bodies(found)["leaf2"])
    assert set(problem.links) == {("server", "leaf2"), ("leaf2", "server")}
    assert ("leaf1", "server") not in problem.links
    assert [assignment.device for assignment in plan.assignments] == ["leaf2"]
    assert [*plan.details.clients] == ["leaf2"]
    document = json.loads(deployment_bodies(found)["leaf2"])
    assert [*document["peers"]] == ["server"]


def test_the_lead_of_a_method_that_plans_again_knows_all_links() -> None:
    found = prepared(ROOT / "scenarios" / "smoke" / "pause.yaml")
    lead = found.plan.coordinator
    for name, body in deployment_bodies(found).items():
        assert (read_deployment(body)[1].links == found.problem.links) == (name == lead)


def test_a_device_more_costs_the_others_its_name() -> None:
    few, many = (deployment_bodies(star(leaves))["leaf1"] for leaves in (10, 110))
    assert len(many) - len(few) < 100 * 40


def test_another_version_of_the_schema_is_refused() -> None:
    body = json.loads(deployment_bodies(star(2))["leaf1"]) | {"version": 7}
    with pytest.raises(
        InputError, match="reads version 1 of the schema, not 7: build the images again"
    ):
        deployment.read(json.dumps(body).encode())
    for text in (b"[]", b"{}", b"null"):
        with pytest.raises(InputError, match="not None"):
            deployment.read(text)
    for text in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(InputError, match="invalid JSON"):
            deployment.read(text)


def test_a_rate_of_nothing_is_refused() -> None:
    body = json.loads(deployment_bodies(star(2))["leaf1"])
    body["kinds"][0]["rate"] = 0
    with pytest.raises(InputError, match="not above 0 bit/s"):
        deployment.read(json.dumps(body).encode())


def test_a_device_needs_no_reader_of_scenarios(tmp_path: Path) -> None:
    """The agent, and all methods and kits, with every module blocked that scenarios are read with."""
    for file in SCENARIOS:
        for name, body in deployment_bodies(prepared(file)).items():
            (tmp_path / f"{file.stem}-{name}").write_bytes(body)
    program = """
import importlib, pkgutil, sys
from dataclasses import replace
from pathlib import Path

for blocked in ("yaml", "testbed.scenario", "testbed.prepare", "testbed.validation", "testbed.simulation"):
    sys.modules[blocked] = None

import testbed_agent, testbed.methods, testbed.ml
from testbed_agent.deployment import read_deployment
from testbed_agent.settings import Settings

for package in (testbed_agent, testbed.methods, testbed.ml):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "testbed.ml.preparation":  # which no device needs
            importlib.import_module(module.name)
files = sorted(Path(sys.argv[1]).iterdir())
for file in files:
    read_deployment(file.read_bytes(), Settings("run-00000000", file.name.rpartition("-")[2], "token"))
print(len(files))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert int(done.stdout) == len(list(tmp_path.iterdir()))


def test_a_device_in_a_container_computes_alone() -> None:
    found = star(3)
    stacked = found.problem.workload.model_copy(update={"numerics": "stacked"})
    _, problem, _ = read_deployment(
        deployment_bodies(
            replace(found, problem=replace(found.problem, workload=stacked))
        )["leaf2"]
    )
    assert problem.workload.numerics == "full"
