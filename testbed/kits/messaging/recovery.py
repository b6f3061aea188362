"""What a method does about devices that are lost: the loop around its work, and the policies that it may choose.

There are two `RecoveryPolicy`s: `testbed.kits.pipeline.checkpointing.FromCheckpoint` stops everything and
goes on from the last checkpoint, `testbed.kits.pipeline.recovery.FromReplicas` from what the devices keep for
each other. A method that goes on without those who are gone, or with substitutes for what they would have sent, needs
neither: it takes its messages with a deadline, and asks `Membership` who is there.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from testbed.common.errors import TestbedError
from testbed.kits.messaging.supervision import Lost, Supervisor

MAX_RETRIES_WITH_LOST = 10
"""Recoveries in a row, nothing having been done in between, after which devices that are lost again are left out."""
MAX_RETRIES = 20
"""Recoveries in a row, nothing having been done in between, after which the run fails."""


class ResumableWork(Protocol):
    """What is to be done, whatever happens to the devices meanwhile."""

    @property
    def start(self) -> int:
        """The step, or request, to go on with."""

    async def run(self) -> None:
        """Do what is left to do; called again after every recovery. Raises `Lost`."""


class RecoveryPolicy(Protocol):
    """Sets devices up, and does so again after a loss."""

    async def establish(self) -> None:
        """Tell every device what it is to be, and wait until all are ready. Raises `Lost`."""

    async def recover(self, lost: Lost, start: int) -> None:
        """Decide which devices to go on with, and from where. Raises `TestbedError` where that cannot be."""


async def run_with_recovery(
    work: ResumableWork, recovery: RecoveryPolicy, supervisor: Supervisor, recovering: bool = False
) -> None:
    """Work to the end through whatever happens; raises `TestbedError` when nothing helps.

    ``recovering``: devices were lost before this began.
    """
    record = supervisor.device.record
    fruitless = 0
    await asyncio.sleep(0)  # devices that start at this very instant greet before they are sent anything
    while True:
        before = supervisor.progress
        try:
            await recovery.establish()
            if recovering:
                record("recovery", phase="resumed", step=work.start, partition=supervisor.stages)
                recovering = False
            await work.run()
            return
        except Lost as lost:
            recovering = True
            fruitless = 0 if supervisor.progress > before else fruitless + 1
            if fruitless == MAX_RETRIES:
                raise TestbedError(
                    f"{MAX_RETRIES} recoveries in a row without getting on, the last for {lost}: if links or "
                    "devices are slower than the scenario says, raise method.patience"
                ) from lost
            if fruitless >= MAX_RETRIES_WITH_LOST:
                lost = Lost(lost.missing, lost.missing, lost.back)
            supervisor.membership.exclude(lost.cut)
            await recovery.recover(lost, work.start)
