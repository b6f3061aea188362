"""Former names of scenario keys."""

import pytest

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load


def test_former_key_is_refused_with_its_present_name():
    changes = ["workload.method.patience=1s"]
    (trial,) = trials(load("quickstart", changes))
    with pytest.raises(InputError, match="has been renamed: write 'stall_timeout'"):
        prepare(trial)
