"""A scenario expanded into what a runtime needs: one device, one link, one fault at a time."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.hardware import DeviceSpec
from testbed.network.cell import Cell
from testbed.network.link import Link, Pair
from testbed.replay import Change
from testbed.scenario.schema import Scenario


@dataclass(frozen=True)
class Experiment:
    """One run of one point of a scenario's sweep."""

    scenario: Scenario
    """Its ``sweep`` is empty and its ``repetitions`` 1; its ``seed`` is the repetition's."""
    devices: tuple[DeviceSpec, ...]
    links: dict[Pair, Link]
    """Every directed pair that may talk; pairs that are absent cannot."""
    point: dict[str, object]
    """The sweep's values here, by dotted key; empty without a sweep."""
    repetition: int = 0
    cells: tuple[Cell, ...] = ()
    """Radio cells; a pair of devices is in one at most."""
    changes: tuple[Change, ...] = ()
    """Of links and speeds, as the scenario's trace has them, in the order of time."""
