"""What the coordinator has found out, by asking, for the choice of partitions: units' times, links, who is of use."""

from __future__ import annotations

import math
from itertools import pairwise

from testbed.kits.asynchronous.messages import Deviates, Measure, Measured
from testbed.kits.asynchronous.partitioners import AsynchronousOptions, HomogeneousPartitioner
from testbed.kits.asynchronous.profiling import profile
from testbed.kits.asynchronous.recovery import FromReplicas
from testbed.kits.layers.feed import Training
from testbed.kits.messaging.supervision import Supervisor
from testbed.method import Problem
from testbed.network.link import Pair


class Survey:
    """Measures on the empty pipeline what is not known, and beside training what leads to devices that stand by."""

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: FromReplicas,
        partitioner: HomogeneousPartitioner,
        problem: Problem[AsynchronousOptions],
        training: Training,
    ) -> None:
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._recovery = recovery
        self._partitioner = partitioner
        self._problem = problem
        self._training = training
        self._runs = partitioner.profile_runs
        """How often each unit is still to be tried."""
        self._awaited: set[Pair] = set()
        """Links of which a measurement is under way."""
        self._tried: set[str] = set()
        """Devices standing by whose links are being measured, or were since the last look for a partition."""
        self._mailbox.on(Measured, self._note)
        self._mailbox.on(Deviates, lambda told: partitioner.forget(told.sender, told.target))
        self._mailbox.on_open(self._start_over)

    @property
    def lacking(self) -> bool:
        """Whether the choice needs something that is not known."""
        return bool(self._runs or self._partitioner.unknown(self._recovery.partition))

    async def learn(self) -> None:
        """Measure, while nothing else goes on, what the choice needs: all links at once, as training uses them."""
        if self._runs:
            images, labels = self._training.batch(0)
            found = await profile(self._supervisor.device, self._problem, images, labels, self._runs)
            self._runs = 0
            self._partitioner.profiled(found)
            self._supervisor.device.record("profile", seconds=list(found.execution))
        pairs = self._partitioner.unknown(self._recovery.partition)
        self._measure(pairs)
        await self._supervisor.until(lambda: self._awaited.isdisjoint(pairs))

    def look(self, again: bool) -> None:
        """Have the stages next to devices that stand by measure their links to them, once or ``again``.

        Training goes on. Who was cut off, or too slow, and is reached now may become a stage again.
        """
        if again:
            self._tried.clear()
        stages = self._recovery.partition.devices
        for device in self._recovery.standing_by() - self._tried - {target for _, target in self._awaited}:
            self._tried.add(device)
            row = pairwise(self._recovery.ordered({*stages, device}))
            self._measure([(one if other == device else other, device) for one, other in row if device in (one, other)])

    def _measure(self, pairs: list[Pair]) -> None:
        for source, target in pairs:
            if (source, target) not in self._awaited:
                self._awaited.add((source, target))
                self._mailbox.post(source, Measure(self._mailbox.configuration, target))

    def _note(self, measured: Measured) -> None:
        source, target = measured.sender, measured.target
        self._awaited.discard((source, target))
        rate = math.inf if measured.rate is None else measured.rate
        self._supervisor.device.record("bandwidth", source=source, destination=target, rate=measured.rate)
        self._partitioner.measured((source, target), rate)
        if not any(awaited == target for _, awaited in self._awaited):
            self._recovery.reached(target)

    def _start_over(self) -> None:
        self._awaited.clear()
        self._tried.clear()
