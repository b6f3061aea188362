"""Measurements at run time: the time of each unit, link rates, and the reachability of standby devices.

FTPipeHD's coordinator profiles the units and the links before training (Section III-B), and chooses partitions by the
results. Here links are watched as well: if regular messages over a link take longer or shorter than the measured rate
predicts, the link is measured again.
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

SMALL_MESSAGE = 1_000
"""Bytes of the smallest message in the measurement of a link: one packet, whose time is mostly the delay."""
LARGE_MESSAGE = 256_000
"""Bytes of the largest message in the measurement of a link, a quarter of the size that every device accepts."""
MIN_EXTRA_TIME = 0.1
"""Seconds by which a larger message must take longer than the small one to measure the rate: far above jitter."""

RECENT_MESSAGES = 10
"""Number of successive messages that must all deviate before a link counts as changed: fewer may be a coincidence."""
MIN_MESSAGE_TIME = 0.01
"""Minimum seconds of a message for conclusions about its link; shorter times are dominated by the host."""
DEVIATION_FACTOR = 1.5
"""Factor by which a message must be slower or faster than expected to indicate a changed link: more than jitter."""


async def profile_units(
    device: Device,
    problem: PlanningProblem,
    images: torch.Tensor,
    labels: torch.Tensor,
    runs: int,
) -> UnitTimes:
    """Train every unit separately on one batch, ``runs`` times; return the mean seconds of each unit.

    ``images`` are (samples, channels, height, width), ``labels`` (samples,). The trained weights are discarded.
    """
    units = problem.model.units
    count = len(units)
    samples = len(labels)
    loss_weight = problem.training.weight(labels)
    # One shard for each unit, since units are timed one by one.
    shards = []
    for unit in range(count):
        shards.append(make_shard(problem, unit, unit + 1, device.name))
    forward = [0.0] * count
    backward = [0.0] * count
    update = [0.0] * count

    async def compute_timed(
        means: list[float],
        unit: int,
        work: Callable[[], T],
        cost: Cost,
    ) -> T:
        """Compute, and add the duration over the number of runs to ``means[unit]``."""
        start = device.now()
        result = await device.compute(work, cost, Span("profile"))
        means[unit] += (device.now() - start) / runs
        return result

    for run in range(runs):
        key = (run, 0)
        values = images
        for unit, shard in enumerate(shards):
            cost = costs.forward_cost(units[unit : unit + 1], samples)
            if unit + 1 < count:
                work = partial(shard.forward, key, values)
                values = await compute_timed(forward, unit, work, cost)
            else:
                loss = partial(shard.forward_loss, key, values, labels, loss_weight)
                await compute_timed(forward, unit, loss, cost)
        gradient: torch.Tensor | None = None
        for unit in reversed(range(count)):
            shard = shards[unit]
            single_unit = units[unit : unit + 1]
            back = partial(shard.backward, key, gradient)
            cost = costs.backward_cost(single_unit, samples)
            gradient = await compute_timed(backward, unit, back, cost)
            step = partial(shard.update, run)
            cost = costs.update_cost(single_unit, problem.training)
            await compute_timed(update, unit, step, cost)
    return UnitTimes(tuple(forward), tuple(backward), tuple(update))


@dataclass(frozen=True)
class MeasuredLink:
    """The measured rate and latency of a link."""

    rate: float
    """Bit/s on the wire; infinite if sending takes no measurable time."""
    latency: float
    """Seconds until a message of `SMALL_MESSAGE` bytes is acknowledged."""

    def seconds(self, size: float) -> float:
        """Return the expected seconds until a message of ``size`` bytes on the wire is acknowledged."""
        extra_bytes = size - wire_bytes(SMALL_MESSAGE)
        return max(0.0, self.latency + 8 * extra_bytes / self.rate)


class LinkWatch:
    """Compares the regular messages over a link with the measured rate of the link."""

    def __init__(self, measurement: MeasuredLink) -> None:
        self._measurement = measurement
        self._ratios: deque[float] = deque(maxlen=RECENT_MESSAGES)
        """Actual over expected seconds of the newest messages."""
        self._smallest_initial_ratio = 1.0
        """The smallest of the first ratios; below 1 if other messages shared the link during its measurement."""
        self._judged_messages = 0
        """Number of messages with a ratio so far."""
        self._last_acknowledged = -math.inf
        """Time of the previous acknowledgement, in seconds."""

    def deviates(self, size: float, posted: float, acknowledged: float) -> bool:
        """Record a message, and return whether all recent messages were slower than expected, or all faster.

        The message has ``size`` bytes on the wire, and was posted and acknowledged at these times, in seconds.
        """
        # A message waits for the previous one, whose bytes have left one latency before its acknowledgement.
        previous_left = self._last_acknowledged - self._measurement.latency
        start = max(posted, previous_left)
        self._last_acknowledged = acknowledged
        transfer_time = acknowledged - start
        expected = self._measurement.seconds(size)
        if max(transfer_time, expected) < MIN_MESSAGE_TIME:
            return False
        ratio = math.inf
        if expected:
            ratio = transfer_time / expected
        self._ratios.append(ratio)
        self._judged_messages += 1
        # After a measurement that shared the link all messages look fast. A faster link must be faster than even those.
        if self._judged_messages <= RECENT_MESSAGES:
            self._smallest_initial_ratio = min(self._smallest_initial_ratio, ratio)
        if len(self._ratios) < RECENT_MESSAGES:
            return False
        is_slower = min(self._ratios) > DEVIATION_FACTOR
        fast_ratio = self._smallest_initial_ratio / DEVIATION_FACTOR
        is_faster = max(self._ratios) < fast_ratio
        return is_slower or is_faster


async def measure_link(mailbox: Mailbox, peer: str) -> MeasuredLink:
    """Measure the link to a peer: the rate follows from the additional time of a larger message.

    Both times contain the delay of the link, so their difference does not. Messages grow until one takes
    `MIN_EXTRA_TIME` longer than the small one: a slow link is not kept busy for long, and a fast link is not measured
    by its jitter. The messages are posted, so a message to an unreachable peer becomes overdue like any other.
    """

    async def transfer_time(size: int) -> float:
        """Return the seconds until a message with ``size`` bytes of payload is acknowledged."""
        packet = Packet(mailbox.configuration, padding=size)
        start = mailbox.device.now()
        await mailbox.post(peer, packet)
        return mailbox.device.now() - start

    # The first message opens the connection, which would count as time of a measured message.
    await transfer_time(SMALL_MESSAGE)
    latency = await transfer_time(SMALL_MESSAGE)
    size = SMALL_MESSAGE
    extra_time = 0.0
    while extra_time < MIN_EXTRA_TIME and size < LARGE_MESSAGE:
        size = min(LARGE_MESSAGE, 4 * size)
        extra_time = await transfer_time(size) - latency
    rate = math.inf
    if extra_time > 0:
        extra_bytes = wire_bytes(size) - wire_bytes(SMALL_MESSAGE)
        rate = 8 * extra_bytes / extra_time
    return MeasuredLink(rate, latency)


class LinkProfiler:
    """The measurements arranged by the coordinator for the partitioner.

    Units, and links without a measurement, are measured while the pipeline is empty; links to standby devices, which
    have no stage, during training.
    """

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
        self._profile_runs = partitioner.profile_runs
        """Profiling runs of each unit that are still to be done: all or none."""
        self._awaited: set[Pair] = set()
        """Links with a measurement under way."""
        self._measured_standbys: set[str] = set()
        """Standby devices whose links are being measured, or were since the last choice of a partition."""
        self._mailbox.on(Measured, self._store_rate)
        self._mailbox.on(Deviates, self._discard_rate)
        self._mailbox.on_open(self._forget_requests)

    @property
    def lacks_measurements(self) -> bool:
        """Whether the choice of a partition lacks measurements."""
        if self._profile_runs:
            return True
        partition = self._recovery.partition
        return bool(self._partitioner.unmeasured_links(partition))

    async def measure_missing(self) -> None:
        """Make all missing measurements while training pauses; links are measured at once, as in training."""
        if self._profile_runs:
            # Any batch will do, since the time does not depend on the values.
            images, labels = self._training.batch(0)
            times = await profile_units(
                device=self._supervisor.device,
                problem=self._problem,
                images=images,
                labels=labels,
                runs=self._profile_runs,
            )
            self._profile_runs = 0
            self._partitioner.store_profile(times)
            self._supervisor.device.record("profile", seconds=list(times.execution))
        pairs = self._partitioner.unmeasured_links(self._recovery.partition)
        self._measure_links(pairs)
        await self._supervisor.until(lambda: self._awaited.isdisjoint(pairs))

    def measure_standby(self, *, repeats: bool) -> None:
        """Make stages measure the links to standby devices that would be their neighbours.

        Training continues meanwhile. ``repeats`` includes devices that were measured before: a device that was cut off
        or too slow may become a stage again once reachable.
        """
        if repeats:
            self._measured_standbys.clear()
        stages = self._recovery.partition.devices
        awaited_targets = {target for _, target in self._awaited}
        known_devices = self._measured_standbys | awaited_targets
        devices = self._recovery.standby.devices_to_measure() - known_devices
        for device in devices:
            self._measured_standbys.add(device)
            # With a stage, the device would be between these two in the pipeline.
            row = self._recovery.ordered({*stages, device})
            pairs: list[Pair] = []
            for previous, following in pairwise(row):
                if following == device:
                    pairs.append((previous, device))
                elif previous == device:
                    pairs.append((following, device))
            self._measure_links(pairs)

    def _measure_links(self, pairs: list[Pair]) -> None:
        """Make the source of each pair measure the link to the target, unless a measurement is under way."""
        for source, target in pairs:
            if (source, target) not in self._awaited:
                self._awaited.add((source, target))
                request = Measure(self._mailbox.configuration, target)
                self._mailbox.post(source, request)

    def _store_rate(self, measured: Measured) -> None:
        source = measured.sender
        target = measured.target
        self._awaited.discard((source, target))
        rate = math.inf if measured.rate is None else measured.rate
        self._supervisor.device.record(
            "bandwidth", source=source, destination=target, rate=measured.rate
        )
        self._partitioner.store_rate((source, target), rate)
        awaited_targets = {awaited_target for _, awaited_target in self._awaited}
        # All neighbours of the target have reached it.
        if target not in awaited_targets:
            self._recovery.standby.mark_reachable(target)

    def _discard_rate(self, report: Deviates) -> None:
        self._partitioner.discard_rate(report.sender, report.target)

    def _forget_requests(self) -> None:
        """Forget measurements under way, which a new configuration cancels."""
        self._awaited.clear()
        self._measured_standbys.clear()
