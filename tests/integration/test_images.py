"""Images as the engine builds them."""

from __future__ import annotations

import secrets

import pytest

from controller.lab import images
from controller.lab.engine import connect
from testbed.common.errors import HostError

pytestmark = pytest.mark.containers


def test_an_image_whose_packages_cannot_be_imported_fails_when_it_is_built() -> None:
    client = connect()
    base = images.ensure_images(client, print).base
    tag = f"testbed/runtime:test-{secrets.token_hex(4)}"
    recipe = images.recipe("runtime").partition(b"FROM ${BASE}\n")[2]
    # Without the stage that installs packages.
    lines = [line for line in recipe.decode().splitlines() if not line.startswith("COPY")]
    text = "\n".join(["ARG BASE", "FROM ${BASE}", *lines]).encode()
    with pytest.raises(HostError, match="No module named 'flask'"):
        images.build(client, tag, text, {}, {"BASE": base, "MODULES": "json, flask"}, {"testbed.image": "stage"})
    assert not images.exists(client, tag)
