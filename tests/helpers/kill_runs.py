"""``python -m tests.helpers.kill_runs COUNT SEED``: kill the controller of a run on two hosts at random times.

The program is a command for `tests.helpers.engines`. It prints the seconds until no container of the run is left.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

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
    clients = [reach(name).client for name in ("h1", "h2")]
    draw, failed = random.Random(seed), 0
    for number in range(count):
        # Kill once this many containers exist. Before the first and after the last one, wait longer.
        threshold, delay = draw.randint(0, CONTAINERS), draw.uniform(0, MAX_DELAY)
        command = [
            str(Path(sys.executable).with_name("testbed")),
            *COMMAND,
            f"/tmp/killed-{time.time_ns()}",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as controller:
            start, containers = time.monotonic(), 0
            while containers < threshold and time.monotonic() - start < BOOT_TIMEOUT:
                counts = [len(client.api.containers(all=True)) for client in clients]
                containers = sum(counts)
                time.sleep(0.05)
            if threshold in (0, CONTAINERS):
                time.sleep(delay)
            controller.kill()
        start = time.monotonic()
        # An engine may still be processing a request of the killed controller.
        time.sleep(0.5)
        while (
            any(labelled_runs(client) for client in clients)
            and time.monotonic() - start < REMOVAL_TIMEOUT
        ):
            time.sleep(0.2)
        left = sum(len(labelled_runs(client)) for client in clients)
        failed += left > 0
        duration = time.monotonic() - start
        print(
            f"{number + 1}: killed with {containers} containers; "
            f"{left} left after {duration:.1f} s",
            flush=True,
        )
    print(f"{failed} of {count} runs left containers")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
