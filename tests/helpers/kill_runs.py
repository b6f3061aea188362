"""``python -m tests.helpers.kill_runs COUNT SEED``: kill a run over h1 and h2 by SIGKILL, at another moment each time.

Says after how many seconds nothing of it is left on either; as a command of `tests.helpers.engines`.
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
"""What the run has, its shapers and keepers included."""
BOOT = 60.0
"""Seconds until all of them are there, on a busy machine."""
GOES_ON = 6.0
"""Seconds after that within which it is killed at the latest."""
PATIENCE = 30.0


def main(count: int, seed: int) -> int:
    clients = [reach(name).client for name in ("h1", "h2")]
    moments, failed = random.Random(seed), 0
    for number in range(count):
        wanted, more = moments.randint(0, CONTAINERS), moments.uniform(0, GOES_ON)
        command = [
            str(Path(sys.executable).with_name("testbed")),
            *COMMAND,
            f"/tmp/killed-{time.time_ns()}",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as controller:
            began, there = time.monotonic(), 0
            while there < wanted and time.monotonic() - began < BOOT:
                there = sum(len(client.api.containers(all=True)) for client in clients)
                time.sleep(0.05)
            time.sleep(more if wanted in (0, CONTAINERS) else 0)
            controller.kill()
        began = time.monotonic()
        # A request of the killed one may still be under way for a moment.
        time.sleep(0.5)
        while (
            any(labelled_runs(client) for client in clients)
            and time.monotonic() - began < PATIENCE
        ):
            time.sleep(0.2)
        left = sum(len(labelled_runs(client)) for client in clients)
        failed += left > 0
        took = time.monotonic() - began
        print(
            f"{number + 1}: with {there} containers; {left} left {took:.1f} s later",
            flush=True,
        )
    print(f"{failed} of {count} left something")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
