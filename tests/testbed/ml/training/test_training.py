"""A whole recipe: every part of it, on one device and on several, against a loop of one's own in plain torch."""

from __future__ import annotations

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data.batches import batch
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from tests.helpers.runs import fields_of, make_scenario, problem_of, run_simulated

RECIPE = {
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "betas": [0.9, 0.98]},
    "schedule": {"name": "cosine-annealing"},
    "loss": {"name": "cross-entropy", "label_smoothing": 0.1},
    "clip": {"norm": 0.5},
}
STEPS = 12


def spec(method, training=RECIPE, workers=3, **keys):
    return make_scenario(
        workers, workload={"training": training, "steps": STEPS}, method=method, **keys
    )


def by_hand(written):
    problem, data = problem_of(written)
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=STEPS)
    criterion, losses = torch.nn.CrossEntropyLoss(label_smoothing=0.1), []
    for step in range(STEPS):
        chosen = batch(
            len(data.train_labels), written.workload.batch_size, problem.seed, step
        )
        loss = criterion(
            model(torch.from_numpy(data.train_images[chosen])),
            torch.from_numpy(data.train_labels[chosen]),
        )
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        cosine.step()
        losses.append(float(loss.detach()))
    return model.state_dict(), losses


METHODS = {
    "single": ({"name": "single"}, []),
    "pipeline": ({"micro_batches": 1}, []),
    "a pipeline that loses a stage": (
        {"micro_batches": 1, "checkpoint_every": 2},
        [
            {
                "kill": "worker2",
                "when": {"device": "worker2", "begins": "backward", "batch": 7},
                "for": "2s",
            }
        ],
    ),
    "four micro-batches": ({"schedule": "gpipe", "micro_batches": 4}, []),
}


@pytest.mark.parametrize("case", METHODS)
def test_a_recipe_does_what_the_loop_in_plain_torch_does(case):
    method, faults = METHODS[case]
    outcome = run_simulated(spec(method, faults=faults))
    assert outcome.status == "finished", outcome.error
    weights, losses = by_hand(spec({"name": "single"}))
    found = {step["step"]: step["loss"] for step in fields_of(outcome, "step")}
    assert [found[step] for step in range(STEPS)] == pytest.approx(losses, abs=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(outcome.weights[name], tensor, rtol=0, atol=1e-5)


def test_clipping_by_norm_is_the_same_to_the_bit_wherever_the_model_is_cut():
    one, other = (
        run_simulated(spec({"micro_batches": 1}, workers=1)),
        run_simulated(spec({"micro_batches": 1})),
    )
    assert all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )
    assert [each["message"] for each in fields_of(other, "send")].count(
        "norms"
    ) == 2 * 3 * STEPS


def test_a_stage_without_anything_trained_has_no_norms():
    problem, _ = problem_of(spec({"name": "single"}))
    assert problem.training.norms([]).shape == (0,)
    problem.training.clip_gradients({}, torch.ones(3))


def test_an_asynchronous_pipeline_keeps_adams_state_over_a_death():
    training = {**RECIPE, "clip": {"value": 0.1}, "ema": 0.5}
    fault = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 9},
        "for": "2s",
    }
    method = {
        "name": "ftpipehd",
        "chain_replication_interval": 3,
        "global_replication_interval": 3,
        "stages": 3,
    }
    plain, killed = (
        run_simulated(spec(method, training, faults=faults, workers=2))
        for faults in ([], [fault])
    )
    assert plain.status == killed.status == "finished", killed.error
    assert fields_of(killed, "recovery")
    assert sorted(killed.weights) == sorted(plain.weights)
    assert fields_of(plain, "step")[0] == fields_of(killed, "step")[0]


def test_a_federated_device_alone_trains_as_a_single_one_does():
    training = {**RECIPE, "optimizer": {"name": "adam", "learning_rate": 0.01}}
    work = {
        "training": training,
        "steps": STEPS,
        "data": {"name": "digits", "train": 96, "test": 40, "split": "iid"},
    }
    prepared = prepare(
        trials(
            make_scenario(
                1, workload=work, method={"name": "federated", "local_steps": STEPS}
            )
        )[0]
    )
    from testbed.ml.data import load
    from testbed.simulation import simulate

    outcome = simulate(prepared, load(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error


def test_a_moving_average_is_evaluated_and_left():
    training = {"optimizer": {"learning_rate": 0.1}, "ema": 0.75}
    averaged, plain = (
        run_simulated(spec({"name": "single"}, each))
        for each in (training, {"optimizer": {"learning_rate": 0.1}})
    )
    assert [step["loss"] for step in fields_of(averaged, "step")] == [
        step["loss"] for step in fields_of(plain, "step")
    ]
    pipelined = run_simulated(spec({"micro_batches": 1}, training))
    for name, tensor in averaged.weights.items():
        assert not torch.equal(tensor, plain.weights[name])
        torch.testing.assert_close(pipelined.weights[name], tensor, rtol=0, atol=1e-6)
    assert fields_of(pipelined, "evaluate")[-1]["loss"] == pytest.approx(
        fields_of(averaged, "evaluate")[-1]["loss"], abs=1e-6
    )


@pytest.mark.parametrize(
    ("method", "training", "words"),
    [
        (
            {"name": "ftpipehd"},
            RECIPE,
            "'ftpipehd' does not support this .each update would wait",
        ),
        (
            {"name": "edgepipe"},
            {"optimizer": {"name": "adam"}},
            "updated by plain descent",
        ),
    ],
)
def test_what_a_method_does_not_follow_is_refused(method, training, words):
    (trial,) = trials(spec(method, training))
    with pytest.raises(InputError, match=words):
        prepare(trial)


def test_adam_counts_in_the_memory_of_a_plan():
    def memory(optimizer):
        (trial,) = trials(spec({"name": "single"}, {"optimizer": optimizer}))
        return prepare(trial).plan.assignments[0].memory

    plain, adam = memory({}), memory({"name": "adam"})
    problem, _ = problem_of(spec({"name": "single"}))
    assert adam - plain == pytest.approx(2 * 4 * problem.model.parameters, rel=1e-3)


def test_without_numbers_as_many_bytes_travel_at_the_same_times():
    training = {**RECIPE, "ema": 0.9}
    runs = []
    for numerics in ("full", "none"):
        work = {"training": training, "steps": 6, "numerics": numerics}
        method = {"micro_batches": 2, "checkpoint_every": 2}
        runs.append(run_simulated(make_scenario(2, workload=work, method=method)))
    plain, shapes = (
        [
            (each["message"], each["bytes"], each["start"])
            for each in fields_of(one, "send")
        ]
        for one in runs
    )
    assert plain == shapes
