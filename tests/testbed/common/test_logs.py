"""The log of a device's process on standard error."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
from testbed.common.logs import log_to_stderr
log_to_stderr({environment})
for level in (logging.DEBUG, logging.INFO, logging.WARNING):
    logging.getLogger("testbed_agent.module").log(level, "a %s", "record")
    logging.getLogger("library").log(level, "a %s", "record")
"""


@pytest.mark.parametrize(
    ("environment", "levels"),
    [
        ({}, ["INFO", "WARNING"]),
        ({"TESTBED_LOG_LEVEL": "debug"}, ["DEBUG", "INFO", "WARNING"]),
    ],
)
def test_log_level_of_environment_applies_to_testbed_loggers_only(
    environment: dict[str, str], levels: list[str]
) -> None:
    program = PROGRAM.format(environment=environment)
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    testbed_lines, library_lines = [], []
    for line in process.stderr.splitlines():
        # The date and the time precede a record.
        record = line.split(maxsplit=2)[2]
        lines = testbed_lines if "testbed_agent" in record else library_lines
        lines.append(record)
    assert testbed_lines == [
        f"{level} testbed_agent.module: a record" for level in levels
    ]
    # Debug records of libraries are left out at any level.
    assert library_lines == ["INFO library: a record", "WARNING library: a record"]
