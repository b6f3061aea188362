"""What the coordinator knows of the points of the training: which count, which are safe, which it has as a whole."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from testbed.kits.asynchronous.messages import Keep, Replicated
from testbed.kits.asynchronous.replicas import BEGINNING, Lineage, Point, dump, load, read, written
from testbed.kits.asynchronous.store import ReplicaStore
from testbed.kits.layers.shard import weights_of
from testbed.kits.messaging.supervision import Supervisor
from testbed.partition.redistribution import StagePartition

if TYPE_CHECKING:
    import torch


class KnownPoints:
    """Follows the replications, and tells the stages what they need no more."""

    def __init__(self, supervisor: Supervisor, store: ReplicaStore, units: int) -> None:
        self.lineage = Lineage()
        self.safe = BEGINNING
        """The newest point of which every unit is on two devices, or here."""
        self.whole = BEGINNING
        """The newest point of which every unit is here."""
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._device = supervisor.device
        self._replicas = store.replicas
        self._units = units
        self._replicated: dict[int, set[str]] = {}
        """Which devices have had their units of a step replicated."""
        self._mailbox.on(Replicated, self._note)

    def branch(self, step: int) -> None:
        """Go on from a step in the present configuration: what came after it counts no more."""
        self.lineage = self.lineage.branch(step, self._mailbox.configuration)
        self.safe, self.whole = (point if point in self.lineage else BEGINNING for point in (self.safe, self.whole))
        self._replicated.clear()

    def needed(self, device: str, points: Collection[Point]) -> list[tuple[int, int]]:
        """Return what a device is to keep, as it is told: these, and here the newest whole one."""
        kept = {*points, self.whole} if device == self._device.name else {*points}
        return [(point.configuration, point.step) for point in sorted(kept)]

    def has_all(self, step: int) -> bool:
        """Say whether every unit as it is after a step is here."""
        return self._is_whole(self.lineage.point(step))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the newest weights that are here as a whole; none before any are."""
        point = self._newest_whole()
        return {} if point is None else weights_of(self._replicas.state(point, range(self._units)))

    async def save(self, partition: StagePartition) -> None:
        """Write to the disk how training stands, beside the replicas."""
        await self._device.save("training", written(self.lineage, partition))

    def remember(self) -> StagePartition | None:
        """Read what a former program of this device has left on the disk; return the partition, if there is any."""
        training, replicas = self._device.saved("training"), self._device.saved("replicas")
        if training is None:
            return None
        self.lineage, partition = read(training)
        if replicas is not None:
            load(self._replicas, replicas)
            self.whole = self._newest_whole() or BEGINNING
        return partition

    def _note(self, replicated: Replicated) -> None:
        """Once all stages have their units replicated, older points are needed no more."""
        point = Point(self._mailbox.configuration, replicated.step)
        having = self._replicated.setdefault(replicated.step, set())
        having.add(replicated.sender)
        if having < self._supervisor.membership.assigned or point < self.safe:
            return
        self.safe = point
        if self._is_whole(point):
            self.whole = point
        for part in self._supervisor.layout:
            keep = Keep(self._mailbox.configuration, self.needed(part.device, {point}))
            self._mailbox.post(part.device, keep)
        self._mailbox.start(self._device.save("replicas", dump(self._replicas)))

    def _is_whole(self, point: Point) -> bool:
        return len(self._replicas.units(point)) == self._units

    def _newest_whole(self) -> Point | None:
        """Return the newest point that still counts of which every unit is here."""
        whole = [point for point in self._replicas.points() if self._is_whole(point)]
        return max((point for point in whole if point in self.lineage), key=lambda point: point.step, default=None)
