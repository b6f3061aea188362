"""How one device carries out arrangements: neurons given to the devices that hold them now, and taken as they come."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.neurons import Neurons
from testbed.methods.versatile.arrangement import Arrangement
from testbed.methods.versatile.knowledge import Knowledge
from testbed.methods.versatile.maintenance import Maintenance
from testbed.methods.versatile.messages import Arrange, Moved
from testbed.models.slices import Channels, as_channels, pick


class Handover:
    """The neurons of one device as arrangements change.

    What a device holds is at every moment what its arrangement says: neurons that are still on their way have their
    first weights until then, and keep them if they never come, since the device that had them is dead.
    """

    def __init__(
        self, mailbox: Mailbox, knowledge: Knowledge, neurons: Neurons, maintenance: Maintenance, first: Arrangement
    ) -> None:
        """``first``: the arrangement of the plan."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._knowledge = knowledge
        self._neurons = neurons
        self._maintenance = maintenance
        self._first = first
        self._arranged: list[Arrange] = []
        self._moved: list[Moved] = []
        self._sends: list[asyncio.Future[None]] = []
        mailbox.on(Arrange, self._arranged.append)
        mailbox.on(Moved, self._moved.append)

    def carry_out(self) -> None:
        """Do what has been told since the last time."""
        if self._arranged:
            newest = max(self._arranged, key=lambda each: each.version)
            self._arranged.clear()
            layers = tuple({name: as_channels(held) for name, held in layer.items()} for layer in newest.layers)
            self.apply(replace(self._first, layers=layers, version=newest.version))
        arrangement = self._knowledge.arrangement
        if arrangement is not None and self._moved:
            moved = [each for each in self._moved if each.version <= arrangement.version]
            self._moved[:] = [each for each in self._moved if each.version > arrangement.version]
            for each in moved:
                self._receive(arrangement, each)

    def apply(self, arrangement: Arrangement) -> None:
        """Give and take until the own neurons are those of an arrangement; one that is not newer changes nothing."""
        before, me = self._knowledge.arrangement, self._device.name
        if before is not None and arrangement.version <= before.version:
            return
        self._knowledge.arrange(arrangement)
        for layer in range(1, len(arrangement.sizes)):
            shard = self._neurons.shards.get(layer)
            held, wanted = set(shard.part.rows if shard else ()), set(arrangement.of(me, layer))
            away, more = as_channels(held - wanted), as_channels(wanted - held)
            if away:
                self._send(arrangement, Moved(arrangement.version, layer, list(away), self._neurons.give(layer, away)))
            if more:
                self._neurons.take(layer, more)
            if away or more:
                self._maintenance.forget(layer)
        holds = {str(layer): len(arrangement.of(me, layer)) for layer in range(len(arrangement.sizes))}
        self._device.record("arranged", version=arrangement.version, neurons=sum(holds.values()), layers=holds)

    async def sent(self) -> None:
        """Wait until all that was given has arrived."""
        await asyncio.gather(*self._sends)

    def _send(self, arrangement: Arrangement, moved: Moved) -> None:
        """Send neurons to those who hold them by an arrangement."""
        for owner, neurons in arrangement.layers[moved.layer].items():
            part = as_channels(set(moved.neurons) & set(neurons))
            if part and owner != self._device.name:
                self._sends.append(self._mailbox.post(owner, _part(moved, part)))

    def _receive(self, arrangement: Arrangement, moved: Moved) -> None:
        """Take the neurons that are one's own, and pass on those that are another's by now."""
        own = as_channels(set(moved.neurons) & set(arrangement.of(self._device.name, moved.layer)))
        if own:
            self._neurons.give(moved.layer, own)
            self._neurons.take(moved.layer, own, _part(moved, own).state)
            self._maintenance.forget(moved.layer)
        self._send(arrangement, moved)


def _part(moved: Moved, neurons: Channels) -> Moved:
    """Return what a message brings of some of its neurons."""
    state = {name: pick(tensor, 0, neurons, moved.neurons) for name, tensor in moved.state.items()}
    return replace(moved, neurons=list(neurons), state=state)
