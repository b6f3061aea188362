"""Schedules against torch's own, stepped as in a loop of one's own."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.schedules import Schedule
from testbed.ml.training.schema import SchedulePart, TrainingPart

SCHEDULES = {
    "one-cycle": (
        {"max_lr": 0.5},
        lambda adam: lr_scheduler.OneCycleLR(adam, max_lr=0.5, total_steps=40),
    ),
    "CosineAnnealingLR": (
        {},
        lambda adam: lr_scheduler.CosineAnnealingLR(adam, T_max=40),
    ),
    "step": ({"step_size": 7}, lambda adam: lr_scheduler.StepLR(adam, step_size=7)),
    "multi-step": (
        {"milestones": [5, 9]},
        lambda adam: lr_scheduler.MultiStepLR(adam, milestones=[5, 9]),
    ),
    "cosine-annealing-warm-restarts": (
        {"T_0": 6},
        lambda adam: lr_scheduler.CosineAnnealingWarmRestarts(adam, 6),
    ),
}


def scheduled(*schedule, codes=None):
    keys = {
        "optimizer": {"name": "adam", "learning_rate": 0.1},
        "schedule": [*schedule],
    }
    return TrainingConfig(TrainingPart.model_validate(keys), codes or {}, 40)


def expected(make, steps):
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, found = make(adam), []
    for _ in range(steps):
        found.append((adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]))
        adam.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_torchs_at_every_step_whatever_was_asked_before(name):
    options, make = SCHEDULES[name]
    recipe = scheduled({"name": name, **options})
    wanted = expected(make, 39)
    for step in (31, 0, 38, *range(39)):
        settings = recipe.settings(step)
        assert (settings["lr"], settings["betas"]) == wanted[step]


def test_warm_up_and_then_a_cosine():
    recipe = scheduled(
        {"name": "linear", "start_factor": 0.1, "total_iters": 8, "steps": 8},
        {"name": "cosine-annealing"},
    )

    def make(adam):
        parts = [
            lr_scheduler.LinearLR(adam, 0.1, total_iters=8),
            lr_scheduler.CosineAnnealingLR(adam, T_max=32),
        ]
        return lr_scheduler.SequentialLR(adam, parts, [8])

    assert [recipe.settings(step)["lr"] for step in range(40)] == [
        rate for rate, _ in expected(make, 40)
    ]


def test_a_step_of_the_schedule_may_take_several_of_training():
    recipe = scheduled({"name": "exponential", "gamma": 0.5, "every": 10})
    assert [recipe.settings(step)["lr"] for step in (0, 9, 10, 39)] == [
        0.1,
        0.1,
        0.05,
        0.0125,
    ]


def test_a_function_of_a_file_is_a_schedule():
    text = "def decay(step):\n    return 1 / (1 + step)\n"
    code = Code(
        name="decay", module="schedule_of_a_test", sources={"schedule_of_a_test": text}
    )
    recipe = scheduled({"name": "decay", "file": "my.py"}, codes={"my.py:decay": code})
    assert recipe.settings(4)["lr"] == pytest.approx(0.02)


def test_one_cycle_beyond_its_end_stays_where_it_ended():
    recipe = scheduled({"name": "one-cycle", "max_lr": 0.5})
    assert recipe.settings(70) == recipe.settings(39)


def halving(**keys):
    return {"name": "exponential", "gamma": 0.5, **keys}


def test_each_part_of_a_list_takes_as_many_training_steps_as_the_first():
    recipe = scheduled(
        {"name": "constant", "factor": 0.1, "steps": 20, "every": 10}, halving(every=10)
    )
    assert [
        recipe.settings(step)["lr"] for step in (0, 19, 20, 29, 30)
    ] == pytest.approx([0.01, 0.01, 0.1, 0.1, 0.05])


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            [halving(steps=20), halving(every=10)],
            "'every' applies to all schedules: set it on the first one only",
        ),
        (
            [halving(steps=9, every=10), halving()],
            "of 9 steps none is a step of the schedule, which takes 10",
        ),
        ([halving(), halving()], "exponential: set 'steps', its length"),
        ([{"name": "lambda"}], "has no 'lambda' supported here"),
        (
            [{"name": "reduce-lr-on-plateau"}],
            "has no 'reduce-lr-on-plateau' supported here",
        ),
        (
            [{"name": "cyclic"}],
            "cyclic: missing 2 required positional arguments: 'base_lr' and 'max_lr'",
        ),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(schedule, words):
    with pytest.raises(InputError, match=words):
        scheduled(*schedule).settings(0)


def test_a_schedule_of_unknown_length_says_which_argument_it_lacks():
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    with pytest.raises(
        InputError,
        match="one-cycle: write 'total_steps', since how many steps there are",
    ):
        Schedule([SchedulePart(name="one-cycle", max_lr=0.5)], {}, None, sgd)
    steady = Schedule([SchedulePart(name="exponential", gamma=0.5)], {}, None, sgd)
    assert steady.settings_at(10)["lr"] == pytest.approx(0.1 / 1024)
