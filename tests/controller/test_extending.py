"""Extension points of docs/extending.md: the package of that page is built as a wheel, and each entry is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.helpers.wheels import unpack_wheel

Completed = subprocess.CompletedProcess[str]
# Commands run in processes of their own, since this one has read its entry points already.
MAIN = "from testbed_controller.cli.main import main; main()"
SCENARIO = """
name: extended
seed: 1
devices: {worker: {profile: raspberry-pi-4b, count: 2}}
network: {link: {rate: 50mbit, delay: 5ms}}
workload:
  task: infer
  model: {name: mlp}
  data: {name: digits}
  method: {name: idle}
"""
NARROW_PARAMETERS = 682
"""Parameters of the model `narrow` with its default width."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two packages: the one of the page, and `torn`, whose entries cannot be imported."""
    folder = tmp_path_factory.mktemp("extending")
    page = (ROOT / "docs" / "extending.md").read_text()
    # The page shows each file below its name.
    code_block = re.compile(
        r"^`([\w./]+)`:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE
    )
    for name, text in code_block.findall(page):
        file = folder / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    content = unpack_wheel(folder / "source", folder)
    # All groups of the page, so that a new one is tested, too.
    entry_point = re.compile(r'^\[project.entry-points."([\w.]+)"\]', re.MULTILINE)
    install_torn(content, sorted(set(entry_point.findall(page))))
    return content


def install_torn(content: Path, groups: list[str]) -> None:
    """Install a package with a broken entry in each group, and a failing metric."""
    info = content / "torn-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    entries = [f"[{group}]\ntorn = nowhere:thing\n" for group in groups]
    entries.append("[testbed.metrics]\nwrong = torn:WRONG\n")
    (info / "entry_points.txt").write_text("".join(entries))
    metric = "Metric('wrong', 'number', 'a wrong metric', lambda run: 1 / 0)"
    (content / "torn.py").write_text(
        f"from testbed.trace.metrics_spec import Metric\nWRONG = {metric}\n"
    )


def run_python(
    folder: Path, program: str, *arguments: str, **environment: str
) -> Completed:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        # Imports of torch take seconds on a busy machine.
        timeout=120,
    )


def with_packages(packages: Path) -> str:
    return f"{packages}:{ROOT}"


def run_testbed(packages: Path, folder: Path, *arguments: str) -> Completed:
    path = with_packages(packages)
    return run_python(folder, MAIN, *arguments, PYTHONPATH=path)


def load_json(packages: Path, folder: Path, *arguments: str) -> Any:
    result = run_testbed(packages, folder, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def load_rows(packages: Path, folder: Path, catalogue: str) -> dict[str, Any]:
    rows = load_json(packages, folder, "show", catalogue)
    return {row["name"]: row for row in rows}


def simulate(packages: Path, folder: Path, *settings: str) -> dict[str, Any]:
    """Simulate the scenario and return the metrics."""
    (folder / "extended.yaml").write_text(SCENARIO)
    arguments = ["run", "extended.yaml", "--runtime", "simulate"]
    for setting in settings:
        arguments += ["--set", setting]
    metrics: dict[str, Any] = load_json(packages, folder, *arguments)["metrics"]
    return metrics


def validate_refused(packages: Path, folder: Path, scenario: str) -> str:
    """Validate an invalid scenario and return the messages."""
    (folder / "invalid.yaml").write_text(scenario)
    result = run_testbed(packages, folder, "validate", "invalid.yaml")
    assert result.returncode == 2
    return result.stdout + result.stderr


def test_command_of_package_is_listed_and_runs(packages: Path, tmp_path: Path) -> None:
    listing = run_testbed(packages, tmp_path, "--help").stdout
    assert re.search(r"^ +greet +Greet a device.$", listing, re.MULTILINE)
    assert run_testbed(packages, tmp_path, "greet", "pi").stdout == "hello pi\n"


def test_broken_command_is_reported_with_its_package(
    packages: Path, tmp_path: Path
) -> None:
    listing = run_testbed(packages, tmp_path, "--help")
    assert listing.returncode == 0
    # Other commands are not affected.
    commands = re.findall(r"^  (\w+) ", listing.stdout, re.MULTILINE)
    assert {"run", "greet", "torn"} <= set(commands)
    result = run_testbed(packages, tmp_path, "torn")
    assert result.returncode == 2
    assert re.fullmatch(
        r"testbed: the package 'torn' .*No module named 'nowhere'\n", result.stderr
    )


TRAINING = (
    "workload.task=train",
    "workload.method={name: single}",
    "workload.model={name: mlp}",
    "workload.epochs=2",
)


def test_data_of_package_are_listed_and_trained_on(
    packages: Path, tmp_path: Path
) -> None:
    rows = load_rows(packages, tmp_path, "data")
    assert rows["waves"]["summary"].startswith("1,000 sines")
    assert "the package 'torn'" in rows["torn"]["summary"]
    metrics = simulate(packages, tmp_path, *TRAINING, "workload.data={name: waves}")
    # The classes are sines and cosines, with noise.
    assert metrics["accuracy"] > 0.9


def test_broken_data_are_reported_at_their_key(packages: Path, tmp_path: Path) -> None:
    messages = validate_refused(packages, tmp_path, SCENARIO.replace("digits", "torn"))
    assert re.search(r"workload.data.name: the package 'torn' .*nowhere", messages)


def test_suggestions_include_data_of_packages(packages: Path, tmp_path: Path) -> None:
    scenario = SCENARIO.replace("digits", "waived")
    messages = validate_refused(packages, tmp_path, scenario)
    assert "unknown data set 'waived': did you mean 'waves'?" in messages


def test_model_of_package_is_listed_and_trained(packages: Path, tmp_path: Path) -> None:
    rows = load_rows(packages, tmp_path, "models")
    assert rows["narrow"]["summary"] == "A perceptron with two narrow layers."
    assert "the package 'torn'" in rows["torn"]["summary"]
    model = load_json(packages, tmp_path, "show", "models", "narrow")
    assert model["parameters"] == NARROW_PARAMETERS
    flops = []
    for width in (8, 32):
        setting = f"workload.model={{name: narrow, width: {width}}}"
        metrics = simulate(packages, tmp_path, *TRAINING, setting)
        flops.append(metrics["devices"]["worker1"]["flops"])
    # Four times the width are at least three times the FLOPs: the option is used.
    assert 0 < 3 * flops[0] < flops[1]


def read_on_device(packages: Path, folder: Path, scenario: str, facts: str) -> str:
    """Deploy a scenario of packages, and return facts of its problem from a process without the packages."""
    (folder / "extended.yaml").write_text(scenario)
    write = (
        "from pathlib import Path\n"
        "from testbed.prepare import prepare\n"
        "from testbed.scenario.expand import trials\n"
        "from testbed.scenario.loading import load\n"
        "from tests.helpers.deployments import deployment_bodies\n"
        "body = next(iter(deployment_bodies(prepare(trials(load('extended.yaml'))[0])).values()))\n"
        "Path('body').write_bytes(body)\n"
    )
    result = run_python(folder, write, PYTHONPATH=with_packages(packages))
    assert result.returncode == 0, result.stderr
    # A device receives source texts of the method, the model and the workload.
    read = (
        "from pathlib import Path\n"
        "from testbed.deployment import read\n"
        "method, problem = read(Path('body').read_bytes()).problem()\n"
        f"print(method.name, {facts})\n"
    )
    result = run_python(folder, read, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_model_of_package_runs_on_devices_without_package(
    packages: Path, tmp_path: Path
) -> None:
    scenario = SCENARIO.replace("mlp", "narrow")
    facts = "problem.model.parameters"
    output = read_on_device(packages, tmp_path, scenario, facts)
    assert output == f"idle {NARROW_PARAMETERS}\n"


def test_metrics_of_package_are_computed_and_expected(
    packages: Path, tmp_path: Path
) -> None:
    metrics = simulate(packages, tmp_path, "expect.event_count='> 0'")
    assert metrics["event_count"] > 0
    (results,) = (tmp_path / "results").iterdir()
    # The scenario of the results expects a metric that nothing defines there.
    without_package = run_python(tmp_path, MAIN, "report", str(results))
    assert without_package.returncode == 2
    message = "unknown metric 'event_count' in `expect`: install the package"
    assert message in without_package.stderr


def test_broken_metrics_are_logged_once_and_run_finishes(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "extended.yaml").write_text(SCENARIO)
    arguments = ("run", "extended.yaml", "--runtime", "simulate")
    result = run_testbed(packages, tmp_path, *arguments)
    assert result.returncode == 0
    # One metric cannot be imported, the other one fails.
    assert result.stderr.count("the package 'torn'") == 1
    message = "the metric 'wrong' of a package is left out: ZeroDivisionError"
    assert result.stderr.count(message) == 1


def test_fault_of_package_is_injected_and_undone(
    packages: Path, tmp_path: Path
) -> None:
    fault = "faults=[{isolate: worker1, at: 100ms, for: 200ms}]"
    assert simulate(packages, tmp_path, fault)["faults"] == 1
    (results,) = (tmp_path / "results").iterdir()
    phases = []
    for line in (results / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "fault":
            assert event["action"] == "isolate"
            assert event["target"] == "worker1"
            phases.append(event["phase"])
    assert phases == ["strike", "undo"]
    help_text = run_testbed(packages, tmp_path, "fault", "-h").stdout
    assert re.search(r"^ +isolate +Isolate: all links", help_text, re.MULTILINE)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{isolate: worker7, at: 1s}", r"faults.0.isolate: .*'worker7'"),
        ("{torn: worker1, at: 1s}", r"faults.0.torn: .*the package 'torn'"),
    ],
    ids=["unknown device", "broken package"],
)
def test_fault_of_package_is_checked(
    fault: str, message: str, packages: Path, tmp_path: Path
) -> None:
    scenario = f"{SCENARIO}faults: [{fault}]"
    assert re.search(message, validate_refused(packages, tmp_path, scenario))


def test_link_backend_reaches_shaper_without_package(
    packages: Path, tmp_path: Path
) -> None:
    unknown = ("up", "extended.yaml", "--links", "rate")
    result = run_testbed(packages, tmp_path, *unknown)
    names = "auto, netem, userspace, torn, rates"
    assert f"unknown link backend 'rate'; available: {names}" in result.stderr
    # The shaper receives the code in variables of its environment.
    write = (
        "import json, sys\n"
        "from testbed_controller.shaping.backend import environment_for\n"
        "json.dump(environment_for(['auto', 'rates', 'netem']), sys.stdout)\n"
    )
    read = (
        "import os\n"
        "from testbed.network.link import Link\n"
        "from testbed_controller.shaping.backend import LINK_BACKENDS, adopt_backends\n"
        "adopt_backends(os.environ)\n"
        "backend = LINK_BACKENDS.find('rates')\n"
        "links = Link(rate=1e6), Link(delay=1)\n"
        "print(list(LINK_BACKENDS), *(backend.link_problem(link, None) for link in links))\n"
    )
    result = run_python(tmp_path, write, PYTHONPATH=with_packages(packages))
    variables = {**json.loads(result.stdout), "TMPDIR": str(tmp_path)}
    result = run_python(tmp_path, read, **variables)
    # The backend can shape the first link, but no delay.
    problems = "None it shapes rates only: use --links auto"
    expected = f"['netem', 'userspace', 'rates'] {problems}\n"
    assert result.stdout == expected, result.stderr


def test_scenario_of_package_runs_by_name(packages: Path, tmp_path: Path) -> None:
    arguments = ("run", "extras/first", "--runtime", "simulate")
    assert load_json(packages, tmp_path, *arguments)["metrics"]["requests"] == 1
    refused = run_testbed(packages, tmp_path, "validate", "extras/frist")
    assert "did you mean 'extras/first'?" in refused.stderr


@pytest.fixture(scope="module")
def exported(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with the exporter `times`, which writes during the run."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "extended.yaml").write_text(SCENARIO)
    arguments = ("run", "extended.yaml", "--runtime", "simulate")
    options = ("--stream", "times", "--out", "results")
    result = run_testbed(packages, folder, *arguments, *options)
    assert result.returncode == 0, result.stderr
    return folder / "results"


def test_exporters_of_package_write_during_and_after_run(
    exported: Path, packages: Path
) -> None:
    # The time of the only request.
    (line,) = (exported / "times.txt").read_text().splitlines()
    assert float(line) == pytest.approx(1.0)
    arguments = ("export", "results", "--format", "markdown")
    result = run_testbed(packages, exported.parent, *arguments)
    assert result.stdout == f"written to results/export: metrics.md{os.linesep}", (
        result.stderr
    )
    table = (exported / "export" / "metrics.md").read_text()
    assert "| results | requests | 1 |" in table


def test_unsuitable_exporters_are_refused(exported: Path, packages: Path) -> None:
    export = ("export", "results", "--format")
    for arguments, message in (
        ((*export, "times"), "--format times: follows a running experiment"),
        ((*export, "torn"), "the package 'torn' that brings 'torn' cannot be used"),
        (
            (*export, "markdowns"),
            "unknown exporter 'markdowns': did you mean 'markdown'?",
        ),
        (
            ("run", "extended.yaml", "--stream", "markdown"),
            "--stream markdown: writes finished results",
        ),
    ):
        result = run_testbed(packages, exported.parent, *arguments)
        assert result.returncode == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    ("placement", "output"),
    [
        # Device q is assigned to host b by the lab.
        ("first", r"\{'p': 'a', 'q': 'b', 'r': 'a'\}"),
        ("torn", r"placement: the package 'torn' .*nowhere"),
        ("frist", r"placement: unknown placement 'frist': did you mean 'first'\?"),
    ],
)
def test_placement_of_package_chooses_hosts(
    placement: str, output: str, packages: Path, tmp_path: Path
) -> None:
    # Two hosts with 4 processors and 8 GB, and three devices with 200 MB.
    program = (
        "import sys\n"
        "from testbed.common.errors import InputError\n"
        "from testbed.hardware import DeviceSpec\n"
        "from testbed_controller.hosts.placement import Capacity, place\n"
        "hosts = dict.fromkeys('ab', Capacity(4, 8e9))\n"
        "devices = [DeviceSpec(name, 1e9, 2e8) for name in 'pqr']\n"
        "try:\n"
        "    print(place(devices, {}, hosts, {'q': 'b'}, (), sys.argv[1]))\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    path = with_packages(packages)
    result = run_python(tmp_path, program, placement, PYTHONPATH=path)
    assert re.match(output, result.stdout), result.stdout + result.stderr


def test_methods_are_listed_beside_broken_package(
    packages: Path, tmp_path: Path
) -> None:
    rows = load_rows(packages, tmp_path, "methods")
    assert {"pipeline", "idle"} <= {*rows}
    assert "the package 'torn'" in rows["torn"]["summary"]
    result = run_testbed(packages, tmp_path, "show", "methods", "torn")
    assert result.returncode == 2


def test_method_of_package_runs(packages: Path, tmp_path: Path) -> None:
    assert simulate(packages, tmp_path)["requests"] == 1


TALK = """
name: talking
devices: {worker: {profile: raspberry-pi-4b, count: 2}}
network: {link: {rate: 50mbit, delay: 5ms}}
workload:
  task: talk
  prompts: [how are you, fine]
  method: {name: echo}
expect: {words_per_second: '>= 9.9'}
"""


def test_workload_of_package_is_planned_simulated_and_reported(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "talking.yaml").write_text(TALK)
    assert run_testbed(packages, tmp_path, "plan", "talking.yaml").returncode == 0
    arguments = ("run", "talking.yaml", "--runtime", "simulate", "--out", "results")
    metrics = load_json(packages, tmp_path, *arguments)["metrics"]
    # The method echoes a word every 0.1 s.
    assert metrics["words_per_second"] == pytest.approx(10)
    assert metrics["trusted"]
    report = run_testbed(packages, tmp_path, "report", "results").stdout
    assert "echo talk, 2 devices" in report
    assert "10 a second" in report


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("prompts", "promts", "unknown key 'promts': did you mean 'prompts'?"),
        ("task: talk", "task: talks", "did you mean 'talk'?"),
        (
            "echo",
            "idle",
            "the method 'idle' does not support the task 'talk'; supported: infer",
        ),
        (
            "task: talk",
            "task: torn",
            "the package 'torn' that brings 'torn' cannot be used",
        ),
    ],
)
def test_keys_of_workload_of_package_are_checked(
    old: str, new: str, message: str, packages: Path, tmp_path: Path
) -> None:
    messages = validate_refused(packages, tmp_path, TALK.replace(old, new))
    assert message in messages


def test_workload_of_package_runs_on_devices_without_package(
    packages: Path, tmp_path: Path
) -> None:
    facts = "*problem.workload.prompts"
    output = read_on_device(packages, tmp_path, TALK, facts)
    assert output == "echo how are you fine\n"
