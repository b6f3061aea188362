"""Logging: one format for the controller, the agents and the shaper."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

LEVEL = "TESTBED_LOG_LEVEL"
"""Variable with the level of agents and shaper, debug or info, and with the default of ``--log-level``."""
LEVELS = ("debug", "info", "warning")
PACKAGES = ("controller", "testbed")
"""Packages whose loggers make up the controller's log."""


class LineFormatter(logging.Formatter):
    """Formats a record as a line with its instant in UTC, so that the files of several hosts can be compared."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.converter = time.gmtime


def log_to_stderr(environment: Mapping[str, str]) -> None:
    """Write all records of this process to standard error, from the level on that its environment names."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    # Users' methods log by loggers of their own, so the level is that of the root.
    level = "DEBUG" if environment.get(LEVEL) == "debug" else "INFO"
    logging.basicConfig(level=level, handlers=[handler])
