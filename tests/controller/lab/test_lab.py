"""Refusal of scenarios that containers cannot emulate, before any container is created."""

import pytest

from testbed.common.errors import InputError
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.lab.lab import check_devices


def test_devices_that_share_machine_are_refused():
    overrides = ("sweep={}", "repetitions=1", "machines=[{cores: 1}]")
    (trial,) = trials(load("quickstart", overrides))
    # Containers compute on the cores of the host, whose number cannot be divided among devices.
    with pytest.raises(InputError, match=r"machines: .*, or use '--runtime simulate'"):
        check_devices(trial.experiment)
