from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import HostError, InputError
from testbed_controller.lab.engineaddress import (
    EngineAddress,
    chosen_engine,
    context_names,
    find_context,
)
from tests.helpers.docker_contexts import write_docker_context


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name in (
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "DOCKER_TLS_VERIFY",
        "DOCKER_CERT_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("url", "local"),
    [
        (EngineAddress.url, True),
        ("unix:///run/user/1000/docker.sock", True),
        ("/run/docker.sock", True),
        ("tcp://127.0.0.2:2375", True),
        ("tcp://localhost:2375", True),
        ("tcp://192.0.2.7:2376", False),
        ("tcp://lab:2376", False),
        ("ssh://me@localhost", False),
    ],
)
def test_an_engine_is_local_when_its_address_is_on_this_machine(
    url: str, local: bool
) -> None:
    assert EngineAddress(url).is_local is local


def test_without_a_choice_the_engine_is_that_of_this_machine(folder: Path) -> None:
    assert chosen_engine() == EngineAddress("unix:///var/run/docker.sock")
    assert not chosen_engine().chosen
    (folder / "config.json").write_text("{ no JSON")
    assert not chosen_engine().chosen


def test_the_current_context_is_followed_unless_the_environment_names_another_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(
        folder, "desktop", "unix:///desktop/docker.sock", is_current=True
    )
    write_docker_context(folder, "lab", "tcp://192.0.2.7:2376")
    found = chosen_engine()
    assert (found.url, found.context, found.chosen) == (
        "unix:///desktop/docker.sock",
        "desktop",
        True,
    )
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    assert chosen_engine().url == "tcp://192.0.2.7:2376"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert not chosen_engine().chosen
    monkeypatch.setenv("DOCKER_HOST", "unix:///other.sock")
    assert (chosen_engine().title, chosen_engine().chosen) == (
        "DOCKER_HOST=unix:///other.sock",
        True,
    )


def test_certificates_belong_to_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(folder, "lab", "tcp://192.0.2.7:2376", is_current=True)
    assert chosen_engine().certificates == ""
    (meta,) = (folder / "contexts" / "meta").iterdir()
    place = folder / "contexts" / "tls" / meta.name / "docker"
    place.mkdir(parents=True)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (place / name).touch()
    assert (chosen_engine().certificates, chosen_engine().verify) == (str(place), True)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2376")
    assert chosen_engine().certificates == ""
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/certificates")
    assert (chosen_engine().certificates, chosen_engine().verify) == (
        "/certificates",
        True,
    )


def test_contexts_are_found_without_a_configuration_beside_them(folder: Path) -> None:
    write_docker_context(folder, "b", "unix:///b")
    write_docker_context(folder, "a", "unix:///a")
    assert context_names() == ["default", "a", "b"]


def test_missing_context_is_refused_with_the_known_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(folder, "a", "unix:///a")
    with pytest.raises(
        InputError,
        match=r"unknown docker context 'x' \(contexts: default, a\): .*docker context create x",
    ):
        find_context("x")
    monkeypatch.setenv("DOCKER_CONTEXT", "x")
    with pytest.raises(HostError, match="unknown docker context 'x'"):
        chosen_engine()
