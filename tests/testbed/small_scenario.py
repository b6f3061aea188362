"""A small valid scenario, of which tests change single words, and its preparation."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

VALID_DEVICES = """\
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
    VALID_DEVICES
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
    file.write_text(text)
    (trial,) = trials(load(file))
    return prepare(trial)


def error_lines(file: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as error:
        prepare_text(file, text)
    return str(error.value).split("\n")
