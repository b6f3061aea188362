"""How a device becomes a stage of an asynchronous pipeline: it fetches what it lacks, and begins when all have theirs.

Between `Prepare` and `Commit` it has whatever it had before: others may fetch it, also those of a later configuration
if the preparation comes to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.roles import RoleHolder
from testbed.kits.pipeline.measuring import LinkWatch, bandwidth
from testbed.kits.pipeline.messages import Commit, Deviates, Fetch, FetchedUnit, Measure, Measured, Packet, Prepare
from testbed.kits.pipeline.placement import BEGINNING, Point
from testbed.kits.pipeline.replicas import ReplicaStore
from testbed.kits.pipeline.stage import Stage


class Preparation:
    """One configuration after the other, on every device."""

    def __init__(
        self,
        mailbox: Mailbox,
        holder: RoleHolder,
        store: ReplicaStore,
        coordinator: str,
        stage_of: Callable[[Prepare], Stage],
    ) -> None:
        self._mailbox = mailbox
        self._holder = holder
        self._store = store
        self._coordinator = coordinator
        self._stage_of = stage_of
        self._stage: Stage | None = None
        """The one that is prepared or runs."""
        self._point = BEGINNING
        """Where it goes on from."""
        self._seeded = False
        """Whether its units come from the seed."""
        self._awaited: set[int] = set()
        """Units that are still to come."""
        self._watches: dict[str, LinkWatch] = {}
        """Watches of the links that this device has measured, by their targets."""
        mailbox.sends.acknowledged = self._acknowledged
        mailbox.on_open(self._give_up)
        mailbox.on(Prepare, self._prepare)
        mailbox.on(FetchedUnit, self._take_in)
        mailbox.on(Commit, self._commit)
        mailbox.on(Measure, self._measure)
        mailbox.on(Packet, lambda packet: None)

    def _give_up(self) -> None:
        self._stage = None

    def _prepare(self, prepare: Prepare) -> None:
        stages: list[Stage] = []

        def role() -> Stage:
            stages.append(self._stage_of(prepare))
            return stages[0]

        if not self._holder.assume(prepare.configuration, role):
            return
        self._stage = stages[0]
        self._point, self._seeded = Point(prepare.made, prepare.step), prepare.seeded
        self._awaited = {unit for units in prepare.fetch.values() for unit in units}
        for owner, units in prepare.fetch.items():
            self._mailbox.post(owner, Fetch(prepare.configuration, prepare.made, prepare.step, units))
        self._report()

    def _take_in(self, found: FetchedUnit) -> None:
        if self._stage is None:
            return
        self._store.replicas.put(Point(found.made, found.step), found.state, [found.unit])
        self._awaited.discard(found.unit)
        self._stage.actions += 1
        self._report()

    def _report(self) -> None:
        """Report that all that the new configuration needs is here, once it is."""
        if not self._awaited:
            self._holder.ready()

    def _commit(self, commit: Commit) -> None:
        if self._stage is None:
            return
        replicas = self._store.replicas
        units = range(*self._stage.position.units)
        self._stage.state = None if self._seeded else replicas.state(self._point, units)
        replicas.keep([Point(*point) for point in commit.keep], later=False)
        self._holder.begin()

    def _measure(self, measure: Measure) -> None:
        if self._stage is not None:
            self._mailbox.start_in_configuration(self._measure_link(measure))

    async def _measure_link(self, measure: Measure) -> None:
        """Measure the link to another device for the coordinator."""
        await self._store.spread()
        found = await bandwidth(self._mailbox, measure.target)
        self._watches[measure.target] = LinkWatch(found)
        finite = None if math.isinf(found.rate) else found.rate
        self._mailbox.post(self._coordinator, Measured(measure.configuration, measure.target, finite))

    def _acknowledged(self, peer: str, size: float, posted: float) -> None:
        """Report, once, that a link does not do any more what was measured."""
        watch = self._watches.get(peer)
        if watch is not None and watch.deviates(size, posted, self._mailbox.device.now()):
            del self._watches[peer]
            self._mailbox.post(self._coordinator, Deviates(self._mailbox.configuration, peer))
