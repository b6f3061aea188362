"""``python -m tests.helpers.kill_runs COUNT SEED``: kill the controllers of runs on two hosts at random times.

The program is a command for `tests.helpers.engines`. For each run it prints the seconds until the run is removed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import docker

from testbed_controller.hosts.contexts import reach
from testbed_controller.lab.removal import labelled_runs

COMMAND = ["run", "quickstart", "--hosts", "h1,h2", "--accept-links", "--out"]
CONTAINERS = 8
"""Number of containers of the run, including shapers and keepers."""
BOOT_TIMEOUT = 60.0
"""Seconds for all containers to start, on a busy machine."""
MAX_DELAY = 6.0
"""Longest time in seconds from the start of the last container to the kill."""
REMOVAL_TIMEOUT = 30.0
"""Seconds for the hosts to remove all containers."""


def main(count: int, seed: int) -> int:
    """Kill ``count`` runs; return 1, as the exit status, if some run was not removed."""
    clients = [reach(name).client for name in ("h1", "h2")]
    draw, failed = random.Random(seed), 0
    for number in range(count):
        containers = start_and_kill(clients, draw)
        start = time.monotonic()
        left = count_hosts_with_runs(clients)
        failed += left > 0
        duration = time.monotonic() - start
        print(
            f"{number + 1}: killed with {containers} containers; "
            f"parts left on {left} hosts after {duration:.1f} s",
            flush=True,
        )
    print(f"{failed} of {count} runs were not removed")
    return failed > 0


def start_and_kill(clients: list[docker.DockerClient], draw: random.Random) -> int:
    """Start a run and kill its controller as soon as a random number of containers exists; return their number."""
    threshold, delay = draw.randint(0, CONTAINERS), draw.uniform(0, MAX_DELAY)
    testbed = str(Path(sys.executable).with_name("testbed"))
    command = [testbed, *COMMAND, f"/tmp/killed-{time.time_ns()}"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as controller:
        start, containers = time.monotonic(), 0
        while containers < threshold and time.monotonic() - start < BOOT_TIMEOUT:
            counts = [len(client.api.containers(all=True)) for client in clients]
            containers = sum(counts)
            time.sleep(0.05)
        # The phases before the first and after the last container take longer than the phases between.
        if threshold in (0, CONTAINERS):
            time.sleep(delay)
        controller.kill()
    return containers


def count_hosts_with_runs(clients: list[docker.DockerClient]) -> int:
    """Wait for the removal of all runs, and return the number of hosts on which parts of a run are left."""
    start = time.monotonic()
    # An engine may still be processing a request of the killed controller.
    time.sleep(0.5)
    while (
        any(labelled_runs(client) for client in clients)
        and time.monotonic() - start < REMOVAL_TIMEOUT
    ):
        time.sleep(0.2)
    return sum(bool(labelled_runs(client)) for client in clients)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
