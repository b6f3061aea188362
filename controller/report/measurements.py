"""Links as they were measured before a run, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from controller.report.grouping import group_links
from controller.report.tables import table
from testbed.trace.outcome import LinkMeasurement


def measurements_table(measurements: Sequence[LinkMeasurement]) -> RenderableType:
    """Return what was asked of each kind of link and what was found, those outside their tolerance first."""
    shown = table("Link", "Requested", "Measured", "What is wrong", bold=["Link"])
    for group in group_links([_row(each) for each in measurements]):
        problem = Text(group.problem or "", style="red")
        measured = Text(group.measured, style="red" if group.problem else "")
        shown.add_row(Text(group.name), Text(group.requested), measured, problem)
    return shown


def _row(each: LinkMeasurement) -> Mapping[str, Any]:
    """Return a measurement as a row of ``metrics()["links"]``, nothing having been sent yet."""
    return {
        "source": each.source,
        "destination": each.destination,
        "requested": each.requested.to_json(),
        "measured": each.figures(),
        "problem": each.problem,
        "bytes": 0,
        "used_share": None,
    }
