"""Training configurations with optimizer, schedule, loss and clipping, against a loop in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.data.batches import batch
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario, problem_of, run_simulated

TRAINING: dict[str, Any] = {
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "betas": [0.9, 0.98]},
    "schedule": {"name": "cosine-annealing"},
    "loss": {"name": "cross-entropy", "label_smoothing": 0.1},
    "clip": {"norm": 0.5},
}
STEPS = 12


def training_scenario(
    method: Mapping[str, object],
    training: Mapping[str, object] = TRAINING,
    workers: int = 3,
    **keys: object,
) -> Scenario:
    workload = {"training": training, "steps": STEPS}
    return make_scenario(workers, workload=workload, method=method, **keys)


def kill(device: str, batch_number: int) -> dict[str, object]:
    """Return a fault: a device is off for two seconds from the backward pass of a batch."""
    trigger = {"device": device, "begins": "backward", "batch": batch_number}
    return {"kill": device, "when": trigger, "for": "2s"}


def train_with_torch(
    scenario: Scenario,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train by the configuration `TRAINING` in plain torch and return weights and losses."""
    problem, data = problem_of(scenario)
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    samples = len(data.train_labels)
    losses = []
    for step in range(STEPS):
        indices = batch(samples, scenario.workload.batch_size, problem.seed, step)
        images = torch.from_numpy(data.train_images[indices])
        labels = torch.from_numpy(data.train_labels[indices])
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), losses


@pytest.mark.parametrize(
    ("method", "faults"),
    [
        ({"name": "single"}, []),
        ({"micro_batches": 1}, []),
        ({"micro_batches": 1, "checkpoint_every": 2}, [kill("worker2", 7)]),
        ({"schedule": "gpipe", "micro_batches": 4}, []),
    ],
    ids=["single", "pipeline", "pipeline-with-restarted-stage", "four-micro-batches"],
)
def test_method_has_losses_and_weights_of_plain_torch(
    method: dict[str, object], faults: Sequence[dict[str, object]]
) -> None:
    outcome = run_simulated(training_scenario(method, faults=faults))
    assert outcome.status == "finished", outcome.error
    weights, losses = train_with_torch(training_scenario({"name": "single"}))
    # After a recovery some steps are repeated; the last one counts.
    losses_by_step = {}
    for fields in fields_of(outcome, "step"):
        losses_by_step[fields["step"]] = fields["loss"]
    actual = [losses_by_step[step] for step in range(STEPS)]
    # Micro-batches sum in another order than a whole batch.
    assert actual == pytest.approx(losses, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(outcome.weights[name], tensor, rtol=0, atol=1e-5)


def test_clipping_by_norm_is_bitwise_independent_of_cuts() -> None:
    two_stages = run_simulated(training_scenario({"micro_batches": 1}, workers=1))
    four_stages = run_simulated(training_scenario({"micro_batches": 1}))
    for name, tensor in two_stages.weights.items():
        assert torch.equal(four_stages.weights[name], tensor), name
    messages = [fields["message"] for fields in fields_of(four_stages, "send")]
    # In each step three stages send their norms and receive the sum.
    assert messages.count("norms") == 2 * 3 * STEPS


def test_stage_without_trained_weights_has_no_norms() -> None:
    problem, _ = problem_of(training_scenario({"name": "single"}))
    assert problem.training.norms([]).shape == (0,)
    # Clipping accepts a stage without gradients.
    problem.training.clip_gradients({}, torch.ones(3))


def test_asynchronous_pipeline_recovers_optimizer_state_of_killed_device() -> None:
    training = {**TRAINING, "clip": {"value": 0.1}, "ema": 0.5}
    method = {
        "name": "ftpipehd",
        "chain_replication_interval": 3,
        "global_replication_interval": 3,
        "stages": 3,
    }
    undisturbed = run_simulated(
        training_scenario(method, training, workers=2, faults=[])
    )
    disturbed = run_simulated(
        training_scenario(method, training, workers=2, faults=[kill("worker1", 9)])
    )
    assert undisturbed.status == "finished", undisturbed.error
    assert disturbed.status == "finished", disturbed.error
    assert fields_of(disturbed, "recovery")
    assert sorted(disturbed.weights) == sorted(undisturbed.weights)
    # Steps before the fault are equal; later ones have other weight versions.
    assert fields_of(undisturbed, "step")[0] == fields_of(disturbed, "step")[0]


def test_federated_learning_accepts_adam_schedule_and_clipping() -> None:
    workload = {
        "training": {**TRAINING, "optimizer": {"name": "adam", "learning_rate": 0.01}},
        "steps": STEPS,
        "data": {"name": "digits", "train": 96, "test": 40, "split": "iid"},
    }
    method = {"name": "federated", "local_steps": STEPS}
    (trial,) = trials(make_scenario(1, workload=workload, method=method))
    prepared = prepare(trial)
    outcome = simulate(prepared, load(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error


def test_moving_average_is_evaluated_and_returned() -> None:
    without_average = {"optimizer": {"learning_rate": 0.1}}
    with_average = {**without_average, "ema": 0.75}
    single = run_simulated(training_scenario({"name": "single"}, with_average))
    newest = run_simulated(training_scenario({"name": "single"}, without_average))
    pipeline = run_simulated(training_scenario({"micro_batches": 1}, with_average))
    # Training itself uses the newest weights.
    losses = [step["loss"] for step in fields_of(single, "step")]
    assert losses == [step["loss"] for step in fields_of(newest, "step")]
    for name, tensor in single.weights.items():
        assert not torch.equal(tensor, newest.weights[name])
        torch.testing.assert_close(pipeline.weights[name], tensor, rtol=0, atol=1e-6)
    test_loss = fields_of(single, "evaluate")[-1]["loss"]
    pipeline_loss = fields_of(pipeline, "evaluate")[-1]["loss"]
    assert pipeline_loss == pytest.approx(test_loss, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "training", "message"),
    [
        (
            {"name": "ftpipehd"},
            TRAINING,
            "'ftpipehd' does not support this .each update would wait",
        ),
        (
            {"name": "edgepipe"},
            {"optimizer": {"name": "adam"}},
            "updated by plain descent",
        ),
    ],
    ids=["clipping-by-norm", "optimizer"],
)
def test_training_key_unsupported_by_method_is_rejected(
    method: dict[str, object], training: dict[str, object], message: str
) -> None:
    (trial,) = trials(training_scenario(method, training))
    with pytest.raises(InputError, match=message):
        prepare(trial)


def test_planned_memory_includes_state_of_adam() -> None:
    def planned_memory(optimizer: dict[str, object]) -> float:
        scenario = training_scenario({"name": "single"}, {"optimizer": optimizer})
        (trial,) = trials(scenario)
        return prepare(trial).plan.assignments[0].memory

    additional = planned_memory({"name": "adam"}) - planned_memory({})
    problem, _ = problem_of(training_scenario({"name": "single"}))
    # Two moments of four bytes for each parameter.
    expected = 2 * 4 * problem.model.parameters
    assert additional == pytest.approx(expected, rel=1e-3)


def test_run_without_numerics_has_messages_of_full_run() -> None:
    def messages_with(numerics: str) -> list[tuple[str, int, float]]:
        workload = {
            "training": {**TRAINING, "ema": 0.9},
            "steps": 6,
            "numerics": numerics,
        }
        method = {"micro_batches": 2, "checkpoint_every": 2}
        run = run_simulated(make_scenario(2, workload=workload, method=method))
        messages = []
        for fields in fields_of(run, "send"):
            messages.append((fields["message"], fields["bytes"], fields["start"]))
        return messages

    assert messages_with("none") == messages_with("full")
