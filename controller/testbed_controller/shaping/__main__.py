"""``python -m testbed_controller.shaping``: serve the shaper of one run on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from testbed.common.errors import TestbedError
from testbed.common.logs import log_to_stderr
from testbed.wire.ports import CONTROL_PORT
from testbed.wire.token import Lease
from testbed_controller.shaping import server
from testbed_controller.shaping.backend import adopt_backends
from testbed_controller.shaping.confinement import confine
from testbed_controller.shaping.shaper import Shaping


def main() -> int:
    """Read the environment (TESTBED_TOKEN, TESTBED_LINKS, TESTBED_HOST, TESTBED_PORT) and serve until SIGTERM."""
    token = os.environ.get("TESTBED_TOKEN", "")
    if not token:
        print(
            "shaper: TESTBED_TOKEN is not set: set it to the token of the run",
            file=sys.stderr,
        )
        return 2
    log_to_stderr(os.environ)
    # Before any thread starts, since the filter applies to the calling thread and its children.
    confine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # A higher priority than the devices' work, so that probes measure links and not the load of the host.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    try:
        adopt_backends(os.environ)
        shaping = Shaping(os.environ.get("TESTBED_LINKS") or "auto")
    except TestbedError as error:
        print(f"shaper: {error}", file=sys.stderr)
        return error.exit_code
    host = os.environ.get("TESTBED_HOST", "0.0.0.0")
    port = int(os.environ.get("TESTBED_PORT") or CONTROL_PORT)
    # At the end of the lease, the process ends at once: the devices' namespaces end with their containers.
    lease = Lease(os.environ, lambda: os._exit(0))
    server.serve(shaping, token, host, port, lease.renew)
    return 0


if __name__ == "__main__":
    sys.exit(main())
