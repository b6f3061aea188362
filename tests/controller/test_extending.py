"""The package of docs/extending.md, built as a wheel: each extension point is used as by its reader."""

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


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the content of the wheel, and a package whose entries cannot be used."""
    folder = tmp_path_factory.mktemp("extending")
    page = (ROOT / "docs" / "extending.md").read_text()
    for name, text in re.findall(
        r"^`([\w./]+)`:\n\n```\w+\n(.*?)```", page, re.DOTALL | re.MULTILINE
    ):
        file = folder / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    content = unpack_wheel(folder / "source", folder)
    info = content / "torn-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    groups = set(
        re.findall(r'^\[project.entry-points."([\w.]+)"\]', page, re.MULTILINE)
    )
    entries = [f"[{group}]\ntorn = nowhere:thing\n" for group in sorted(groups)]
    (info / "entry_points.txt").write_text(
        "".join([*entries, "[testbed.metrics]\nwrong = torn:WRONG\n"])
    )
    figure = "Metric('wrong', 'number', 'a wrong figure', lambda run: 1 / 0)"
    (content / "torn.py").write_text(
        f"from testbed.trace.metrics_spec import Metric\nWRONG = {figure}\n"
    )
    return content


def run(
    packages: Path, here: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}"}
    command = [sys.executable, "-c", MAIN, *arguments]
    return subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=120
    )


def simulate(packages: Path, here: Path, *settings: str) -> dict[str, Any]:
    """Simulate the scenario and return the metrics."""
    (here / "extended.yaml").write_text(SCENARIO)
    overrides = [word for setting in settings for word in ("--set", setting)]
    arguments = ["run", "extended.yaml", "--runtime", "simulate", "--json", *overrides]
    done = run(packages, here, *arguments)
    assert done.returncode == 0, done.stderr
    metrics: dict[str, Any] = json.loads(done.stdout)["metrics"]
    return metrics


def test_a_command_of_a_package_is_listed_and_runs(
    packages: Path, tmp_path: Path
) -> None:
    assert re.search(
        r"^ +greet +Greet a device.$",
        run(packages, tmp_path, "--help").stdout,
        re.MULTILINE,
    )
    assert run(packages, tmp_path, "greet", "pi").stdout == "hello pi\n"


def test_a_broken_command_is_reported_by_its_package_and_the_others_are_listed(
    packages: Path, tmp_path: Path
) -> None:
    listed = run(packages, tmp_path, "--help")
    assert listed.returncode == 0
    assert {"run", "greet", "torn"} <= set(
        re.findall(r"^  (\w+) ", listed.stdout, re.MULTILINE)
    )
    called = run(packages, tmp_path, "torn")
    assert called.returncode == 2
    assert re.fullmatch(
        r"testbed: the package 'torn' .*No module named 'nowhere'\n", called.stderr
    )


TRAINED = (
    "workload.task=train",
    "workload.method={name: single}",
    "workload.model={name: mlp}",
    "workload.epochs=2",
)


def test_data_of_a_package_are_listed_and_trained_on(
    packages: Path, tmp_path: Path
) -> None:
    rows = {
        row["name"]: row
        for row in json.loads(run(packages, tmp_path, "show", "data", "--json").stdout)
    }
    assert rows["waves"]["summary"].startswith("1,000 sines")
    assert "the package 'torn'" in rows["torn"]["summary"]
    assert (
        simulate(packages, tmp_path, *TRAINED, "workload.data={name: waves}")[
            "accuracy"
        ]
        > 0.9
    )


def test_broken_data_are_reported_at_their_key(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(SCENARIO.replace("digits", "torn"))
    refused = run(packages, tmp_path, "validate", "broken.yaml")
    assert refused.returncode == 2
    assert re.search(
        r"workload.data.name: the package 'torn' .*nowhere",
        refused.stdout + refused.stderr,
    )


def test_an_unknown_name_lists_the_data_of_packages(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "unknown.yaml").write_text(SCENARIO.replace("digits", "waived"))
    refused = run(packages, tmp_path, "validate", "unknown.yaml")
    assert (
        "unknown data set 'waived': did you mean 'waves'?"
        in refused.stdout + refused.stderr
    )


def test_a_model_of_a_package_is_listed_and_trained(
    packages: Path, tmp_path: Path
) -> None:
    rows = {
        row["name"]: row
        for row in json.loads(
            run(packages, tmp_path, "show", "models", "--json").stdout
        )
    }
    assert rows["narrow"]["summary"] == "A perceptron with two narrow layers."
    assert "the package 'torn'" in rows["torn"]["summary"]
    assert (
        json.loads(
            run(packages, tmp_path, "show", "models", "narrow", "--json").stdout
        )["parameters"]
        == 682
    )
    flops = []
    for width in (8, 32):
        metrics = simulate(
            packages,
            tmp_path,
            *TRAINED,
            f"workload.model={{name: narrow, width: {width}}}",
        )
        flops.append(metrics["devices"]["worker1"]["flops"])
    assert 0 < 3 * flops[0] < flops[1]


def read_on_a_device(packages: Path, folder: Path, scenario: str, facts: str) -> str:
    """Deploy a scenario of packages, and return facts of its problem from a process without them."""
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
    read = (
        "from pathlib import Path\n"
        "from testbed.deployment import read\n"
        "method, problem = read(Path('body').read_bytes()).problem()\n"
        f"print(method.name, {facts})\n"
    )
    for program, path in ((write, f"{packages}:{ROOT}"), (read, str(ROOT))):
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_text_of_a_model_travels_to_devices_without_the_package(
    packages: Path, tmp_path: Path
) -> None:
    read = read_on_a_device(
        packages,
        tmp_path,
        SCENARIO.replace("mlp", "narrow"),
        "problem.model.parameters",
    )
    assert read == "idle 682\n"


def test_metrics_of_a_package_are_computed_and_expected(
    packages: Path, tmp_path: Path
) -> None:
    assert simulate(packages, tmp_path, "expect.event_count='> 0'")["event_count"] > 0
    (results,) = (tmp_path / "results").iterdir()
    command = [sys.executable, "-c", MAIN, "report", str(results)]
    without_package = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True
    )
    assert without_package.returncode == 2
    assert (
        "unknown metric 'event_count' in `expect`: install the package"
        in without_package.stderr
    )


def test_broken_metrics_are_logged_once_and_the_run_ends(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "extended.yaml").write_text(SCENARIO)
    done = run(packages, tmp_path, "run", "extended.yaml", "--runtime", "simulate")
    assert done.returncode == 0
    assert done.stderr.count("the package 'torn'") == 1
    assert (
        done.stderr.count(
            "the metric 'wrong' of a package is left out: ZeroDivisionError"
        )
        == 1
    )


FAULT = "faults=[{isolate: worker1, at: 100ms, for: 200ms}]"


def test_a_fault_of_a_package_strikes_and_is_undone(
    packages: Path, tmp_path: Path
) -> None:
    assert simulate(packages, tmp_path, FAULT)["faults"] == 1
    (results,) = (tmp_path / "results").iterdir()
    events = (
        json.loads(line) for line in (results / "events.jsonl").read_text().splitlines()
    )
    faults = [event for event in events if event["event"] == "fault"]
    assert [(each["action"], each["target"], each["phase"]) for each in faults] == [
        ("isolate", "worker1", "strike"),
        ("isolate", "worker1", "undo"),
    ]
    assert re.search(
        r"^ +isolate +Isolate: all links",
        run(packages, tmp_path, "fault", "-h").stdout,
        re.MULTILINE,
    )


def test_a_fault_of_a_package_is_checked_as_the_others(
    packages: Path, tmp_path: Path
) -> None:
    for fault, text in (
        ("{isolate: worker7, at: 1s}", r"faults.0.isolate: .*'worker7'"),
        ("{torn: worker1, at: 1s}", r"faults.0.torn: .*the package 'torn'"),
    ):
        (tmp_path / "struck.yaml").write_text(f"{SCENARIO}faults: [{fault}]")
        refused = run(packages, tmp_path, "validate", "struck.yaml")
        assert refused.returncode == 2
        assert re.search(text, refused.stdout + refused.stderr)


def test_a_link_backend_reaches_a_shaper_without_the_package(
    packages: Path, tmp_path: Path
) -> None:
    refused = run(packages, tmp_path, "up", "extended.yaml", "--links", "rate")
    assert (
        "unknown link backend 'rate'; available: auto, netem, userspace, torn, rates"
        in refused.stderr
    )
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
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}"}
    sent = subprocess.run(
        [sys.executable, "-c", write],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    environment = {**os.environ, **json.loads(sent.stdout), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", read],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (
        done.stdout
        == "['netem', 'userspace', 'rates'] None it shapes rates only: use --links auto\n"
    ), done.stderr


def test_a_scenario_of_a_package_runs_by_its_name(
    packages: Path, tmp_path: Path
) -> None:
    done = run(
        packages, tmp_path, "run", "extras/first", "--runtime", "simulate", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["requests"] == 1
    assert (
        "did you mean 'extras/first'?"
        in run(packages, tmp_path, "validate", "extras/frist").stderr
    )


def test_exporters_of_a_package_follow_a_run_and_write_its_results(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "extended.yaml").write_text(SCENARIO)
    done = run(
        packages,
        tmp_path,
        "run",
        "extended.yaml",
        "--runtime",
        "simulate",
        "--stream",
        "times",
        "--out",
        "kept",
    )
    assert done.returncode == 0, done.stderr
    assert [
        float(line)
        for line in (tmp_path / "kept" / "times.txt").read_text().splitlines()
    ] == pytest.approx([1.0])
    written = run(packages, tmp_path, "export", "kept", "--format", "markdown")
    assert written.stdout == f"kept/export: metrics.md{os.linesep}", written.stderr
    assert (
        "| kept | requests | 1 |"
        in (tmp_path / "kept" / "export" / "metrics.md").read_text()
    )
    for arguments, text in (
        (
            ("export", "kept", "--format", "times"),
            "--format times: follows a running experiment",
        ),
        (
            ("export", "kept", "--format", "torn"),
            "the package 'torn' that brings 'torn' cannot be used",
        ),
        (
            ("export", "kept", "--format", "markdowns"),
            "unknown exporter 'markdowns': did you mean 'markdown'?",
        ),
        (
            ("run", "extended.yaml", "--stream", "markdown"),
            "--stream markdown: writes finished results",
        ),
    ):
        refused = run(packages, tmp_path, *arguments)
        assert refused.returncode == 2
        assert text in refused.stderr


def test_a_placement_of_a_package_chooses_hosts(packages: Path, tmp_path: Path) -> None:
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
    environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}"}
    for name, text in (
        ("first", r"\{'p': 'a', 'q': 'b', 'r': 'a'\}"),
        ("torn", r"placement: the package 'torn' .*nowhere"),
        ("frist", r"placement: unknown placement 'frist': did you mean 'first'\?"),
    ):
        command = [sys.executable, "-c", program, name]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert re.match(text, done.stdout), done.stdout + done.stderr


def test_methods_are_listed_beside_a_broken_package(
    packages: Path, tmp_path: Path
) -> None:
    rows = {
        row["name"]: row
        for row in json.loads(
            run(packages, tmp_path, "show", "methods", "--json").stdout
        )
    }
    assert {"pipeline", "idle"} <= {*rows}
    assert "the package 'torn'" in rows["torn"]["summary"]
    assert run(packages, tmp_path, "show", "methods", "torn").returncode == 2


def test_a_method_of_a_package_runs(packages: Path, tmp_path: Path) -> None:
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


def test_a_workload_of_a_package_is_planned_simulated_and_reported(
    packages: Path, tmp_path: Path
) -> None:
    (tmp_path / "talking.yaml").write_text(TALK)
    assert run(packages, tmp_path, "plan", "talking.yaml").returncode == 0
    done = run(
        packages,
        tmp_path,
        "run",
        "talking.yaml",
        "--runtime",
        "simulate",
        "--json",
        "--out",
        "kept",
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["words_per_second"] == pytest.approx(10)
    assert metrics["trusted"]
    shown = run(packages, tmp_path, "report", "kept").stdout
    assert "echo talk, 2 devices" in shown
    assert "10 a second" in shown


def test_keys_of_a_workload_of_a_package_are_checked(
    packages: Path, tmp_path: Path
) -> None:
    for change, text in (
        (("prompts", "promts"), "unknown key 'promts': did you mean 'prompts'?"),
        (("task: talk", "task: talks"), "did you mean 'talk'?"),
        (("echo", "idle"), "the method 'idle' cannot talk: it can infer"),
        (
            ("task: talk", "task: torn"),
            "the package 'torn' that brings 'torn' cannot be used",
        ),
    ):
        (tmp_path / "talking.yaml").write_text(TALK.replace(*change))
        refused = run(packages, tmp_path, "validate", "talking.yaml")
        assert refused.returncode == 2
        assert text in refused.stdout + refused.stderr


def test_the_text_of_a_workload_travels_to_devices_without_the_package(
    packages: Path, tmp_path: Path
) -> None:
    read = read_on_a_device(packages, tmp_path, TALK, "*problem.workload.prompts")
    assert read == "echo how are you fine\n"
