"""Changes of assignment on one device: neurons are sent to their new holders, and received ones are added."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.models.slices import Channels, as_channels, pick
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.neurons import Neurons


@dataclass(frozen=True)
class Arrange(TypedMessage, kind="arrange"):
    """From the coordinator: the new assignment of neurons."""

    version: int
    layers: list[dict[str, list[int]]]
    """By layer, the neurons of each device."""


@dataclass(frozen=True)
class Moved(TypedMessage, kind="moved"):
    """Neurons with their weights, sent to the device that holds them under assignment ``version``."""

    version: int
    layer: int
    neurons: list[int]
    state: State


class Handover:
    """The neurons of one device as assignments change.

    From its first assignment on, a device holds the neurons of the newest one that it knows. Neurons that are on their
    way have initial weights until they arrive, and keep these if the previous holder has failed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        neurons: Neurons,
        first: NeuronAssignment,
        changed: Callable[[int], None],
    ) -> None:
        """``first`` is the plan's assignment; it is not applied, and received ones copy its sizes and groups.

        ``changed`` is called with the index of a layer whose neurons have changed.
        """
        self.known: NeuronAssignment | None = None
        """The newest assignment; None after a boot, until the first one arrives."""
        self.past: dict[int, NeuronAssignment] = {}
        """All assignments by version, since casts sent under an earlier one still arrive."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._neurons = neurons
        self._first = first
        self._changed = changed
        self._arrange_messages: list[Arrange] = []
        self._moved_messages: list[Moved] = []
        self._sends: list[asyncio.Future[None]] = []
        mailbox.on(Arrange, self._arrange_messages.append)
        mailbox.on(Moved, self._moved_messages.append)

    @property
    def assignment(self) -> NeuronAssignment:
        """The newest assignment. Raises ValueError without one."""
        if self.known is None:
            raise ValueError(
                f"{self._device.name} has received no assignment since it booted"
            )
        return self.known

    def apply_messages(self) -> None:
        """Apply the changes requested by messages since the last call."""
        if self._arrange_messages:
            newest = max(self._arrange_messages, key=lambda message: message.version)
            self._arrange_messages.clear()
            self.apply(self._assignment_of(newest))
        if self.known is not None:
            self._receive_until(self.known)

    def _assignment_of(self, message: Arrange) -> NeuronAssignment:
        layers = []
        for holders in message.layers:
            layers.append({name: as_channels(own) for name, own in holders.items()})
        return replace(self._first, layers=tuple(layers), version=message.version)

    def _receive_until(self, assignment: NeuronAssignment) -> None:
        """Add neurons that were moved by an assignment or by an earlier one."""
        due: list[Moved] = []
        later: list[Moved] = []
        for moved in self._moved_messages:
            if moved.version <= assignment.version:
                due.append(moved)
            else:
                later.append(moved)
        # In place: the mailbox appends to this list.
        self._moved_messages[:] = later
        # In the order of arrival: the initial weights of a neuron may have been sent on before its trained ones.
        for moved in due:
            self._receive(assignment, moved)

    def apply(self, assignment: NeuronAssignment) -> None:
        """Release and add own neurons as an assignment requires; older assignments change nothing."""
        if self.known is not None and assignment.version <= self.known.version:
            return
        self.known = self.past[assignment.version] = assignment
        # Layer 0 is the input, whose neurons have no weights.
        for layer in range(1, len(assignment.sizes)):
            self._apply_layer(assignment, layer)
        me = self._device.name
        counts = {}
        for layer in range(len(assignment.sizes)):
            counts[str(layer)] = len(assignment.neurons_of(me, layer))
        self._device.record(
            "arrangement",
            version=assignment.version,
            neurons=sum(counts.values()),
            layers=counts,
        )

    def _apply_layer(self, assignment: NeuronAssignment, layer: int) -> None:
        shard = self._neurons.shards.get(layer)
        present = set(shard.part.rows if shard else ())
        assigned = set(assignment.neurons_of(self._device.name, layer))
        released = as_channels(present - assigned)
        added = as_channels(assigned - present)
        # The new holder works with initial weights until these arrive.
        if released:
            state = self._neurons.release(layer, released)
            moved = Moved(assignment.version, layer, list(released), state)
            self._send(assignment, moved)
        if added:
            self._neurons.add(layer, added)
        if released or added:
            self._changed(layer)

    async def wait_until_delivered(self) -> None:
        """Wait until all neurons that left this device have arrived."""
        await asyncio.gather(*self._sends)

    def _send(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Send neurons to the other devices that hold them under an assignment."""
        for owner, neurons in assignment.layers[moved.layer].items():
            part = as_channels(set(moved.neurons) & set(neurons))
            if part and owner != self._device.name:
                sent = self._mailbox.post(owner, _select_neurons(moved, part))
                self._sends.append(sent)

    def _receive(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Add received neurons of this device, and send all others to their present devices."""
        assigned = assignment.neurons_of(self._device.name, moved.layer)
        own = as_channels(set(moved.neurons) & set(assigned))
        if own:
            # They have had initial weights since the assignment was applied.
            self._neurons.release(moved.layer, own)
            self._neurons.add(moved.layer, own, _select_neurons(moved, own).state)
            self._changed(moved.layer)
        # This device may know a newer assignment than the sender: neurons that it no longer holds go to their present
        # holder. They carry the newer version, so that a holder that does not know it waits instead of returning them.
        self._send(assignment, replace(moved, version=assignment.version))


def _select_neurons(moved: Moved, neurons: Channels) -> Moved:
    """Return the weights of some neurons in a message."""
    state = {}
    for name, tensor in moved.state.items():
        state[name] = pick(tensor, 0, neurons, moved.neurons)
    return replace(moved, neurons=list(neurons), state=state)
