from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.common.errors import HostError, InputError
from testbed_controller.hosts import contexts
from testbed_controller.hosts.contexts import Host, find_manager, reach, reach_all
from testbed_controller.lab.engineaddress import EngineAddress
from tests.helpers.docker_contexts import write_docker_context


def host(name: str, **changes: Any) -> Host:
    found = Host(
        name=name,
        client=None,  # type: ignore[arg-type]
        reached=EngineAddress(),
        socket="/var/run/docker.sock",
        engine=f"id-{name}",
        node=name,
        address="10.0.0.1",
        manages=name == "a",
        swarm="",
        managers=("10.0.0.1:2377",),
        cores=2,
        memory=8 << 30,
        version="20.10",
        kernel="6.1",
    )
    return replace(found, **changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def test_an_engine_that_does_not_answer_is_named_with_how_to_try_it(
    folder: Path,
) -> None:
    write_docker_context(folder, "a", "unix:///nowhere/sock")
    with pytest.raises(
        HostError,
        match=r"a: no engine responds at unix:///nowhere/sock .*docker --context a info",
    ):
        reach("a")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_a_host_that_ssh_does_not_reach_is_named_with_how_to_try_it(
    folder: Path,
) -> None:
    write_docker_context(folder, "a", "ssh://me@127.0.0.1:9")
    with pytest.raises(
        HostError,
        match=r"a: ssh cannot reach ssh://me@127.0.0.1:9 .*'ssh -p 9 me@127.0.0.1'",
    ):
        reach("a")


def test_an_ssh_that_is_not_installed_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(folder, "a", "ssh://me@127.0.0.1:9")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(
        HostError,
        match=r"a: ssh://me@127.0.0.1:9 needs ssh, which is not installed here: apt-get",
    ):
        reach("a")


def test_the_connection_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    # In place of ssh, what makes the socket that it is asked for and runs the command that it is given.
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid\n"
        'while [ "$1" != -L ]; do shift; done\n: > "${2%%:*}"\nshift 3\nexec "$@"\n'
    )
    stand_in.chmod(0o755)
    program = (
        "from testbed_controller.hosts.contexts import _forward_socket; import os, signal\n"
        "_forward_socket('a', 'ssh://host/run/docker.sock'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=30)
    assert done.returncode == -signal.SIGKILL
    connection = (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 20
    while is_running(connection):
        assert time.monotonic() < deadline, "the connection has outlived its controller"
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_an_engine_that_is_open_to_everybody_on_the_way_is_refused(
    folder: Path,
) -> None:
    write_docker_context(folder, "a", "tcp://10.0.0.7:2375")
    with pytest.raises(
        InputError,
        match=r"tcp://10.0.0.7:2375 is unprotected .* certificates to the context, or use ssh://",
    ):
        reach("a")


def test_two_contexts_of_one_engine_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contexts, "reach", lambda name: host(name, engine="one"))
    with pytest.raises(
        InputError, match="the contexts a and b lead to the same engine"
    ):
        reach_all(["a", "b"])


def test_hosts_have_to_be_of_one_swarm_with_a_manager_among_them() -> None:
    a, b = host("a"), host("b", address="10.0.0.2")
    assert find_manager({"b": b, "a": a}) is a
    with pytest.raises(HostError, match=r"b is not in a swarm: .*swarm init"):
        find_manager({"a": a, "b": replace(b, address="")})
    with pytest.raises(
        HostError,
        match=r"no manager of the swarm among b: add the context of one of 10.0.0.1:2377",
    ):
        find_manager({"b": b})
    with pytest.raises(
        HostError,
        match=r"a and b are in two swarms: run 'docker --context b swarm leave'",
    ):
        find_manager({"a": a, "b": replace(b, managers=("10.0.0.9:2377",))})
