"""Methods from files and packages: loading, error messages, and deployment as source text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.methods import METHODS
from testbed.methods.external import code_of, from_code, from_file
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.validation import find_method
from testbed_controller.results import files
from tests.helpers import ROOT, recorded
from tests.helpers.deployments import deployment_bodies

RING = ROOT / "scenarios" / "examples" / "ring.yaml"
# The shortest valid method; no test runs the program.
SMALL = """
from testbed.method import Method
from testbed.plan import Plan

class Nothing(Method):
    name = "nothing"

    def plan(self, problem):
        return Plan(method=self.name, coordinator=problem.devices[0].name, assignments=())

    async def program(self, device, context):
        raise RuntimeError("never started")
"""


def write_method(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def prepare_ring(*changes: str) -> Prepared:
    return prepare(trials(load(RING, changes))[0])


def test_method_of_file_plans_and_defines_metrics() -> None:
    prepared = prepare_ring()
    assert prepared.plan.method == "ring"
    metrics = prepared.method.declared.metrics
    assert [metric.name for metric in metrics] == ["tokens_lost"]


def test_deployed_method_is_loaded_in_another_process(tmp_path: Path) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text(
        "import sys\n"
        "from testbed.deployment import read\n"
        "method, problem = read(sys.stdin.buffer.read()).problem()\n"
        "print(method.name, problem.options.stall_timeout)\n"
    )
    completed = subprocess.run(
        [sys.executable, str(reader)],
        check=True,
        capture_output=True,
        input=first_deployment(prepare_ring()),
    )
    assert completed.stdout == b"ring 6.0\n"


def first_deployment(prepared: Prepared) -> bytes:
    """Return the request body of the deployment on the first device."""
    return next(iter(deployment_bodies(prepared).values()))


SYSTEMS = {
    "testbed_stahl": "papers/stahl-example",
    "testbed_ftpipehd": "papers/ftpipehd-figure-5",
    "testbed_pipelearn": "papers/pipelearn-table-3",
    "testbed_edgepipe": "papers/edgepipe-headlines",
    "testbed_versatilefl": "papers/versatilefl-figure-5",
}


@pytest.mark.parametrize("package", SYSTEMS)
def test_deployed_method_of_paper_needs_no_installed_package(
    package: str, tmp_path: Path
) -> None:
    methods = set()
    for point in entry_points(group="testbed.methods"):
        if point.module.startswith(package):
            methods.add(point.name)
    # Scenarios of papers also run other methods, for comparison.
    trial = next(
        trial
        for trial in trials(load(SYSTEMS[package]))
        if trial.scenario.workload.method.name in methods
    )
    method = trial.scenario.workload.method.name
    output = _read_without(package, first_deployment(prepare(trial)), tmp_path)
    assert output == f"{method} True\n"


def test_workload_and_method_of_one_package_share_sources(
    tmp_path: Path,
) -> None:
    trial = trials(load(ROOT / "generation" / "scenarios" / "kill.yaml"))[0]
    body = first_deployment(prepare(trial))
    document = json.loads(body)
    assert "testbed_generation.methods" in document["work_code"]["sources"]
    assert document["method_code"]["sources"] == {}
    assert _read_without("testbed_generation", body, tmp_path) == "petals True\n"


def _read_without(package: str, body: bytes, tmp_path: Path) -> str:
    """Read a deployment in a process without a package.

    Returns the printed name of the method, and whether its options have the method's own type.
    """
    (tmp_path / "testbed").symlink_to(ROOT / "testbed")
    (tmp_path / "reader.py").write_text(
        "import importlib, sys\n"
        "from importlib.util import find_spec\n"
        "from testbed.deployment import read\n"
        f"assert find_spec({package!r}) is None\n"
        "deployment = read(sys.stdin.buffer.read())\n"
        "method, problem = deployment.problem()\n"
        "codes = (deployment.method_code, deployment.work_code)\n"
        "for name in [name for code in codes if code for name in code.sources]:\n"
        "    assert importlib.import_module(name).__spec__.origin is None, name\n"
        "print(method.name, type(problem.options) is method.Options)\n"
    )
    # Option -S hides editable installations, so that the process has only the folders of a device image.
    path = f"{tmp_path}:{sysconfig.get_path('purelib')}"
    command = [sys.executable, "-S", str(tmp_path / "reader.py")]
    environment = {**os.environ, "PYTHONPATH": path}
    completed = subprocess.run(
        command, env=environment, capture_output=True, input=body
    )
    assert completed.returncode == 0, completed.stderr.decode()
    return completed.stdout.decode()


def test_builtin_method_is_deployed_without_sources() -> None:
    # Every device has the testbed installed.
    assert code_of(METHODS["pipeline"]) is None


def test_results_store_method_file_and_load_without_original(tmp_path: Path) -> None:
    original = write_method(tmp_path, SMALL)
    method = {"file": "mine.py", "name": "nothing"}
    workload = recorded.SCENARIO["workload"] | {"method": method}
    scenario = {**recorded.SCENARIO, "workload": workload, "faults": []}
    (tmp_path / "mine.yaml").write_text(str(scenario))
    trial = trials(load(tmp_path / "mine.yaml"))[0]
    results = recorded.write_run(
        tmp_path / "run", trial, recorded.make_plan(), recorded.make_outcome()
    )
    original.unlink()
    run = files.load(results)
    assert (results / "mine.py").read_text() == SMALL
    assert run.trial.scenario.workload.method.file == "mine.py"
    assert "step_time" in run.metrics


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("def plan(:\n", r"mine.py:1: is not Python: ", id="syntax-error"),
        pytest.param(
            "import testbed\n\nraise ValueError('x')\n",
            r"mine.py:3: ValueError: x",
            id="exception",
        ),
        pytest.param(
            "import nowhere.at.all\n",
            r"mine.py:1: ModuleNotFoundError: No module named 'nowhere'",
            id="missing-module",
        ),
        pytest.param(
            SMALL.replace('"nothing"', '"other"'),
            r"defines no method 'nothing': .* \(methods of the file: other\)",
            id="other-name",
        ),
        pytest.param("x = 1\n", r"\(methods of the file: none\)", id="no-method"),
        pytest.param(
            SMALL.replace("def plan", "def plans"),
            r"Nothing lacks plan",
            id="missing-function",
        ),
    ],
)
def test_invalid_method_file_is_rejected_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as raised:
        from_file(write_method(tmp_path, text), "nothing")
    assert raised.value.key == ("method", "file")
    assert "\n" not in str(raised.value)


METRIC_NAMED_LOSS = """\
    declared = MetricsSpec(metrics=(Metric('loss', 'number', 'x', None),))
    name ="""


def test_metric_with_name_of_builtin_metric_is_rejected(tmp_path: Path) -> None:
    text = "from testbed.trace.metrics_spec import MetricsSpec, Metric\n"
    text += SMALL.replace("    name =", METRIC_NAMED_LOSS)
    with pytest.raises(InputError, match="two metrics are called 'loss'"):
        from_file(write_method(tmp_path, text), "nothing")


def test_missing_method_file_is_reported_at_key_of_file(tmp_path: Path) -> None:
    # The scenario of the ring without the file of its method.
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(RING.read_text())
    with pytest.raises(
        InputError,
        match=r"mine.yaml:\d+: workload.method.file: .*ring.py cannot be read \(No such file",
    ):
        prepare(trials(load(scenario))[0])


def test_expect_accepts_only_metrics_of_method_in_file() -> None:
    with pytest.raises(
        InputError, match="unknown metric 'tokens_los': did you mean 'tokens_lost'"
    ):
        prepare_ring("expect.tokens_los=== 1")
    # A metric of the asynchronous pipelines.
    with pytest.raises(InputError, match="unknown metric 'versions_kept'"):
        prepare_ring("expect.versions_kept=== 1")


def test_fault_can_wait_for_event_of_method_file() -> None:
    trigger = "faults.0.when={device: source, event: lost, batch: 3}"
    assert prepare_ring(trigger)
    with pytest.raises(InputError, match="the event 'lost' has no micro"):
        prepare_ring(trigger.replace("batch", "micro"))


def write_package(folder: Path) -> None:
    """Write an installed package whose entry point registers a method."""
    package = folder / "rings"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rest.py").write_text("WORD = 'from the package'\n")
    (package / "small.py").write_text(
        SMALL + "    from rings.rest import WORD as summary\n"
    )
    info = folder / "rings-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rings\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[testbed.methods]\nnothing = rings.small:Nothing\n"
    )


def test_method_of_entry_point_is_deployed_with_package_modules(
    tmp_path: Path,
) -> None:
    write_package(tmp_path)
    program = (
        "from testbed.methods import METHODS\n"
        "from testbed.methods.external import code_of\n"
        "method = METHODS['nothing']\n"
        "print(code_of(method).model_dump_json())"
    )
    # Another process, since this one has read its entry points already.
    completed = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    code = Code.model_validate_json(completed.stdout)
    assert set(code.sources) == {"rings", "rings.rest", "rings.small"}
    method = from_code(code)
    assert (method.name, method.summary) == ("nothing", "from the package")


def test_method_without_span_names_accepts_fault_at_any_span() -> None:
    # Without names, a typing error in the fault cannot be detected.
    (trial,) = trials(load(RING, ["faults.0.when.begins=anything"]))
    method = find_method(trial.scenario)
    assert method.spans(recorded.make_plan(), "worker2") is None
    assert prepare(trial)
