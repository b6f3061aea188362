"""Figures of metrics.json as they are shown."""

from __future__ import annotations

from typing import Any

from testbed import formats
from testbed.scenario.expect import kind_of


def figure(name: str, value: Any) -> str:
    """Write a figure of metrics.json as its kind asks for."""
    try:
        kind = kind_of(name)
    except KeyError:
        kind = "number"
    return formats.of_kind(kind, value)
