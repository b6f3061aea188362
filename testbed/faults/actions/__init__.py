"""What can break and mend, one file an action and what undoes it. A new one is listed here and in `FaultPart`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.faults.actions.degrade import Degrade
from testbed.faults.actions.flap import Flap
from testbed.faults.actions.heal import Heal
from testbed.faults.actions.kill import Kill, Restart
from testbed.faults.actions.obstruct import Obstruct
from testbed.faults.actions.partition import NetworkPartition
from testbed.faults.actions.pause import Pause, Resume
from testbed.faults.actions.retire import Join, Retire
from testbed.faults.actions.throttle import Throttle, Unthrottle
from testbed.faults.conditions import FaultAction

ACTIONS: Mapping[str, type[FaultAction[Any]]] = {
    kind.name: kind
    for kind in (
        Kill,
        Restart,
        Retire,
        Join,
        Pause,
        Resume,
        NetworkPartition,
        Degrade,
        Obstruct,
        Flap,
        Heal,
        Throttle,
        Unthrottle,
    )
}
"""By name, which is the key in a scenario; in the order in which users read them."""


def mending(name: str, target: str) -> FaultAction[str] | None:
    """Return the mending action with that name and target, both as recorded; None where the name's does not mend."""
    kind = ACTIONS.get(name)
    return kind(target) if kind is not None and kind.undoes else None
