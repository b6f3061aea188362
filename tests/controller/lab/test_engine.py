from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import BaseAdapter

from controller.lab import engine
from testbed.common.errors import HostError


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("", True),
        ("unix:///run/user/1000/docker.sock", True),
        ("tcp://127.0.0.1:2375", True),
        ("tcp://localhost:2375", True),
        ("tcp://192.0.2.7:2376", False),
        ("ssh://me@lab", False),
    ],
)
def test_an_engine_is_local_when_its_loopback_is_ours(host: str, local: bool) -> None:
    assert engine.is_local(host) is local


def test_somebody_elses_engine_is_reported_and_never_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setattr(engine.subprocess, "Popen", lambda *_a, **_k: pytest.fail("started something"))
    monkeypatch.setattr(engine.subprocess, "run", lambda *_a, **_k: pytest.fail("ran something"))
    with pytest.raises(HostError, match=r"there is no such socket.*unset DOCKER_HOST") as caught:
        engine.ensure_engine(print)
    assert caught.value.exit_code == 3


def test_without_root_no_engine_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(engine.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(engine.docker, "from_env", lambda **_k: (_ for _ in ()).throw(OSError("FileNotFoundError")))
    monkeypatch.setattr(engine.subprocess, "run", lambda *_a, **_k: pytest.fail("ran something"))
    monkeypatch.setattr(engine.shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(HostError, match=r"there is no Docker engine: .* as root"):
        engine.ensure_engine(print)


def test_a_user_outside_the_group_is_told_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert "group 'docker'" in engine._advice(PermissionError(13, "Permission denied"))


def test_the_engines_own_complaint_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "dockerd.log"
    log.write_text(
        'time="1" level=info msg="Starting up"\n'
        "failed to start daemon: Devices cgroup isn't mounted\n"
        'time="2" level=info msg="stopping"\n\n'
    )
    assert engine._complaint(log) == "failed to start daemon: Devices cgroup isn't mounted"
    log.write_text("")
    assert engine._complaint(log) == "no word of why"


def test_legacy_iptables_go_in_front_where_only_they_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = tmp_path / "sbin"
    programs.mkdir()
    for name in ("iptables", "iptables-legacy", "iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy"):
        program = programs / name
        program.write_text(f"#!/bin/sh\nexit {int(name == 'iptables')}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = Path(engine._path_with_working_iptables().split(":")[0])
    assert (first / "iptables").resolve() == programs / "iptables-legacy"
    assert (first / "iptables-restore").resolve() == programs / "iptables-legacy-restore"
    (programs / "iptables").write_text("#!/bin/sh\nexit 0\n")
    assert engine._path_with_working_iptables().startswith(str(programs))


class Flaky(BaseAdapter):
    """Stands for the engine's socket: refuses some requests, then answers."""

    def __init__(self, refusals: int, error: type[Exception] = requests.ConnectionError) -> None:
        super().__init__()
        self.left = refusals
        self.error = error

    def send(self, request: requests.PreparedRequest, *_arguments: Any, **_options: Any) -> requests.Response:
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


def test_requests_are_repeated_until_the_engine_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PAUSE", 0.01)
    flaky = Flaky(5)
    engine._Patient(flaky).send(request(b"{}"))
    assert flaky.left == -1


def test_an_engine_that_stays_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PAUSE", 0.01)
    monkeypatch.setattr(engine, "PATIENCE", 0.1)
    with pytest.raises(HostError, match=r"has not answered for 0 s \(connection refused\)"):
        engine._Patient(Flaky(10**6)).send(request())
    with pytest.raises(HostError, match="took more than 120 s"):
        engine._Patient(Flaky(1, requests.ReadTimeout)).send(request())
    # A stream has been read from by then.
    with pytest.raises(HostError):
        engine._Patient(Flaky(1)).send(request(iter([b"x"])))
