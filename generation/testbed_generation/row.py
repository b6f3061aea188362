"""The stages that the source uses: assigns layers, asks for signs of life, and replaces stages that are lost."""

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
from testbed_generation.placement import Layers

_LOG = logging.getLogger(__name__)

Planner = Callable[[Collection[str]], Layers]
"""Function that divides the layers over the reachable devices; raises `InputError` where the network does not fit."""


@dataclass(frozen=True)
class RowOptions:
    """Monitoring of stages, and recovery from a lost stage."""

    recovery: Literal["restart", "replay", "replicate"]
    """restart: all remaining devices get layers anew. Otherwise one device takes the layers of the lost one."""
    heartbeat: float
    """Seconds between two rounds of pings."""
    patience: float
    """Seconds without an answer after which a stage counts as lost."""
    startup: float = 10.0
    """Patience in seconds until all stages hold their first layers: devices in containers start at different times."""


@dataclass(frozen=True)
class Stage:
    """A range of layers on a device."""

    device: str
    assignment: int
    """Number of the message that assigned the layers; no two assignments of a run have the same number."""
    first: int
    last: int
    """The layer after the last one."""
    since: int = 0
    """Number of the loss after which the device got these layers; 0: it has had them from the beginning."""
    held: Mapping[str, int] = field(default_factory=dict)
    """By request, the number of tokens in the KV caches when the device got these layers: those that it had copies of.
    """


class Watch:
    """Pings devices, and finds those that are lost."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._question = 0
        """Number of the last round of pings."""
        self._answers: dict[str, Pong] = {}
        """Answers to the last round, by device."""
        self._incarnations: dict[str, float] = {}
        """Start time of each device's program, as in its first answer after layers were assigned."""
        mailbox.on(Pong, self._take_pong)

    def _take_pong(self, pong: Pong) -> None:
        # A late answer to an earlier round does not show that the device is alive now.
        if pong.question == self._question:
            self._answers[pong.sender] = pong

    def forget_start(self, name: str) -> None:
        """Forget the start time of a device, whose present start counts once layers are assigned."""
        self._incarnations.pop(name, None)

    async def find_lost(self, names: Collection[str], patience: float) -> set[str]:
        """Return the devices without an answer in time, or with a restart since layers were assigned."""
        self._question += 1
        self._answers.clear()
        pings = {}
        for name in names:
            pings[name] = self._mailbox.post(name, Ping(self._question))
        await self._wait_for_answers(names, patience)
        lost = set(names) - self._answers.keys()
        for name, ping in pings.items():
            if name in lost:
                # A message to a dead device would be under way until the end of the run.
                ping.cancel()
        for name, pong in self._answers.items():
            first_incarnation = self._incarnations.setdefault(name, pong.incarnation)
            # A device that has restarted answers, and has lost its layers.
            if pong.incarnation != first_incarnation:
                lost.add(name)
        return lost

    async def _wait_for_answers(self, names: Collection[str], patience: float) -> None:
        """Wait until all devices have answered, or until the last deadline of the silent ones."""
        device, sends = self._mailbox.device, self._mailbox.sends
        deadlines = {}
        for name in names:
            # A ping waits for the messages before it on the link, which may take longer than the patience.
            deadlines[name] = sends.due(name) + patience
        while silent := set(names) - self._answers.keys():
            left = max(deadlines[name] for name in silent) - device.now()
            if left <= 0:
                return
            await self._mailbox.changed(left)


class Row:
    """The present stages in the order of their layers."""

    def __init__(
        self,
        mailbox: Mailbox,
        devices: Sequence[str],
        plan: Planner,
        room: Callable[[str], int],
        options: RowOptions,
        weights: Callable[[str, Assign], Mapping[str, Tensor]],
    ) -> None:
        """``devices`` may hold layers, the source first; ``room`` returns for how many layers a device has memory.

        ``weights`` returns the weights to send to a device with an assignment; empty if the device has them.
        """
        self.stages: list[Stage] = []
        self.losses = 0
        """Number of times that stages were lost and have been replaced since."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._reachable = list(devices)
        self._plan = plan
        self._room = room
        self._options = options
        self._weights = weights
        self._numbers = count(1)
        self._watch = Watch(mailbox)
        self._whole = asyncio.Event()
        self._has_begun = False
        """Whether all stages have held their layers once."""
        self._loss_number = 0
        """Number of times that stages were lost, including a loss that is being repaired."""

    async def assign_layers(self) -> None:
        """Assign the planned layers, and watch the stages from then on.

        Raises `TestbedError` if the network does not fit on the reachable devices.
        """
        await self._assign_all()
        self._has_begun = True
        self._mailbox.start(self._keep_watch())

    async def wait_until_whole(self) -> None:
        """Wait until all stages hold their layers."""
        await self._whole.wait()

    @property
    def first_layers(self) -> tuple[int, ...]:
        """The first layers of the present stages: the cuts at which the layers are divided."""
        return tuple(stage.first for stage in self.stages)

    def stage_at(self, first: int) -> Stage:
        """Return the stage whose first layer is ``first``. Raises ValueError if no present stage begins there."""
        return self.stages[self.first_layers.index(first)]

    def release_request(self, request: int) -> None:
        """Ask all stages to forget the caches of a request."""
        for stage in self.stages:
            self._mailbox.post(stage.device, Release(request))

    async def _assign_all(self) -> None:
        """Assign layers to the reachable devices, again without each device lost meanwhile."""
        while True:
            try:
                planned = self._plan(self._reachable)
            except InputError as error:
                raise TestbedError(
                    f"too few devices are left for the network: {error}"
                ) from error
            first = 0
            stages = []
            # Numbers of assignments are never used again, so that a late answer is not taken for a new one.
            for name, layers in planned:
                number, last = next(self._numbers), first + layers
                stages.append(Stage(name, number, first, last, self._loss_number))
                first = last
            # At first there is nothing to drop.
            oldest = stages[0].assignment if stages[0].assignment > 1 else None
            lost = await self._assign_stages(stages, stages, oldest)
            if not lost:
                return
            self._forget_devices(lost)

    async def _assign_stages(
        self, wanted: Sequence[Stage], row: list[Stage], oldest: int | None = None
    ) -> set[str]:
        """Assign some stages of a row, which becomes the present one; return devices lost meanwhile.

        Assignments before number ``oldest`` become void.
        """
        waiting = {}
        for stage in wanted:
            self._watch.forget_start(stage.device)
            assign = Assign(
                stage.assignment,
                stage.first,
                stage.last,
                # The last stage of a ring has no layers: its predecessor ends with the same layer, and is not the last.
                final=stage.first == row[-1].first,
                replica=self._replica_of(stage, row),
                oldest=oldest,
            )
            weights = self._weights(stage.device, assign)
            self._mailbox.post(stage.device, replace(assign, weights=weights))
            waiting[stage.assignment] = stage
        self.stages = row
        while waiting:
            deadline = self._device.now() + self._options.heartbeat
            done = await self._mailbox.take(Assigned, deadline=deadline)
            if done is None:
                # A device that dies while it loads never answers, and is not watched before the row is whole.
                lost = await self._find_lost(waiting.values())
                if lost:
                    return lost
            elif done.assignment in waiting:
                stage = waiting.pop(done.assignment)
                self.stages[self.stages.index(stage)] = replace(stage, held=done.held)
        self.losses = self._loss_number
        self._whole.set()
        return set()

    def _replica_of(self, stage: Stage, row: list[Stage]) -> str | None:
        """Return the receiver of copies of a stage's caches: the next device, after the last one the first."""
        if self._options.recovery != "replicate" or len(row) < 2:
            return None
        following = row[(row.index(stage) + 1) % len(row)].device
        # A copy on the same device would be lost together with the original.
        return following if following != stage.device else None

    async def _find_lost(self, stages: Iterable[Stage]) -> set[str]:
        """Return the lost devices of some stages."""
        options = self._options
        patience = options.patience
        if not self._has_begun:
            patience = max(options.startup, patience)
        # The source itself is always there: a run without it has ended.
        # A dictionary as an ordered set: pings leave in the order of the stages in every run with the same seed.
        others = dict.fromkeys(stage.device for stage in stages)
        others.pop(self._device.name, None)
        return await self._watch.find_lost(others, patience)

    def _forget_devices(self, lost: set[str]) -> None:
        self._reachable = [name for name in self._reachable if name not in lost]

    # Losses

    async def _keep_watch(self) -> None:
        while True:
            await self._device.sleep(self._options.heartbeat)
            lost = await self._find_lost(self.stages)
            if lost:
                await self._recover_from(lost)

    async def _recover_from(self, lost: set[str]) -> None:
        """Replace the lost stages. Raises `TestbedError` where their layers fit nowhere else."""
        _LOG.info("lost: %s", ", ".join(sorted(lost)))
        self._device.record("recovery", phase="detected", missing=sorted(lost))
        # Requests wait from here on until all stages hold their layers again.
        self._whole.clear()
        self._loss_number += 1
        self._forget_devices(lost)
        if self._options.recovery == "restart":
            await self._assign_all()
        else:
            # A substitute may be lost while it loads the layers.
            while lost:
                lost = await self._replace_lost()
                self._forget_devices(lost)
        partition = [[stage.device, stage.first, stage.last] for stage in self.stages]
        self._device.record("recovery", phase="resumed", partition=partition)

    async def _replace_lost(self) -> set[str]:
        """Assign the layers of lost stages to reachable devices; return devices lost meanwhile."""
        row = list(self.stages)
        gaps = []
        for index, stage in enumerate(row):
            if stage.device not in self._reachable:
                name, number = self._substitute_for(stage, row), next(self._numbers)
                row[index] = Stage(
                    name, number, stage.first, stage.last, self._loss_number
                )
                gaps.append(row[index])
        return await self._assign_stages(gaps, row)

    def _substitute_for(self, lost: Stage, row: list[Stage]) -> str:
        """Return the substitute for a lost stage: the device with copies of the caches, else the emptiest."""
        layers = lost.last - lost.first

        def room_left(name: str) -> int:
            left = self._room(name)
            for stage in row:
                if stage.device == name:
                    left -= stage.last - stage.first
            return left

        replica = self._replica_of(lost, row)
        # With copies of the caches, no token is computed again.
        if replica in self._reachable and room_left(replica) >= layers:
            return replica
        emptiest = max(self._reachable, key=room_left)
        if room_left(emptiest) < layers:
            raise TestbedError(
                f"no device has room for the {layers} layers of {lost.device}: the emptiest is {emptiest} with room "
                f"for {room_left(emptiest)}: add a spare device or more memory"
            )
        return emptiest
