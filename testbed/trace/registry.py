"""All figures there are of a run: those of every run, declared in this room, and those that its method declares."""

from __future__ import annotations

import re
from collections.abc import Mapping

from testbed.formats import FigureKind
from testbed.trace import course, devices, learning, pace, phases, recovery, requests, traffic
from testbed.trace.figures import Declared, Figure, Row, Table, by_name

COMMON: Mapping[str, Figure] = by_name(
    [
        *learning.FIGURES,
        *pace.FIGURES,
        *requests.FIGURES,
        *recovery.FIGURES,
        *course.FIGURES,
        *traffic.FIGURES,
        *devices.FIGURES,
    ]
)
"""The figures that every run may have."""

OF_DEVICES: Mapping[str, FigureKind] = devices.OF_DEVICES
"""The figures of one device, named as ``devices.<device>.<figure>``."""


def figures_of(declared: Declared) -> dict[str, Figure]:
    """Return the figures of runs whose method declares that; raises ValueError where two have one name."""
    return by_name([*COMMON.values(), *declared.figures])


def rows_of(declared: Declared) -> tuple[Row, ...]:
    """Return the lines at the head of the report of such a run."""
    common = (*learning.ROWS, *pace.ROWS, *requests.ROWS, *recovery.ROWS)
    return (*common, *declared.rows, *recovery.LAST_ROWS, *course.ROWS)


def tables_of(declared: Declared) -> tuple[Table, ...]:
    """Return the tables of the report of such a run."""
    return (phases.TABLE, *declared.tables)


def kind_of(name: str, figures: Mapping[str, Figure]) -> FigureKind:
    """Return what a figure is measured in, of a run or of one of its devices; KeyError where there is none."""
    if name in figures:
        return figures[name].kind
    head, _, of_device = name.rpartition(".")
    if not re.fullmatch(r"devices\.[^.]+", head):
        raise KeyError(name)
    return OF_DEVICES[of_device]
