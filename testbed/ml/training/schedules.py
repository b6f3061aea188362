"""The learning rate as a function of the step: torch's schedulers, run ahead on a dummy optimizer.

Devices reach a step at different times, and repeat steps after a fault, while a scheduler of torch only counts its own
steps. A schedule therefore keeps the settings of all steps that the scheduler has reached.
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
_WITHOUT = (
    "ReduceLROnPlateau",
    "SequentialLR",
    "ChainedScheduler",
    "LambdaLR",
    "MultiplicativeLR",
)
"""Unsupported schedulers: the first depends on measurements and not on the step, the others on further objects."""
_LENGTHS = ("T_max", "total_steps")
"""Arguments that are the workload's steps by default."""


class Schedule:
    """The settings of an optimizer at every step, independent of the order of queries."""

    def __init__(
        self,
        parts: Sequence[SchedulePart],
        codes: Mapping[str, Code],
        steps: int | None,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        """``steps`` is the length of the workload, None if unknown. Raises `InputError`."""
        _check_lengths(parts)
        every = parts[0].every
        self._every = every
        """Training steps for each step of the schedule."""
        self._last = None if steps is None else (steps - 1) // every
        """Last step of the schedule in the workload; None if unknown."""
        self._optimizer = optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
        # All in steps of the schedule: where each schedule but the last ends, and the length of the last one.
        lengths = [(part.steps or 0) // every for part in parts[:-1]]
        ends = list(accumulate(lengths))
        remaining = None
        if steps is not None:
            earlier = ends[-1] if ends else 0
            remaining = math.ceil(steps / every) - earlier
        schedulers = []
        for part in parts:
            length = remaining if part.steps is None else part.steps // every
            schedulers.append(_make_scheduler(part, codes, length, self._optimizer))
        self._scheduler = schedulers[0]
        if len(schedulers) > 1:
            self._scheduler = torch.optim.lr_scheduler.SequentialLR(
                self._optimizer, schedulers, ends
            )
        self._known = [self._current_settings()]
        """The settings of all steps of the schedule so far."""

    def settings_at(self, step: int) -> Mapping[str, Any]:
        """Return the optimizer's settings in a training step, counted from 0, such as ``lr``.

        After the last step of the workload the settings stay as they are.
        """
        wanted = step // self._every
        if self._last is not None:
            wanted = min(wanted, self._last)
        while len(self._known) <= wanted:
            with warnings.catch_warnings():
                # torch warns that no optimizer took a step, and that SequentialLR names steps.
                warnings.simplefilter("ignore")
                try:
                    self._scheduler.step()
                except ValueError:
                    # One-cycle knows no more steps than it was made for.
                    return self._known[-1]
            self._known.append(self._current_settings())
        return self._known[wanted]

    def _current_settings(self) -> Mapping[str, Any]:
        (group,) = self._optimizer.param_groups
        # One-cycle changes the momentum, too, under the name that the optimizer has for it.
        settings: dict[str, Any] = {"lr": float(group["lr"])}
        for key in ("momentum", "betas"):
            if key in group:
                settings[key] = group[key]
        return settings


def _check_lengths(parts: Sequence[SchedulePart]) -> None:
    """Raise `InputError` for inconsistent lengths of consecutive schedules."""
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
            text = f"{part.title}: of {part.steps} steps none is a step of the schedule, which takes {every}"
            raise InputError(f"{text}: make 'steps' more, or 'every' less", _KEY)


def _make_scheduler(
    part: SchedulePart,
    codes: Mapping[str, Code],
    steps: int | None,
    optimizer: torch.optim.Optimizer,
) -> Any:
    """Return a scheduler of torch; ``steps`` is its length, None if unknown."""
    from torch.optim import lr_scheduler

    factory = named.find_definition(
        part, codes, _KEY, lr_scheduler, lr_scheduler.LRScheduler, "LR", _WITHOUT
    )
    if part.file is not None:
        # A function of the step.
        return named.call_definition(
            lr_scheduler.LambdaLR, part, _KEY, optimizer, lr_lambda=factory
        )
    options = part.options()
    accepted = inspect.signature(factory).parameters
    missing = [name for name in _LENGTHS if name in accepted and name not in options]
    # One-cycle takes either its steps, or epochs and steps of an epoch.
    if missing and "epochs" not in options:
        length = missing[0]
        if steps is None:
            text = f"{part.title}: write '{length}', since how many steps there are is only known with the data"
            raise InputError(text, _KEY)
        options[length] = steps
    return named.call_definition(factory, part, _KEY, optimizer, **options)
