"""History of the measurements of `make bench`: one value per measurement and git revision, to detect regressions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from testbed_controller.lab.paths import ROOT
from testbed_controller.results.recorder import revision
from tools.bench.measurement import Measurement

HISTORY_FILE = ROOT / "results/bench.json"
"""File with the values of all revisions: revision -> name of a measurement -> value."""
WORSE_RATIO = 1.1
"""A measurement is marked as worse if it is worse than at the earlier revision by more than this factor."""


def store_measurements(
    measurements: Iterable[Measurement], file: Path = HISTORY_FILE
) -> None:
    """Store measurements for the current revision, and replace earlier measurements of the same names."""
    stored = _read_file(file)
    # Outside a checkout, the revision is unknown.
    current = stored.setdefault(revision() or "unknown", {})
    for measurement in measurements:
        current[measurement.name] = measurement.value
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(stored, indent=1) + "\n")


def measurements_of_revision(
    prefix: str, file: Path = HISTORY_FILE
) -> Mapping[str, float]:
    """Return the measurements of the revision whose hash begins with ``prefix``.

    Raises UsageError if the hash of no revision, or of more than one, begins with ``prefix``.
    """
    stored = _read_file(file)
    matches = [each for each in stored if each.startswith(prefix)]
    if len(matches) != 1:
        available = ", ".join(each[:12] for each in stored)
        if not available:
            available = "none: run the bench at that revision first"
        raise click.UsageError(
            f"{len(matches)} revisions beginning with '{prefix}' have measurements in {file}; available: {available}"
        )
    return stored[matches[0]]


def compare_measurement(
    measurement: Measurement, before: Mapping[str, float]
) -> tuple[str, bool]:
    """Return the ratio to the earlier measurement as text, and whether the measurement is worse by `WORSE_RATIO`.

    Without an earlier measurement, or if the earlier value is 0, the text is empty.

    >>> compare_measurement(Measurement("start-up", 9.0, "s"), {"start-up": 8.0})
    ('1.12×', True)
    """
    if not before.get(measurement.name):
        return "", False
    ratio = measurement.value / before[measurement.name]
    # A lower rate is worse, and a ratio of 0 would divide by zero.
    worsening = ratio if measurement.at_most else 1 / max(ratio, 1e-9)
    return f"{ratio:.2f}×", worsening > WORSE_RATIO


def _read_file(file: Path) -> dict[str, dict[str, float]]:
    if not file.exists():
        return {}
    stored: dict[str, dict[str, float]] = json.loads(file.read_text())
    return stored
