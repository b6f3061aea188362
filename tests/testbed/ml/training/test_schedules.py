"""Learning-rate schedules, against torch's schedulers in a plain training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.schedules import Schedule
from testbed.ml.training.schema import SchedulePart, TrainingPart

STEPS = 40
MakeScheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULES: dict[str, tuple[dict[str, object], MakeScheduler]] = {
    "one-cycle": (
        {"max_lr": 0.5},
        lambda adam: lr_scheduler.OneCycleLR(adam, max_lr=0.5, total_steps=STEPS),
    ),
    "CosineAnnealingLR": (
        {},
        lambda adam: lr_scheduler.CosineAnnealingLR(adam, T_max=STEPS),
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
"""By name: options of the scenario, and torch's scheduler with these options. A name is torch's, also in lower case
with dashes and without LR."""


def config_with(
    *schedules: Mapping[str, object], codes: Mapping[str, Code] | None = None
) -> TrainingConfig:
    keys = {
        "optimizer": {"name": "adam", "learning_rate": 0.1},
        "schedule": list(schedules),
    }
    return TrainingConfig(TrainingPart.model_validate(keys), codes or {}, STEPS)


def rates_at(config: TrainingConfig, *steps: int) -> list[float]:
    return [config.settings(step)["lr"] for step in steps]


def torch_settings(make_scheduler: MakeScheduler, steps: int) -> list[tuple[Any, Any]]:
    """Return learning rate and betas of Adam at each step of a loop with torch's scheduler."""
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make_scheduler(adam)
    settings = []
    for _ in range(steps):
        (group,) = adam.param_groups
        settings.append((group["lr"], group["betas"]))
        adam.step()
        scheduler.step()
    return settings


@pytest.mark.parametrize("name", SCHEDULES)
def test_settings_equal_torch_in_any_order_of_steps(name: str) -> None:
    options, make_scheduler = SCHEDULES[name]
    config = config_with({"name": name, **options})
    # torch's one-cycle schedule cannot be stepped once more.
    last = STEPS - 1
    expected = torch_settings(make_scheduler, last)
    # Later steps first, since recovery returns to earlier steps. torch steps forward only.
    for step in (31, 0, 38, *range(last)):
        settings = config.settings(step)
        assert (settings["lr"], settings["betas"]) == expected[step]


def test_list_of_schedules_equals_sequential_scheduler_of_torch() -> None:
    # The rate rises over `total_iters` steps, and the next schedule begins after `steps` steps.
    config = config_with(
        {"name": "linear", "start_factor": 0.1, "total_iters": 8, "steps": 8},
        {"name": "cosine-annealing"},
    )

    def make_scheduler(adam: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        warm_up = lr_scheduler.LinearLR(adam, 0.1, total_iters=8)
        cosine = lr_scheduler.CosineAnnealingLR(adam, T_max=STEPS - 8)
        return lr_scheduler.SequentialLR(adam, [warm_up, cosine], [8])

    expected = [rate for rate, _ in torch_settings(make_scheduler, STEPS)]
    assert rates_at(config, *range(STEPS)) == expected


def test_step_of_schedule_lasts_for_every_training_steps() -> None:
    config = config_with({"name": "exponential", "gamma": 0.5, "every": 10})
    # The rate halves after steps 10, 20 and 30.
    assert rates_at(config, 0, 9, 10, 39) == [0.1, 0.1, 0.05, 0.0125]


def test_function_of_user_file_is_schedule() -> None:
    text = "def decay(step):\n    return 1 / (1 + step)\n"
    module = "schedule_of_a_test"
    code = Code(name="decay", module=module, sources={module: text})
    # The code of a scenario's files is stored by file and name.
    config = config_with(
        {"name": "decay", "file": "my.py"}, codes={"my.py:decay": code}
    )
    # A factor of 1/5 on the rate of 0.1.
    assert config.settings(4)["lr"] == pytest.approx(0.02)


def test_one_cycle_keeps_last_rate_after_its_end() -> None:
    config = config_with({"name": "one-cycle", "max_lr": 0.5})
    assert config.settings(70) == config.settings(STEPS - 1)


def halving(**keys: object) -> dict[str, object]:
    return {"name": "exponential", "gamma": 0.5, **keys}


@pytest.mark.parametrize("second_keys", [{}, {"every": 10}], ids=["once", "repeated"])
def test_every_of_first_schedule_applies_to_all_schedules(
    second_keys: dict[str, object],
) -> None:
    config = config_with(
        {"name": "constant", "factor": 0.1, "steps": 20, "every": 10},
        halving(**second_keys),
    )
    rates = rates_at(config, 0, 19, 20, 29, 30)
    # A tenth of the rate of 0.1 for 20 training steps; then the rate halves after each 10 training steps.
    assert rates == pytest.approx([0.01, 0.01, 0.1, 0.1, 0.05])


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        (
            [halving(steps=20), halving(every=10)],
            "'every' applies to all schedules: set it on the first one only",
        ),
        (
            [halving(steps=9, every=10), halving()],
            "'steps' is 9, less than one step of the schedule, 'every' 10",
        ),
        ([halving(), halving()], "exponential: set 'steps', its length"),
        # This schedule of torch needs a function, and the next one measurements.
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
    ids=[
        "every-on-second-schedule",
        "fewer-steps-than-every",
        "missing-length",
        "lambda",
        "plateau",
        "missing-options",
    ],
)
def test_unsuitable_schedule_is_rejected(
    schedules: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        config_with(*schedules).settings(0)


def make_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_schedule_that_needs_length_is_rejected_for_unknown_length() -> None:
    part = SchedulePart(name="one-cycle", max_lr=0.5)
    message = "one-cycle: set 'total_steps', since the number of steps"
    with pytest.raises(InputError, match=message):
        Schedule([part], codes={}, steps=None, make_optimizer=make_sgd)


def test_schedule_without_length_is_accepted_for_unknown_length() -> None:
    part = SchedulePart(name="exponential", gamma=0.5)
    schedule = Schedule([part], codes={}, steps=None, make_optimizer=make_sgd)
    # 0.5 to the power of 10 is 1/1024.
    assert schedule.settings_at(10)["lr"] == pytest.approx(0.1 / 1024)
