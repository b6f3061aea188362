"""The address of the container engine: docker contexts, environment variables and certificates."""

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
    """Return an empty configuration folder of docker."""
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
    ("url", "is_local"),
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
def test_engine_with_address_of_this_machine_is_local(url: str, is_local: bool) -> None:
    assert EngineAddress(url).is_local is is_local


def test_default_engine_is_local_one(folder: Path) -> None:
    assert chosen_engine() == EngineAddress("unix:///var/run/docker.sock")
    assert not chosen_engine().chosen
    # A damaged configuration chooses nothing.
    (folder / "config.json").write_text("{ no JSON")
    assert not chosen_engine().chosen


def test_environment_overrides_current_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(
        folder, "desktop", "unix:///desktop/docker.sock", is_current=True
    )
    write_docker_context(folder, "lab", "tcp://192.0.2.7:2376")
    address = chosen_engine()
    assert address.url == "unix:///desktop/docker.sock"
    assert address.context == "desktop"
    assert address.chosen
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    assert chosen_engine().url == "tcp://192.0.2.7:2376"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert not chosen_engine().chosen
    # DOCKER_HOST takes precedence over DOCKER_CONTEXT, as for the docker command.
    monkeypatch.setenv("DOCKER_HOST", "unix:///other.sock")
    assert chosen_engine().title == "DOCKER_HOST=unix:///other.sock"
    assert chosen_engine().chosen


def test_certificates_of_context_or_environment_are_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(folder, "lab", "tcp://192.0.2.7:2376", is_current=True)
    assert chosen_engine().certificates == ""
    (meta,) = (folder / "contexts" / "meta").iterdir()
    # Both folders of a context are named by the hash of its name.
    certificates = folder / "contexts" / "tls" / meta.name / "docker"
    certificates.mkdir(parents=True)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (certificates / name).touch()
    assert chosen_engine().certificates == str(certificates)
    assert chosen_engine().verify
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:2376")
    assert chosen_engine().certificates == ""
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/certificates")
    assert chosen_engine().certificates == "/certificates"
    assert chosen_engine().verify


def test_contexts_are_listed_without_configuration_file(folder: Path) -> None:
    write_docker_context(folder, "b", "unix:///b")
    write_docker_context(folder, "a", "unix:///a")
    assert context_names() == ["default", "a", "b"]


def test_missing_context_is_refused_with_known_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(folder, "a", "unix:///a")
    known = r"unknown docker context 'x' \(contexts: default, a\)"
    with pytest.raises(InputError, match=f"{known}: .*docker context create x"):
        find_context("x")
    # A problem of the host rather than of the input.
    monkeypatch.setenv("DOCKER_CONTEXT", "x")
    with pytest.raises(HostError, match="unknown docker context 'x'"):
        chosen_engine()
