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
def test_own_loggers_have_the_level_of_the_environment_and_others_begin_at_info(
    environment: dict[str, str], levels: list[str]
) -> None:
    program = PROGRAM.format(environment=environment)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    records = [line.split(maxsplit=2)[2] for line in done.stderr.splitlines()]
    own = [line for line in records if "agent" in line]
    assert own == [f"{level} testbed_agent.module: a record" for level in levels]
    assert [line for line in records if line not in own] == [
        "INFO library: a record",
        "WARNING library: a record",
    ]
