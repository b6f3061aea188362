"""A scenario that tests of preparation change, and its preparation; `loading_scenario` has one for tests of loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

VALID_HEAD = """\
name: small
devices:
  source: {profile: laptop}
  worker:
    profile: raspberry-pi-4b
    count: 3
    memory: 64MiB
network:
  link: {rate: 50mbit, delay: 5ms}
"""
VALID = (
    VALID_HEAD
    + """\
workload:
  task: train
  model: {name: mlp}
  data: {name: digits}
  method: {name: pipeline, micro_batches: 4}
  batch_size: 64
  epochs: 2
faults:
  - kill: worker1
    at: 3s
    for: 1s
expect:
  accuracy: ">= 0.9"
time_limit: 60s
"""
)


def prepare_text(file: Path, text: str = VALID) -> Prepared:
    """Write a scenario to a file and prepare its only run."""
    file.write_text(text)
    (trial,) = trials(load(file))
    return prepare(trial)


def error_lines(file: Path, text: str) -> list[str]:
    """Return the lines of the error with which preparation rejects a scenario."""
    with pytest.raises(InputError) as error:
        prepare_text(file, text)
    return str(error.value).split("\n")
