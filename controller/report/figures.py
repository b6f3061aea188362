"""Figures of metrics.json as they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed import formats
from testbed.trace.figures import Figure
from testbed.trace.registry import kind_of


def figure(name: str, value: Any, figures: Mapping[str, Figure]) -> str:
    """Write a figure of metrics.json as its kind asks for; ``figures`` are those that there are."""
    return formats.of_kind(kind_of(name, figures), value)
