"""A valid scenario that tests of loading change, and the errors with which loading rejects scenarios."""

from __future__ import annotations

import pytest

from testbed.common.errors import InputError
from testbed.scenario.loading import load

VALID = """\
name: small
devices:
  source: {profile: laptop}
  worker: {profile: raspberry-pi-4b, count: 2}
network:
  topology: mesh
  link: {rate: 50mbit, delay: 5ms}
workload:
  model: {name: mlp}
  method:
    name: pipeline
    schedule: 1f1b
  epochs: 1
faults:
  - kill: worker1
    at: 3s
expect:
  accuracy: ">= 0.9"
"""


def error_lines(path: str, *overrides: str) -> list[str]:
    """Return the lines of the error with which a scenario is rejected."""
    with pytest.raises(InputError) as raised:
        load(path, overrides)
    assert raised.value.exit_code == 2
    return str(raised.value).split("\n")


def single_error(path: str, *overrides: str) -> str:
    (line,) = error_lines(path, *overrides)
    return line
