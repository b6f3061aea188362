"""The `expect` section: conditions on metrics that decide the exit status of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.common.conditions import parse_condition
from testbed.trace.metrics_spec import Metric, Metrics
from testbed.trace.registry import metric_kind


@dataclass(frozen=True)
class Expectation:
    """The result of checking one condition."""

    key: str
    condition: str
    value: Any
    """The figure; None where the run gave none."""
    holds: bool


def look_up(tree: object, dotted: str) -> Any:
    """Return the value at a dotted key of nested mappings and lists; None for a missing key."""
    for part in dotted.split("."):
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif (
            isinstance(tree, list | tuple)
            and part.isdecimal()
            and int(part) < len(tree)
        ):
            tree = tree[int(part)]
        else:
            return None
    return tree


def evaluate(
    expect: Mapping[str, str], metrics: Metrics, figures: Mapping[str, Metric]
) -> list[Expectation]:
    """Check all conditions in order. Raises KeyError for an unknown metric."""
    results = []
    for key, text in expect.items():
        value = look_up(metrics, key)
        holds = parse_condition(text, metric_kind(key, figures)).holds(value)
        results.append(Expectation(key, text, value, holds))
    return results
