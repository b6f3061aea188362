"""Runtime measurements: the time of each unit, link rates, and the reachability of standby devices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

from testbed.device import Cost, Device, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.supervision import Supervisor
from testbed.ml.layers import costs
from testbed.ml.layers.feed import Training
from testbed.ml.layers.shape_shard import make_shard
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.partition.asynchronous import UnitTimes
from testbed.ml.pipeline.messages import Deviates, Measure, Measured, Packet
from testbed.ml.pipeline.planning import AsynchronousOptions, Partitioner
from testbed.ml.pipeline.recovery import ReplicaRecovery
from testbed.network.link import Pair
from testbed.wire.framing import wire_bytes

T = TypeVar("T")

SMALL = 1_000
"""Bytes of the smallest message in the measurement of a link: one packet, whose time is mostly the delay."""
LARGE = 256_000
"""Bytes of the largest message in the measurement of a link, a quarter of the size that every device accepts."""
ENOUGH = 0.1
"""Additional seconds of a large message after which the rate of a link counts as measured: far above jitter."""


RECENT = 10
"""Number of successive messages that must all deviate before a link counts as changed."""
NOTICEABLE = 0.01
"""Minimum seconds of a message for conclusions about its link; shorter times are dominated by the host."""
DEVIATION = 1.5
"""Factor by which a message must be slower or faster than expected to indicate a changed link."""


async def profile_units(
    device: Device,
    problem: PlanningProblem,
    images: torch.Tensor,
    labels: torch.Tensor,
    runs: int,
) -> UnitTimes:
    """Train every unit separately on one batch, ``runs`` times; return the mean seconds.

    ``images`` are (samples, channels, height, width). The trained weights are discarded.
    """
    units = problem.model.units
    count = len(units)
    samples = len(labels)
    whole = problem.training.weight(labels)
    shards = [make_shard(problem, unit, unit + 1, device.name) for unit in range(count)]
    forward = [0.0] * count
    backward = [0.0] * count
    update = [0.0] * count

    async def timed(
        spent: list[float], index: int, work: Callable[[], T], cost: Cost
    ) -> T:
        begun = device.now()
        result = await device.compute(work, cost, Span("profile"))
        spent[index] += (device.now() - begun) / runs
        return result

    for run in range(runs):
        key = (run, 0)
        values = images
        for index, shard in enumerate(shards):
            cost = costs.forward_cost(units[index : index + 1], samples)
            if index + 1 < count:
                work = partial(shard.forward, key, values)
                values = await timed(forward, index, work, cost)
            else:
                loss = partial(shard.forward_loss, key, values, labels, whole)
                await timed(forward, index, loss, cost)
        gradient: torch.Tensor | None = None
        for index in reversed(range(count)):
            shard = shards[index]
            unit = units[index : index + 1]
            back = partial(shard.backward, key, gradient)
            cost = costs.backward_cost(unit, samples)
            gradient = await timed(backward, index, back, cost)
            step = partial(shard.update, run)
            cost = costs.update_cost(unit, problem.training)
            await timed(update, index, step, cost)
    return UnitTimes(tuple(forward), tuple(backward), tuple(update))


@dataclass(frozen=True)
class MeasuredLink:
    """The measured rate and latency of a link."""

    rate: float
    """Bit/s on the wire; infinite where sending takes no time."""
    latency: float
    """Seconds until a message of `SMALL` bytes is acknowledged."""

    def seconds(self, size: float) -> float:
        """Return the expected seconds until a message of this many bytes on the wire is acknowledged."""
        return max(0.0, self.latency + 8 * (size - wire_bytes(SMALL)) / self.rate)


class LinkWatch:
    """Compares regular messages over a link with its measured rate."""

    def __init__(self, measurement: MeasuredLink) -> None:
        self._measurement = measurement
        self._ratios: deque[float] = deque(maxlen=RECENT)
        """Ratio of measured to expected seconds of the last messages."""
        self._usual = 1.0
        """The smallest initial ratio: below 1 if the link was shared during its measurement."""
        self._seen = 0
        self._last = -math.inf
        """Time of the previous acknowledgement."""

    def deviates(self, size: float, posted: float, acknowledged: float) -> bool:
        """Record a message of this many bytes on the wire; return whether all recent ones were slower, or all faster.

        A message waits for the previous one, whose bytes have left one latency before its acknowledgement.
        """
        start = max(posted, self._last - self._measurement.latency)
        self._last = acknowledged
        transfer_time = acknowledged - start
        expected = self._measurement.seconds(size)
        if max(transfer_time, expected) < NOTICEABLE:
            return False
        ratio = transfer_time / expected if expected else math.inf
        self._ratios.append(ratio)
        self._seen += 1
        # Faster than the smallest initial ratio: a link measured while others used it looks faster from then on.
        if self._seen <= RECENT:
            self._usual = min(self._usual, ratio)
        if len(self._ratios) < RECENT:
            return False
        is_slower = min(self._ratios) > DEVIATION
        is_faster = max(self._ratios) < self._usual / DEVIATION
        return is_slower or is_faster


async def measure_link(mailbox: Mailbox, peer: str) -> MeasuredLink:
    """Measure the link to a peer: the rate follows from the additional time of a larger message.

    The messages are posted, so a message to an unreachable peer becomes overdue like any other.

    The delay cancels. Messages grow until one takes long enough to be distinguished, so neither is a slow link kept
    busy for long nor a fast one measured by its jitter.
    """

    async def transfer_time(size: int) -> float:
        begun = mailbox.device.now()
        await mailbox.post(peer, Packet(mailbox.configuration, padding=size))
        return mailbox.device.now() - begun

    # Opens the connection, which would count as time of a measured message.
    await transfer_time(SMALL)
    latency = await transfer_time(SMALL)
    size = SMALL
    longer = 0.0
    while longer < ENOUGH and size < LARGE:
        size = min(LARGE, 4 * size)
        longer = await transfer_time(size) - latency
    rate = math.inf
    if longer > 0:
        rate = 8 * (wire_bytes(size) - wire_bytes(SMALL)) / longer
    return MeasuredLink(rate, latency)


class LinkProfiler:
    """Measures unknown links while the pipeline is empty, and links to standby devices during training."""

    def __init__(
        self,
        supervisor: Supervisor,
        recovery: ReplicaRecovery,
        partitioner: Partitioner,
        problem: PlanningProblem[AsynchronousOptions],
        training: Training,
    ) -> None:
        self._supervisor = supervisor
        self._mailbox = supervisor.mailbox
        self._recovery = recovery
        self._partitioner = partitioner
        self._problem = problem
        self._training = training
        self._runs = partitioner.profile_runs
        """Remaining profiling runs of each unit."""
        self._awaited: set[Pair] = set()
        """Links with a measurement under way."""
        self._tried: set[str] = set()
        """Standby devices whose links are being measured, or were since the last choice of a partition."""
        self._mailbox.on(Measured, self._store_link)
        self._mailbox.on(Deviates, self._forget_link)
        self._mailbox.on_open(self._start_over)

    @property
    def lacks_measurements(self) -> bool:
        """Whether the choice of a partition lacks measurements."""
        return bool(
            self._runs or self._partitioner.unmeasured_links(self._recovery.partition)
        )

    async def measure_missing(self) -> None:
        """Measure everything the choice needs while training pauses: all links at once, as in training."""
        if self._runs:
            images, labels = self._training.batch(0)
            times = await profile_units(
                self._supervisor.device, self._problem, images, labels, self._runs
            )
            self._runs = 0
            self._partitioner.store_profile(times)
            self._supervisor.device.record("profile", seconds=list(times.execution))
        pairs = self._partitioner.unmeasured_links(self._recovery.partition)
        self._measure_links(pairs)
        await self._supervisor.until(lambda: self._awaited.isdisjoint(pairs))

    def measure_standby(self, *, repeats: bool) -> None:
        """Make the neighbouring stages measure their links to standby devices.

        Training continues. ``repeats`` includes devices that were tried before: a device that was cut off or too slow
        may become a stage again once reachable.
        """
        if repeats:
            self._tried.clear()
        stages = self._recovery.partition.devices
        under_way = {target for _, target in self._awaited}
        untested = self._recovery.standby.untested() - self._tried - under_way
        for device in untested:
            self._tried.add(device)
            # The stages that would be its neighbours.
            row = self._recovery.ordered({*stages, device})
            pairs: list[Pair] = []
            for one, other in pairwise(row):
                if other == device:
                    pairs.append((one, device))
                elif one == device:
                    pairs.append((other, device))
            self._measure_links(pairs)

    def _measure_links(self, pairs: list[Pair]) -> None:
        for source, target in pairs:
            if (source, target) not in self._awaited:
                self._awaited.add((source, target))
                self._mailbox.post(source, Measure(self._mailbox.configuration, target))

    def _store_link(self, measured: Measured) -> None:
        source = measured.sender
        target = measured.target
        self._awaited.discard((source, target))
        rate = math.inf if measured.rate is None else measured.rate
        self._supervisor.device.record(
            "bandwidth", source=source, destination=target, rate=measured.rate
        )
        self._partitioner.store_rate((source, target), rate)
        is_last = all(awaited != target for _, awaited in self._awaited)
        if is_last:
            self._recovery.standby.reached(target)

    def _forget_link(self, report: Deviates) -> None:
        self._partitioner.discard_rate(report.sender, report.target)

    def _start_over(self) -> None:
        self._awaited.clear()
        self._tried.clear()
