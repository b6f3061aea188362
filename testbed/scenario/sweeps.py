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
    """One swept key, or the keys under ``together``, whose values change together."""

    place: Key
    """The key of the scenario that contains the swept keys, such as ``("sweep", "together")``."""
    values: Mapping[str, Sequence[Any]]
    """Dotted key -> swept values; all keys have equally many values."""

    def __len__(self) -> int:
        return max(map(len, self.values.values()))

    def steps(self) -> list[dict[str, Any]]:
        """Return the first values of all keys, then the second values, and so on."""
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
    point_count = len(scenario.points)
    for axes in sweeps:
        point_count += math.prod(map(len, axes))
    runs = point_count * scenario.repetitions
    if runs > MAX_RUNS:
        key = "sweep" if scenario.sweep else "points"
        # The larger factor is the one to reduce.
        if scenario.repetitions > point_count:
            key = "repetitions"
        text = f"makes {runs:,} runs, more than {MAX_RUNS:,}: use fewer"
        raise scenario.source.error([Diagnostic((key,), text)])


def sweep_points(
    scenario: Scenario,
) -> Iterator[tuple[dict[str, Key], dict[str, object]]]:
    """Yield (places, values) of each point: all combinations of the sweep, then the entries of ``points``.

    ``values`` maps dotted keys to swept values, and ``places`` maps the same dotted keys to the scenario's keys under
    which these values are written. A scenario without sweep and points has one empty point.
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
    for combination in itertools.product(*(axis.steps() for axis in axes)):
        point: dict[str, object] = {}
        for step in combination:
            point |= step
        yield places, point


def _sweep_axes(scenario: Scenario) -> Iterator[list[_Axis]]:
    """Yield the axes of each sweep; a scenario with neither sweep nor points has one sweep without axes."""
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
    earlier_keys: set[str] = set()
    for axis in axes:
        first_key = next(iter(axis.values), "")
        for key, values in axis.values.items():
            place = (*axis.place, key)
            needed = len(axis.values[first_key])
            if not values:
                yield Diagnostic(place, "has no values")
            elif len(values) != needed:
                text = f"needs as many values as '{first_key}', {needed}, and has {len(values)}"
                yield Diagnostic(place, text)
            elif key in earlier_keys:
                # Of two values for one key, the second would silently win.
                yield Diagnostic(place, "is swept twice: remove one of the two")
            earlier_keys.add(key)
