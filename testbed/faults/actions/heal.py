"""All links are as they were."""

from __future__ import annotations

from testbed.common.errors import Key
from testbed.faults.actions.degrade import Degrade
from testbed.faults.actions.flap import Flap
from testbed.faults.actions.obstruct import Obstruct
from testbed.faults.actions.partition import NetworkPartition
from testbed.faults.conditions import FaultAction


class Heal(FaultAction[str]):
    """Every partition, degradation and obstruction is undone, every flap ends."""

    name = "heal"
    undoes = (NetworkPartition.name, Degrade.name, Obstruct.name, Flap.name)

    def named(self) -> list[tuple[Key, str]]:
        """Return nothing: it concerns all."""
        return []
