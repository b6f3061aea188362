"""Removal of a run from several hosts.

Run as a program, this module is the reaper: a process that removes such a run after its controller has died.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
    recheck: bool = False,
    lost: Collection[str] = (),
) -> int:
    """Remove a run; return the number of removed containers, networks and volumes.

    Hosts are connections or context names. All hosts are tried before the first error is raised. A connected host
    whose name is in ``lost`` is not contacted and counts as failed. After a failure, the run's state file stays for a
    second attempt, and if a host could not be reached, also the networks of the swarm. ``recheck`` is as for
    `remove_from`.
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

    def remove(host: Host | TestbedError, *, networks: bool) -> int | TestbedError:
        if isinstance(host, TestbedError):
            return host
        try:
            return remove_from(host.client, run, recheck=recheck, networks=networks)
        except TestbedError as error:
            return error

    targets = list(hosts)
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        connections = list(pool.map(connect, targets))
        # Containers of a failed host may still use the networks of the swarm.
        all_connected = all(isinstance(host, Host) for host in connections)
        counts = list(pool.map(partial(remove, networks=all_connected), connections))
    total = 0
    for count in counts:
        if isinstance(count, TestbedError):
            raise count
        total += count
    # Last, because a second attempt reads the hosts from the state.
    runstate.forget(run)
    return total


def remove(
    run: str, client: docker.DockerClient | None, *, recheck: bool = True
) -> int:
    """Remove a run from its engine or from all its hosts.

    ``client`` is a connection to the engine of a run without hosts; None makes one.
    """
    hosts = runstate.hosts_of(run)
    if hosts:
        return remove_everywhere(run, hosts, recheck=recheck)
    return remove_run(client or connect_to_run(run), run, recheck=recheck)


def _remove_if_recorded(run: str) -> int:
    # Without a state file, another process has removed the run already.
    return remove(run, None) if run in runstate.runs() else 0


if __name__ == "__main__":
    reaper.main(sys.argv[1], _remove_if_recorded)
