"""Figures of the bench by revision, so that a slower commit is seen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from testbed_controller.lab.paths import ROOT
from testbed_controller.results.recorder import revision
from tools.bench.figure import Measurement

KEPT = ROOT / "results/bench.json"
WORSE = 1.1
"""Ratio to the other revision from which on a figure is marked."""


def keep(figures: Iterable[Measurement], file: Path = KEPT) -> None:
    """Note figures as those of the present revision, the newest of each name."""
    found = _read(file)
    found.setdefault(revision() or "unknown", {}).update(
        {each.name: each.value for each in figures}
    )
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


def of_revision(name: str, file: Path = KEPT) -> Mapping[str, float]:
    """Return the figures of a revision, which may be named by its beginning; raise UsageError where there are none."""
    found = _read(file)
    fitting = [each for each in found if each.startswith(name)]
    if len(fitting) != 1:
        known = (
            ", ".join(each[:12] for each in found) or "none: run the bench there first"
        )
        raise click.UsageError(
            f"{len(fitting)} revisions '{name}' have figures in {file}; there are {known}"
        )
    return found[fitting[0]]


def ratio(figure: Measurement, before: Mapping[str, float]) -> tuple[str, bool]:
    """Return the figure over that of before, empty where there is none, and whether it got worse by a tenth."""
    if not before.get(figure.name):
        return "", False
    found = figure.value / before[figure.name]
    return f"{found:.2f}×", (found if figure.at_most else 1 / max(found, 1e-9)) > WORSE


def _read(file: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = (
        json.loads(file.read_text()) if file.exists() else {}
    )
    return found
