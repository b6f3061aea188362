"""Runs of asynchronous pipelines with faults, and checks of their results."""

from __future__ import annotations

from typing import Any

from testbed.trace.outcome import Outcome
from tests.helpers.delayed_gradients import DelayedReference, final_stretches
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import METHOD, MODEL, STEPS
from tests.testbed.ml.outcomes import assert_equal_weights, field_values, loss_by_step


def run_with_faults(
    *faults: dict, method: dict = METHOD, steps: int = STEPS, **keys: Any
) -> Outcome:
    """Run four devices with faults; ``method`` changes some of `METHOD`'s options."""
    return run_simulated(
        make_scenario(
            workload={"steps": steps, "model": MODEL},
            method={**METHOD, **method},
            faults=faults,
            **keys,
        )
    )


def assert_all_steps(outcome: Outcome, steps: int) -> None:
    """Check the status of a run, and the record of every step."""
    assert outcome.status == "finished", outcome.error
    assert set(field_values(outcome, "step", "step")) == set(range(steps))


def assert_weights_match_reference(outcome: Outcome, steps: int = STEPS) -> None:
    """Compare weights and losses with torch's, for all stretches except undone ones."""
    assert_all_steps(outcome, steps)
    assert len(fields_of(outcome, "evaluate")) == 1
    scenario = make_scenario(workload={"steps": steps, "model": MODEL})
    reference = DelayedReference(scenario).replay(outcome, steps)
    assert outcome.weights is not None
    assert outcome.weights.keys() == reference.newest.keys()
    assert_equal_weights(outcome.weights, reference.newest)
    # A step may be recorded twice: only its last loss was not undone.
    losses = loss_by_step(outcome)
    assert [losses[step] for step in range(steps)] == reference.losses


def recovery_events(outcome: Outcome, phase: str) -> list[dict]:
    """Return the fields of one phase of each recovery."""
    return [
        fields for fields in fields_of(outcome, "recovery") if fields["phase"] == phase
    ]


def devices_of(partition: list[tuple[str, int, int]]) -> list[str]:
    """Return the devices of a recorded partition: (device, first unit, last unit exclusive) by stage."""
    return [device for device, _, _ in partition]


def devices_by_stretch(outcome: Outcome) -> list[list[str]]:
    """Return the devices of the pipeline in each stretch, except undone ones."""
    return [devices_of(partition) for _, _, partition in final_stretches(outcome)]
