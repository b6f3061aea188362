"""The stages that the source uses: assigns layers, asks for signs of life, and replaces stages that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
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
"""Devices that are there -> the row over them; raises `InputError` where the network does not fit."""


@dataclass(frozen=True)
class RowOptions:
    """Monitoring of stages, and recovery from a lost stage."""

    recovery: Literal["restart", "replay", "replicate"]
    """restart: all devices that are left get layers anew. Otherwise one device takes the layers of the lost one."""
    heartbeat: float
    """Seconds between two questions whether the stages are there."""
    patience: float
    """Seconds without an answer after which a stage counts as lost."""
    startup: float = 10.0
    """Patience until all stages hold their first layers, since devices in containers start at different times."""


@dataclass(frozen=True)
class Stage:
    """A range of layers on a device."""

    device: str
    assignment: int
    first: int
    last: int
    since: int = 0
    """Number of the loss after which it got them; 0: it has had them from the beginning."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Tokens in its caches when it got them, by request: those of which it had copies."""


class Watch:
    """Asks devices for signs of life."""

    def __init__(self, mailbox: Mailbox) -> None:
        """Hear the answers of all devices."""
        self._mailbox = mailbox
        self._question = 0
        self._answers: dict[str, Pong] = {}
        self._incarnations: dict[str, float] = {}
        mailbox.on(Pong, self._take_pong)

    def _take_pong(self, pong: Pong) -> None:
        if pong.question == self._question:
            self._answers[pong.sender] = pong

    def forget_start(self, name: str) -> None:
        """Forget the start time of a device, whose present start counts once layers are assigned."""
        self._incarnations.pop(name, None)

    async def find_lost(self, names: Collection[str], patience: float) -> set[str]:
        """Return the devices without an answer in time, or with a restart since layers were assigned."""
        device, sends = self._mailbox.device, self._mailbox.sends
        self._question += 1
        self._answers.clear()
        pings = {name: self._mailbox.post(name, Ping(self._question)) for name in names}
        # A ping waits for the messages before it on the link, which may take longer than the patience.
        deadline = {name: sends.due(name) + patience for name in names}
        while silent := set(names) - self._answers.keys():
            left = max(deadline[name] for name in silent) - device.now()
            if left <= 0:
                break
            await self._mailbox.changed(left)
        lost = set(names) - self._answers.keys()
        for name in lost:
            # A message to a dead device would be under way until the end of the run.
            pings[name].cancel()
        for name, pong in self._answers.items():
            if (
                self._incarnations.setdefault(name, pong.incarnation)
                != pong.incarnation
            ):
                lost.add(name)
        return lost


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
        """``devices`` may hold layers, the source first; ``room`` returns for how many layers one has memory.

        ``weights`` are sent to a device with an assignment; empty: it has them.
        """
        self.stages: list[Stage] = []
        self.losses = 0
        """How often stages were lost and replaced."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._there = list(devices)
        self._plan = plan
        self._room = room
        self._options = options
        self._weights = weights
        self._numbers = count(1)
        self._watch = Watch(mailbox)
        self._whole = asyncio.Event()
        self._has_begun = False
        """Whether all stages have held their layers once."""
        self._loss = 0
        """How often stages were lost, the present loss included."""

    async def assign_layers(self) -> None:
        """Assign the planned layers, and watch the stages from then on. Raises `TestbedError`."""
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
        """Let all stages forget the caches of a request."""
        for stage in self.stages:
            self._mailbox.post(stage.device, Release(request))

    async def _assign_all(self) -> None:
        """Assign layers to the reachable devices, again without each device lost meanwhile."""
        while True:
            try:
                planned = self._plan(self._there)
            except InputError as error:
                raise TestbedError(
                    f"too few devices are left for the network: {error}"
                ) from error
            first = 0
            stages = []
            # Numbers of assignments are never used again, so that a late answer is not taken for a new one.
            for name, layers in planned:
                stages.append(
                    Stage(name, next(self._numbers), first, first + layers, self._loss)
                )
                first += layers
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
            # The last stage of a ring has no layers: the one before it ends with the same layer, and is not the last.
            final = stage.first == row[-1].first
            assign = Assign(
                stage.assignment,
                stage.first,
                stage.last,
                final,
                self._replica_of(stage, row),
                oldest,
            )
            self._mailbox.post(
                stage.device,
                replace(assign, weights=self._weights(stage.device, assign)),
            )
            waiting[stage.assignment] = stage
        self.stages = row
        while waiting:
            done = await self._mailbox.take(
                Assigned, deadline=self._device.now() + self._options.heartbeat
            )
            if done is None:
                # A device that dies while it loads never answers, and is not watched before the row is whole.
                lost = await self._find_lost(
                    {stage.device for stage in waiting.values()}
                )
                if lost:
                    return lost
            elif done.assignment in waiting:
                stage = waiting.pop(done.assignment)
                self.stages[self.stages.index(stage)] = replace(stage, held=done.held)
        self.losses = self._loss
        self._whole.set()
        return set()

    def _replica_of(self, stage: Stage, row: list[Stage]) -> str | None:
        """Return the receiver of copies of a stage's caches: the next device, after the last one the first."""
        if self._options.recovery != "replicate" or len(row) < 2:
            return None
        following = row[(row.index(stage) + 1) % len(row)].device
        return following if following != stage.device else None

    async def _find_lost(self, names: set[str]) -> set[str]:
        options = self._options
        patience = options.patience
        if not self._has_begun:
            patience = max(options.startup, patience)
        return await self._watch.find_lost(names - {self._device.name}, patience)

    def _forget_devices(self, lost: set[str]) -> None:
        self._there = [name for name in self._there if name not in lost]

    # Losses

    async def _keep_watch(self) -> None:
        while True:
            await self._device.sleep(self._options.heartbeat)
            lost = await self._find_lost({stage.device for stage in self.stages})
            if lost:
                await self._recover_from(lost)

    async def _recover_from(self, lost: set[str]) -> None:
        """Go on without the lost devices. Raises `TestbedError` where the layers fit nowhere else."""
        _LOG.info("lost: %s", ", ".join(sorted(lost)))
        self._device.record("recovery", phase="detected", missing=sorted(lost))
        self._whole.clear()
        self._loss += 1
        self._forget_devices(lost)
        if self._options.recovery == "restart":
            await self._assign_all()
        else:
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
            if stage.device not in self._there:
                name = self._substitute_for(stage, row)
                row[index] = Stage(
                    name, next(self._numbers), stage.first, stage.last, self._loss
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
        if replica in self._there and room_left(replica) >= layers:
            return replica
        emptiest = max(self._there, key=room_left)
        if room_left(emptiest) < layers:
            raise TestbedError(
                f"no device has room for the {layers} layers of {lost.device}: the emptiest is {emptiest} with room "
                f"for {room_left(emptiest)}: add a spare device or more memory"
            )
        return emptiest
