"""Failures of a run, its controller or the engine: results are kept, and all containers are removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from testbed.ml.data import load as load_data
from testbed.network.checks import SHAPER
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.trace.events import Event
from testbed_controller.lab import engine, runstate
from testbed_controller.lab import lab as labs
from testbed_controller.lab.containers import container_name
from testbed_controller.lab.engine import connect
from testbed_controller.lab.images import ensure_images
from testbed_controller.lab.lab import Lab
from testbed_controller.lab.removal import RUN
from testbed_controller.running import control
from testbed_controller.running.emulation import emulate
from tests.helpers import rings
from tests.helpers.commands import run_command
from tests.helpers.waiting import wait_for
from tests.integration.test_lab import children_of
from tools.stress.engineproxy import proxied

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]

TESTBED = Path(sys.executable).with_name("testbed")


def tree(name: str) -> dict[str, Any]:
    """Return the keys of a scenario with two devices and a duration of one minute."""
    return {
        "name": name,
        "devices": {"source": {"speed": rings.SPEED}, "worker": {"speed": rings.SPEED}},
        "network": {"link": {"rate": "100mbit", "delay": "5ms"}},
        "workload": rings.ring_workload(),
        "time_limit": "120s",
    }


@pytest.fixture(autouse=True)
def _isolate_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def client() -> docker.DockerClient:
    return connect()


def leftovers_of(client: docker.DockerClient, name: str) -> list[str]:
    """Return the objects of the engine and the state files of all runs of a scenario."""
    label = {"label": RUN}
    items = client.api.containers(all=True, filters=label)
    items += client.api.networks(filters=label)
    items += client.api.volumes(filters=label)["Volumes"] or []
    leftovers = []
    for item in items:
        if item["Labels"][RUN].startswith(f"{name}-"):
            leftovers.append(str(item.get("Names") or item["Name"]))
    state_files = runstate.state_folder().glob(f"{name}-*")
    return leftovers + [path.name for path in state_files]


class RunProcess:
    """A `testbed run` in a separate process."""

    def __init__(
        self, folder: Path, name: str, engine: str | None = None, **changes: Any
    ) -> None:
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(tree(name) | changes))
        self.results = folder / "results"
        environment = {**os.environ}
        if engine is not None:
            environment["DOCKER_HOST"] = engine
        command = [str(TESTBED), "run", str(path), "--accept-links"]
        command += ["--out", str(self.results)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            # Under nohup this signal is ignored, and child processes inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def run_id(self) -> str:
        wait_for(runstate.runs)
        return runstate.runs()[0]

    def wait_for_rounds(self, rounds: int = 2) -> None:
        """Wait until the token has completed ``rounds`` rounds."""
        wait_for(lambda: self.count_rounds() >= rounds, 90)

    def count_rounds(self) -> int:
        return len([event for event in self.events() if event["event"] == "request"])

    def events(self) -> list[dict[str, Any]]:
        path = self.results / "events.jsonl"
        if not path.exists():
            return []
        # The last line may be incomplete.
        complete, _, _ = path.read_text().rpartition("\n")
        return [json.loads(line) for line in complete.splitlines()]

    def log_texts(self) -> list[str]:
        return [str(event.get("text")) for event in self.events()]

    def wait_for_end(self, seconds: float = 60.0) -> str:
        """Wait for the end of the process, and return the output on one line."""
        output, _ = self.process.communicate(timeout=seconds)
        assert "Traceback" not in output, output
        return " ".join(output.split())

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.results / "manifest.json").read_text()))

    def check_interruption(
        self, client: docker.DockerClient, name: str, number: signal.Signals
    ) -> None:
        """Send a signal, and check the results and the clean-up of the run."""
        os.kill(self.process.pid, number)
        self.wait_for_end()
        assert self.process.returncode == 130
        assert self.manifest()["status"] == "interrupted"
        assert leftovers_of(client, name) == []


@pytest.fixture
def start_run(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., RunProcess]]:
    runs: list[RunProcess] = []

    def start(name: str, **options: Any) -> RunProcess:
        runs.append(RunProcess(tmp_path, name, **options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


# The controller


@pytest.mark.parametrize("gap", [0.1, 0.6, 1.2])
def test_repeated_sigint_removes_everything(
    client: docker.DockerClient, start_run: Callable[..., RunProcess], gap: float
) -> None:
    run = start_run("left-twice")
    run.wait_for_rounds()
    for wait in (0.0, gap, gap):
        time.sleep(wait)
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGINT)
    run.wait_for_end()
    wait_for(lambda: leftovers_of(client, "left-twice") == [], 30)


def test_run_of_killed_controller_and_reaper_is_offered_for_removal(
    client: docker.DockerClient, start_run: Callable[..., RunProcess]
) -> None:
    run = start_run("left-both")
    run.wait_for_rounds(1)
    name = run.run_id()
    assert "was killed" not in run_command("show", "profiles").stderr
    for pid in (*children_of(run.process.pid), run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    time.sleep(1.0)
    assert leftovers_of(client, "left-both") != []
    assert f"'testbed down {name}'" in run_command("show", "profiles").stderr
    removal = run_command("down", name)
    assert (removal.returncode, removal.stderr) == (0, "")
    assert leftovers_of(client, "left-both") == []
    assert run_command("show", "profiles").stderr == ""


def test_containers_end_with_their_lease_unless_lab_is_kept(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_images(client, lambda _text: None)
    start = time.monotonic()
    kept_trial = trials(Scenario.model_validate(tree("left-stands")))[0]
    kept = Lab.create(kept_trial, keep=True)
    # The lease is not renewed while a lab is created, so it must be longer than that takes.
    lease = max(4.0, 2 * (time.monotonic() - start))
    monkeypatch.setattr(labs, "LEASE_SECONDS", lease)
    monkeypatch.setattr(labs, "RENEWAL_SECONDS", lease / 8)
    try:
        source = client.api.inspect_container(container_name(kept.run_id, "source"))
        for variable in source["Config"]["Env"]:
            assert not variable.startswith("TESTBED_LEASE")
        lab = Lab.create(trials(Scenario.model_validate(tree("left-lease")))[0])
        try:
            of_lab = {"label": f"{RUN}={lab.run_id}"}
            time.sleep(1.5 * lease)
            assert len(client.api.containers(filters=of_lab)) == 3
            # Stop the renewal of the lease.
            lab.removed.set()
            wait_for(lambda: client.api.containers(filters=of_lab) == [])
        finally:
            lab.down()
        of_kept = {"label": f"{RUN}={kept.run_id}"}
        assert len(client.api.containers(filters=of_kept)) == 3
    finally:
        assert Lab.open(kept.run_id).down()
    assert leftovers_of(client, "left-lease") == []
    assert leftovers_of(client, "left-stands") == []


# The engine


def test_run_survives_temporary_loss_of_engine(
    client: docker.DockerClient, start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    rounds = 16
    with proxied(tmp_path) as proxy:

        def cut(seconds: float) -> None:
            proxy.cut()
            time.sleep(seconds)
            proxy.mend()

        workload = rings.ring_workload(rounds)
        run = start_run("left-engine", engine=proxy.address, workload=workload)
        wait_for(lambda: "shaper" in str(leftovers_of(client, "left-engine")))
        # While the lab is created, during the run, and while the lab is removed.
        cut(3.0)
        run.wait_for_rounds(1)
        cut(2.0)
        run.wait_for_rounds(rounds - 1)
        cut(5.0)
        output = run.wait_for_end(120)
    assert run.process.returncode == 0, output
    assert run.manifest()["status"] == "finished"
    assert leftovers_of(client, "left-engine") == []


def test_restart_of_engine_fails_run_and_keeps_results(
    client: docker.DockerClient, start_run: Callable[..., RunProcess], tmp_path: Path
) -> None:
    with proxied(tmp_path) as proxy:
        run = start_run("left-restart", engine=proxy.address)
        run.wait_for_rounds()
        # An engine that stops is unreachable and stops its containers.
        proxy.cut()
        of_run = {"label": f"{RUN}={run.run_id()}"}
        for container in client.api.containers(filters=of_run):
            client.api.stop(container["Id"], timeout=1)
        time.sleep(1.0)
        proxy.mend()
        output = run.wait_for_end()
    assert run.process.returncode == 1
    cause = "the shaper, which emulates the links, was ended through the engine"
    assert cause in output
    assert "while the container engine was away for" in output
    assert run.manifest()["status"] == "failed"
    logs = [event["text"] for event in run.events() if event["event"] == "log"]
    assert any("engine was away" in text for text in logs)
    assert leftovers_of(client, "left-restart") == []


def test_permanent_loss_of_engine_fails_run_and_delays_removal(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(trials(Scenario.model_validate(tree("left-away")))[0])
    dataset = load_data(prepared.scenario.workload.data)
    stages: list[str] = []
    with proxied(tmp_path) as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.address)
        monkeypatch.setattr(engine, "PATIENCE", 2.0)
        cut = threading.Event()

        def cut_engine(event: Event) -> None:
            if event.event == "request" and not cut.is_set():
                cut.set()
                proxy.cut()

        outcome = emulate(
            prepared, dataset, cut_engine, on_stage=stages.append, accept_links=True
        )
        assert (outcome.status, outcome.error) == (
            "failed",
            "the container engine has not answered for 2 s (the socket does not exist)",
        )
        assert any(event.event == "request" for event in outcome.events)
        assert "removed in the background" in stages[-1]
        assert leftovers_of(client, "left-away") != []
        proxy.mend()
        wait_for(lambda: leftovers_of(client, "left-away") == [], 30)


# Containers


def test_removal_of_shaper_fails_run(
    client: docker.DockerClient, start_run: Callable[..., RunProcess]
) -> None:
    run = start_run("left-shaper")
    run.wait_for_rounds()
    client.api.remove_container(container_name(run.run_id(), SHAPER), force=True)
    output = run.wait_for_end(20)
    assert run.process.returncode == 1
    assert "the shaper, which emulates the links, was removed from outside" in output
    assert run.count_rounds() >= 2
    assert leftovers_of(client, "left-shaper") == []


def test_killed_shim_is_reported_and_sighup_keeps_results(
    client: docker.DockerClient, start_run: Callable[..., RunProcess]
) -> None:
    run = start_run("left-shim")
    run.wait_for_rounds()
    worker = client.api.inspect_container(container_name(run.run_id(), "worker"))
    # The shim of containerd is the parent of the container's first process.
    status = Path(f"/proc/{worker['State']['Pid']}/status").read_text()
    shim = int(status.split("PPid:")[1].split()[0])
    os.kill(shim, signal.SIGKILL)

    def is_reported() -> bool:
        return any("worker was ended from outside" in text for text in run.log_texts())

    wait_for(is_reported, 20)
    # A kill by the kernel for want of memory would look alike.
    assert not any("memory" in text for text in run.log_texts())
    run.check_interruption(client, "left-shim", signal.SIGHUP)


# Manual faults


def test_manual_faults_are_recorded_and_device_started_by_docker_joins(
    client: docker.DockerClient, start_run: Callable[..., RunProcess]
) -> None:
    run = start_run("left-hand")
    run.wait_for_rounds()
    ask = control.connect(run.run_id())
    throttle = {"throttle": {"device": "worker", "slowdown": 2}}
    handle = ask({"strike": throttle})["handle"]
    assert ask({"show": None}) == {
        "in_force": {handle: "throttle worker"},
        "devices": {"source": "up", "worker": "up"},
    }
    ask({"undo": handle})
    ask({"strike": {"kill": "worker"}})
    client.api.start(container_name(run.run_id(), "worker"))

    def worker_starts() -> int:
        starts = 0
        for event in run.events():
            if event["device"] == "worker" and event.get("state") == "started":
                starts += 1
        return starts

    # At the start of the run, and after the kill.
    wait_for(lambda: worker_starts() == 2)
    faults = [
        (event["action"], event["phase"])
        for event in run.events()
        if event["event"] == "fault"
    ]
    assert faults == [("throttle", "strike"), ("throttle", "undo"), ("kill", "strike")]
    run.check_interruption(client, "left-hand", signal.SIGTERM)
