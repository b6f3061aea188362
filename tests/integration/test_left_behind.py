"""Whatever happens to a run, its controller or the engine: what it was is known, and nothing of it stays."""

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
    """Return a scenario of two devices that takes a minute unless something happens."""
    return {
        "name": name,
        "devices": {"source": {"speed": rings.SPEED}, "worker": {"speed": rings.SPEED}},
        "network": {"link": {"rate": "100mbit", "delay": "5ms"}},
        "workload": rings.ring_workload(),
        "time_limit": "120s",
    }


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def client() -> docker.DockerClient:
    return connect()


def left_of(client: docker.DockerClient, name: str) -> list[str]:
    """Name what the engine and the state folder hold of runs of this name."""
    label = {"label": RUN}
    volumes = client.api.volumes(filters=label)["Volumes"] or []
    things = [
        *client.api.containers(all=True, filters=label),
        *client.api.networks(filters=label),
        *volumes,
    ]
    held = [
        str(each.get("Names") or each["Name"])
        for each in things
        if each["Labels"][RUN].startswith(f"{name}-")
    ]
    return held + [path.name for path in runstate.state_folder().glob(f"{name}-*")]


class Running:
    """A `testbed run` in a process of its own."""

    def __init__(
        self, folder: Path, name: str, engine: str | None = None, **changes: Any
    ) -> None:
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(tree(name) | changes))
        self.results = folder / "results"
        environment = (
            {**os.environ} if engine is None else {**os.environ, "DOCKER_HOST": engine}
        )
        command = [
            str(TESTBED),
            "run",
            str(path),
            "--accept-links",
            "--out",
            str(self.results),
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            # Whoever runs the tests under nohup ignores this signal, and so would what they start.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def run_id(self) -> str:
        wait_for(runstate.runs)
        return runstate.runs()[0]

    def went_round(self, rounds: int = 2) -> None:
        """Return once the token has gone round so often."""
        wait_for(
            lambda: (
                len([each for each in self.events() if each["event"] == "request"])
                >= rounds
            ),
            90,
        )

    def events(self) -> list[dict[str, Any]]:
        path = self.results / "events.jsonl"
        if not path.exists():
            return []
        whole, _, _ = path.read_text().rpartition(
            "\n"
        )  # the last line may be only half written
        return [json.loads(line) for line in whole.splitlines()]

    def over(self, seconds: float = 60.0) -> str:
        """Return what it said, once it is over."""
        said, _ = self.process.communicate(timeout=seconds)
        assert "Traceback" not in said, said
        return " ".join(said.split())

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.results / "manifest.json").read_text()))

    def terminated(
        self, client: docker.DockerClient, name: str, number: signal.Signals
    ) -> None:
        """Send a signal that ends it, and see that what it saw is kept, and that nothing of it is left."""
        os.kill(self.process.pid, number)
        self.over()
        assert self.process.returncode == 130
        assert self.manifest()["status"] == "interrupted"
        assert left_of(client, name) == []


@pytest.fixture
def begun(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def begin(name: str, **options: Any) -> Running:
        made.append(Running(tmp_path, name, **options))
        return made[-1]

    yield begin
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


# The controller


@pytest.mark.parametrize("gap", [0.1, 0.6, 1.2])
def test_sigint_twice_leaves_nothing(
    client: docker.DockerClient, begun: Callable[..., Running], gap: float
) -> None:
    run = begun("left-twice")
    run.went_round()
    for wait in (0.0, gap, gap):
        time.sleep(wait)
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGINT)
    run.over()
    wait_for(lambda: left_of(client, "left-twice") == [], 30)


def test_what_controller_and_reaper_left_is_offered_for_removal(
    client: docker.DockerClient, begun: Callable[..., Running]
) -> None:
    run = begun("left-both")
    run.went_round(1)
    name = run.run_id()
    assert "was killed" not in run_command("show", "profiles").stderr
    for pid in (*children_of(run.process.pid), run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    time.sleep(1.0)
    assert left_of(client, "left-both") != []
    assert f"'testbed down {name}'" in run_command("show", "profiles").stderr
    done = run_command("down", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert left_of(client, "left-both") == []
    assert run_command("show", "profiles").stderr == ""


def test_containers_live_while_their_lease_is_renewed_or_while_they_are_to_stand(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_images(client, lambda _text: None)
    began = time.monotonic()
    standing = Lab.create(
        trials(Scenario.model_validate(tree("left-stands")))[0], keep=True
    )
    # Twice as long as a lab takes to come up, which nobody renews meanwhile.
    lease = max(4.0, 2 * (time.monotonic() - began))
    monkeypatch.setattr(labs, "LEASE_SECONDS", lease)
    monkeypatch.setattr(labs, "RENEWAL_SECONDS", lease / 8)
    try:
        found = client.api.inspect_container(container_name(standing.run_id, "source"))[
            "Config"
        ]["Env"]
        assert not [each for each in found if each.startswith("TESTBED_LEASE")]
        lab = Lab.create(trials(Scenario.model_validate(tree("left-lease")))[0])
        try:
            running = {"label": f"{RUN}={lab.run_id}"}
            time.sleep(1.5 * lease)
            assert len(client.api.containers(filters=running)) == 3
            lab.over.set()  # the controller says no more
            wait_for(lambda: client.api.containers(filters=running) == [])
        finally:
            lab.down()
        assert (
            len(client.api.containers(filters={"label": f"{RUN}={standing.run_id}"}))
            == 3
        )
    finally:
        assert Lab.open(standing.run_id).down()
    assert left_of(client, "left-lease") + left_of(client, "left-stands") == []


# The engine


def test_a_run_survives_an_engine_that_does_not_answer_for_a_while(
    client: docker.DockerClient, begun: Callable[..., Running], tmp_path: Path
) -> None:
    """At its start, in its midst, and at its end."""
    rounds = 16
    with proxied(tmp_path) as proxy:

        def cut(seconds: float) -> None:
            proxy.cut()
            time.sleep(seconds)
            proxy.mend()

        run = begun(
            "left-engine", engine=proxy.address, workload=rings.ring_workload(rounds)
        )
        wait_for(
            lambda: any("shaper" in each for each in left_of(client, "left-engine"))
        )
        cut(3.0)
        run.went_round(1)
        cut(2.0)
        run.went_round(rounds - 1)
        cut(5.0)
        said = run.over(120)
    assert run.process.returncode == 0, said
    assert run.manifest()["status"] == "finished"
    assert left_of(client, "left-engine") == []


def test_an_engine_that_starts_again_ends_the_run_with_what_it_saw(
    client: docker.DockerClient, begun: Callable[..., Running], tmp_path: Path
) -> None:
    with proxied(tmp_path) as proxy:
        run = begun("left-restart", engine=proxy.address)
        run.went_round()
        # What an engine does to its containers as it stops, while nobody hears it.
        proxy.cut()
        for each in client.api.containers(filters={"label": f"{RUN}={run.run_id()}"}):
            client.api.stop(each["Id"], timeout=1)
        time.sleep(1.0)
        proxy.mend()
        said = run.over()
    assert run.process.returncode == 1
    assert "the shaper, which emulates the links, was ended through the engine" in said
    assert "while the container engine was away for" in said
    assert run.manifest()["status"] == "failed"
    assert any(
        each["event"] == "log" and "engine was away" in each["text"]
        for each in run.events()
    )
    assert left_of(client, "left-restart") == []


def test_an_engine_that_stays_away_ends_the_run_with_what_it_saw_and_its_rest_is_removed_later(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(trials(Scenario.model_validate(tree("left-away")))[0])
    dataset = load_data(prepared.scenario.workload.data)
    stages: list[str] = []
    with proxied(tmp_path) as proxy:
        monkeypatch.setenv("DOCKER_HOST", proxy.address)
        monkeypatch.setattr(engine, "PATIENCE", 2.0)
        cut = threading.Event()

        def see(event: Event) -> None:
            if event.event == "request" and not cut.is_set():
                cut.set()
                proxy.cut()

        outcome = emulate(
            prepared, dataset, see, on_stage=stages.append, accept_links=True
        )
        assert (outcome.status, outcome.error) == (
            "failed",
            "the container engine has not answered for 2 s (the socket does not exist)",
        )
        assert any(event.event == "request" for event in outcome.events)
        assert "removed in the background" in stages[-1]
        assert left_of(client, "left-away") != []
        proxy.mend()
        wait_for(lambda: left_of(client, "left-away") == [], 30)


# Containers


def test_a_shaper_that_is_removed_ends_the_run_at_once(
    client: docker.DockerClient, begun: Callable[..., Running]
) -> None:
    run = begun("left-shaper")
    run.went_round()
    client.api.remove_container(container_name(run.run_id(), SHAPER), force=True)
    said = run.over(20)
    assert run.process.returncode == 1
    assert "the shaper, which emulates the links, was removed from outside" in said
    assert len([each for each in run.events() if each["event"] == "request"]) >= 2
    assert left_of(client, "left-shaper") == []


def test_a_device_whose_shim_is_killed_was_ended_from_outside_and_a_run_that_is_hung_up_keeps_that(
    client: docker.DockerClient, begun: Callable[..., Running]
) -> None:
    run = begun("left-shim")
    run.went_round()
    found = client.api.inspect_container(container_name(run.run_id(), "worker"))
    status = Path(f"/proc/{found['State']['Pid']}/status").read_text()
    os.kill(int(status.split("PPid:")[1].split()[0]), signal.SIGKILL)

    def told() -> bool:
        return any(
            "worker was ended from outside" in str(each.get("text"))
            for each in run.events()
        )

    wait_for(told, 20)
    assert not any("memory" in str(each.get("text")) for each in run.events())
    run.terminated(client, "left-shim", signal.SIGHUP)


# By hand


def test_what_is_done_by_hand_is_among_the_events_and_a_device_started_by_docker_joins(
    client: docker.DockerClient, begun: Callable[..., Running]
) -> None:
    run = begun("left-hand")
    run.went_round()
    ask = control.connect(run.run_id())
    throttled = ask({"strike": {"throttle": {"device": "worker", "slowdown": 2}}})[
        "handle"
    ]
    assert ask({"show": None}) == {
        "in_force": {throttled: "throttle worker"},
        "devices": {"source": "up", "worker": "up"},
    }
    ask({"undo": throttled})
    ask({"strike": {"kill": "worker"}})
    client.api.start(container_name(run.run_id(), "worker"))

    def ups() -> int:
        return len(
            [
                each
                for each in run.events()
                if each["device"] == "worker" and each.get("state") == "started"
            ]
        )

    wait_for(lambda: ups() == 2)
    assert [
        (each["action"], each["phase"])
        for each in run.events()
        if each["event"] == "fault"
    ] == [
        ("throttle", "strike"),
        ("throttle", "undo"),
        ("kill", "strike"),
    ]
    run.terminated(client, "left-hand", signal.SIGTERM)
