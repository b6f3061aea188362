"""Methods from a file and from a package: found, refused in one line, and sent to devices as text."""

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
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.validation import find_method
from testbed_controller.results import files
from tests.helpers import ROOT, recorded
from tests.helpers.deployments import deployment_bodies

RING = ROOT / "scenarios" / "examples" / "ring.yaml"
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


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def test_the_method_of_a_file_plans_and_declares() -> None:
    prepared = prepare(trials(load(RING))[0])
    assert prepared.plan.method == "ring"
    assert [figure.name for figure in prepared.method.declared.metrics] == [
        "tokens_lost"
    ]


def test_a_method_travels_as_text_and_is_the_same_there(tmp_path: Path) -> None:
    (tmp_path / "there.py").write_text(
        "import sys\n"
        "from testbed.deployment import read\n"
        "method, problem = read(sys.stdin.buffer.read()).problem()\n"
        "print(method.name, problem.options.stall_timeout)\n"
    )
    body = next(iter(deployment_bodies(prepare(trials(load(RING))[0])).values()))
    command = [sys.executable, str(tmp_path / "there.py")]
    assert (
        subprocess.run(command, check=True, capture_output=True, input=body).stdout
        == b"ring 6.0\n"
    )


SYSTEMS = {
    "testbed_stahl": "papers/stahl-example",
    "testbed_ftpipehd": "papers/ftpipehd-figure-5",
    "testbed_pipelearn": "papers/pipelearn-table-3",
    "testbed_edgepipe": "papers/edgepipe-headlines",
    "testbed_versatilefl": "papers/versatilefl-figure-5",
}


@pytest.mark.parametrize("package", SYSTEMS)
def test_a_published_system_runs_from_its_text_on_a_device_without_the_package(
    package: str, tmp_path: Path
) -> None:
    names = {
        point.name
        for point in entry_points(group="testbed.methods")
        if point.module.startswith(package)
    }
    trial = next(
        each
        for each in trials(load(SYSTEMS[package]))
        if each.scenario.workload.method.name in names
    )
    body = next(iter(deployment_bodies(prepare(trial)).values()))
    assert (
        _read_without(package, body, tmp_path)
        == f"{trial.scenario.workload.method.name} True\n"
    )


def test_a_workload_and_its_method_from_one_package_share_their_texts(
    tmp_path: Path,
) -> None:
    trial = trials(load(ROOT / "generation" / "scenarios" / "kill.yaml"))[0]
    body = next(iter(deployment_bodies(prepare(trial)).values()))
    document = json.loads(body)
    assert "testbed_generation.methods" in document["work_code"]["sources"]
    assert document["method_code"]["sources"] == {}
    assert _read_without("testbed_generation", body, tmp_path) == "petals True\n"


def _read_without(package: str, body: bytes, tmp_path: Path) -> str:
    """Read a deployment in a process without a package; return its method's name and whether its options are read."""
    (tmp_path / "testbed").symlink_to(ROOT / "testbed")
    (tmp_path / "there.py").write_text(
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
    # Without site no editable installation is found: the folders are what a device image has.
    path = f"{tmp_path}:{sysconfig.get_path('purelib')}"
    command = [sys.executable, "-S", str(tmp_path / "there.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, input=body
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_methods_of_this_code_need_not_travel() -> None:
    assert code_of(METHODS["pipeline"]) is None


def test_results_keep_the_file_and_load_without_the_original(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SMALL)
    workload = recorded.SCENARIO["workload"] | {
        "method": {"file": "mine.py", "name": "nothing"}
    }
    (tmp_path / "mine.yaml").write_text(
        str({**recorded.SCENARIO, "workload": workload, "faults": []})
    )
    trial = trials(load(tmp_path / "mine.yaml"))[0]
    kept = recorded.write_run(
        tmp_path / "run", trial, recorded.make_plan(), recorded.make_outcome()
    )
    (tmp_path / "mine.py").unlink()
    run = files.load(kept)
    assert (kept / "mine.py").read_text() == SMALL
    assert run.trial.scenario.workload.method.file == "mine.py"
    assert "step_time" in run.metrics


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def plan(:\n", r"mine.py:1: is not Python: "),
        ("import testbed\n\nraise ValueError('x')\n", r"mine.py:3: ValueError: x"),
        (
            "import nowhere.to.be.found\n",
            r"mine.py:1: ModuleNotFoundError: No module named 'nowhere'",
        ),
        (
            SMALL.replace('"nothing"', '"other"'),
            r"defines no method 'nothing': .* \(there: other\)",
        ),
        ("x = 1\n", r"\(there: none\)"),
        (SMALL.replace("def plan", "def plans"), r"Nothing lacks plan"),
    ],
)
def test_file_without_method_is_refused_in_one_line(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as refused:
        from_file(written(tmp_path, text), "nothing")
    assert refused.value.key == ("method", "file")
    assert "\n" not in str(refused.value)


def test_figures_of_a_method_may_not_take_names_that_there_are(tmp_path: Path) -> None:
    text = (
        "from testbed.trace.metrics_spec import MetricsSpec, Metric\n"
        + SMALL.replace(
            "    name =",
            "    declared = MetricsSpec(metrics=(Metric('loss', 'number', 'x', None),))\n    name =",
        )
    )
    with pytest.raises(InputError, match="two metrics are called 'loss'"):
        from_file(written(tmp_path, text), "nothing")


def test_a_missing_file_is_named_at_its_key(tmp_path: Path) -> None:
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(RING.read_text())
    with pytest.raises(
        InputError,
        match=r"mine.yaml:\d+: workload.method.file: .*ring.py cannot be read \(No such file",
    ):
        prepare(trials(load(scenario))[0])


def test_expect_knows_the_figures_of_the_file_and_of_no_other_method() -> None:
    with pytest.raises(
        InputError, match="unknown metric 'tokens_los': did you mean 'tokens_lost'"
    ):
        prepare(trials(load(RING, ["expect.tokens_los=== 1"]))[0])
    with pytest.raises(InputError, match="unknown metric 'versions_kept'"):
        prepare(trials(load(RING, ["expect.versions_kept=== 1"]))[0])


def test_events_of_the_file_can_be_waited_for() -> None:
    waiting = "faults.0.when={device: source, event: lost, batch: 3}"
    assert prepare(trials(load(RING, [waiting]))[0])
    with pytest.raises(InputError, match="the event 'lost' has no micro"):
        prepare(trials(load(RING, [waiting.replace("batch", "micro")]))[0])


def test_a_package_registers_methods_by_entry_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rings"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rest.py").write_text("WORD = 'from the package'\n")
    (package / "small.py").write_text(
        SMALL + "    from rings.rest import WORD as summary\n"
    )
    info = tmp_path / "rings-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rings\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[testbed.methods]\nnothing = rings.small:Nothing\n"
    )
    program = (
        "from testbed.methods import METHODS\n"
        "from testbed.methods.external import code_of\n"
        "method = METHODS['nothing']\n"
        "print(code_of(method).model_dump_json())"
    )
    root = str(ROOT)
    environment = {"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    code = Code.model_validate_json(found.stdout)
    assert set(code.sources) == {"rings", "rings.rest", "rings.small"}
    method = from_code(code)
    assert (method.name, method.summary) == ("nothing", "from the package")


def test_method_without_span_names_accepts_all_faults() -> None:
    (trial,) = trials(load(RING, ["faults.0.when.begins=anything"]))
    assert find_method(trial.scenario).spans(recorded.make_plan(), "worker2") is None
    assert prepare(trial)
