"""Former names of scenario keys."""

import pytest

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load


def test_former_key_is_refused_with_its_present_name():
    changes = ["workload.method.patience=1s"]
    (trial,) = trials(load("quickstart", changes))
    with pytest.raises(InputError, match="has been renamed: write 'stall_timeout'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("former", "present"), [("outage", "outage_time"), ("rest", "remaining_time")]
)
def test_former_metrics_of_expectations_name_the_present_ones(
    former: str, present: str
) -> None:
    changes = ["sweep={}", "points=[]", f"expect.{former}=> 0"]
    (trial,) = trials(load("papers/ftpipehd-figure-6", changes))
    with pytest.raises(InputError, match=f"renamed: write '{present}'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("method", "former", "present"),
    [
        ("edgepipe", "learned", "update_share"),
        ("versatile", "accuracy_risen", "accuracy_gain"),
    ],
)
def test_former_metric_of_one_method_is_refused_with_its_present_name(
    method, former, present
):
    (trial,) = trials(load(f"smoke/{method}", [f"expect.{former}=> 0"]))
    with pytest.raises(InputError, match=f"renamed: write '{present}'"):
        prepare(trial)


EXAMPLES = {
    "distributed": "papers/stahl-table-1",
    "edgepipe": "smoke/edgepipe",
    "ftpipehd": "papers/ftpipehd-figure-6",
    "pipelearn": "papers/pipelearn-speeds",
    "split-federated": "papers/pipelearn-killed",
    "versatile": "smoke/versatile",
}
"""A scenario of each method with former keys."""


@pytest.mark.parametrize(
    ("method", "former", "present"),
    [
        (name, former, present)
        for name in EXAMPLES
        for former, present in METHODS[name].Options.former_keys.items()
    ],
)
def test_former_key_of_one_method_is_refused_with_its_present_name(
    method, former, present
):
    assert present in METHODS[method].Options.model_fields
    changes = ["sweep={}", "points=[]", f"workload.method.name={method}"]
    changes.append(f"workload.method.{former}=1")
    (trial,) = trials(load(EXAMPLES[method], changes))
    expected = f"method.{former}: '{former}' has been renamed: write '{present}'"
    with pytest.raises(InputError, match=expected):
        prepare(trial)
