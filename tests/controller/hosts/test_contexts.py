"""Docker contexts of hosts: connection errors with a remedy, and the swarm of several hosts."""

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


def make_host(name: str, **changes: Any) -> Host:
    """Return a host of a swarm with the manager "a"."""
    host = Host(
        name=name,
        client=None,  # type: ignore[arg-type]
        address_from_here=EngineAddress(),
        socket="/var/run/docker.sock",
        engine_id=f"id-{name}",
        node=name,
        address="10.0.0.1",
        is_manager=name == "a",
        managers=("10.0.0.1:2377",),
        cores=2,
        memory=8 << 30,
        version="20.10",
    )
    return replace(host, **changes)


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration folder."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def test_unresponsive_engine_is_reported_with_a_command_to_try(
    config_folder: Path,
) -> None:
    write_docker_context(config_folder, "a", "unix:///nowhere/sock")
    with pytest.raises(
        HostError,
        match=r"a: no engine responds at unix:///nowhere/sock .*docker --context a info",
    ):
        reach("a")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
def test_unreachable_ssh_host_is_reported_with_a_command_to_try(
    config_folder: Path,
) -> None:
    # No service uses port 9 (discard).
    write_docker_context(config_folder, "a", "ssh://me@127.0.0.1:9")
    with pytest.raises(
        HostError,
        match=r"a: ssh cannot reach ssh://me@127.0.0.1:9 .*'ssh -p 9 me@127.0.0.1'",
    ):
        reach("a")


def test_missing_ssh_is_reported_with_installation(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_docker_context(config_folder, "a", "ssh://me@127.0.0.1:9")
    monkeypatch.setenv("PATH", str(config_folder))
    with pytest.raises(
        HostError,
        match=r"a: ssh://me@127.0.0.1:9 needs ssh, which is not installed here: apt-get",
    ):
        reach("a")


def test_connection_ends_with_a_killed_controller(tmp_path: Path) -> None:
    # Stands for ssh: creates the forwarded socket (-L SOCKET:TARGET) and runs the remote command as a child.
    fake_ssh = tmp_path / "ssh"
    fake_ssh.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid\n"
        'while [ "$1" != -L ]; do shift; done\n: > "${2%%:*}"\nshift 3\nexec "$@"\n'
    )
    fake_ssh.chmod(0o755)
    program = (
        "from testbed_controller.hosts.contexts import _forward_socket; import os, signal\n"
        "_forward_socket('a', 'ssh://host/run/docker.sock'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    controller = subprocess.run(
        [sys.executable, "-c", program], env=environment, timeout=30
    )
    assert controller.returncode == -signal.SIGKILL
    connection = (tmp_path / "pid").read_text().strip()
    deadline = time.monotonic() + 20
    while is_running(connection):
        assert time.monotonic() < deadline, "the connection has outlived its controller"
        time.sleep(0.02)


def is_running(pid: str) -> bool:
    """Return whether a process exists, zombies excluded."""
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The state follows the program's name, which is in parentheses and may contain spaces.
    state = stat.rpartition(")")[2].split()[0]
    return state != "Z"


def test_unprotected_engine_on_the_network_is_refused(config_folder: Path) -> None:
    write_docker_context(config_folder, "a", "tcp://10.0.0.7:2375")
    with pytest.raises(
        InputError,
        match=r"tcp://10.0.0.7:2375 is unprotected .* certificates to the context, or use ssh://",
    ):
        reach("a")


def test_two_contexts_of_one_engine_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both contexts would place their devices on one host, as if there were two.
    monkeypatch.setattr(
        contexts, "reach", lambda name: make_host(name, engine_id="one")
    )
    with pytest.raises(
        InputError, match="the contexts a and b lead to the same engine"
    ):
        reach_all(["a", "b"])


def test_manager_of_the_swarm_is_selected() -> None:
    manager, worker = make_host("a"), make_host("b", address="10.0.0.2")
    assert find_manager({"b": worker, "a": manager}) is manager


def test_hosts_without_a_common_swarm_and_manager_are_refused() -> None:
    manager, worker = make_host("a"), make_host("b", address="10.0.0.2")
    outside = replace(worker, address="")
    with pytest.raises(HostError, match=r"b is not in a swarm: .*swarm init"):
        find_manager({"a": manager, "b": outside})
    with pytest.raises(
        HostError,
        match=r"no manager of the swarm among b: add the context of one of 10.0.0.1:2377",
    ):
        find_manager({"b": worker})
    in_another_swarm = replace(worker, managers=("10.0.0.9:2377",))
    with pytest.raises(
        HostError,
        match=r"a and b are in two swarms: run 'docker --context b swarm leave'",
    ):
        find_manager({"a": manager, "b": in_another_swarm})
