"""Baselines: named sets of method options, with which publications compare methods."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.methods import METHODS
from testbed_edgepipe.planner import EdgePipeOptions
from testbed_versatilefl.planner import VersatileOptions
from tests.helpers.runs import make_scenario, problem_of

# The class of the options of a method, and the name of a baseline.
BASELINES = [
    (method.Options, name)
    for method in METHODS.values()
    for name in method.Options.baselines
]


@pytest.mark.parametrize(("options", "name"), BASELINES)
def test_baseline_sets_options_of_method(options, name):
    def values(**keys):
        return options.model_validate(keys).model_dump(exclude={"baseline"})

    assert values(baseline=name) == values(**options.baselines[name])
    assert values(baseline=name) != values()


def test_option_of_baseline_may_be_repeated_and_others_set():
    # The baseline implies the vertical allocation.
    options = EdgePipeOptions.model_validate(
        {"baseline": "pipedream", "allocation": "vertical", "timeslot": "300ms"}
    )
    assert options.allocation == "vertical"
    assert options.timeslot == 0.3
    assert options.baseline == "pipedream"


@pytest.mark.parametrize("name", ["nothing", [], {"a": 1}, 7])
def test_unknown_baseline_is_refused(name):
    with pytest.raises(ValidationError, match="unknown baseline"):
        EdgePipeOptions.model_validate({"baseline": name})


def test_option_contradicting_baseline_is_refused():
    with pytest.raises(
        ValidationError,
        match="'naive' implies substitution: false: remove 'substitution'",
    ):
        VersatileOptions.model_validate({"baseline": "naive", "substitution": True})


def test_misspelt_baseline_is_refused_with_suggestion():
    with pytest.raises(
        ValidationError, match="unknown baseline 'modell': did you mean 'model'"
    ):
        EdgePipeOptions.model_validate({"baseline": "modell"})


def test_gpipe_baseline_has_one_micro_batch_per_device():
    workload = {
        "model": {"name": "mlp", "hidden": [12, 10]},
        "training": {"optimizer": {"learning_rate": 0.1}},
    }
    method = {"name": "edgepipe", "baseline": "gpipe"}
    problem, _ = problem_of(make_scenario(3, workload=workload, method=method))
    # Three workers and the coordinator.
    assert METHODS["edgepipe"].plan(problem).details.micro_batches == 4
