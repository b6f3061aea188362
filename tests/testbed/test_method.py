"""Options of methods, and the baselines that publications compare methods with."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.methods import METHODS
from testbed_edgepipe.planner import EdgePipeOptions
from testbed_versatilefl.planner import VersatileOptions
from tests.helpers.runs import make_scenario, problem_of

BASELINES = [
    (method.Options, name)
    for method in METHODS.values()
    for name in method.Options.baselines
]


@pytest.mark.parametrize(("options", "name"), BASELINES)
def test_a_baseline_is_the_options_that_it_stands_for(options, name):
    given = options.model_validate({"baseline": name}).model_dump(exclude={"baseline"})
    assert given == options.model_validate(options.baselines[name]).model_dump(
        exclude={"baseline"}
    )
    assert given != options().model_dump(exclude={"baseline"})


def test_other_options_stay_and_those_of_the_baseline_may_be_repeated():
    given = EdgePipeOptions.model_validate(
        {"baseline": "pipedream", "allocation": "vertical", "timeslot": "300ms"}
    )
    assert (given.allocation, given.timeslot, given.baseline) == (
        "vertical",
        0.3,
        "pipedream",
    )


@pytest.mark.parametrize("name", ["nothing", [], {"a": 1}, 7])
def test_what_is_no_name_of_a_baseline_is_refused(name):
    with pytest.raises(ValidationError, match="unknown baseline"):
        EdgePipeOptions.model_validate({"baseline": name})


def test_what_contradicts_a_baseline_and_unknown_ones_are_refused():
    with pytest.raises(
        ValidationError,
        match="'naive' implies substitution: false: remove 'substitution'",
    ):
        VersatileOptions.model_validate({"baseline": "naive", "substitution": True})
    with pytest.raises(
        ValidationError, match="unknown baseline 'modell': did you mean 'model'"
    ):
        EdgePipeOptions.model_validate({"baseline": "modell"})


def test_gpipe_has_as_many_micro_batches_as_devices():
    work = {
        "model": {"name": "mlp", "hidden": [12, 10]},
        "training": {"optimizer": {"learning_rate": 0.1}},
    }
    problem, _ = problem_of(
        make_scenario(
            3, workload=work, method={"name": "edgepipe", "baseline": "gpipe"}
        )
    )
    assert METHODS["edgepipe"].plan(problem).details.micro_batches == 4
