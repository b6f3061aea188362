"""What containers cannot carry out is refused before any is made."""

import pytest

from testbed.common.errors import InputError
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed_controller.lab.lab import check_devices


def test_devices_that_share_a_machine_are_refused():
    (trial,) = trials(
        load("quickstart", ("sweep={}", "repetitions=1", "machines=[{cores: 1}]"))
    )
    with pytest.raises(InputError, match=r"machines: .*, or use '--runtime simulate'"):
        check_devices(trial.experiment)
