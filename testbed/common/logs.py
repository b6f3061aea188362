"""Logging: one format for the controller, the agents and the shaper."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

LEVEL = "TESTBED_LOG_LEVEL"
"""Variable with the level of agents and shaper, debug or info, and with the default of ``--log-level``."""
LEVELS = ("debug", "info", "warning")
PACKAGES = ("testbed", "testbed_agent", "testbed_controller")
"""Packages whose loggers have the requested level."""


class LineFormatter(logging.Formatter):
    """Format log records as lines with UTC times, so that files of several hosts are comparable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime


def log_to_stderr(environment: Mapping[str, str]) -> None:
    """Log to standard error, at debug level if requested by the environment, else at info level."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    # The root logger is configured, since users' methods have loggers outside the testbed's packages.
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if environment.get(LEVEL) == "debug":
        # Only our packages: pyroute2 and asyncio would write hundreds of debug lines for each change of a link.
        for name in PACKAGES:
            logging.getLogger(name).setLevel(logging.DEBUG)
