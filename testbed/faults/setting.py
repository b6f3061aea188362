"""What the faults of a run meet: its devices and links, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.network.radio import Radio


@dataclass(frozen=True)
class Setting:
    """The facts against which faults are checked before a run."""

    devices: Sequence[DeviceSpec]
    links: Mapping[Pair, Link]
    """Of the scenario."""
    traced: Sequence[tuple[Pair, Link]] = ()
    """Links as the scenario's trace leaves them, one entry for each of its changes."""
    time_limit: float = math.inf
    """Seconds after which the run is over."""
    radio: Radio | None = None
    """By which the devices hear each other."""
