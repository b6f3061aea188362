"""Measurements at run time: the time of each unit, link rates, and the reachability of standby devices.

A unit is the smallest part of a model that moves between devices, and a stage is a device of the pipeline with its
units. FTPipeHD's coordinator profiles the units and the links before training (Section III-B of the paper on FTPipeHD),
and chooses partitions by the results. Here links are watched as well: if regular messages over a link take longer or
shorter than the measured rate predicts, the link is measured again. A link is one direction, from a sender to a
receiver.
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
"""Bytes of payload of the smallest message in the measurement of a link: one packet, whose time is mostly the delay."""
LARGE_MESSAGE = 256_000
"""Bytes of payload of the largest message in the measurement of a link: about a quarter of the message size that every
device accepts in spite of its memory (`testbed.hardware.largest_message`)."""
SIZE_FACTOR = 4
"""Factor between successive message sizes of a measurement: four messages lead from the smallest size to the largest.
"""
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
    """Train on one batch ``runs`` times with separately timed units; return the mean seconds of each unit.

    ``images`` are (samples, channels, height, width), ``labels`` (samples,). The trained weights are discarded.
    """
    units = problem.model.units
    count = len(units)
    samples = len(labels)
    # The weight of the whole batch, by which the loss is divided.
    total_weight = problem.training.weight(labels)
    # A shard computes successive units: here one, since units are timed one by one.
    shards = []
    for unit in range(count):
        shards.append(make_shard(problem, unit, unit + 1, device.name))
    single_units = [units[unit : unit + 1] for unit in range(count)]
    forward = [0.0] * count
    backward = [0.0] * count
    update = [0.0] * count

    async def compute_timed(
        means: list[float],
        unit: int,
        work: Callable[[], T],
        cost: Cost,
    ) -> T:
        """Compute, and add the duration divided by the number of runs to ``means[unit]``."""
        start = device.now()
        result = await device.compute(work, cost, Span("profile"))
        means[unit] += (device.now() - start) / runs
        return result

    for run in range(runs):
        # Each run is a batch of one micro-batch.
        key = (run, 0)
        values = images
        for unit, shard in enumerate(shards):
            cost = costs.forward_cost(single_units[unit], samples)
            if unit + 1 < count:
                run_forward = partial(shard.forward, key, values)
                values = await compute_timed(forward, unit, run_forward, cost)
            else:
                run_loss = partial(
                    shard.forward_loss, key, values, labels, total_weight
                )
                await compute_timed(forward, unit, run_loss, cost)
        gradient: torch.Tensor | None = None
        for unit in reversed(range(count)):
            shard = shards[unit]
            run_backward = partial(shard.backward, key, gradient)
            cost = costs.backward_cost(single_units[unit], samples)
            gradient = await compute_timed(backward, unit, run_backward, cost)
            run_update = partial(shard.update, run)
            cost = costs.update_cost(single_units[unit], problem.training)
            await compute_timed(update, unit, run_update, cost)
    return UnitTimes(tuple(forward), tuple(backward), tuple(update))


@dataclass(frozen=True)
class MeasuredLink:
    """The measured rate of a link, and the time of a small message."""

    rate: float
    """Bit/s on the wire; infinite if sending takes no measurable time."""
    small_seconds: float
    """Seconds until a message of `SMALL_MESSAGE` bytes is acknowledged."""

    def seconds(self, size: float) -> float:
        """Return the expected seconds until a message of ``size`` bytes on the wire is acknowledged."""
        extra_bytes = size - wire_bytes(SMALL_MESSAGE)
        return max(0.0, self.small_seconds + 8 * extra_bytes / self.rate)


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
        # A message waits until the bytes of the previous message have left. From then on, the acknowledgement of these
        # bytes takes about as long as the acknowledgement of a small message.
        previous_left = self._last_acknowledged - self._measurement.small_seconds
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
        # After a measurement that shared the link with other messages, all regular messages look fast. Only messages
        # that are faster than the first regular ones show that the link itself has become faster.
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
        # Posting alone would not wait for the acknowledgement.
        await mailbox.post(peer, packet)
        return mailbox.device.now() - start

    # The first message opens the connection, which would count as time of a measured message.
    await transfer_time(SMALL_MESSAGE)
    small_seconds = await transfer_time(SMALL_MESSAGE)
    size = SMALL_MESSAGE
    extra_time = 0.0
    while extra_time < MIN_EXTRA_TIME and size < LARGE_MESSAGE:
        size = min(LARGE_MESSAGE, SIZE_FACTOR * size)
        extra_time = await transfer_time(size) - small_seconds
    rate = math.inf
    if extra_time > 0:
        extra_bytes = wire_bytes(size) - wire_bytes(SMALL_MESSAGE)
        rate = 8 * extra_bytes / extra_time
    return MeasuredLink(rate, small_seconds)


class Profiler:
    """The measurements of units and links arranged by the coordinator for the partitioner.

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
        self._mailbox.on(Measured, self._take_measurement)
        self._mailbox.on(Deviates, self._discard_rate)
        # Called at the beginning of each new configuration, which assigns new stages.
        self._mailbox.on_open(self._forget_measurements)

    @property
    def lacks_measurements(self) -> bool:
        """Whether the choice of a partition lacks measurements."""
        if self._profile_runs:
            return True
        partition = self._recovery.partition
        return bool(self._partitioner.unmeasured_links(partition))

    async def measure_missing(self) -> None:
        """Make all missing measurements while training pauses.

        All links are measured at the same time, since training uses them at the same time, too.
        """
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

        Training continues meanwhile. ``repeats`` includes devices that were measured before; training passes true
        whenever a new choice of the partition is due. A device that was cut off or too slow may become a stage again
        once reachable.
        """
        if repeats:
            self._measured_standbys.clear()
        stages = self._recovery.partition.devices
        awaited_receivers = {receiver for _, receiver in self._awaited}
        known_devices = self._measured_standbys | awaited_receivers
        devices = self._recovery.standby.devices_to_measure() - known_devices
        for device in devices:
            self._measured_standbys.add(device)
            # The order of a pipeline in which the standby device is a stage, too.
            pipeline = self._recovery.ordered({*stages, device})
            pairs: list[Pair] = []
            for previous, following in pairwise(pipeline):
                if following == device:
                    pairs.append((previous, device))
                elif previous == device:
                    pairs.append((following, device))
            self._measure_links(pairs)

    def _measure_links(self, pairs: list[Pair]) -> None:
        """Make the sender of each pair measure the link to the receiver, unless a measurement is under way."""
        for sender, receiver in pairs:
            if (sender, receiver) not in self._awaited:
                self._awaited.add((sender, receiver))
                request = Measure(self._mailbox.configuration, receiver)
                # Not awaited: the result arrives later, as a message of its own (`Measured`).
                self._mailbox.post(sender, request)

    def _take_measurement(self, measured: Measured) -> None:
        """Store the rate of a link, and mark the receiver as reachable after the last measurement of its links."""
        sender = measured.sender
        receiver = measured.target
        self._awaited.discard((sender, receiver))
        # None stands for infinity, which a message in JSON cannot contain.
        rate = math.inf if measured.rate is None else measured.rate
        self._supervisor.device.record(
            "bandwidth", source=sender, destination=receiver, rate=measured.rate
        )
        self._partitioner.store_rate((sender, receiver), rate)
        awaited_receivers = {awaited for _, awaited in self._awaited}
        # All neighbours of the receiver have reached it.
        if receiver not in awaited_receivers:
            self._recovery.standby.mark_reachable(receiver)

    def _discard_rate(self, report: Deviates) -> None:
        self._partitioner.discard_rate(report.sender, report.target)

    def _forget_measurements(self) -> None:
        """Forget measurements under way, which a new configuration cancels, and measured standby devices."""
        self._awaited.clear()
        # Their neighbours may be others in the new configuration.
        self._measured_standbys.clear()
