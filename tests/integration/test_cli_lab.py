"""Commands for labs, images and this machine, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.helpers import commands, rings
from tests.helpers.commands import CompletedCommand

pytestmark = pytest.mark.containers

SCENARIO = f"""
name: cli-test
devices:
  source: {{speed: {rings.SPEED}}}
  worker: {{profile: raspberry-pi-4b}}
network:
  link: {{rate: 20mbit, delay: 2ms}}
workload: {json.dumps(rings.ring_workload(1))}
"""


@pytest.fixture(autouse=True)
def _isolate_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def command(*arguments: str, expect: int = 0, **environment: str) -> CompletedCommand:
    completed = commands.run_command(*arguments, **environment)
    assert completed.returncode == expect, completed.stderr
    return completed


def command_json(*arguments: str) -> Any:
    return json.loads(command(*arguments, "--json").stdout)


def test_lab_runs_several_scenarios_until_it_is_removed(tmp_path: Path) -> None:
    scenario = tmp_path / "cli-test.yaml"
    scenario.write_text(SCENARIO)
    lab = command_json("up", str(scenario))
    run = lab["run"]
    on_lab = ("run", str(scenario), "--on", run)
    try:
        assert run.startswith("cli-test-")
        states = [(device["name"], device["state"]) for device in lab["devices"]]
        assert states == [("source", "running"), ("worker", "running")]
        lines = [line.split() for line in command("ps").stdout.splitlines()]
        containers = {line[1]: line for line in lines if line[0] == run}
        assert set(containers) == {"shaper", "source", "worker"}
        assert lab["devices"][1]["address"] in containers["worker"]
        command("logs", "source")
        out = tmp_path / "run"
        result = command_json(*on_lab, "--accept-links", "--out", str(out))
        assert result["metrics"]["requests"] == 1
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["host"]["images"]
        # A run has the faults of its scenario, in addition to faults that a user injected before.
        command("fault", "throttle", "source", "--slowdown", "2")
        throttle = '[{"throttle": {"device": "worker", "slowdown": 3}, "at": "0s"}]'
        changes = ("--set", f"faults={throttle}", "--set", "workload.requests=2")
        for name in ("first", "second"):
            out = tmp_path / name
            command(*on_lab, "--accept-links", *changes, "--out", str(out))
        factors = []
        for line in (tmp_path / "second" / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "speed":
                factors.append((event["target"], event["factor"]))
        assert factors == [("source", 0.5), ("worker", pytest.approx(1 / 3))]
        refusal = command(*on_lab, "--set", "network.link.rate=10mbit", expect=2)
        assert f"network: differs from the lab {run}" in refusal.stderr
        lines_of_run = [
            line for line in command("ps").stdout.splitlines() if line.startswith(run)
        ]
        assert len(lines_of_run) == 4
    finally:
        removal = command("down")
    assert removal.stdout == f"{run}: removed 4 containers and networks\n"
    assert run not in command("ps").stdout
    assert "no run is up" in command("down", expect=2).stderr


def test_up_with_invalid_scenario_creates_nothing(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "wrong.yaml"
    scenario.write_text(SCENARIO.replace("20mbit", "20Mbps"))
    refusal = command("up", str(scenario), expect=2)
    assert f"{scenario}:7" in refusal.stderr
    # A /30 has two addresses, too few for two devices and a gateway.
    too_small = SCENARIO.replace("delay: 2ms}", "delay: 2ms}\n  subnet: 10.9.8.0/30")
    scenario.write_text(too_small)
    assert "network.subnet" in command("up", str(scenario), expect=2).stderr
    assert not list((tmp_path / "state" / "testbed").glob("*.json"))


def test_down_with_run_and_all_is_refused() -> None:
    refusal = command("down", "x", "--all", expect=2)
    assert "RUN and --all cannot be combined" in refusal.stderr


def test_setup_images_lists_existing_images() -> None:
    rows = {row["image"]: row for row in command_json("setup", "images")}
    assert set(rows) == {"base", "device_runtime", "shaper_runtime", "device", "shaper"}
    assert rows["device"]["bytes"] > rows["shaper"]["bytes"] > rows["base"]["bytes"]
    lines = command("setup", "images", "--env").stdout.splitlines()
    variables = dict(line.split("=", 1) for line in lines)
    assert variables["TESTBED_DEVICE_IMAGE"] == rows["device"]["tag"]
    assert len(variables["TESTBED_TOKEN"]) >= 32
    client, tag = docker.from_env(), rows["shaper_runtime"]["tag"]
    runtime = client.images.get(tag)
    # --prune of another checkout removes runtime images, too.
    client.images.remove(tag, noprune=True)
    try:
        names = {row["image"] for row in command_json("setup", "images")}
        assert names == set(rows) - {"shaper_runtime"}
    finally:
        runtime.tag(tag)


def test_doctor_reports_usable_machine() -> None:
    command("setup", "images")
    statuses = {check["name"]: check["status"] for check in command_json("doctor")}
    assert statuses["engine"] == "ok"
    assert statuses["images"] == "ok"
    assert "ok" in (statuses["links: netem"], statuses["links: userspace"])


def test_doctor_without_engine_exits_with_3(tmp_path: Path) -> None:
    elsewhere = f"unix://{tmp_path}/docker.sock"
    report = command("doctor", expect=3, DOCKER_HOST=elsewhere)
    assert "--runtime simulate" in report.stderr
    assert "unset DOCKER_HOST" in report.stdout
    listing = command("ps", expect=3, DOCKER_HOST=elsewhere)
    assert "the socket does not exist" in listing.stderr
