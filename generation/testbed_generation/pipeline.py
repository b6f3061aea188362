"""The stages of a pipeline as the coordinator manages them: it assigns layers, detects losses and replaces stages.

A loss is an event in which one or more devices with stages fail or restart. `FailureDetector` detects losses by pings,
and `Pipeline` repairs them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from torch import Tensor

from testbed.common.errors import InputError, TestbedError
from testbed.messaging.mailbox import Mailbox
from testbed_generation.messages import Assign, Assigned, Ping, Pong, Release
from testbed_generation.placement import LayerCounts

_LOG = logging.getLogger(__name__)

DivideLayers = Callable[[Collection[str]], LayerCounts]
"""Function that divides the layers among reachable devices; raises `InputError` if the model does not fit into memory.
"""


@dataclass(frozen=True)
class PipelineOptions:
    """Times for the detection of lost stages, and the kind of recovery."""

    recovery: Literal["restart", "replay", "replicate"]
    """restart: all layers are assigned again to the remaining devices. Otherwise one device replaces the lost one."""
    heartbeat: float
    """Interval between health checks of the stages in seconds."""
    failure_timeout: float
    """Seconds without an answer after which a stage counts as lost."""
    startup_timeout: float = 10.0
    """Failure timeout until all stages hold their first layers: devices in containers start at different times."""


@dataclass(frozen=True)
class Stage:
    """A range of layers on a device."""

    device: str
    assignment: int
    """Number of the message that assigned the layers; no two assignments of a run have the same number."""
    start: int
    """First layer."""
    stop: int
    """The layer after the last one."""
    loss_number: int = 0
    """Number of the loss after which the device got these layers; 0: it has had them from the beginning."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """By request, the number of tokens in the KV caches when the device got these layers.

    These are the tokens of which the device had copies.
    """

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stop - self.start


class FailureDetector:
    """Pings devices in rounds, and reports lost devices."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._question = 0
        """Number of the newest round of pings."""
        self._answers: dict[str, Pong] = {}
        """Answers to the newest round of pings, by device."""
        self._incarnations: dict[str, float] = {}
        """Start time of each device's program, as in its first answer after its layers were assigned."""
        mailbox.on(Pong, self._store_pong)

    def _store_pong(self, pong: Pong) -> None:
        # A late answer to an earlier ping does not show that the device is alive now.
        if pong.question == self._question:
            self._answers[pong.sender] = pong

    def forget_start(self, name: str) -> None:
        """Forget the start time of a device that gets new layers, so that its next answer defines the start time."""
        self._incarnations.pop(name, None)

    async def find_lost(
        self, names: Collection[str], failure_timeout: float
    ) -> set[str]:
        """Return the devices that do not answer in time, or have restarted since their layers were assigned."""
        self._question += 1
        self._answers.clear()
        pings = {}
        for name in names:
            pings[name] = self._mailbox.post(name, Ping(self._question))
        await self._wait_for_answers(names, failure_timeout)
        lost = set(names) - self._answers.keys()
        for name, ping in pings.items():
            if name in lost:
                # A message to a dead device would be in transit until the end of the run.
                ping.cancel()
        for name, pong in self._answers.items():
            first_incarnation = self._incarnations.setdefault(name, pong.incarnation)
            # A restarted device answers, but has lost its layers.
            if pong.incarnation != first_incarnation:
                lost.add(name)
        return lost

    async def _wait_for_answers(
        self, names: Collection[str], failure_timeout: float
    ) -> None:
        """Wait until all devices have answered, or until the last deadline of the silent devices."""
        device, outbox = self._mailbox.device, self._mailbox.outbox
        deadlines = {}
        for name in names:
            # A ping waits for the messages before it on the link, which may take longer than the timeout.
            deadlines[name] = outbox.acknowledgement_deadline(name) + failure_timeout
        while silent := set(names) - self._answers.keys():
            remaining = max(deadlines[name] for name in silent) - device.now()
            if remaining <= 0:
                return
            await self._mailbox.changed(remaining)


class Pipeline:
    """The current stages in the order of their layers."""

    def __init__(
        self,
        mailbox: Mailbox,
        devices: Sequence[str],
        divide_layers: DivideLayers,
        layer_capacity: Callable[[str], int],
        options: PipelineOptions,
        weights_to_send: Callable[[str, Assign], Mapping[str, Tensor]],
    ) -> None:
        """Register the handlers of messages; `assign_layers` creates the stages.

        Args:
            mailbox: mailbox of the coordinator.
            devices: names of all devices, spares included, the coordinator first.
            divide_layers: function that divides the layers among the reachable devices.
            layer_capacity: function of a device that returns the number of layers for which it has memory.
            options: kind of recovery, and times.
            weights_to_send: function of a device and its assignment that returns the weights for the message; empty if
                the device has these weights.
        """
        self.stages: list[Stage] = []
        """The current stages."""
        self.losses = 0
        """Number of losses that have been repaired."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._reachable = list(devices)
        self._divide_layers = divide_layers
        self._layer_capacity = layer_capacity
        self._options = options
        self._weights_to_send = weights_to_send
        self._assignment_numbers = count(1)
        self._detector = FailureDetector(mailbox)
        self._ready_event = asyncio.Event()
        self._has_started = False
        """Whether all stages have had their layers at some time."""
        self._loss_number = 0
        """Number of losses so far, including a loss that is being repaired."""

    async def assign_layers(self) -> None:
        """Assign the planned layers, and monitor the stages from then on.

        Raises `TestbedError` if the model does not fit into the memory of the reachable devices.
        """
        await self._assign_all()
        self._has_started = True
        self._mailbox.start(self._monitor_stages())

    async def wait_until_ready(self) -> None:
        """Wait until all stages hold their layers."""
        await self._ready_event.wait()

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layer of each current stage: the cuts at which the layers are divided."""
        return tuple(stage.start for stage in self.stages)

    def stage_at(self, first_layer: int) -> Stage:
        """Return the stage beginning with a layer. Raises ValueError if no current stage begins with the layer."""
        return self.stages[self.first_layers.index(first_layer)]

    def release_request(self, request: int) -> None:
        """Ask all stages to drop the caches of a request."""
        for stage in self.stages:
            self._mailbox.post(stage.device, Release(request))

    async def _assign_all(self) -> None:
        """Assign all layers to the reachable devices; repeat this without devices that are lost meanwhile."""
        while True:
            try:
                layer_counts = self._divide_layers(self._reachable)
            except InputError as error:
                raise TestbedError(
                    f"too few devices are left for the model: {error}"
                ) from error
            stages = self._make_stages(layer_counts)
            # Devices drop all earlier assignments; the first assignment has no earlier ones.
            oldest = stages[0].assignment if stages[0].assignment > 1 else None
            lost = await self._assign_stages(stages, stages, oldest)
            if not lost:
                return
            self._forget_devices(lost)

    def _make_stages(self, layer_counts: LayerCounts) -> list[Stage]:
        stages = []
        start = 0
        for name, layers in layer_counts:
            # Numbers of assignments are never used again, so that a late answer is not taken for a new one.
            number = next(self._assignment_numbers)
            stop = start + layers
            stages.append(Stage(name, number, start, stop, self._loss_number))
            start = stop
        return stages

    async def _assign_stages(
        self,
        changed_stages: Sequence[Stage],
        stages: list[Stage],
        oldest: int | None = None,
    ) -> set[str]:
        """Make ``stages`` the current ones, and assign the layers of ``changed_stages``; return devices lost meanwhile.

        Devices drop assignments before number ``oldest``.
        """
        loading = {}
        """Stages that have not loaded their layers yet, by number of the assignment."""
        for stage in changed_stages:
            self._detector.forget_start(stage.device)
            assign = Assign(
                stage.assignment,
                stage.start,
                stage.stop,
                # Compared by the first layer: the last stage of a ring has no layers, so the stage before it has the
                # same last layer.
                final=stage.start == stages[-1].start,
                replica=self._replica_of(stage, stages),
                oldest=oldest,
            )
            weights = self._weights_to_send(stage.device, assign)
            self._mailbox.post(stage.device, replace(assign, weights=weights))
            loading[stage.assignment] = stage
        self.stages = stages
        while loading:
            deadline = self._device.now() + self._options.heartbeat
            assigned = await self._mailbox.take(Assigned, deadline=deadline)
            if assigned is None:
                # A device that dies while it loads never answers, and no other check runs before all stages are ready.
                lost = await self._find_lost(loading.values())
                if lost:
                    return lost
            elif assigned.assignment in loading:
                stage = loading.pop(assigned.assignment)
                index = self.stages.index(stage)
                self.stages[index] = replace(stage, cached_tokens=assigned.held)
        self.losses = self._loss_number
        self._ready_event.set()
        return set()

    def _replica_of(self, stage: Stage, stages: list[Stage]) -> str | None:
        """Return the receiver of copies of a stage's caches: the next device; for the last stage the first device."""
        if self._options.recovery != "replicate" or len(stages) < 2:
            return None
        next_index = (stages.index(stage) + 1) % len(stages)
        next_device = stages[next_index].device
        # A copy on the same device would be lost together with the original.
        return next_device if next_device != stage.device else None

    async def _find_lost(self, stages: Iterable[Stage]) -> set[str]:
        """Return the lost devices of ``stages``, without the coordinator."""
        failure_timeout = self._options.failure_timeout
        if not self._has_started:
            failure_timeout = max(self._options.startup_timeout, failure_timeout)
        # The dictionary is an ordered set: pings are sent in the order of the stages in every run with the same seed.
        names = dict.fromkeys(stage.device for stage in stages)
        # The coordinator runs this program: a run without it has ended.
        names.pop(self._device.name, None)
        return await self._detector.find_lost(names, failure_timeout)

    def _forget_devices(self, lost: set[str]) -> None:
        self._reachable = [name for name in self._reachable if name not in lost]

    async def _monitor_stages(self) -> None:
        while True:
            await self._device.sleep(self._options.heartbeat)
            lost = await self._find_lost(self.stages)
            if lost:
                await self._recover_from(lost)

    async def _recover_from(self, lost: set[str]) -> None:
        """Replace the lost stages. Raises `TestbedError` if no device has room for their layers."""
        _LOG.info("lost: %s", ", ".join(sorted(lost)))
        self._device.record("recovery", phase="detected", missing=sorted(lost))
        # From here on, requests wait until all stages hold their layers again.
        self._ready_event.clear()
        self._loss_number += 1
        self._forget_devices(lost)
        if self._options.recovery == "restart":
            await self._assign_all()
        else:
            # A substitute may be lost while it loads the layers.
            while lost:
                lost = await self._replace_lost()
                self._forget_devices(lost)
        partition = [[stage.device, stage.start, stage.stop] for stage in self.stages]
        self._device.record("recovery", phase="resumed", partition=partition)

    async def _replace_lost(self) -> set[str]:
        """Assign the layers of lost stages to reachable devices; return devices lost meanwhile."""
        stages = list(self.stages)
        substitutes = []
        for index, stage in enumerate(stages):
            if stage.device in self._reachable:
                continue
            substitute = Stage(
                self._choose_substitute(stage, stages),
                next(self._assignment_numbers),
                stage.start,
                stage.stop,
                self._loss_number,
            )
            stages[index] = substitute
            substitutes.append(substitute)
        return await self._assign_stages(substitutes, stages)

    def _choose_substitute(self, lost: Stage, stages: list[Stage]) -> str:
        """Return the device that replaces a lost stage: the one with copies of the caches, or else the emptiest one.

        Raises `TestbedError` if the layers of the stage fit into no device.
        """

        def free_capacity(name: str) -> int:
            """Return the number of further layers for which a device has memory."""
            capacity = self._layer_capacity(name)
            for stage in stages:
                if stage.device == name:
                    capacity -= stage.layers
            return capacity

        replica = self._replica_of(lost, stages)
        # If the substitute has copies of the caches, no token has to be computed again.
        if replica in self._reachable and free_capacity(replica) >= lost.layers:
            return replica
        emptiest = max(self._reachable, key=free_capacity)
        if free_capacity(emptiest) < lost.layers:
            raise TestbedError(
                f"no device has room for the {lost.layers} layers of {lost.device}: the emptiest is {emptiest} with "
                f"room for {free_capacity(emptiest)}: add a spare device or more memory"
            )
        return emptiest
