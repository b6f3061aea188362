"""Export of a lab as a docker compose project with the same settings."""

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


def test_export_writes_project_links_and_script(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        export,
        ["compose", "quickstart", "--out", str(tmp_path)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"docker-compose.yml", "links.json", "shape"}
    # The script is executable.
    assert (tmp_path / "shape").stat().st_mode & 0o111


def test_compose_services_have_settings_of_lab() -> None:
    overrides = ["devices.source.cpus=1.5", "devices.source.uplink=10mbit"]
    trial = trials(load("quickstart", overrides))[0]
    files = compose_project(trial, {"worker1": "mine:1"})
    services = yamltext.values(files["docker-compose.yml"])["services"]
    assert services["worker1"]["image"] == "mine:1"
    source = services["source"]
    assert source["cap_drop"] == ["ALL"]
    assert source["read_only"] is True
    assert source["cpus"] == 1.5
    # The shaper enters the network namespaces of devices, and creates their interfaces.
    assert source["network_mode"] == "none"
    assert services["shaper"]["pid"] == "host"
    assert services["shaper"]["ports"] == ["127.0.0.1:8710:8700"]
    links = json.loads(files["links.json"])
    source_endpoint = links["endpoints"][0]
    host_entry = f"source:{source_endpoint['address']}"
    assert host_entry in services["worker2"]["extra_hosts"]
    assert source_endpoint["uplink"] == 1e7
    assert len(links["links"]) == len(trial.experiment.links)


def test_device_with_gpu_can_use_gpus_of_host() -> None:
    spec = replace(trials(load("quickstart"))[0].experiment.devices[0], gpu=True)
    settings = device_settings(STATE, "i", spec, {"source": "10.0.0.2"})
    (request,) = settings["host_config"]["DeviceRequests"]
    # Docker's number for all GPUs.
    assert request["Count"] == -1
    assert request["Capabilities"] == [["gpu"]]
    assert compose_service(settings)["gpus"] == "all"


def test_unknown_setting_of_container_is_refused() -> None:
    # A setting that is not exported would make the project differ from the lab.
    spec = trials(load("quickstart"))[0].experiment.devices[0]
    for settings in (
        device_settings(STATE, "i", spec, {"source": "10.0.0.2"}),
        shaper_settings(STATE, "i", "auto"),
    ):
        compose_service(settings)
        host_config = {**settings["host_config"], "Privileged": True}
        with pytest.raises(KeyError, match="Privileged"):
            compose_service({**settings, "host_config": host_config})
