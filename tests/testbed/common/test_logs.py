"""The log that a device's process writes to its standard error."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
from testbed.common.logs import log_to_stderr
log_to_stderr({environment})
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("of.a.user").log(level, "a %s", "record")
"""


@pytest.mark.parametrize(
    ("environment", "levels"),
    [({}, ["INFO", "WARNING"]), ({"TESTBED_LOG_LEVEL": "debug"}, ["DEBUG", "INFO", "WARNING"])],
)
def test_records_of_all_loggers_are_written_from_the_level_of_the_environment_on(
    environment: dict[str, str], levels: list[str]
) -> None:
    program = PROGRAM.format(environment=environment)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split(maxsplit=2)[2] for line in done.stderr.splitlines()] == [
        f"{level} of.a.user: a record" for level in levels
    ]
