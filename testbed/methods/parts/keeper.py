"""What every device of an asynchronous pipeline does: prepare and commit configurations, keep replicas."""

from __future__ import annotations

import asyncio
import math

from testbed.device import Device
from testbed.methods.base import Problem
from testbed.methods.parts import messages
from testbed.methods.parts.asynchronous import AsynchronousStage, Asynchrony
from testbed.methods.parts.background import Background
from testbed.methods.parts.former_stage import Place, Stage
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.profiling import bandwidth
from testbed.methods.parts.replicas import Inventory, Point, Replicas
from testbed.methods.parts.worker import Duty, Worker
from testbed.wire import Message


class Keeper(Worker):
    """A worker whose replicas outlive its configurations: where training goes on from is made of them alone.

    Between ``configure`` and ``commit`` it has whatever it had before: others may fetch it, also those of a later
    configuration if the preparation comes to nothing.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        lead: str,
        background: Background,
        outbox: Outbox,
        asynchrony: Asynchrony,
    ) -> None:
        super().__init__(device, problem, lead, background, outbox)
        self.stage: AsynchronousStage | None = None
        self.replicas = Replicas()
        self._asynchrony = asynchrony
        self._point: Point | None = None
        """Where the configuration that is prepared goes on from."""
        self._awaited: set[int] = set()
        """Units that are still to come before it can."""
        self._measuring: asyncio.Task[None] | None = None
        self._seeded = False
        """Whether its units come from the seed."""

    def handle(self, message: Message) -> None:
        """Take in a message; never waits."""
        kind = message.kind
        if kind in (messages.PROBE, messages.CONFIGURE):
            super().handle(message)
        elif message["configuration"] < self.configuration:
            return
        elif kind == messages.FETCH:
            self.enter(message["configuration"])
            self._hand_out(message)
        elif kind == messages.REPLICA:
            point = Point(message["configuration"], message["step"])
            self.replicas.put(point, message.tensors, [message["unit"]])
        elif kind == messages.KEEP:
            self.replicas.keep(_points(message))
        elif self.stage is not None and message["configuration"] == self.stage.place.configuration:
            self._handle_as_stage(self.stage, message)

    def _handle_as_stage(self, stage: Stage, message: Message) -> None:
        kind = message.kind
        if kind == messages.UNIT:
            self._take_in(message)
        elif kind == messages.COMMIT:
            self._commit(stage, message)
        elif kind == messages.MEASURE:
            self._measuring = self.background.start(self._measure(message["configuration"], message["target"]))
        elif kind != messages.PACKET:
            stage.put(message)

    def _busy(self, stage: Duty | None) -> bool:
        return super()._busy(stage) or self.outbox.waiting()

    def save(self, name: str, message: Message) -> None:
        """Write to the device's disk while other things go on."""
        self.background.start(self._device.save(name, message))

    def enter(self, configuration: int) -> None:
        """Give up everything that belongs to a lower configuration."""
        if configuration > self.configuration and self._measuring is not None:
            self._measuring.cancel()
        super().enter(configuration)

    def _held(self) -> Inventory:
        return self.replicas.inventory()

    def _duty(self, message: Message) -> AsynchronousStage:
        stages = tuple((device, first, last) for device, first, last in message["stages"])
        index = [device for device, _, _ in stages].index(self._device.name)
        place = Place(message["configuration"], self.lead, stages, index, message["steps"])
        return AsynchronousStage(
            self._device, self._problem, place, self.outbox, self._asynchrony, self.replicas, self.incarnation
        )

    def _configure(self, message: Message) -> None:
        if self.stage is not None or message["configuration"] < self.configuration:
            return
        self.stage = self._duty(message)
        self._point = Point(message["made"], message["step"])
        self._seeded = message["seeded"]
        self._awaited = {unit for units in message["fetch"].values() for unit in units}
        for holder, units in message["fetch"].items():
            self.outbox.post(
                holder,
                messages.FETCH,
                configuration=self.configuration,
                made=self._point.configuration,
                step=self._point.step,
                units=units,
            )
        self._report()

    async def _measure(self, configuration: int, peer: str) -> None:
        """Measure the link to a peer and tell the lead; a number that JSON has no name for is None."""
        rate = await bandwidth(self._device, self.outbox, peer, configuration)
        finite = None if math.isinf(rate) else rate
        self.outbox.post(self.lead, messages.MEASURED, configuration=configuration, target=peer, rate=finite)

    def _hand_out(self, message: Message) -> None:
        point = Point(message["made"], message["step"])
        if not self.replicas.units(point) >= set(message["units"]):
            return  # it has started anew since it said what it has, and the lead is about to learn that
        for unit in message["units"]:
            state = self.replicas.state(point, [unit])
            fields = {"made": point.configuration, "step": point.step, "unit": unit}
            self.outbox.post(message.sender, messages.UNIT, state, configuration=message["configuration"], **fields)

    def _take_in(self, message: Message) -> None:
        self.replicas.put(Point(message["made"], message["step"]), message.tensors, [message["unit"]])
        self._awaited.discard(message["unit"])
        assert self.stage is not None
        self.stage.actions += 1
        self._report()

    def _report(self) -> None:
        """Say that all that the new configuration needs is here, once it is."""
        if not self._awaited:
            self.outbox.post(
                self.lead, messages.CONFIGURED, configuration=self.configuration, incarnation=self.incarnation
            )

    def _commit(self, stage: Stage, message: Message) -> None:
        assert self._point is not None
        state = None if self._seeded else self.replicas.state(self._point, range(*stage.place.units))
        self.replicas.clear_but(_points(message))
        self._running = self.background.start(stage.run(state))


def _points(message: Message) -> list[Point]:
    return [Point(made, step) for made, step in message["keep"]]
