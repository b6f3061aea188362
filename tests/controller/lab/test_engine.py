from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter

from testbed.common.errors import HostError
from testbed_controller.lab import engine, runstate
from testbed_controller.lab.engineaddress import EngineAddress
from tests.helpers.docker_contexts import write_docker_context


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder as docker's configuration, in place of this user's."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when root would start or install anything."""
    monkeypatch.setattr(engine.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        engine.subprocess, "Popen", lambda *_a, **_k: pytest.fail("started something")
    )
    monkeypatch.setattr(
        engine.subprocess, "run", lambda *_a, **_k: pytest.fail("ran something")
    )


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("url", ["unix:///nowhere/docker.sock", "tcp://127.0.0.2:1"])
def test_an_engine_of_the_current_context_is_reported_and_never_started(
    configuration: Path, url: str
) -> None:
    write_docker_context(configuration, "away", url, is_current=True)
    with pytest.raises(
        HostError,
        match=r"the docker context 'away' .*'docker context use default'.*--runtime simulate",
    ):
        engine.ensure_engine(print)


@pytest.mark.usefixtures("started")
def test_an_engine_over_ssh_is_refused_with_the_way_over_hosts(
    configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(configuration, "lab", "ssh://me@lab", is_current=True)
    with pytest.raises(HostError, match=r"reached by ssh: .*'--hosts lab'"):
        engine.ensure_engine(print)
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@lab")
    with pytest.raises(
        HostError,
        match=r"docker context create NAME --docker host=ssh://me@lab.*'--hosts NAME'",
    ):
        engine.connect()


@pytest.mark.parametrize(
    ("address", "option", "text"),
    [
        (
            EngineAddress("tcp://192.0.2.7:2376", "lab", True),
            "",
            "another machine.*'--hosts lab'",
        ),
        (EngineAddress(), "name=rootless", "rootless"),
        (EngineAddress(), "name=userns", "userns-remap"),
    ],
)
def test_an_engine_without_room_for_a_lab_is_refused_with_a_remedy(
    address: EngineAddress, option: str, text: str
) -> None:
    client: Any = SimpleNamespace(
        info=lambda: {"SecurityOptions": ["name=seccomp,profile=default", option]}
    )
    with pytest.raises(HostError, match=f"{text}.*--runtime simulate"):
        engine.refuse_unusable(client, address)


def test_a_run_is_looked_for_on_the_engine_that_it_was_made_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (
        EngineAddress("unix:///first.sock"),
        EngineAddress("unix:///second.sock"),
    )
    runstate.write(runstate.RunState("x-1", "secret", engine=first))
    monkeypatch.setattr(engine, "connect", lambda address=None: address or second)
    monkeypatch.setattr(engine, "chosen_engine", lambda: second)
    assert engine.connect_to_run("x-1") == first
    assert engine.connect_to_run("of-another-user") == second
    assert list(engine.connect_to_all()) == [second, first]


def test_somebody_elses_engine_is_reported_and_never_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(
        engine.subprocess, "Popen", lambda *_a, **_k: pytest.fail("started something")
    )
    monkeypatch.setattr(
        engine.subprocess, "run", lambda *_a, **_k: pytest.fail("ran something")
    )
    with pytest.raises(
        HostError, match=r"the socket does not exist.*unset DOCKER_HOST"
    ) as caught:
        engine.ensure_engine(print)
    assert caught.value.exit_code == 3


def test_without_root_no_engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        engine,
        "connect_to",
        lambda *_: (_ for _ in ()).throw(OSError("FileNotFoundError")),
    )
    monkeypatch.setattr(
        engine.subprocess, "run", lambda *_a, **_k: pytest.fail("ran something")
    )
    monkeypatch.setattr(engine.shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(HostError, match=r"no Docker engine is installed: .* as root"):
        engine.ensure_engine(print)


def test_a_user_outside_the_group_is_told_about_it() -> None:
    assert "group 'docker'" in engine._explain_missing_engine(
        EngineAddress(), PermissionError(13, "Permission denied")
    )


def test_the_engines_own_complaint_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "dockerd.log"
    log.write_text(
        'time="1" level=info msg="Starting up"\n'
        "failed to start daemon: Devices cgroup isn't mounted\n"
        'time="2" level=info msg="stopping"\n\n'
    )
    assert (
        engine._last_error(log)
        == "failed to start daemon: Devices cgroup isn't mounted"
    )
    log.write_text("")
    assert engine._last_error(log) == "no reason given"


def test_legacy_iptables_go_in_front_where_only_they_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / "sbin"
    programs.mkdir()
    for name in (
        "iptables",
        "iptables-legacy",
        "iptables-legacy-save",
        "iptables-legacy-restore",
        "ip6tables-legacy",
    ):
        program = programs / name
        program.write_text(f"#!/bin/sh\nexit {int(name == 'iptables')}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = Path(engine._path_with_working_iptables().split(":")[0])
    assert (first / "iptables").resolve() == programs / "iptables-legacy"
    assert (
        first / "iptables-restore"
    ).resolve() == programs / "iptables-legacy-restore"
    (programs / "iptables").write_text("#!/bin/sh\nexit 0\n")
    assert engine._path_with_working_iptables().startswith(str(programs))


class Flaky(BaseAdapter):
    """Stands for the engine's socket: refuses some requests, then answers."""

    def __init__(
        self, refusals: int, error: type[Exception] = requests.ConnectionError
    ) -> None:
        super().__init__()
        self.left = refusals
        self.error = error

    def send(
        self, request: requests.PreparedRequest, *_arguments: Any, **_options: Any
    ) -> requests.Response:
        self.left -= 1
        if self.left >= 0:
            raise self.error("Connection refused")
        return requests.Response()

    def close(self) -> None:
        pass


def request(body: Any = None) -> requests.PreparedRequest:
    made = requests.PreparedRequest()
    made.body = body
    return made


def test_requests_are_repeated_until_the_engine_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_PAUSE", 0.01)
    flaky = Flaky(5)
    engine._Patient(flaky).send(request(b"{}"))
    assert flaky.left == -1


def test_absent_engine_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PAUSE", 0.01)
    monkeypatch.setattr(engine, "PATIENCE", 0.1)
    with pytest.raises(
        HostError, match=r"has not answered for 0 s \(connection refused\)"
    ):
        engine._Patient(Flaky(10**6)).send(request())
    with pytest.raises(HostError, match="took more than 120 s"):
        engine._Patient(Flaky(1, requests.ReadTimeout)).send(request())
    # A stream has been read from by then.
    with pytest.raises(HostError):
        engine._Patient(Flaky(1)).send(request(iter([b"x"])))
