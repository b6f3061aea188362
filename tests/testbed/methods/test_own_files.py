"""Whole runs of a user's method in two files: events, stored sources and locations of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from testbed_controller.results.recorder import with_local_sources
from tests.helpers import ROOT
from tests.helpers.deployments import deployment_bodies, read_deployment

EXAMPLES = ROOT / "scenarios" / "examples"


HELPER = """from testbed.device import Cost

def hold():
    return Cost(flops=1e9)

def fail():
    {}['x']
"""


def write_example(folder: Path, old: str = "", new: str = "") -> Path:
    """Write the example ring with a helper module and one replacement into a folder; return the scenario's path."""
    text = (EXAMPLES / "ring.py").read_text()
    text = text.replace("import asyncio\n", "import asyncio\n\nimport helper\n")
    text = text.replace("Cost(flops=1e9)", "helper.hold()")
    assert old in text
    (folder / "ring.py").write_text(text.replace(old, new, 1))
    (folder / "helper.py").write_text(HELPER)
    (folder / "ring.yaml").write_text((EXAMPLES / "ring.yaml").read_text())
    return folder / "ring.yaml"


def simulate_file(scenario: Path) -> Outcome:
    return simulate(prepare(trials(load(scenario, []))[0]), None)


def test_method_with_helper_module_runs_as_method_in_one_file(tmp_path: Path) -> None:
    outcome = simulate_file(write_example(tmp_path))
    assert outcome.status == "finished", outcome.error
    in_one_file = simulate_file(EXAMPLES / "ring.yaml")
    assert [*outcome.events] == [*in_one_file.events]


def test_helper_module_is_deployed_and_stored_with_results(tmp_path: Path) -> None:
    prepared = prepare(trials(load(write_example(tmp_path), []))[0])
    method, _, _ = read_deployment(deployment_bodies(prepared)["worker1"])
    assert type(method).__module__.startswith("ring_")
    _, sources = with_local_sources(prepared.scenario)
    assert sources["helper.py"] == (tmp_path / "helper.py").read_text()


def test_program_error_shows_only_lines_of_user_files(tmp_path: Path) -> None:
    program = "            await device.send(following, token)\n"
    scenario = write_example(tmp_path, program, "            helper.fail()\n")
    outcome = simulate_file(scenario)
    assert outcome.status == "failed"
    first, *calls = (outcome.error or "").splitlines()
    # Line 7 of the helper is the body of fail().
    assert first.endswith(f"{tmp_path}/helper.py:7: KeyError: 'x'")
    files = [line.split(":")[0].strip() for line in calls]
    # The calls of program() and pass_tokens() precede the helper's.
    assert files == [
        f"{tmp_path}/ring.py",
        f"{tmp_path}/ring.py",
        f"{tmp_path}/helper.py",
    ]


def test_planner_error_shows_line_of_user_file(tmp_path: Path) -> None:
    # A positional argument, which Plan does not accept.
    scenario = write_example(
        tmp_path, "method=self.name, coordinator", "self.name, coordinator"
    )
    with pytest.raises(
        InputError, match=r"method.file: \S+/ring.py:\d+: TypeError: "
    ) as raised:
        prepare(trials(load(scenario, []))[0])
    assert "Traceback" not in str(raised.value)
