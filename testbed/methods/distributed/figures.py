"""What distributed inference tells of its runs beside the figures of every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.formats import size
from testbed.trace.figures import Declared, Metrics, Row


def _fullest(metrics: Metrics) -> tuple[str, Mapping[str, Any]]:
    """Return the device that held most, of those that said what they hold."""
    held = {name: row for name, row in metrics["devices"].items() if "weights" in row}
    return max(held.items(), key=lambda item: float(item[1]["weights"] + item[1]["activations"]))


def _memory(metrics: Metrics) -> str:
    _, row = _fullest(metrics)
    return size(row["weights"] + row["activations"])


def _parts(metrics: Metrics) -> str:
    name, row = _fullest(metrics)
    return f"at most, on {name}: {size(row['weights'])} weights, {size(row['activations'])} activations"


def _known(metrics: Metrics) -> bool:
    return "requests" in metrics and any("weights" in row for row in metrics["devices"].values())


DECLARED = Declared(rows=(Row("Memory", _memory, _parts, when=_known),))
