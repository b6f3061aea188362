"""Connection to the container engine, its start by root, and refusal of unusable engines."""

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


def fail_if_called(*_arguments: Any, **_options: Any) -> None:
    pytest.fail("started a process")


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty configuration folder of docker, used instead of the user's folder."""
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return folder


@pytest.fixture
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a process is started."""
    monkeypatch.setattr(engine.subprocess, "Popen", fail_if_called)
    monkeypatch.setattr(engine.subprocess, "run", fail_if_called)


@pytest.fixture
def _as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    # Root starts or installs a missing engine.
    monkeypatch.setattr(engine.os, "geteuid", lambda: 0)


@pytest.mark.usefixtures("_no_processes", "_as_root")
@pytest.mark.parametrize("url", ["unix:///nowhere/docker.sock", "tcp://127.0.0.2:1"])
def test_unreachable_engine_of_context_is_reported_and_not_started(
    configuration: Path, url: str
) -> None:
    write_docker_context(configuration, "away", url, is_current=True)
    remedy = "'docker context use default'.*--runtime simulate"
    with pytest.raises(HostError, match=f"the docker context 'away' .*{remedy}"):
        engine.ensure_engine(print)


@pytest.mark.usefixtures("_no_processes", "_as_root")
def test_engine_over_ssh_is_refused_with_option_for_hosts(
    configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(configuration, "lab", "ssh://me@lab", is_current=True)
    with pytest.raises(HostError, match=r"reached by ssh: .*'--hosts lab'"):
        engine.ensure_engine(print)
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@lab")
    create = "docker context create NAME --docker host=ssh://me@lab"
    with pytest.raises(HostError, match=f"{create}.*'--hosts NAME'"):
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
def test_engine_unable_to_run_labs_is_refused_with_remedy(
    address: EngineAddress, option: str, text: str
) -> None:
    client: Any = SimpleNamespace(
        info=lambda: {"SecurityOptions": ["name=seccomp,profile=default", option]}
    )
    with pytest.raises(HostError, match=f"{text}.*--runtime simulate"):
        engine.refuse_unusable(client, address)


def test_commands_connect_to_engine_of_their_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_run = EngineAddress("unix:///first.sock")
    current = EngineAddress("unix:///second.sock")
    runstate.write(runstate.RunState("x-1", "secret", engine=of_run))
    monkeypatch.setattr(engine, "connect", lambda address=None: address or current)
    monkeypatch.setattr(engine, "chosen_engine", lambda: current)
    assert engine.connect_to_run("x-1") == of_run
    # A run without a state file may be on the current engine.
    assert engine.connect_to_run("of-another-user") == current
    assert list(engine.connect_to_all()) == [current, of_run]


@pytest.mark.usefixtures("_no_processes")
def test_unreachable_engine_of_environment_is_reported_and_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    message = r"the socket does not exist.*unset DOCKER_HOST"
    with pytest.raises(HostError, match=message) as raised:
        engine.ensure_engine(print)
    assert raised.value.exit_code == 3


@pytest.mark.usefixtures("_no_processes")
def test_engine_is_not_installed_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("FileNotFoundError")

    monkeypatch.setattr(engine.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(engine, "connect_to", refuse)
    monkeypatch.setattr(engine.shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(HostError, match=r"no Docker engine is installed: .* as root"):
        engine.ensure_engine(print)


def test_missing_permission_is_explained_by_group() -> None:
    error = PermissionError(13, "Permission denied")
    text = engine._explain_missing_engine(EngineAddress(), error)
    assert "group 'docker'" in text


def test_last_error_of_engine_is_read_from_log(tmp_path: Path) -> None:
    log = tmp_path / "dockerd.log"
    error = "failed to start daemon: Devices cgroup isn't mounted"
    # dockerd prints its last error without the format of its log.
    log.write_text(
        'time="1" level=info msg="Starting up"\n'
        f"{error}\n"
        'time="2" level=info msg="stopping"\n\n'
    )
    assert engine._last_error(log) == error
    log.write_text("")
    assert engine._last_error(log) == "no reason given"


def test_legacy_iptables_are_preferred_if_others_fail(
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
        # `iptables` fails, as on kernels without nftables.
        status = 1 if name == "iptables" else 0
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    links = Path(engine._path_with_working_iptables().split(":")[0])
    assert (links / "iptables").resolve() == programs / "iptables-legacy"
    restore = (links / "iptables-restore").resolve()
    assert restore == programs / "iptables-legacy-restore"
    (programs / "iptables").write_text("#!/bin/sh\nexit 0\n")
    assert engine._path_with_working_iptables().startswith(str(programs))


class FlakyAdapter(BaseAdapter):
    """A connection to the engine with failures of the first requests."""

    def __init__(
        self, refusals: int, error: type[Exception] = requests.ConnectionError
    ) -> None:
        super().__init__()
        self.remaining_refusals = refusals
        self.error = error

    def send(
        self, request: requests.PreparedRequest, *_arguments: Any, **_options: Any
    ) -> requests.Response:
        self.remaining_refusals -= 1
        if self.remaining_refusals >= 0:
            raise self.error("Connection refused")
        return requests.Response()

    def close(self) -> None:
        pass


def make_request(body: Any = None) -> requests.PreparedRequest:
    request = requests.PreparedRequest()
    request.body = body
    return request


def test_requests_are_repeated_until_engine_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_RETRY_SECONDS", 0.01)
    adapter = FlakyAdapter(5)
    engine._RetryingAdapter(adapter).send(make_request(b"{}"))
    # Five refusals and one answer.
    assert adapter.remaining_refusals == -1


def test_request_to_absent_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(engine, "PATIENCE", 0.1)
    # 0.1 s are printed as 0.
    message = r"has not answered for 0 s \(connection refused\)"
    with pytest.raises(HostError, match=message):
        engine._RetryingAdapter(FlakyAdapter(10**6)).send(make_request())
    silent = engine._RetryingAdapter(FlakyAdapter(1, requests.ReadTimeout))
    with pytest.raises(HostError, match="took more than 120 s"):
        silent.send(make_request())
    # A stream cannot be sent again, as the first attempt has read from it.
    with pytest.raises(HostError):
        engine._RetryingAdapter(FlakyAdapter(1)).send(make_request(iter([b"x"])))
