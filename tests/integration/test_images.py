"""Builds and removal of images by a real engine."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import docker
import pytest

from testbed.common.errors import HostError
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.lab import images
from testbed_controller.lab.containers import (
    container_name,
    device_settings,
    make_container,
)
from testbed_controller.lab.engine import connect
from testbed_controller.lab.engineaddress import chosen_engine
from testbed_controller.lab.removal import remove_run
from testbed_controller.lab.runstate import RunState, new_id

pytestmark = pytest.mark.containers


def test_image_with_missing_package_fails_to_build() -> None:
    client = connect()
    base = images.ensure_images(client, print).base
    tag = f"testbed/runtime:test-{secrets.token_hex(4)}"
    # The last stage of the recipe; the first one begins with "FROM ${BASE} AS stage".
    recipe = images.recipe("runtime").partition(b"FROM ${BASE}\n")[2]
    # Without COPY, the packages of the first stage are missing.
    lines = [
        line for line in recipe.decode().splitlines() if not line.startswith("COPY")
    ]
    text = "\n".join(["ARG BASE", "FROM ${BASE}", *lines]).encode()
    with pytest.raises(HostError, match="No module named 'flask'"):
        images.build(
            client,
            tag,
            text,
            {},
            {"BASE": base, "MODULES": "json, flask"},
            {"testbed.image": "stage"},
        )
    assert not images.image_exists(client, tag)


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> docker.DockerClient:
    """Return a client whose docker configuration names proxies and absent credential helpers."""
    engine = chosen_engine()
    settings = {
        "auths": {"registry.example": {}},
        "credsStore": "no-such-helper",
        "credHelpers": {"registry.example": "no-such-helper"},
        "proxies": {"default": {"httpProxy": "http://user:secret@proxy.example:3128"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return connect(engine)


def test_build_without_network_ignores_proxies_and_missing_helpers(
    configured: docker.DockerClient,
) -> None:
    base = images.ensure_images(configured, print).base
    tag = f"testbed/stage:test-{secrets.token_hex(4)}"
    # The build fails if a proxy is set inside.
    recipe = b'ARG BASE\nFROM ${BASE}\nRUN test -z "$http_proxy$HTTP_PROXY"\n'
    try:
        images.build(
            configured, tag, recipe, {}, {"BASE": base}, {"testbed.image": "stage"}
        )
    finally:
        if images.image_exists(configured, tag):
            configured.images.remove(tag)


def test_proxies_of_docker_configuration_do_not_reach_devices(
    configured: docker.DockerClient,
) -> None:
    state = RunState(new_id("test"), "")
    image = images.ensure_images(configured, print).device
    device = trials(load("quickstart"))[0].experiment.devices[0]
    settings = device_settings(state, image, device, {device.name: "10.0.0.2"})
    try:
        make_container(configured, state.run, device.name, settings)
        container = configured.containers.get(container_name(state.run, device.name))
        environment = container.attrs["Config"]["Env"]
    finally:
        remove_run(configured, state.run, recheck=False)
    assert "proxy" not in " ".join(environment).lower()


def test_recent_stage_survives_removal_of_images() -> None:
    client = connect()
    base = images.ensure_images(client, print).base
    tag = f"testbed/stage:test-{secrets.token_hex(4)}"
    recipe = b"ARG BASE\nFROM ${BASE}\n"
    images.build(client, tag, recipe, {}, {"BASE": base}, {"testbed.image": "stage"})
    try:
        # The stage is neither kept nor spared: its age alone protects it, since a build of another checkout may use it.
        images.remove_images(client, keep=images.find_tags(client), spare=images.SPARE)
        assert images.image_exists(client, tag)
    finally:
        client.images.remove(tag)
