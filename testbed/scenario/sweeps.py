"""The sweep points of a scenario: combinations of swept values, and explicitly listed points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.common.errors import Diagnostic, Key
from testbed.scenario.points import LABEL
from testbed.scenario.schema import Scenario

MAX_RUNS = 10_000
"""Maximum number of runs of a scenario, all of which are checked before the first one starts."""


@dataclass(frozen=True)
class _Axis:
    """Keys whose values change together, mostly a single one."""

    place: Key
    """The place of the keys in the scenario."""
    values: Mapping[str, Sequence[Any]]
    """The values of each key, the same number of each."""

    def __len__(self) -> int:
        return max(map(len, self.values.values()))

    def steps(self) -> list[dict[str, Any]]:
        """Return the values of all keys, step by step."""
        keys = list(self.values)
        columns = zip(*self.values.values(), strict=True)
        return [dict(zip(keys, column, strict=True)) for column in columns]


def check_points(scenario: Scenario) -> None:
    """Raise `InputError` for invalid points or too many runs, before any expansion."""
    sweeps = list(_sweep_axes(scenario))
    problems: list[Diagnostic] = []
    for axes in sweeps:
        problems += _axis_problems(axes)
    for index, point in enumerate(scenario.points):
        if not set(point) - {LABEL}:
            problems.append(Diagnostic(("points", index), "sets no key"))
    if problems:
        raise scenario.source.error(problems)
    points = len(scenario.points) + sum(math.prod(map(len, axes)) for axes in sweeps)
    runs = points * scenario.repetitions
    if runs > MAX_RUNS:
        key = "sweep" if scenario.sweep else "points"
        # The larger factor is the one to reduce.
        if scenario.repetitions > points:
            key = "repetitions"
        text = f"makes {runs:,} runs, more than {MAX_RUNS:,}: use fewer"
        raise scenario.source.error([Diagnostic((key,), text)])


def sweep_points(
    scenario: Scenario,
) -> Iterator[tuple[dict[str, Key], dict[str, object]]]:
    """Yield (places, values) of each point: all combinations of the sweep, then the further points.

    ``places`` are the keys of the scenario that set each value. A scenario without sweep and points has one empty
    point.
    """
    for axes in _sweep_axes(scenario):
        yield from _axis_combinations(axes)
    for index, point in enumerate(scenario.points):
        yield {key: ("points", index, key) for key in point}, dict(point)


def _axis_combinations(
    axes: Sequence[_Axis],
) -> Iterator[tuple[dict[str, Key], dict[str, object]]]:
    places: dict[str, Key] = {}
    for axis in axes:
        for key in axis.values:
            places[key] = (*axis.place, key)
    for chosen in itertools.product(*(axis.steps() for axis in axes)):
        point: dict[str, object] = {}
        for step in chosen:
            point |= step
        yield places, point


def _sweep_axes(scenario: Scenario) -> Iterator[list[_Axis]]:
    """Yield the axes of each sweep; a scenario with neither sweep nor points has one without axes."""
    if scenario.points and not scenario.sweep:
        return
    if isinstance(scenario.sweep, Mapping):
        sweeps: dict[Key, Mapping[str, Any]] = {("sweep",): scenario.sweep}
    else:
        sweeps = {("sweep", index): sweep for index, sweep in enumerate(scenario.sweep)}
    for place, sweep in sweeps.items():
        axes = []
        for key, values in sweep.items():
            # Under `together`, the values are mappings themselves.
            if isinstance(values, Mapping):
                axes.append(_Axis((*place, key), values))
            else:
                axes.append(_Axis(place, {key: values}))
        yield axes


def _axis_problems(axes: Sequence[_Axis]) -> Iterator[Diagnostic]:
    """Yield the problems of the axes of one sweep."""
    known: set[str] = set()
    for axis in axes:
        first = next(iter(axis.values), "")
        for key, values in axis.values.items():
            place = (*axis.place, key)
            if not values:
                yield Diagnostic(place, "has no values")
            elif len(values) != len(axis.values[first]):
                text = f"needs as many values as '{first}', {len(axis.values[first])}, and has {len(values)}"
                yield Diagnostic(place, text)
            elif key in known:
                # Of two values for one key, the second would silently win.
                yield Diagnostic(place, "is swept twice: remove one of the two")
            known.add(key)
