"""Whole runs through the command line, on real containers: what a user does, and what must be left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from testbed.common import yamltext
from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.lab.engine import connect
from testbed_controller.lab.removal import RUN
from tests.helpers import ROOT, own_tokens
from tests.helpers.browser import CHROMIUM, open_page
from tests.helpers.commands import run_command
from tests.helpers.message_counts import (
    count_differences,
    lost_in_containers,
    outcome_in,
    size_differences,
)

pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]

TESTBED = Path(sys.executable).with_name("testbed")

RUNTIMES = {
    # A shared host may not keep the links within their tolerance.
    "emulate": ["--accept-links"],
    "simulate": ["--runtime", "simulate"],
}
"""Arguments of `testbed run` by runtime."""
ON_A_LAB = RUNTIMES | {"emulate": [*RUNTIMES["emulate"], "--on"]}
"""The same where the containers stand already."""


@pytest.fixture(scope="module", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def scenario(folder: Path, name: str, **changes: Any) -> Path:
    """Write a small training scenario: a stage each on three devices."""
    tree: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "devices": {
            "source": {"speed": "600mflops"},
            "worker": {"profile": "raspberry-pi-4b", "speed": "300mflops", "count": 2},
        },
        "network": {"link": {"rate": "100mbit", "delay": "2ms"}},
        "workload": {
            "model": {"name": "mlp"},
            "method": {
                "name": "pipeline",
                "micro_batches": 2,
                "stall_timeout": "1s",
                "checkpoint_every": 5,
            },
            "batch_size": 32,
            "steps": 40,
        },
        "time_limit": "120s",
    }
    path = folder / f"{name}.yaml"
    path.write_text(yamltext.written(tree | changes))
    return path


def start(path: Path, out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a run that takes long, its progress going to ``out``.log."""
    slow = [
        "--set",
        "devices.worker.speed=20mflops",
        "--set",
        "workload.method.rejoin_timeout=60s",
    ]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [TESTBED, "run", path, "--out", out, "--accept-links", *slow, *arguments],
            stdout=log,
        )


def differences_in(folder: Path, **known: Any) -> list[str]:
    """Return the differences between the counts of the runs in ``emulate`` and ``simulate`` of a folder."""
    return count_differences(
        outcome_in(folder / "emulate"), outcome_in(folder / "simulate"), **known
    )


def fresh_folder(folder: Path) -> Path:
    """Return a new folder in a folder: a test of time is repeated with the same one, and results need an empty one."""
    return Path(tempfile.mkdtemp(dir=folder))


def is_running(out: Path) -> bool:
    return "running" in out.with_suffix(".log").read_text().split()


def left_of(name: str) -> list[str]:
    """Name what the engine still holds of runs of one scenario."""
    client: docker.DockerClient = connect()
    found = [
        *client.api.containers(all=True, filters={"label": RUN}),
        *client.api.networks(filters={"label": RUN}),
    ]
    return [
        str(each.get("Names") or each["Name"])
        for each in found
        if each["Labels"][RUN].startswith(name)
    ]


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.timed  # a fault strikes while a device holds the token
def test_a_method_from_a_file_runs_in_containers_with_its_own_figure(
    tmp_path: Path,
) -> None:
    ring = ROOT / "scenarios" / "examples" / "ring.yaml"
    out = fresh_folder(tmp_path) / "ring"
    # A round takes three seconds; the fault strikes in the first, and one more shows that it goes on.
    fault = "faults=[{kill: worker2, when: {device: worker2, begins: hold, batch: 0}, for: 1s}]"
    changes = [fault, "workload.requests=2", "expect.requests=== 2"]
    shorter = [part for change in changes for part in ("--set", change)]
    done = run_command("run", ring, "--out", out, "--accept-links", *shorter)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((out / "metrics.json").read_text())["tokens_lost"] == 1
    assert (out / "ring.py").read_text() == ring.with_name("ring.py").read_text()
    assert "tokens that were lost and replaced" in (out / "report.html").read_text()
    # Read from its own folder again: the figures are those of the file that lies there.
    again = run_command("report", out)
    assert again.returncode == 0, again.stderr
    assert left_of("ring") == []


def test_both_clocks_have_the_same_fixed_kernels_and_an_expectation_that_both_miss_ends_them_with_1(
    tmp_path: Path,
) -> None:
    # With the kernels that torch would choose, other instruction sets give other weights after a few steps.
    kernels = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    path = scenario(tmp_path, "run-same", expect={"accuracy": ">= 0.999"})
    cnn = ["--set", "workload.model={name: cnn}", "--set", "workload.reproducible=true"]
    for runtime, options in RUNTIMES.items():
        arguments = ["run", path, "--out", tmp_path / runtime, *options, *cnn]
        # A process of its own, since it starts itself again where torch has been imported.
        done = subprocess.run(
            [TESTBED, *arguments],
            env=os.environ | kernels,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stderr
    losses = {}
    for runtime in ("emulate", "simulate"):
        events = [
            json.loads(line)
            for line in (tmp_path / runtime / "events.jsonl").read_text().splitlines()
        ]
        losses[runtime] = [
            event["loss"] for event in events if event["event"] == "step"
        ]
    assert losses["emulate"] == losses["simulate"]
    emulated = load_file(tmp_path / "emulate" / "weights.safetensors")
    simulated = load_file(tmp_path / "simulate" / "weights.safetensors")
    assert emulated.keys() == simulated.keys()
    for name, tensor in simulated.items():
        assert emulated[name].equal(tensor), name
    assert differences_in(tmp_path) == []
    assert left_of("run-same") == []


def test_a_tensor_parallel_perceptron_answers_with_the_given_weights_on_both_clocks(
    tmp_path: Path,
) -> None:
    example = ROOT / "scenarios" / "examples" / "tensorparallel.yaml"
    prepared = prepare(trials(load(example))[0])
    network, workload = prepared.problem.model, prepared.problem.workload
    whole = network.build(0, len(network.units), 12345).eval()
    save_file(whole.state_dict(), tmp_path / "given.safetensors")
    data = load_data(workload.data)
    with torch.no_grad():
        outputs = whole(torch.from_numpy(data.test_images[:80]))
    wanted = float(
        torch.nn.functional.cross_entropy(
            outputs, torch.from_numpy(data.test_labels[:80])
        )
    )
    for runtime, options in RUNTIMES.items():
        out = tmp_path / runtime
        given = ["--weights", tmp_path / "given.safetensors"]
        done = run_command("run", example, "--out", out, *options, *given)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "read from this file" in done.stdout
        (evaluation,) = json.loads((out / "metrics.json").read_text())["series"][
            "evaluations"
        ]
        assert evaluation["loss"] == pytest.approx(wanted, rel=1e-5)
    assert differences_in(tmp_path) == []


def test_tokens_are_learnt_in_containers_as_on_the_virtual_clock(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokens.yaml").write_text(own_tokens.SCENARIO)
    (tmp_path / "own_tokens.py").write_text(
        (ROOT / "tests" / "helpers" / "own_tokens.py").read_text()
    )
    losses = {}
    for runtime, options in RUNTIMES.items():
        out = tmp_path / runtime
        done = run_command("run", tmp_path / "tokens.yaml", "--out", out, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = json.loads((out / "metrics.json").read_text())["series"]["steps"]
        losses[runtime] = [step["loss"] for step in steps]
    assert losses["emulate"] == pytest.approx(losses["simulate"], rel=1e-5)
    assert differences_in(tmp_path) == []


# Of a slot, computing and transmitting need a tenth: the rest is for a slow host.
SLOTTED = {
    "edgepipe": (0.45, 3, {"name": "edgepipe", "timeslot": "450ms"}),
    "versatile": (
        0.3,
        1,
        {
            "name": "versatile",
            "allocation": "horizontal",
            "timeslot": "300ms",
            "management_window": 6,
            "evaluate_every": 1,
            "test_batch_size": 32,
            "test_runs": 1,
        },
    ),
}
"""The length of a slot in seconds, the number of steps and the options, by method."""


@pytest.mark.timed
def test_super_neurons_learn_the_same_over_the_same_losses_on_both_clocks(
    tmp_path: Path,
) -> None:
    """EdgePipe, then VersatileFL on the same containers."""
    folder = fresh_folder(tmp_path)
    smoke = ROOT / "scenarios" / "smoke" / "edgepipe.yaml"
    common = ["faults=[]", "expect={}", "network.link.delay=20ms"]
    same_lab = [part for change in common for part in ("--set", change)]
    assert run_command("up", smoke, *same_lab).returncode == 0
    try:
        for method, (slot, steps, options) in SLOTTED.items():
            sets = ["--set", f"workload.method={json.dumps(options)}"]
            sets += ["--set", f"workload.steps={steps}"]
            for runtime, arguments in ON_A_LAB.items():
                out = folder / method / runtime
                done = run_command(
                    "run", smoke, *arguments, "--out", out, *same_lab, *sets
                )
                assert done.returncode == 0, done.stderr
            check_both_clocks(folder / method, slot, steps)
    finally:
        assert run_command("down").returncode == 0


def check_both_clocks(folder: Path, slot: float, steps: int) -> None:
    """Compare the casts that devices heard, and the losses, of both runs in a folder; skip if the host was too slow."""
    runs = {}
    for runtime in ("emulate", "simulate"):
        runs[runtime] = [
            json.loads(line)
            for line in (folder / runtime / "events.jsonl").read_text().splitlines()
        ]
    emulated, simulated = (
        {heard(event) for event in runs[runtime] if "cast" in event} for runtime in runs
    )
    late = late_casts(runs["emulate"], slot)
    if late:
        pytest.skip(f"the host was too slow: {late} casts came after their slot")
    assert emulated == simulated
    assert differences_in(folder) == []
    # What is tested are the weights of all devices, so equal losses of steps and tests mean equal weights.
    losses = {
        runtime: [
            event["loss"]
            for event in runs[runtime]
            if event["event"] in ("step", "evaluate")
        ]
        for runtime in runs
    }
    assert len(losses["simulate"]) == steps + 1
    assert losses["emulate"] == pytest.approx(losses["simulate"], rel=1e-5)


def heard(event: dict[str, Any]) -> tuple[str, str, int]:
    return event["device"], event["peer"], event["cast"]


def late_casts(events: list[dict[str, Any]], slot: float) -> int:
    """Count casts that arrived when the slot after that in which they were called had begun."""
    called = {
        (event["device"], event["number"]): event["start"]
        for event in events
        if event["event"] == "cast"
    }
    return sum(
        event["time"] // slot > called[event["peer"], event["cast"]] // slot
        for event in events
        if "cast" in event
    )


def test_every_kind_of_fault_is_outlived(tmp_path: Path) -> None:
    faults = [
        {
            "pause": "worker1",
            "when": {"device": "worker1", "begins": "forward", "batch": 8},
            "for": "500ms",
        },
        {
            "degrade": {
                "between": ["source", "worker1"],
                "rate": "5mbit",
                "delay": "20ms",
                "loss": "1%",
            },
            "at": "2s",
        },
        # By batches, so that on a fast host too the partition is over before the kill, and long before all is healed.
        {
            "partition": [["worker2"]],
            "when": {"device": "worker2", "begins": "forward", "batch": 14},
            "for": "2s",
        },
        {
            "kill": "worker2",
            "when": {"device": "worker2", "begins": "backward", "batch": 25},
            "for": "1s",
        },
        {"heal": "all", "after": "2s"},
    ]
    path = scenario(tmp_path, "run-faults", faults=faults)
    done = run_command("run", path, "--out", tmp_path / "out", "--accept-links")
    assert done.returncode == 0, done.stderr + done.stdout
    events = [
        json.loads(line)
        for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    ]
    struck = {
        (event["action"], event["phase"])
        for event in events
        if event["event"] == "fault"
    }
    assert struck >= {
        ("pause", "strike"),
        ("pause", "undo"),
        ("degrade", "strike"),
        ("partition", "strike"),
        ("partition", "undo"),
        ("kill", "strike"),
        ("kill", "undo"),
        ("heal", "strike"),
    }
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["steps"] == 40
    assert metrics["recoveries"] >= 1
    assert left_of("run-faults") == []


def test_a_device_killed_and_restarted_by_hand_joins_again_and_is_recorded(
    tmp_path: Path,
) -> None:
    path = scenario(tmp_path, "run-hand")
    running = start(path, tmp_path / "out", "--set", "workload.steps=50", "--watch")
    try:
        # A device that is killed before its first step is only waited for, which is no recovery.
        assert eventually(lambda: "steps/s" in (tmp_path / "out.log").read_text(), 90)
        address = next(
            line
            for line in (tmp_path / "out.log").read_text().splitlines()
            if "?token=" in line
        )
        kill_from_the_page(address, "worker1")
        # From now on the run cannot end before the restart, however long commands take on a busy host.
        assert (
            run_command("fault", "degrade", "worker2", "--delay", "3ms").returncode == 0
        )
        flapped = run_command(
            "fault",
            "flap",
            "source",
            "worker2",
            "--down",
            "50ms",
            "--up",
            "200ms",
            "--times",
            "2",
        )
        assert "went down 2 times" in flapped.stdout, flapped.stderr
        assert (
            "no link from 'source' to 'source'"
            in run_command(
                "fault", "flap", "source", "source", "--down", "50ms", "--up", "1s"
            ).stderr
        )
        for action in (["heal"], ["restart", "worker1"]):
            done = run_command("fault", *action)
            assert done.returncode == 0, done.stderr
        assert running.wait(120) == 0
    finally:
        running.kill()
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["steps"] == 50
    assert metrics["recoveries"] >= 1
    assert [fault["action"] for fault in metrics["fault_list"]] == [
        *("kill", "degrade", "flap", "flap", "heal", "restart")
    ]
    assert metrics["fault_list"][1]["undone"] == metrics["fault_list"][-2]["struck"]


def kill_from_the_page(address: str, device: str) -> None:
    """Click on the device and on "kill" in a browser, and see it go down there; without a browser, ask as it would."""
    if CHROMIUM is None:
        origin, _, token = address.partition("/?token=")
        fault = {"kill": device}
        answer = requests.post(
            f"{origin}/strike",
            json=fault,
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
        )
        assert answer.json() == {"done": f"kill: {device}"}
        return
    with open_page(address) as page:
        assert eventually(
            lambda: (
                "step"
                in page.evaluate("document.getElementById('status')?.textContent ?? ''")
            ),
            20,
        )
        top = page.evaluate(
            "[names.source, circles.source].map(each => each.getBoundingClientRect().y)"
        )
        assert top[0] < top[1], (
            "on the circle's upper half names lie outside, where no link goes"
        )
        click = "dispatchEvent(new MouseEvent('click'))"
        page.evaluate(f"document.getElementById('device-{device}').{click}")
        page.evaluate(
            f"[...document.querySelectorAll('button')].find(each => each.textContent === 'kill').{click}"
        )
        assert eventually(lambda: page.evaluate(f"state['{device}']") == "down", 20)
        assert f"kill {device}" in page.evaluate(
            "document.getElementById('log').textContent"
        )


@pytest.mark.parametrize("seconds", [1.0, 3.0, 7.0])
def test_reaper_removes_lab_of_killed_controller(
    tmp_path: Path, seconds: float
) -> None:
    name = f"run-orphan{seconds:.0f}"
    path = scenario(tmp_path, name)
    running = start(path, tmp_path / "out")
    time.sleep(seconds)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert eventually(lambda: left_of(name) == [], 30), left_of(name)


def test_an_interrupted_run_keeps_its_results_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    path = scenario(tmp_path, "run-ctrl-c")
    running = start(path, tmp_path / "out")
    assert eventually(lambda: is_running(tmp_path / "out"), 90)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert (tmp_path / "out" / "metrics.json").exists()
    assert left_of("run-ctrl-c") == []


def test_bad_input_ends_with_2(tmp_path: Path) -> None:
    wrong = run_command(
        "run", scenario(tmp_path, "run-wrong"), "--set", "network.link.rate=100Mbps"
    )
    assert wrong.returncode == 2
    assert "mbit" in wrong.stderr
    assert left_of("run-wrong") == []


def test_a_distributed_inference_is_the_same_on_both_clocks(tmp_path: Path) -> None:
    workload = {
        "task": "infer",
        "model": {"name": "cnn", "channels": [6, 7, 5], "hidden": [30]},
        "data": {"name": "digits"},
        "method": {
            "name": "distributed",
            "scheme": "fuse",
            "tiled_layers": 2,
            "in_flight": 2,
        },
        "batch_size": 8,
        "requests": 6,
    }
    path = scenario(tmp_path, "run-distributed", workload=workload)
    found: dict[str, list[dict[str, Any]]] = {}
    for runtime, options in RUNTIMES.items():
        done = run_command("run", path, "--out", tmp_path / runtime, *options)
        assert done.returncode == 0, done.stderr + done.stdout
        found[runtime] = [
            json.loads(line)
            for line in (tmp_path / runtime / "events.jsonl").read_text().splitlines()
        ]

    def of(runtime: str, name: str) -> list[dict[str, Any]]:
        return [event for event in found[runtime] if event["event"] == name]

    (real,), (virtual,) = of("emulate", "evaluate"), of("simulate", "evaluate")
    assert real["accuracy"] == virtual["accuracy"]
    assert real["loss"] == pytest.approx(virtual["loss"], rel=1e-4)
    for runtime in found:
        assert len(of(runtime, "request")) == 6
    weights = {
        runtime: {event["device"]: event["weights"] for event in of(runtime, "memory")}
        for runtime in found
    }
    assert weights["emulate"] == weights["simulate"]
    assert differences_in(tmp_path) == []
    assert left_of("run-distributed") == []


PIPELINE_OF_THE_PAPER = """\
name: ftpipehd
seed: 1
devices: {}
network: {link: {rate: 20mbit, delay: 5ms}}
workload:
  model: {name: mlp, hidden: [32, 32, 32]}
  data: {name: digits}
  # Capacities are measured, so what follows from them is left out: a new partition changes every count.
  method:
    name: ftpipehd
    chain_replication_interval: 10
    global_replication_interval: 20
    repartition_first: 1000
    repartition_every: 1000
    stall_timeout: 5s
  batch_size: 32
time_limit: 60s
"""


def test_methods_of_one_file_learn_in_containers_as_on_the_virtual_clock(
    tmp_path: Path,
) -> None:
    """One after the other, on containers that stand; last a published system, FTPipeHD."""
    devices = (
        "devices={source: {speed: 200mflops}, device: {speed: 20mflops, count: 2}}"
    )
    shorter = [devices, "network.topology=mesh", "workload.steps=40", "expect={}"]
    # Who comes first decides what asynchronous methods compute: where all devices' samples are alike, by 0.15 if one is
    # six times as slow as another. The others compute the same on both clocks.
    alike = ["workload.data.split=iid"]
    methods = {
        "fedprox": ([], 1e-6),
        "fedadam": ([], 1e-6),
        "scaffold": ([], 1e-6),
        "fedbuff": (alike, 0.3),
        "gossip": (alike, 0.3),
        "ftpipehd": ([], 0.3),
    }
    changes = {
        name: [part for change in shorter + more for part in ("--set", change)]
        for name, (more, _) in methods.items()
    }
    scenarios = {
        name: ROOT / "scenarios" / "examples" / f"{name}.yaml" for name in methods
    }
    scenarios["ftpipehd"] = tmp_path / "ftpipehd.yaml"
    scenarios["ftpipehd"].write_text(PIPELINE_OF_THE_PAPER)
    assert run_command("up", scenarios["fedprox"], *changes["fedprox"]).returncode == 0
    try:
        for name, (_, same) in methods.items():
            accuracy = {}
            for runtime, arguments in ON_A_LAB.items():
                out = tmp_path / name / runtime
                done = run_command(
                    "run",
                    scenarios[name],
                    *arguments,
                    "--out",
                    out,
                    *changes[name],
                )
                assert done.returncode == 0, done.stdout + done.stderr
                accuracy[runtime] = json.loads((out / "metrics.json").read_text())[
                    "accuracy"
                ]
            assert accuracy["emulate"] == pytest.approx(
                accuracy["simulate"], abs=same
            ), name
            if name in ("fedbuff", "gossip"):
                # Who comes first decides who is sent what and how often, but no message is lost or of another size.
                emulated = outcome_in(tmp_path / name / "emulate")
                simulated = outcome_in(tmp_path / name / "simulate")
                assert lost_in_containers(emulated) == [], name
                assert size_differences(emulated, simulated) == [], name
            else:
                assert differences_in(tmp_path / name) == [], name
    finally:
        assert run_command("down").returncode == 0
    assert left_of("fedprox") == []
