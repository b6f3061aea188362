"""All figures there are of a run: those of every run, declared in this room, and those that its method declares."""

from __future__ import annotations

import re
from collections.abc import Mapping

from testbed.common.formats import FigureKind
from testbed.trace import course, devices, host, learning, pace, phases, recovery, requests, traffic
from testbed.trace.figures import Figure, Reporting, Row, Table, by_name

COMMON: Mapping[str, Figure] = by_name(
    [
        *learning.FIGURES,
        *pace.FIGURES,
        *requests.FIGURES,
        *recovery.FIGURES,
        *course.FIGURES,
        *traffic.FIGURES,
        *devices.FIGURES,
        *host.FIGURES,
    ]
)
"""The figures that every run may have."""

OF_DEVICES: Mapping[str, FigureKind] = devices.OF_DEVICES
"""The figures of one device, named as ``devices.<device>.<figure>``."""


def figures_of(declared: Reporting) -> dict[str, Figure]:
    """Return the figures of runs whose method declares that; raises ValueError where two have one name."""
    return by_name([*COMMON.values(), *declared.figures])


def rows_of(declared: Reporting) -> tuple[Row, ...]:
    """Return the lines at the head of the report of such a run."""
    common = (*learning.ROWS, *pace.ROWS, *requests.ROWS, *recovery.ROWS)
    return (*common, *declared.rows, *recovery.LAST_ROWS, *course.ROWS, *host.ROWS)


def tables_of(declared: Reporting) -> tuple[Table, ...]:
    """Return the tables of the report of such a run."""
    return (phases.TABLE, *declared.tables)


def kind_of(name: str, figures: Mapping[str, Figure]) -> FigureKind:
    """Return what a figure is measured in, of a run, a device or a layer; KeyError where there is none."""
    one = re.fullmatch(r"(\w+)s\.[^.<]+(\.\w+)?", name)
    declared = f"{one[1]}s.<{one[1]}>{one[2] or ''}" if one else name
    if one and one[1] == "device" and declared not in figures:
        return OF_DEVICES[(one[2] or "").removeprefix(".")]
    return figures[declared].kind
