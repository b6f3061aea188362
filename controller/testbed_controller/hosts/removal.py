"""Removal of a run from several hosts. As a program: the reaper of such a run."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import docker

from testbed.common.errors import HostError, TestbedError
from testbed_controller.hosts.contexts import Host, reach
from testbed_controller.lab import reaper, runstate
from testbed_controller.lab.engine import connect_to_run
from testbed_controller.lab.removal import remove_from, remove_run


def remove_everywhere(
    run: str,
    hosts: Iterable[Host | str],
    *,
    settle: bool = False,
    lost: Collection[str] = (),
) -> int:
    """Remove a run; return the number of containers, networks and stray volumes.

    Hosts are given as connections or context names. Raises the error of a failed or silent host after all others are
    cleaned up; ``lost`` hosts are skipped. The swarm's network stays while a host is absent.
    """

    def connect(host: Host | str) -> Host | TestbedError:
        if isinstance(host, Host):
            if host.name in lost:
                return HostError(
                    f"{host.name}: the host is lost and may still have parts of {run}"
                )
            return host
        try:
            return reach(host)
        except TestbedError as error:
            return error

    def remove(host: Host | TestbedError) -> int | TestbedError:
        if isinstance(host, TestbedError):
            return host
        try:
            return remove_from(host.client, run, settle=settle, networks=whole)
        except TestbedError as error:
            return error

    targets = list(hosts)
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        connections = list(pool.map(connect, targets))
        # Containers of an absent host may still use the network of the swarm.
        whole = all(isinstance(connection, Host) for connection in connections)
        counts = list(pool.map(remove, connections))
    total = 0
    for count in counts:
        if isinstance(count, TestbedError):
            raise count
        total += count
    # Only now: the state names the hosts that a second attempt has to visit.
    runstate.forget(run)
    return total


def remove(run: str, client: docker.DockerClient | None, *, settle: bool = True) -> int:
    """Remove a run from one engine or from several hosts; ``client`` is the engine of a run on one."""
    hosts = runstate.hosts_of(run)
    if hosts:
        return remove_everywhere(run, hosts, settle=settle)
    return remove_run(client or connect_to_run(run), run, settle=settle)


def _remove_known(run: str) -> int:
    # A run removed by another process has no state file any more.
    return remove(run, None) if run in runstate.runs() else 0


if __name__ == "__main__":
    reaper.main(sys.argv[1], _remove_known)
