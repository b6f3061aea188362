"""How one device carries out arrangements: neurons given to the devices that hold them now, and taken as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.layers.shard import State
from testbed.ml.models.slices import Channels, as_channels, pick
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.neurons import Neurons


@dataclass(frozen=True)
class Arrange(Typed, kind="arrange"):
    """From the coordinator: the new placement of neurons."""

    version: int
    layers: list[dict[str, list[int]]]
    """By layer, the neurons of each device."""


@dataclass(frozen=True)
class Moved(Typed, kind="moved"):
    """Neurons with their weights, for whoever holds them by that arrangement or a newer one."""

    version: int
    layer: int
    neurons: list[int]
    state: State


class Handover:
    """The neurons of one device as arrangements change.

    What a device holds is at every moment what its arrangement says: neurons that are still on their way have their
    first weights until then, and keep them if they never come, since the device that had them is dead.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        neurons: Neurons,
        first: NeuronAssignment,
        changed: Callable[[int], None],
    ) -> None:
        """``first``: the arrangement of the plan, not yet carried out; ``changed`` is called with a layer."""
        self.known: NeuronAssignment | None = None
        """The newest arrangement; None: the device has booted, and waits for one."""
        self.past: dict[int, NeuronAssignment] = {}
        """Arrangements by version, for what is still under way."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._neurons = neurons
        self._first = first
        self._changed = changed
        self._arranged: list[Arrange] = []
        self._moved: list[Moved] = []
        self._sends: list[asyncio.Future[None]] = []
        mailbox.on(Arrange, self._arranged.append)
        mailbox.on(Moved, self._moved.append)

    @property
    def now(self) -> NeuronAssignment:
        """The newest arrangement. Raises ValueError where there is none."""
        if self.known is None:
            raise ValueError(
                f"{self._device.name} has no arrangement yet: nobody has sent one since it booted"
            )
        return self.known

    def apply_messages(self) -> None:
        """Apply the changes requested by messages since the last call."""
        if self._arranged:
            newest = max(self._arranged, key=lambda each: each.version)
            self._arranged.clear()
            layers = tuple(
                {name: as_channels(held) for name, held in layer.items()}
                for layer in newest.layers
            )
            self.apply(replace(self._first, layers=layers, version=newest.version))
        if self.known is not None:
            self._receive_until(self.known)

    def _receive_until(self, arrangement: NeuronAssignment) -> None:
        """Take the neurons that were moved by this arrangement or an earlier one."""
        moved = [each for each in self._moved if each.version <= arrangement.version]
        self._moved[:] = [
            each for each in self._moved if each.version > arrangement.version
        ]
        for each in moved:
            self._receive(arrangement, each)

    def apply(self, arrangement: NeuronAssignment) -> None:
        """Give and take until the own neurons are those of an arrangement; one that is not newer changes nothing."""
        me = self._device.name
        if self.known is not None and arrangement.version <= self.known.version:
            return
        self.known = self.past[arrangement.version] = arrangement
        for layer in range(1, len(arrangement.sizes)):
            shard = self._neurons.shards.get(layer)
            held, wanted = (
                set(shard.part.rows if shard else ()),
                set(arrangement.of(me, layer)),
            )
            away, more = as_channels(held - wanted), as_channels(wanted - held)
            if away:
                self._send(
                    arrangement,
                    Moved(
                        arrangement.version,
                        layer,
                        list(away),
                        self._neurons.give(layer, away),
                    ),
                )
            if more:
                self._neurons.take(layer, more)
            if away or more:
                self._changed(layer)
        holds = {
            str(layer): len(arrangement.of(me, layer))
            for layer in range(len(arrangement.sizes))
        }
        self._device.record(
            "arranged",
            version=arrangement.version,
            neurons=sum(holds.values()),
            layers=holds,
        )

    async def wait_until_sent(self) -> None:
        """Wait until all that was given has arrived."""
        await asyncio.gather(*self._sends)

    def _send(self, arrangement: NeuronAssignment, moved: Moved) -> None:
        """Send neurons to those who hold them by an arrangement."""
        for owner, neurons in arrangement.layers[moved.layer].items():
            part = as_channels(set(moved.neurons) & set(neurons))
            if part and owner != self._device.name:
                self._sends.append(
                    self._mailbox.post(owner, _select_neurons(moved, part))
                )

    def _receive(self, arrangement: NeuronAssignment, moved: Moved) -> None:
        """Take the neurons that are one's own, and pass on those that are another's by now."""
        own = as_channels(
            set(moved.neurons) & set(arrangement.of(self._device.name, moved.layer))
        )
        if own:
            self._neurons.give(moved.layer, own)
            self._neurons.take(moved.layer, own, _select_neurons(moved, own).state)
            self._changed(moved.layer)
        self._send(arrangement, moved)


def _select_neurons(moved: Moved, neurons: Channels) -> Moved:
    """Return the weights of some neurons in a message."""
    state = {
        name: pick(tensor, 0, neurons, moved.neurons)
        for name, tensor in moved.state.items()
    }
    return replace(moved, neurons=list(neurons), state=state)
