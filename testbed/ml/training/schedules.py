"""The learning rate as a function of the training step, computed by torch's schedulers.

Devices reach a training step at different times, and repeat steps after a fault, while a scheduler of torch can only
advance. A `Schedule` therefore advances the scheduler on an optimizer that trains nothing, and stores all settings.
A schedule's step lasts for `SchedulePart.every` training steps.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.lazy import torch
from testbed.ml.training import named
from testbed.ml.training.schema import SchedulePart

_KEY = ("training", "schedule")
_UNSUPPORTED = (
    "ReduceLROnPlateau",
    "SequentialLR",
    "ChainedScheduler",
    "LambdaLR",
    "MultiplicativeLR",
)
"""Schedulers of torch that depend on measurements instead of the step (the first), or on further objects."""
_LENGTH_OPTIONS = ("T_max", "total_steps")
"""Options of torch's schedulers whose default is the length of the schedule."""


class Schedule:
    """The settings of an optimizer in every training step, independent of the order in which steps are queried.

    ``parts`` are consecutive schedules; each but the last has a length, `SchedulePart.steps`.
    """

    def __init__(
        self,
        parts: Sequence[SchedulePart],
        codes: Mapping[str, Code],
        steps: int | None,
        make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        """Create the schedulers; ``steps`` is the number of training steps of the workload, None if unknown.

        Raises `InputError` for wrong names, options and lengths.
        """
        _check_lengths(parts)
        every = parts[0].every
        self._every = every
        """Training steps for each step of the schedule."""
        self._last_step = None if steps is None else (steps - 1) // every
        """Last step of the schedule in the workload; None if unknown."""
        # The parameter has no use: torch's classes require at least one.
        self._optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
        # The following numbers count steps of the schedule.
        lengths = [(part.steps or 0) // every for part in parts[:-1]]
        ends = list(accumulate(lengths))
        last_length = None
        if steps is not None:
            last_start = ends[-1] if ends else 0
            last_length = math.ceil(steps / every) - last_start
        schedulers = []
        for part in parts:
            length = last_length if part.steps is None else part.steps // every
            schedulers.append(_make_scheduler(part, codes, length, self._optimizer))
        self._scheduler = schedulers[0]
        if len(schedulers) > 1:
            self._scheduler = torch.optim.lr_scheduler.SequentialLR(
                self._optimizer, schedulers, ends
            )
        self._settings = [self._current_settings()]
        """The settings in each step of the schedule that the scheduler has reached."""

    def settings_at(self, step: int) -> Mapping[str, Any]:
        """Return the optimizer's settings, such as ``lr``, in a training step, counted from 0.

        After the last step of the workload the settings stay as they are.
        """
        schedule_step = step // self._every
        if self._last_step is not None:
            schedule_step = min(schedule_step, self._last_step)
        while len(self._settings) <= schedule_step:
            with warnings.catch_warnings():
                # torch warns that no optimizer took a step, and that SequentialLR passes step numbers.
                warnings.simplefilter("ignore")
                try:
                    self._scheduler.step()
                except ValueError:
                    # OneCycleLR fails after the number of steps that it was created with.
                    return self._settings[-1]
            self._settings.append(self._current_settings())
        return self._settings[schedule_step]

    def _current_settings(self) -> Mapping[str, Any]:
        (group,) = self._optimizer.param_groups
        # OneCycleLR also changes the momentum, which Adam's classes have as the first of their betas.
        settings: dict[str, Any] = {"lr": float(group["lr"])}
        for key in ("momentum", "betas"):
            if key in group:
                settings[key] = group[key]
        return settings


def _check_lengths(parts: Sequence[SchedulePart]) -> None:
    """Raise `InputError` if lengths of schedules are missing or too short, or if their steps differ in length."""
    every = parts[0].every
    for part in parts[:-1]:
        if part.steps is None:
            raise InputError(
                f"{part.title}: set 'steps', its length until the next schedule", _KEY
            )
    for part in parts:
        if "every" in part.model_fields_set and part.every != every:
            raise InputError(
                f"{part.title}: 'every' applies to all schedules: set it on the first one only",
                _KEY,
            )
        if part.steps is not None and part.steps < every:
            text = f"{part.title}: 'steps' is {part.steps}, less than one step of the schedule, 'every' {every}"
            raise InputError(f"{text}: increase 'steps' or decrease 'every'", _KEY)


def _make_scheduler(
    part: SchedulePart,
    codes: Mapping[str, Code],
    steps: int | None,
    optimizer: torch.optim.Optimizer,
) -> Any:
    """Return a scheduler of torch; ``steps`` is the length in steps of the schedule, None if unknown."""
    from torch.optim import lr_scheduler

    factory = named.find_definition(
        part,
        codes,
        _KEY,
        lr_scheduler,
        lr_scheduler.LRScheduler,
        suffix="LR",
        unsupported=_UNSUPPORTED,
    )
    if part.file is not None:
        # A user's function takes the step and returns a factor of the learning rate.
        return named.call_definition(
            lr_scheduler.LambdaLR, part, _KEY, optimizer, lr_lambda=factory
        )
    options = part.options()
    accepted = inspect.signature(factory).parameters
    # OneCycleLR accepts ``epochs`` and ``steps_per_epoch`` instead of ``total_steps``.
    if "epochs" not in options:
        for name in _LENGTH_OPTIONS:
            if name not in accepted or name in options:
                continue
            if steps is None:
                text = f"{part.title}: set '{name}', since the number of steps depends on data that is not loaded yet"
                raise InputError(text, _KEY)
            options[name] = steps
    return named.call_definition(factory, part, _KEY, optimizer, **options)
