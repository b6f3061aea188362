"""Images as the engine builds them."""

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


def test_an_image_whose_packages_cannot_be_imported_fails_when_it_is_built() -> None:
    client = connect()
    base = images.ensure_images(client, print).base
    tag = f"testbed/runtime:test-{secrets.token_hex(4)}"
    recipe = images.recipe("runtime").partition(b"FROM ${BASE}\n")[2]
    # Without the stage that installs packages.
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
    """Return a client of this engine, of a user whose configuration names proxies and absent credential helpers."""
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


def test_absent_credential_helpers_stop_no_build_and_proxies_stay_outside(
    configured: docker.DockerClient,
) -> None:
    base = images.ensure_images(configured, print).base
    tag = f"testbed/stage:test-{secrets.token_hex(4)}"
    recipe = b'ARG BASE\nFROM ${BASE}\nRUN test -z "$http_proxy$HTTP_PROXY"\n'
    try:
        images.build(
            configured, tag, recipe, {}, {"BASE": base}, {"testbed.image": "stage"}
        )
    finally:
        if images.image_exists(configured, tag):
            configured.images.remove(tag)


def test_proxies_of_the_users_configuration_reach_no_device(
    configured: docker.DockerClient,
) -> None:
    state = RunState(new_id("test"), "")
    image = images.ensure_images(configured, print).device
    device = trials(load("quickstart"))[0].experiment.devices[0]
    try:
        make_container(
            configured,
            state.run,
            device.name,
            device_settings(state, image, device, {device.name: "10.0.0.2"}),
        )
        found = configured.containers.get(container_name(state.run, device.name)).attrs[
            "Config"
        ]["Env"]
    finally:
        remove_run(configured, state.run, recheck=False)
    assert not [each for each in found if "proxy" in each.lower()]


def test_a_young_stage_survives_when_another_checkout_removes_images() -> None:
    client = connect()
    base = images.ensure_images(client, print).base
    tag = f"testbed/stage:test-{secrets.token_hex(4)}"
    recipe = b"ARG BASE\nFROM ${BASE}\nARG STAGE\nLABEL testbed.image=stage testbed.stage=${STAGE}\n"
    images.build(client, tag, recipe, {}, {"BASE": base}, {"testbed.image": "stage"})
    try:
        images.remove_images(client, keep=images.find_tags(client), spare=images.SPARE)
        assert images.image_exists(client, tag)
    finally:
        client.images.remove(tag)
