"""Storage of the bench's figures by revision, to detect slower commits."""

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
"""Ratio to the other revision above which a figure is marked as worse."""


def store_figures(figures: Iterable[Measurement], file: Path = KEPT) -> None:
    """Store figures for the current revision, and replace earlier figures of the same names."""
    stored = _read_file(file)
    own = stored.setdefault(revision() or "unknown", {})
    for each in figures:
        own[each.name] = each.value
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(stored, indent=1) + "\n")


def figures_of_revision(name: str, file: Path = KEPT) -> Mapping[str, float]:
    """Return the figures of the revision whose name begins with ``name``.

    Raises UsageError if no revision, or more than one, has such a name.
    """
    stored = _read_file(file)
    matches = [each for each in stored if each.startswith(name)]
    if len(matches) != 1:
        known = ", ".join(each[:12] for each in stored)
        if not known:
            known = "none: run the bench there first"
        raise click.UsageError(
            f"{len(matches)} revisions '{name}' have figures in {file}; available: {known}"
        )
    return stored[matches[0]]


def compare_figure(
    figure: Measurement, before: Mapping[str, float]
) -> tuple[str, bool]:
    """Return the ratio to the earlier figure as text, and whether the figure is a tenth worse.

    Without an earlier figure, the text is empty.

    >>> compare_figure(Measurement("start-up", 9.0, "s"), {"start-up": 8.0})
    ('1.12×', True)
    """
    if not before.get(figure.name):
        return "", False
    value = figure.value / before[figure.name]
    loss = value if figure.at_most else 1 / max(value, 1e-9)
    return f"{value:.2f}×", loss > WORSE


def _read_file(file: Path) -> dict[str, dict[str, float]]:
    if not file.exists():
        return {}
    stored: dict[str, dict[str, float]] = json.loads(file.read_text())
    return stored
