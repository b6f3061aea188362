"""``python -m agent``: the two servers of a device's container."""

from __future__ import annotations

import logging
import os
import signal
import threading

from testbed.common.logs import log_to_stderr
from testbed.wire.serving import PatientServer
from testbed.wire.token import Lease
from testbed_agent.control import ControlApplication
from testbed_agent.receiving import DataServer
from testbed_agent.runner import Runner
from testbed_agent.settings import Settings

CONTROL_THREADS = 8

_LOG = logging.getLogger("testbed_agent")


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = Settings.from_environment(os.environ)
    log_to_stderr(os.environ)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    lease = Lease(os.environ, over.set)
    runner = Runner(settings, DataServer(settings))
    server = PatientServer(settings.control, ControlApplication(runner, lease.renew), CONTROL_THREADS)
    threading.Thread(target=server.serve, name="serve", daemon=True).start()
    _LOG.info("device %s of run %s is on", settings.device, settings.run)
    over.wait()
    _LOG.info("switched off by a signal, or since nobody renewed the lease")
    # A device that is switched off does not tidy up first.
    os._exit(0)


if __name__ == "__main__":
    main()
