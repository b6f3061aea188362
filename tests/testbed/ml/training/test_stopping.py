"""Early stopping: target values, patience, best weights, and unsupported combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.ml.training.stopping import Stopping
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of, make_scenario
from tests.helpers.training import training_config

METHODS: dict[str, dict[str, object]] = {
    "single": {"name": "single", "evaluate_every": 5},
    "pipeline": {
        "name": "pipeline",
        "micro_batches": 1,
        "evaluate_every": 5,
        "checkpoint_every": 1000,
    },
    "ftpipehd": {
        "name": "ftpipehd",
        "evaluate_every": 5,
        "global_replication_interval": 0,
    },
    "federated": {"name": "federated", "local_steps": 5},
}


def train(
    method: str, training: Mapping[str, object], steps: int = 200, **keys: object
) -> Outcome:
    data: dict[str, object] = {"name": "digits", "train": 400, "test": 100}
    if method == "federated":
        data["split"] = "iid"
    workload = {
        "training": {"optimizer": {"learning_rate": 0.1}, **training},
        "steps": steps,
        "data": data,
    }
    (trial,) = trials(
        make_scenario(2, workload=workload, method=METHODS[method], **keys)
    )
    prepared = prepare(trial)
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome


@pytest.mark.parametrize("method", METHODS)
def test_training_ends_with_first_evaluation_that_reaches_target(method: str) -> None:
    outcome = train(method, {"until": {"accuracy": ">= 0.4"}})
    evaluations = fields_of(outcome, "evaluate")
    *earlier, last = [evaluation["accuracy"] for evaluation in evaluations]
    assert last >= 0.4
    assert max(earlier, default=0.0) < 0.4
    end = evaluations[-1]["step"]
    # Steps count from 0, and an evaluation names the number of steps before it.
    last_step = max(step["step"] for step in fields_of(outcome, "step"))
    assert last_step == end - 1
    # Federated learning evaluates by rounds, of five steps each.
    assert end < (200 / 5 if method == "federated" else 200)


@pytest.mark.parametrize("method", METHODS)
def test_result_has_weights_of_best_evaluation(method: str) -> None:
    # After eight steps the learning rate rises to 4, so that training diverges.
    training: dict[str, object] = {
        "optimizer": {"learning_rate": 0.1},
        "schedule": {"name": "step", "step_size": 8, "gamma": 40},
    }
    outcome = train(method, {**training, "best": "test_loss"}, steps=20)
    losses = {}
    for evaluation in fields_of(outcome, "evaluate"):
        losses[evaluation["step"]] = evaluation["loss"]
    best = min(losses, key=losses.get)
    assert best < max(losses), "the last weights must not be the best"
    # A round of federated learning has five steps.
    steps = 5 * best if method == "federated" else best
    shorter = train(method, training, steps=steps)
    for name, tensor in shorter.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name


def test_pipeline_with_restarted_stage_ends_at_same_evaluation() -> None:
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 12},
        "for": "1s",
    }
    target = {"until": {"accuracy": ">= 0.4"}}
    undisturbed = train("pipeline", target, faults=[])
    disturbed = train("pipeline", target, faults=[fault])
    assert fields_of(disturbed, "recovery")
    expected = fields_of(undisturbed, "evaluate")[-1]
    assert fields_of(disturbed, "evaluate")[-1] == expected


EVALUATIONS = [(0.5, 3.0), (0.6, 2.0), (0.7, 2.5), (0.8, 1.9), (0.9, 2.0), (0.95, 2.1)]
"""Accuracy and loss after each step, from step 1."""


def judge_evaluations(
    training: Mapping[str, object], evaluations: Sequence[tuple[float, float]]
) -> tuple[int | None, int]:
    """Return the last step of a stopped training and the step of the resulting weights.

    Without a stop the first value is absent (None); -1 as the second value means the last weights.
    """
    stopping = Stopping(training_config(**training))
    end = None
    for step, (accuracy, loss) in enumerate(evaluations, 1):
        values = {"accuracy": accuracy, "loss": loss}
        # The step stands for the weights.
        stopping.judge(step, values, lambda step=step: {"step": step})
        if stopping.reason:
            end = step
            break
    last_weights: dict[str, Any] = {"step": -1}
    return end, stopping.result(last_weights)["step"]


@pytest.mark.parametrize(
    ("training", "end", "best"),
    [
        # Losses after steps 5 and 6 exceed the one after step 4.
        ({"patience": 2}, 6, -1),
        ({"patience": 2, "best": "accuracy"}, None, 6),
        ({"patience": 2, "best": "test_loss"}, 6, 4),
        ({"until": {"accuracy": "> 65%", "test_loss": "< 2"}}, 4, -1),
    ],
    ids=["patience", "best-accuracy", "best-loss", "two-targets"],
)
def test_evaluations_end_training_and_select_weights(
    training: dict[str, object], end: int | None, best: int
) -> None:
    assert judge_evaluations(training, EVALUATIONS) == (end, best)


def test_repeated_evaluation_counts_once() -> None:
    # A recovery repeats the evaluation of a step.
    stopping = Stopping(training_config(patience=1))
    for _ in range(3):
        stopping.judge(1, {"loss": 1.0}, dict)
        assert not stopping.reason


@pytest.mark.parametrize(
    ("method", "training", "message"),
    [
        ({"name": "pipeline"}, {"patience": 1}, "set evaluate_every"),
        (
            {"name": "edgepipe"},
            {"until": {"accuracy": "> 0.5"}},
            "does not support early stopping",
        ),
    ],
    ids=["without-evaluations", "unsupported-method"],
)
def test_early_stopping_without_evaluations_is_rejected(
    method: dict[str, object], training: dict[str, object], message: str
) -> None:
    (trial,) = trials(make_scenario(2, workload={"training": training}, method=method))
    with pytest.raises(InputError, match=message):
        prepare(trial)


@pytest.mark.parametrize(
    "training",
    [
        {"until": {"acuracy": "> 1"}},
        {"best": "metrics.f1"},
        {"until": {"accuracy": "1"}},
    ],
    ids=["unknown-metric", "undefined-metric", "no-comparison"],
)
def test_unknown_metric_or_condition_is_rejected(training: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"an evaluation has no|is not a condition"):
        training_config(**training)
