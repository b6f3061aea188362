"""``python -m agent``: the two servers of a device's container."""

from __future__ import annotations

import os
import signal
import threading

from agent.control import ControlApplication
from agent.http import serve
from agent.receiving import MOST_READING, DataApplication
from agent.runner import Runner
from agent.settings import Settings
from testbed.wire.token import Lease

CONTROL_THREADS = 8
DATA_THREADS = 4


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = Settings.from_environment(os.environ)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    data = DataApplication(settings)
    data_server = serve(settings.data, data, DATA_THREADS, linger=True)

    def make_room(peers: int) -> None:
        # Slow links keep a thread for minutes, and a peer that reconnects may leave another one waiting for a while.
        pool = data_server.requests
        pool.grow(max(0, DATA_THREADS + MOST_READING * peers - len(pool._threads)))

    lease = Lease(os.environ, over.set)
    control = ControlApplication(Runner(settings, data, make_room), lease.renew)
    servers = [serve(settings.control, control, CONTROL_THREADS), data_server]
    for server in servers:
        threading.Thread(target=server.serve, name="serve", daemon=True).start()
    over.wait()
    # A device that is switched off does not tidy up first.
    os._exit(0)


if __name__ == "__main__":
    main()
