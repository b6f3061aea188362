"""``python -m testbed_agent``: start the control and data servers of a device's container."""

from __future__ import annotations

import logging
import os
import signal
import threading

from testbed.common.logs import log_to_stderr
from testbed.wire.serving import PatientServer
from testbed.wire.token import Lease
from testbed_agent.receiving import DataServer
from testbed_agent.runner import Runner
from testbed_agent.settings import Settings
from testbed_agent.starting import HealthFirst

CONTROL_THREADS = 8
"""Threads of the control server; some requests wait for the whole run."""

_LOG = logging.getLogger("testbed_agent")


def main() -> None:
    """Serve until SIGTERM, SIGINT or the end of the lease."""
    settings = Settings.from_environment(os.environ)
    log_to_stderr(os.environ)
    switched_off = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: switched_off.set())
    lease = Lease(os.environ, switched_off.set)
    runner = Runner(settings, DataServer(settings))
    server = PatientServer(
        settings.control, HealthFirst(runner, lease.renew), CONTROL_THREADS
    )
    threading.Thread(target=server.serve, name="serve", daemon=True).start()
    _LOG.info("device %s of run %s is on", settings.device, settings.run)
    switched_off.wait()
    _LOG.info("switched off by a signal or by the end of the lease")
    # A device loses its power without cleaning up; so does the agent.
    os._exit(0)


if __name__ == "__main__":
    main()
