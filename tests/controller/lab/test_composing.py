"""A lab as a docker compose project: what the lab does, in compose's words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common import yamltext
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.cli.export import export
from testbed_controller.lab.composing import compose_project, compose_service
from testbed_controller.lab.containers import device_settings, shaper_settings
from testbed_controller.lab.runstate import RunState

STATE = RunState(run="x", token="t")


def test_the_command_writes_a_project(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        export,
        ["compose", "quickstart", "--out", str(tmp_path)],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        "docker-compose.yml",
        "links.json",
        "shape",
    }
    assert (tmp_path / "shape").stat().st_mode & 0o111


def test_compose_services_have_the_settings_of_a_lab() -> None:
    trial = trials(
        load("quickstart", ["devices.source.cpus=1.5", "devices.source.uplink=10mbit"])
    )[0]
    files = compose_project(trial, {"worker1": "mine:1"})
    services = yamltext.values(files["docker-compose.yml"])["services"]
    assert services["worker1"]["image"] == "mine:1"
    source = services["source"]
    assert (source["cap_drop"], source["read_only"], source["cpus"]) == (
        ["ALL"],
        True,
        1.5,
    )
    assert services["shaper"]["pid"] == "host"
    told = json.loads(files["links.json"])
    assert (
        f"source:{told['endpoints'][0]['address']}"
        in services["worker2"]["extra_hosts"]
    )
    assert (source["network_mode"], services["shaper"]["ports"]) == (
        "none",
        ["127.0.0.1:8710:8700"],
    )
    assert told["endpoints"][0]["uplink"] == 1e7
    assert len(told["links"]) == len(trial.experiment.links)


def test_a_device_with_a_gpu_is_given_those_of_the_host() -> None:
    spec = replace(trials(load("quickstart"))[0].experiment.devices[0], gpu=True)
    settings = device_settings(STATE, "i", spec, {"source": "10.0.0.2"})
    (request,) = settings["host_config"]["DeviceRequests"]
    assert (request["Count"], request["Capabilities"]) == (-1, [["gpu"]])
    assert compose_service(settings)["gpus"] == "all"


def test_no_setting_of_a_container_is_forgotten() -> None:
    spec = trials(load("quickstart"))[0].experiment.devices[0]
    for settings in (
        device_settings(STATE, "i", spec, {"source": "10.0.0.2"}),
        shaper_settings(STATE, "i", "auto"),
    ):
        compose_service(settings)
        with pytest.raises(KeyError, match="Privileged"):
            compose_service(
                {
                    **settings,
                    "host_config": {**settings["host_config"], "Privileged": True},
                }
            )
