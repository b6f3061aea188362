"""What every device does for the lead: answers it, and is the stage that it is told to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from testbed.device import Device
from testbed.methods.parts import messages
from testbed.methods.parts.background import Background
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.shard import State
from testbed.wire import Message


class Duty(Protocol):
    """What a device is in one configuration, such as a stage."""

    @property
    def actions(self) -> int:
        """Pieces of work done: rises as long as it gets on."""

    @property
    def computing(self) -> bool:
        """Whether the device computes for it right now."""

    def put(self, message: Message) -> None:
        """Take in a message of this configuration."""

    async def run(self, state: State | None) -> None:
        """Get ready, from a state or from the seed, say so to the lead, and work until cancelled."""


MakeDuty = Callable[[Message, "Worker"], Duty]
"""From a configure message, and the worker that got it."""


class Worker:
    """One device from the start of its program on; knows nothing from before.

    A configuration higher than its own ends what it is doing, whether a probe or a configure message brings it:
    the lead has given that up.
    """

    def __init__(
        self,
        device: Device,
        lead: str,
        background: Background,
        outbox: Outbox,
        make_duty: MakeDuty,
    ) -> None:
        self.incarnation = device.now()
        """When this program started: tells it from the one before a restart."""
        self.configuration = 0
        """The highest heard of."""
        self.stage: Duty | None = None
        self.lead = lead
        self.outbox = outbox
        self._held = 0
        """The configuration of the stage."""
        self.background = background
        self._make_duty = make_duty
        self._running: asyncio.Task[None] | None = None

    def greet(self) -> None:
        """Tell the lead that this device has started and holds nothing."""
        self.outbox.post(self.lead, messages.HELLO, incarnation=self.incarnation)

    def handle(self, message: Message) -> None:
        """Take in a message; never waits."""
        if message.kind == messages.PROBE:
            held = self.stage
            number = self._held if held is not None else 0
            self.enter(message["configuration"])
            self._answer(message, held, number)
        elif message.kind == messages.CONFIGURE:
            self.enter(message["configuration"])
            self._configure(message)
        elif self.stage is not None and message["configuration"] == self._held:
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

    def _answer(self, probe: Message, stage: Duty | None, holds: int) -> None:
        self.outbox.post(
            self.lead,
            messages.ALIVE,
            configuration=probe["configuration"],
            question=probe["question"],
            holds=holds,
            incarnation=self.incarnation,
            actions=stage.actions if stage else 0,
            computing=stage is not None and stage.computing,
            overdue=self.outbox.overdue(),
        )

    def _configure(self, message: Message) -> None:
        if self.stage is not None or message["configuration"] < self.configuration:
            return
        self._held = message["configuration"]
        self.stage = self._make_duty(message, self)
        self._running = self.background.start(self.stage.run(message.tensors if message["given"] else None))
