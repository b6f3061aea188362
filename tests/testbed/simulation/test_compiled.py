"""The compiled simulator passes the same tests as Python's own, and a run has the same events."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import check_compiled, simulate
from tests.helpers import copy_sources

WHERE = "import testbed.simulation.channel as module; print(module.__file__)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources in which the simulator is compiled."""
    folder = tmp_path_factory.mktemp("compiled")
    copy_sources(folder, "tests", "tools")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    # Not optimised: what mypyc makes is the same, and the C compiler takes a third of the time.
    environment = {**os.environ, "TESTBED_COMPILE": "1", "MYPYC_OPT_LEVEL": "0"}
    subprocess.run(build, cwd=folder, env=environment, check=True)
    return folder


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("TESTBED_TIMED_COUNTS", None)  # these tests are not to be counted twice
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_compiled_simulator_passes_the_tests_of_the_plain_one(compiled):
    assert run(compiled, "-c", WHERE).strip().endswith(".so")
    tests = ["tests/testbed/simulation", f"--ignore=tests/testbed/simulation/{Path(__file__).name}"]
    assert " passed" in run(compiled, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)


@pytest.mark.timeout(600)
def test_a_compiled_run_has_the_events_of_a_plain_one(compiled):
    program = "from tests.testbed.simulation.test_compiled import events; print(*events(), sep='\\n')"
    assert run(compiled, "-c", program).splitlines() == events()


def events() -> list[str]:
    """Return the events of a run with a fault, as the simulator of this process has them."""
    (trial,) = trials(load("examples/ring"))
    outcome = simulate(prepare(trial), None)
    assert outcome.status == "finished", outcome.error
    return [event.to_json() for event in outcome.events]


def test_a_compiled_module_that_is_older_than_its_source_is_refused(tmp_path):
    source, compiled = tmp_path / "channel.py", tmp_path / "channel.cpython-311-x86_64-linux-gnu.so"
    source.touch()
    compiled.touch()
    os.utime(source, (1, 1))
    check_compiled(tmp_path)
    os.utime(compiled, (0, 0))
    with pytest.raises(InputError, match=r"channel.py .* has changed .* 'make compiled'"):
        check_compiled(tmp_path)
