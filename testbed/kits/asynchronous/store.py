"""The replica store of a device: what it keeps for restarts, and hands out to those that lack it."""

from __future__ import annotations

import asyncio

from testbed.kits.asynchronous.messages import Fetch, FetchedUnit, Keep, Replica
from testbed.kits.asynchronous.replicas import Point, Replicas
from testbed.kits.messaging.mailbox import Mailbox


class ReplicaStore:
    """Outlives configurations: where training goes on from is made of replicas alone."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.replicas = Replicas()
        self.spreading: asyncio.Task[None] | None = None
        """The replicas that are being sent."""
        self._mailbox = mailbox
        mailbox.on(Fetch, self._hand_out)
        mailbox.on(Replica, self._take_in)
        mailbox.on(Keep, lambda keep: self.replicas.keep([Point(*point) for point in keep.keep]))

    async def spread(self) -> None:
        """Wait until no replicas are being sent any more."""
        if self.spreading is not None:
            await asyncio.wait({self.spreading})

    def _take_in(self, replica: Replica) -> None:
        self.replicas.put(Point(replica.configuration, replica.step), replica.state, [replica.unit])

    def _hand_out(self, fetch: Fetch) -> None:
        self._mailbox.open(fetch.configuration)
        point = Point(fetch.made, fetch.step)
        if not self.replicas.units(point) >= set(fetch.units):
            return  # it has started again since it said what it has, and the coordinator is about to learn that
        for unit in fetch.units:
            state = self.replicas.state(point, [unit])
            found = FetchedUnit(fetch.configuration, fetch.made, fetch.step, unit, state)
            self._mailbox.post(fetch.sender, found)
