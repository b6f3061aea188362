from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from testbed_controller.lab import diagnosis, engine, images


def test_failing_engine_is_not_reported_as_missing_kernel_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise APIError("500", explanation="runc create failed: error setting rlimits")

    monkeypatch.setattr(diagnosis, "image_exists", lambda *_: True)
    client: Any = SimpleNamespace(
        info=dict,
        containers=SimpleNamespace(run=refuses, list=lambda **_: []),
        networks=SimpleNamespace(list=lambda **_: []),
    )
    monkeypatch.setattr(diagnosis.capability, "remove_run", lambda *_, **__: [])
    checks = list(diagnosis._check_links(client, "testbed/shaper:x"))
    assert [(check.name, check.status, check.needed) for check in checks] == [
        ("links", "missing", True)
    ]
    assert "error setting rlimits" in checks[0].detail
    assert "modprobe" not in f"{checks[0]}"


@pytest.mark.parametrize(
    ("component", "name"), [("Engine", "Docker"), ("Podman Engine", "Podman")]
)
def test_an_engine_has_its_own_name(component: str, name: str) -> None:
    client: Any = SimpleNamespace(
        info=dict,
        version=lambda: {"Version": "4.3.1", "Components": [{"Name": component}]},
    )
    found = engine.facts(client)
    assert (found["name"], found["version"]) == (name, "4.3.1")


def test_limits_that_the_kernel_ignores_are_among_the_facts_of_an_engine() -> None:
    client: Any = SimpleNamespace(
        info=lambda: {"MemoryLimit": False, "PidsLimit": True}, version=dict
    )
    assert engine.facts(client)["unlimited"] == ["memory"]


def test_images_are_complete_without_those_that_they_stand_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags = images.image_tags()
    present = {tags.device, tags.shaper}
    for module in (diagnosis, images):
        monkeypatch.setattr(module, "image_exists", lambda _, tag: tag in present)
    client: Any = SimpleNamespace(info=dict)
    assert diagnosis._check_images(client).status == "ok"
    present.remove(tags.shaper)
    assert diagnosis._check_images(client).detail == "not built yet: shaper"
