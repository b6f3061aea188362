"""A user's method with a helper beside it, as a whole run: it works, it is kept, and its errors are located in it."""

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


def lay(folder: Path, was: str = "", becomes: str = "") -> Path:
    """Lay the example of a method with a helper that may fail into a folder; return its scenario."""
    text = (
        (EXAMPLES / "ring.py")
        .read_text()
        .replace("import asyncio\n", "import asyncio\n\nimport helper\n")
    )
    assert was in text
    (folder / "ring.py").write_text(
        text.replace("Cost(flops=1e9)", "helper.hold()").replace(was, becomes, 1)
    )
    helper = "from testbed.device import Cost\n\ndef hold():\n    return Cost(flops=1e9)\n\ndef fail():\n    {}['x']\n"
    (folder / "helper.py").write_text(helper)
    (folder / "ring.yaml").write_text((EXAMPLES / "ring.yaml").read_text())
    return folder / "ring.yaml"


def simulated(scenario: Path) -> Outcome:
    return simulate(prepare(trials(load(scenario, []))[0]), None)


def test_a_method_with_a_helper_runs_as_if_it_were_one_file(tmp_path: Path) -> None:
    outcome = simulated(lay(tmp_path))
    assert outcome.status == "finished", outcome.error
    assert [*outcome.events] == [*simulated(EXAMPLES / "ring.yaml").events]


def test_the_helper_travels_and_is_kept(tmp_path: Path) -> None:
    prepared = prepare(trials(load(lay(tmp_path), []))[0])
    method, _, _ = read_deployment(deployment_bodies(prepared)["worker1"])
    assert type(method).__module__.startswith("ring_")
    _, sources = with_local_sources(prepared.scenario)
    assert sources["helper.py"] == (tmp_path / "helper.py").read_text()


def test_an_error_of_a_program_is_located_in_the_users_files_alone(
    tmp_path: Path,
) -> None:
    program = "            await device.send(following, token)\n"
    outcome = simulated(lay(tmp_path, program, "            helper.fail()\n"))
    assert outcome.status == "failed"
    first, *others = (outcome.error or "").splitlines()
    assert first.endswith(f"{tmp_path}/helper.py:7: KeyError: 'x'")
    assert [line.split(":")[0].strip() for line in others] == [
        f"{tmp_path}/ring.py",  # program
        f"{tmp_path}/ring.py",  # pass_tokens
        f"{tmp_path}/helper.py",
    ]


def test_an_error_of_a_planner_is_located_in_the_users_files_alone(
    tmp_path: Path,
) -> None:
    scenario = lay(tmp_path, "method=self.name, coordinator", "self.name, coordinator")
    with pytest.raises(
        InputError, match=r"method.file: \S+/ring.py:\d+: TypeError: "
    ) as raised:
        prepare(trials(load(scenario, []))[0])
    assert "Traceback" not in str(raised.value)
