"""Measurements at run time: the time of each unit, link rates, and the reachability of standby devices.

FTPipeHD's coordinator profiles the units and the links before training (Section III-B), and chooses partitions by the
results. Here links are watched as well: a link whose messages take longer or shorter than measured is measured again.
"""

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

    ``images`` are (samples, channels, height, width), ``labels`` (samples,). The trained weights are discarded.
    """
    units = problem.model.units
    count = len(units)
    samples = len(labels)
    whole = problem.training.weight(labels)
    # One shard for each unit, since the times of single units are wanted.
    shards = []
    for unit in range(count):
        shards.append(make_shard(problem, unit, unit + 1, device.name))
    forward = [0.0] * count
    backward = [0.0] * count
    update = [0.0] * count

    async def timed(
        spent: list[float],
        index: int,
        work: Callable[[], T],
        cost: Cost,
    ) -> T:
        """Compute, and add the share of this run in the mean seconds to ``spent[index]``."""
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
            own_units = units[index : index + 1]
            back = partial(shard.backward, key, gradient)
            cost = costs.backward_cost(own_units, samples)
            gradient = await timed(backward, index, back, cost)
            step = partial(shard.update, run)
            cost = costs.update_cost(own_units, problem.training)
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
        """Return the expected seconds until a message of ``size`` bytes on the wire is acknowledged."""
        more_bytes = size - wire_bytes(SMALL)
        return max(0.0, self.latency + 8 * more_bytes / self.rate)


class LinkWatch:
    """Compares the regular messages over a link with the measured rate of the link."""

    def __init__(self, measurement: MeasuredLink) -> None:
        self._measurement = measurement
        self._ratios: deque[float] = deque(maxlen=RECENT)
        """Ratio of measured to expected seconds of the last messages."""
        self._usual = 1.0
        """The smallest initial ratio: below 1 if the link was shared during its measurement."""
        self._seen = 0
        """Number of messages with a ratio."""
        self._last = -math.inf
        """Time of the previous acknowledgement."""

    def deviates(self, size: float, posted: float, acknowledged: float) -> bool:
        """Record a message, and return whether all recent messages were slower than expected, or all faster.

        The message has ``size`` bytes on the wire, and was posted and acknowledged at these times, in seconds.
        """
        # A message waits for the previous one, whose bytes have left one latency before its acknowledgement.
        previous_left = self._last - self._measurement.latency
        start = max(posted, previous_left)
        self._last = acknowledged
        transfer_time = acknowledged - start
        expected = self._measurement.seconds(size)
        if max(transfer_time, expected) < NOTICEABLE:
            return False
        ratio = math.inf
        if expected:
            ratio = transfer_time / expected
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

    The delay of the link is in the time of both messages and cancels. Messages grow until one takes long enough to be
    distinguished, so neither is a slow link kept busy for long nor a fast one measured by its jitter. The messages are
    posted, so a message to an unreachable peer becomes overdue like any other.
    """

    async def transfer_time(size: int) -> float:
        """Return the seconds until a message with ``size`` bytes of payload is acknowledged."""
        packet = Packet(mailbox.configuration, padding=size)
        begun = mailbox.device.now()
        await mailbox.post(peer, packet)
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
        more_bytes = wire_bytes(size) - wire_bytes(SMALL)
        rate = 8 * more_bytes / longer
    return MeasuredLink(rate, latency)


class LinkProfiler:
    """The coordinator's measurements: unknown links while the pipeline is empty, standby devices during training."""

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
        if self._runs:
            return True
        partition = self._recovery.partition
        return bool(self._partitioner.unmeasured_links(partition))

    async def measure_missing(self) -> None:
        """Measure everything the choice needs while training pauses: all links at once, as in training."""
        if self._runs:
            # The first batch stands for all: the time does not depend on the values.
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
        """Make stages measure the links to standby devices that would be their neighbours.

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
        """Make the source of each pair measure the link to the target, unless a measurement is under way."""
        for source, target in pairs:
            if (source, target) not in self._awaited:
                self._awaited.add((source, target))
                request = Measure(self._mailbox.configuration, target)
                self._mailbox.post(source, request)

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
        # All neighbours have reached the device.
        if is_last:
            self._recovery.standby.reached(target)

    def _forget_link(self, report: Deviates) -> None:
        self._partitioner.discard_rate(report.sender, report.target)

    def _start_over(self) -> None:
        """Forget measurements under way, which a new configuration cancels."""
        self._awaited.clear()
        self._tried.clear()
