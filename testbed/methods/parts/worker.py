"""What every device does for the lead: answers it, and is the stage that it is told to be."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol

from testbed.device import Device
from testbed.methods.base import Problem
from testbed.methods.parts import messages
from testbed.methods.parts.background import Background
from testbed.methods.parts.former_stage import Place, Routine, Stage
from testbed.methods.parts.membership import Held as Inventory
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.shard import State
from testbed.wire import Message


class Duty(Protocol):
    """What a device is in one configuration, such as a stage."""

    actions: int
    """Pieces of work done: rises as long as it gets on."""
    computing: bool
    """Whether the device computes for it right now."""

    @property
    def configuration(self) -> int:
        """The configuration that it lasts for."""

    def put(self, message: Message) -> None:
        """Take in a message of this configuration."""

    async def run(self, state: State | None) -> None:
        """Get ready, from a state or from the seed, say so to the lead, and work until cancelled."""


class Worker(ABC):
    """One device from the start of its program on; knows nothing from before.

    A configuration higher than its own ends what it is doing, whether a probe or a configure message brings it:
    the lead has given that up.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        lead: str,
        background: Background,
        outbox: Outbox,
    ) -> None:
        self.incarnation = device.now()
        """When this program started: tells it from the one before a restart."""
        self.configuration = 0
        """The highest heard of."""
        self.stage: Duty | None = None
        self._device = device
        self._problem = problem
        self.lead = lead
        self.background = background
        self.outbox = outbox
        self._running: asyncio.Task[None] | None = None

    def greet(self) -> None:
        """Tell the lead that this device has started and holds nothing."""
        self.outbox.post(self.lead, messages.HELLO, incarnation=self.incarnation)

    def handle(self, message: Message) -> None:
        """Take in a message; never waits."""
        if message.kind == messages.PROBE:
            held = self.stage
            self.enter(message["configuration"])
            self._answer(message, held)
        elif message.kind == messages.CONFIGURE:
            self.enter(message["configuration"])
            self._configure(message)
        elif self.stage is not None and message["configuration"] == self.stage.configuration:
            self.stage.put(message)

    def enter(self, configuration: int) -> None:
        """Give up everything that belongs to a lower configuration."""
        if configuration <= self.configuration:
            return
        self.configuration = configuration
        self.stage = None
        if self._running is not None:
            self._running.cancel()
        self.outbox.withdraw()

    def _answer(self, probe: Message, stage: Duty | None) -> None:
        self.outbox.post(
            self.lead,
            messages.ALIVE,
            configuration=probe["configuration"],
            question=probe["question"],
            holds=stage.configuration if stage else 0,
            incarnation=self.incarnation,
            actions=stage.actions if stage else 0,
            computing=self._busy(stage),
            overdue=self.outbox.overdue(),
            held=self._held(),
        )

    def _busy(self, stage: Duty | None) -> bool:
        """Say whether this device is doing something that may take long."""
        return stage is not None and stage.computing

    def _held(self) -> Inventory:
        """Say which replicas this device has."""
        return []

    def _configure(self, message: Message) -> None:
        if self.stage is not None or message["configuration"] < self.configuration:
            return
        self.stage = self._duty(message)
        self._running = self.background.start(self.stage.run(message.tensors if message["given"] else None))

    @abstractmethod
    def _duty(self, message: Message) -> Duty:
        """Return what a configure message tells the device to be."""


class StageWorker(Worker):
    """One whose duties are stages."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        lead: str,
        background: Background,
        outbox: Outbox,
        routine: Routine | None,
    ) -> None:
        super().__init__(device, problem, lead, background, outbox)
        self._routine = routine

    def _duty(self, message: Message) -> Stage:
        stages = tuple((device, first, last) for device, first, last in message["stages"])
        index = [device for device, _, _ in stages].index(self._device.name)
        place = Place(message["configuration"], self.lead, stages, index, message["steps"])
        return Stage(self._device, self._problem, place, self.outbox, self._routine, self.incarnation)
