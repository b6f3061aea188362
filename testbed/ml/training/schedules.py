"""The learning rate as a function of the step: torch's schedulers, run ahead on a dummy optimizer."""

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
"""The first is no function of the step, but of what was measured; the others are made of others, or of functions."""
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
        self._every = every = parts[0].every
        self._last = None if steps is None else (steps - 1) // every
        self._optimizer = optimizer([torch.nn.Parameter(torch.zeros(1, 1))])
        ends = [*accumulate((part.steps or 0) // every for part in parts[:-1])]
        total = None
        if steps is not None:
            total = math.ceil(steps / every) - (ends[-1] if ends else 0)
        made = []
        for part in parts:
            length = total if part.steps is None else part.steps // every
            made.append(_scheduler(part, codes, length, self._optimizer))
        self._scheduler = made[0]
        if len(made) > 1:
            self._scheduler = torch.optim.lr_scheduler.SequentialLR(
                self._optimizer, made, ends
            )
        self._known = [self._current_settings()]

    def at(self, step: int) -> Mapping[str, Any]:
        """Return the settings of a step, counted from 0, such as ``lr``; later steps have those of the last."""
        wanted = min(step // self._every, step if self._last is None else self._last)
        while len(self._known) <= wanted:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # that no optimizer took a step, and that SequentialLR names steps
                try:
                    self._scheduler.step()
                except ValueError:  # one cycle knows no more steps than it was made for
                    return self._known[-1]
            self._known.append(self._current_settings())
        return self._known[wanted]

    def _current_settings(self) -> Mapping[str, Any]:
        (group,) = self._optimizer.param_groups
        return {
            key: float(group[key]) if key == "lr" else group[key]
            for key in ("lr", "momentum", "betas")
            if key in group
        }


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


def _scheduler(
    part: SchedulePart,
    codes: Mapping[str, Code],
    steps: int | None,
    optimizer: torch.optim.Optimizer,
) -> Any:
    from torch.optim import lr_scheduler

    factory = named.find(
        part, codes, _KEY, lr_scheduler, lr_scheduler.LRScheduler, "LR", _WITHOUT
    )
    if part.file is not None:
        return named.make(
            lr_scheduler.LambdaLR, part, _KEY, optimizer, lr_lambda=factory
        )
    options = part.options()
    wanted = [
        name
        for name in _LENGTHS
        if name in inspect.signature(factory).parameters and name not in options
    ]
    if wanted and "epochs" not in options:
        if steps is None:
            text = f"{part.title}: write '{wanted[0]}', since how many steps there are is only known with the data"
            raise InputError(text, _KEY)
        options[wanted[0]] = steps
    return named.make(factory, part, _KEY, optimizer, **options)
