"""Checks of `testbed doctor`, and facts about the container engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from testbed_controller.lab import diagnosis, engine, images


def test_failing_engine_is_not_reported_as_missing_kernel_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # runc fails before the container could load a module.
    def refuse(*_: Any, **__: Any) -> None:
        raise APIError("500", explanation="runc create failed: error setting rlimits")

    monkeypatch.setattr(diagnosis, "image_exists", lambda *_: True)
    client: Any = SimpleNamespace(
        info=dict,
        containers=SimpleNamespace(run=refuse, list=lambda **_: []),
        networks=SimpleNamespace(list=lambda **_: []),
    )
    monkeypatch.setattr(diagnosis.capability, "remove_run", lambda *_, **__: [])
    (check,) = diagnosis._check_links(client, "testbed/shaper:x")
    assert check.name == "links"
    assert check.status == "missing"
    assert check.needed
    assert "error setting rlimits" in check.detail
    # Kernel modules are loaded with modprobe, which would not help here.
    assert "modprobe" not in f"{check}"


@pytest.mark.parametrize(
    ("component", "name"), [("Engine", "Docker"), ("Podman Engine", "Podman")]
)
def test_engine_is_named_after_its_component(component: str, name: str) -> None:
    client: Any = SimpleNamespace(
        info=dict,
        version=lambda: {"Version": "4.3.1", "Components": [{"Name": component}]},
    )
    facts = engine.facts(client)
    assert facts["name"] == name
    assert facts["version"] == "4.3.1"


def test_limits_without_kernel_support_are_recorded() -> None:
    client: Any = SimpleNamespace(
        info=lambda: {"MemoryLimit": False, "PidsLimit": True}, version=dict
    )
    assert engine.facts(client)["unlimited"] == ["memory"]


def test_images_are_complete_without_their_base_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The base images are needed only to build these two.
    tags = images.image_tags()
    present = {tags.device, tags.shaper}
    for module in (diagnosis, images):
        monkeypatch.setattr(module, "image_exists", lambda _, tag: tag in present)
    client: Any = SimpleNamespace(info=dict)
    assert diagnosis._check_images(client).status == "ok"
    present.remove(tags.shaper)
    assert diagnosis._check_images(client).detail == "not built yet: shaper"
