"""The commands around labs, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

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
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def command(*arguments: str, expect: int = 0, **environment: str) -> CompletedCommand:
    done = commands.run_command(*arguments, **environment)
    assert done.returncode == expect, done.stderr
    return done


def test_a_lab_stands_until_it_is_taken_down(tmp_path: Path) -> None:
    scenario = tmp_path / "cli-test.yaml"
    scenario.write_text(SCENARIO)
    made = json.loads(command("up", str(scenario), "--json").stdout)
    run = made["run"]
    try:
        assert run.startswith("cli-test-")
        assert [(each["name"], each["state"]) for each in made["devices"]] == [
            ("source", "running"),
            ("worker", "running"),
        ]
        lines = [line.split() for line in command("ps").stdout.splitlines()]
        mine = {line[1]: line for line in lines if line[0] == run}
        assert set(mine) == {"shaper", "source", "worker"}
        assert made["devices"][1]["address"] in mine["worker"]
        command("logs", "source")
        done = command(
            "run",
            str(scenario),
            "--on",
            run,
            "--accept-links",
            "--out",
            str(tmp_path / "run"),
            "--json",
        )
        assert json.loads(done.stdout)["metrics"]["requests"] == 1
        assert json.loads((tmp_path / "run" / "manifest.json").read_text())["host"][
            "images"
        ]
        # Each start has the faults of its own scenario, and what was done by hand before.
        command("fault", "throttle", "source", "--slowdown", "2")
        throttle = '[{"throttle": {"device": "worker", "slowdown": 3}, "at": "0s"}]'
        changes = ("--set", f"faults={throttle}", "--set", "workload.requests=2")
        for name in ("first", "second"):
            out = str(tmp_path / name)
            command(
                "run",
                str(scenario),
                "--on",
                run,
                "--accept-links",
                *changes,
                "--out",
                out,
            )
        events = [
            json.loads(line)
            for line in (tmp_path / "second" / "events.jsonl").read_text().splitlines()
        ]
        factors = [
            (each["target"], each["factor"])
            for each in events
            if each["event"] == "speed"
        ]
        assert factors == [("source", 0.5), ("worker", pytest.approx(1 / 3))]
        refused = command(
            "run",
            str(scenario),
            "--on",
            run,
            "--set",
            "network.link.rate=10mbit",
            expect=2,
        )
        assert f"network: differs from the lab {run}" in refused.stderr
        assert (
            len(
                [
                    line
                    for line in command("ps").stdout.splitlines()
                    if line.startswith(run)
                ]
            )
            == 4
        )
    finally:
        done = command("down")
    assert done.stdout == f"{run}: removed 4 containers and networks\n"
    assert run not in command("ps").stdout
    assert "no run is up" in command("down", expect=2).stderr


def test_up_refuses_a_scenario_that_is_wrong_before_anything_exists(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "wrong.yaml"
    scenario.write_text(SCENARIO.replace("20mbit", "20Mbps"))
    refused = command("up", str(scenario), expect=2)
    assert f"{scenario}:7" in refused.stderr
    scenario.write_text(
        SCENARIO.replace("delay: 2ms}", "delay: 2ms}\n  subnet: 10.9.8.0/30")
    )
    assert "network.subnet" in command("up", str(scenario), expect=2).stderr
    assert not list((tmp_path / "state" / "testbed").glob("*.json"))


def test_down_says_what_it_wants() -> None:
    assert (
        "RUN and --all cannot be combined"
        in command("down", "x", "--all", expect=2).stderr
    )


def test_images_are_listed_and_found_again() -> None:
    rows = {
        row["image"]: row
        for row in json.loads(command("setup", "images", "--json").stdout)
    }
    assert set(rows) == {"base", "device_runtime", "shaper_runtime", "device", "shaper"}
    assert rows["device"]["bytes"] > rows["shaper"]["bytes"] > rows["base"]["bytes"]
    lines = dict(
        line.split("=", 1)
        for line in command("setup", "images", "--env").stdout.splitlines()
    )
    assert lines["TESTBED_DEVICE_IMAGE"] == rows["device"]["tag"]
    assert len(lines["TESTBED_TOKEN"]) >= 32
    client, tag = docker.from_env(), rows["shaper_runtime"]["tag"]
    runtime = client.images.get(tag)
    client.images.remove(tag, noprune=True)  # as --prune of another checkout does
    try:
        assert {
            row["image"]
            for row in json.loads(command("setup", "images", "--json").stdout)
        } == set(rows) - {"shaper_runtime"}
    finally:
        runtime.tag(tag)


def test_doctor_knows_this_machine_serves() -> None:
    command("setup", "images")
    checks = {
        check["name"]: check for check in json.loads(command("doctor", "--json").stdout)
    }
    assert checks["engine"]["status"] == "ok"
    assert checks["images"]["status"] == "ok"
    assert "ok" in (
        checks["links: netem"]["status"],
        checks["links: userspace"]["status"],
    )


def test_doctor_says_what_is_missing_and_ends_with_3(tmp_path: Path) -> None:
    elsewhere = f"unix://{tmp_path}/docker.sock"
    done = command("doctor", expect=3, DOCKER_HOST=elsewhere)
    assert "--runtime simulate" in done.stderr
    assert "unset DOCKER_HOST" in done.stdout
    assert (
        "the socket does not exist"
        in command("ps", expect=3, DOCKER_HOST=elsewhere).stderr
    )
