"""Former names of method options and metrics are rejected with a message that contains the new names."""

import pytest

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

EXPAND_TO_ONE_TRIAL = ["sweep={}", "points=[]"]
"""Changes that remove the sweep and the points of a scenario, which may set the keys under test in each trial."""


def test_message_for_former_option_contains_new_name():
    changes = ["workload.method.patience=1s"]
    (trial,) = trials(load("quickstart", changes))
    with pytest.raises(InputError, match="has been renamed: write 'stall_timeout'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("old_name", "new_name"), [("outage", "outage_time"), ("rest", "remaining_time")]
)
def test_former_metric_of_pipelines_is_rejected_with_new_name(
    old_name: str, new_name: str
) -> None:
    # The condition "> 0" on the metric.
    changes = [*EXPAND_TO_ONE_TRIAL, f"expect.{old_name}=> 0"]
    (trial,) = trials(load("papers/ftpipehd-figure-6", changes))
    with pytest.raises(InputError, match=f"renamed: write '{new_name}'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("method", "old_name", "new_name"),
    [
        ("edgepipe", "learned", "update_share"),
        ("versatile", "accuracy_risen", "accuracy_gain"),
    ],
)
def test_former_metric_of_method_is_rejected_with_new_name(method, old_name, new_name):
    (trial,) = trials(load(f"smoke/{method}", [f"expect.{old_name}=> 0"]))
    with pytest.raises(InputError, match=f"renamed: write '{new_name}'"):
        prepare(trial)


EXAMPLES = {
    "distributed": "papers/stahl-table-1",
    "edgepipe": "smoke/edgepipe",
    "ftpipehd": "papers/ftpipehd-figure-6",
    "pipedream": "papers/ftpipehd-figure-6",
    "pipelearn": "papers/pipelearn-speeds",
    "respipe": "papers/ftpipehd-figure-6",
    "split-federated": "papers/pipelearn-killed",
    "split-learning": "papers/pipelearn-killed",
    "versatile": "smoke/versatile",
}
"""A scenario for each method with renamed options; it may use another method with the same kind of devices."""


def renamed_options() -> list[tuple[str, str, str]]:
    """Return method, old name and new name of all renamed options."""
    options = []
    for method in EXAMPLES:
        for old_name, new_name in METHODS[method].Options.former_keys.items():
            options.append((method, old_name, new_name))
    return options


@pytest.mark.parametrize(("method", "old_name", "new_name"), renamed_options())
def test_former_option_of_method_is_rejected_with_new_name(method, old_name, new_name):
    # The message must not name a key that has been renamed again.
    assert new_name in METHODS[method].Options.model_fields
    changes = [*EXPAND_TO_ONE_TRIAL, f"workload.method.name={method}"]
    # The name is rejected before the value is read.
    changes.append(f"workload.method.{old_name}=1")
    (trial,) = trials(load(EXAMPLES[method], changes))
    expected = f"method.{old_name}: '{old_name}' has been renamed: write '{new_name}'"
    with pytest.raises(InputError, match=expected):
        prepare(trial)
