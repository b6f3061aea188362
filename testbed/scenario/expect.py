"""The `expect` section: conditions on metrics that decide the exit status of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.common.conditions import parse_condition
from testbed.common.errors import parse_key
from testbed.trace.metrics_spec import Metric, Metrics
from testbed.trace.registry import metric_kind


@dataclass(frozen=True)
class Expectation:
    """The result of checking one condition."""

    key: str
    """Dotted name of the metric, such as ``accuracy`` or ``devices.worker1.bytes_sent``."""
    condition: str
    """Comparison with the metric, such as ``>= 0.9``."""
    value: Any
    """Value of the metric; None if the run has none."""
    holds: bool


def look_up(tree: object, dotted: str) -> Any:
    """Return the value at a dotted key of nested mappings and lists; None for a missing key.

    >>> look_up({"layers": [{"loss": 0.5}]}, "layers.0.loss")
    0.5
    """
    for part in parse_key(dotted):
        if isinstance(tree, Mapping):
            tree = tree.get(str(part))
        elif isinstance(tree, list | tuple) and isinstance(part, int):
            tree = tree[part] if part < len(tree) else None
        else:
            return None
    return tree


def evaluate(
    expect: Mapping[str, str], metrics: Metrics, definitions: Mapping[str, Metric]
) -> list[Expectation]:
    """Check all conditions in order. Raises KeyError for an unknown metric."""
    results = []
    for key, text in expect.items():
        value = look_up(metrics, key)
        holds = parse_condition(text, metric_kind(key, definitions)).holds(value)
        results.append(Expectation(key, text, value, holds))
    return results
