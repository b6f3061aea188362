"""Takes a run over several hosts away, from all of them. As a program: the reaper of such a run."""

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
    run: str, hosts: Iterable[Host | str], *, settle: bool = False, lost: Collection[str] = ()
) -> int:
    """Remove everything of a run; return how many containers, networks and stray volumes there were.

    Hosts are given as they were reached, or by the names of their contexts. Raises the error of a host where something
    does not go away, or that does not answer, once all is gone from the others. Those that are ``lost`` are not asked.
    A network of the swarm stays as long as a host is away.
    """

    def reached(host: Host | str) -> Host | TestbedError:
        if isinstance(host, Host):
            return (
                HostError(f"{host.name}: it is lost, and may still have some of {run}") if host.name in lost else host
            )
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

    given = list(hosts)
    with ThreadPoolExecutor(max(1, len(given))) as pool:
        found = list(pool.map(reached, given))
        whole = all(isinstance(each, Host) for each in found)
        counts = list(pool.map(remove, found))
    for count in counts:
        if isinstance(count, TestbedError):
            raise count
    runstate.forget(run)
    return sum(count for count in counts if isinstance(count, int))


def remove(run: str, client: docker.DockerClient | None, *, settle: bool = True) -> int:
    """Remove a run from wherever it is; ``client`` is the engine of those that are on one."""
    hosts = runstate.hosts_of(run)
    if hosts:
        return remove_everywhere(run, hosts, settle=settle)
    return remove_run(client or connect_to_run(run), run, settle=settle)


if __name__ == "__main__":
    # What somebody else has removed has no state file any more.
    reaper.main(sys.argv[1], lambda run: remove(run, None) if run in runstate.runs() else 0)
