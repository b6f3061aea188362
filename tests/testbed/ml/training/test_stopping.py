"""What evaluations decide: when training ends, and which weights it leaves."""

from __future__ import annotations

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.ml.training.stopping import Stopping
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario
from tests.helpers.training import training_config

METHODS = {
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


def trained(name, training, steps=200, **keys):
    data = {"name": "digits", "train": 400, "test": 100} | (
        {"split": "iid"} if name == "federated" else {}
    )
    training = {"optimizer": {"learning_rate": 0.1}, **training}
    work = {"training": training, "steps": steps, "data": data}
    prepared = prepare(
        trials(make_scenario(2, workload=work, method=METHODS[name], **keys))[0]
    )
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome


@pytest.mark.parametrize("name", METHODS)
def test_training_ends_with_the_first_evaluation_that_is_good_enough(name):
    outcome = trained(name, {"until": {"accuracy": ">= 0.4"}})
    evaluations = fields_of(outcome, "evaluate")
    *before, last = [each["accuracy"] for each in evaluations]
    assert last >= 0.4 > max(before, default=0.0)
    steps = evaluations[-1]["step"]
    assert max(step["step"] for step in fields_of(outcome, "step")) == steps - 1
    assert steps < 200 / (5 if name == "federated" else 1)


@pytest.mark.parametrize("name", METHODS)
def test_the_best_weights_are_left_not_the_last(name):
    training = {
        "optimizer": {"learning_rate": 0.1},
        "schedule": {"name": "step", "step_size": 8, "gamma": 40},
    }
    outcome = trained(name, {**training, "best": "test_loss"}, steps=20)
    losses = {each["step"]: each["loss"] for each in fields_of(outcome, "evaluate")}
    best = min(losses, key=losses.get)
    assert best < max(losses), "the test wants a training that gets worse"
    again = trained(name, training, steps=5 * best if name == "federated" else best)
    assert all(
        torch.equal(outcome.weights[key], again.weights[key]) for key in again.weights
    )


def test_a_pipeline_that_loses_a_stage_ends_where_the_unharmed_one_does():
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 12},
        "for": "1s",
    }
    runs = [
        trained("pipeline", {"until": {"accuracy": ">= 0.4"}}, faults=faults)
        for faults in ([], [fault])
    ]
    ends = [fields_of(each, "evaluate")[-1] for each in runs]
    assert ends[0] == ends[1]
    assert fields_of(runs[1], "recovery")


def judged(training, values):
    stopping = Stopping(training_config(**training))
    for step, (accuracy, loss) in enumerate(values, 1):
        stopping.judge(
            step, {"accuracy": accuracy, "loss": loss}, lambda step=step: {"step": step}
        )
        if stopping.reason:
            return step, stopping.result({"step": -1})["step"]
    return None, stopping.result({"step": -1})["step"]


def test_patience_counts_evaluations_that_are_no_better():
    losses = [(0.5, 3.0), (0.6, 2.0), (0.7, 2.5), (0.8, 1.9), (0.9, 2.0), (0.95, 2.1)]
    assert judged({"patience": 2}, losses) == (6, -1)
    assert judged({"patience": 2, "best": "accuracy"}, losses) == (None, 6)
    assert judged({"patience": 2, "best": "test_loss"}, losses) == (6, 4)
    assert judged({"until": {"accuracy": "> 65%", "test_loss": "< 2"}}, losses) == (
        4,
        -1,
    )


def test_an_evaluation_that_is_made_again_counts_once():
    stopping = Stopping(training_config(patience=1))
    for step in (1, 1, 1):
        stopping.judge(step, {"loss": 1.0}, dict)
    assert not stopping.reason


@pytest.mark.parametrize(
    ("method", "training", "words"),
    [
        ({"name": "pipeline"}, {"patience": 1}, "set evaluate_every"),
        (
            {"name": "edgepipe"},
            {"until": {"accuracy": "> 0.5"}},
            "does not support early stopping",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(method, training, words):
    (trial,) = trials(make_scenario(2, workload={"training": training}, method=method))
    with pytest.raises(InputError, match=words):
        prepare(trial)


@pytest.mark.parametrize(
    "training",
    [
        {"until": {"acuracy": "> 1"}},
        {"best": "metrics.f1"},
        {"until": {"accuracy": "1"}},
    ],
)
def test_what_no_evaluation_has_is_refused(training):
    with pytest.raises(ValueError, match=r"an evaluation has no|is not a condition"):
        training_config(**training)
