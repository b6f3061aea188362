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
    """Message from the acting coordinator to all devices: a new assignment of neurons."""

    version: int
    """Number of the assignment; the coordinator increases it with each decision."""
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

    A device holds the neurons that the newest received assignment gives to it. A neuron that has not arrived has its
    initial weights until it does, and keeps them if its previous holder has failed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        neurons: Neurons,
        planned: NeuronAssignment,
        on_layer_changed: Callable[[int], None],
    ) -> None:
        """``planned`` is the plan's assignment, from which all later ones take their layer sizes and groups.

        The constructor does not apply ``planned``: a restarted device has lost its neurons and awaits an assignment.
        ``on_layer_changed`` is called with the index of each layer in which neurons of this device were added, removed
        or replaced.
        """
        self.newest: NeuronAssignment | None = None
        """The assignment with the highest version that was applied here; None from the start of the program until then.
        """
        self.by_version: dict[int, NeuronAssignment] = {}
        """All received assignments, applied or not: a cast sent under any of them may still arrive."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._neurons = neurons
        self._planned = planned
        self._on_layer_changed = on_layer_changed
        self._arrange_messages: list[Arrange] = []
        self._moved_messages: list[Moved] = []
        self._sends: list[asyncio.Future[None]] = []
        mailbox.on(Arrange, self._arrange_messages.append)
        mailbox.on(Moved, self._moved_messages.append)

    @property
    def assignment(self) -> NeuronAssignment:
        """The newest assignment, for callers that run only with one. Raises ValueError without one."""
        if self.newest is None:
            raise ValueError(
                f"{self._device.name} has received no assignment since its program started"
            )
        return self.newest

    def apply_messages(self) -> None:
        """Apply the newest assignment received since the last call, and add the neurons that have arrived for it."""
        received = []
        for message in self._arrange_messages:
            assignment = self._assignment_of(message)
            # Also of assignments that a newer one has overtaken: another device may have cast under them.
            self.by_version[message.version] = assignment
            received.append(assignment)
        self._arrange_messages.clear()
        if received:
            self.apply(max(received, key=lambda assignment: assignment.version))
        if self.newest is not None:
            self._receive_due_neurons(self.newest)

    def _assignment_of(self, message: Arrange) -> NeuronAssignment:
        layers = []
        for holders in message.layers:
            by_device = {}
            for name, own in holders.items():
                by_device[name] = as_channels(own)
            layers.append(by_device)
        return replace(self._planned, layers=tuple(layers), version=message.version)

    def _receive_due_neurons(self, assignment: NeuronAssignment) -> None:
        """Add the received neurons that an assignment or an earlier one moved; keep those of later ones."""
        due: list[Moved] = []
        later: list[Moved] = []
        for moved in self._moved_messages:
            if moved.version <= assignment.version:
                due.append(moved)
            else:
                later.append(moved)
        # In place: the mailbox appends to this list.
        self._moved_messages[:] = later
        # In the order of arrival. If a neuron moves on before its trained weights have arrived, its holder first sends
        # initial weights, and later the trained ones, which have to replace them.
        for moved in due:
            self._receive(assignment, moved)

    def apply(self, assignment: NeuronAssignment) -> None:
        """Send neurons that an assignment takes from this device, and add those that it gives to the device.

        An assignment that is not newer than the current one changes nothing.
        """
        if self.newest is not None and assignment.version <= self.newest.version:
            return
        self.newest = assignment
        self.by_version[assignment.version] = assignment
        # Layer 0 is the input, whose neurons have no weights.
        for layer in range(1, len(assignment.sizes)):
            self._apply_layer(assignment, layer)
        me = self._device.name
        # The event counts the neurons of the input layer, too, whose values the device casts.
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
        # The rows of a layer's weights are its neurons.
        present = set(shard.part.rows if shard else ())
        assigned = set(assignment.neurons_of(self._device.name, layer))
        released = as_channels(present - assigned)
        added = as_channels(assigned - present)
        if released:
            state = self._neurons.release(layer, released)
            moved = Moved(assignment.version, layer, list(released), state)
            # The new holder works with initial weights until this message arrives.
            self._send(assignment, moved)
        if added:
            self._neurons.add(layer, added)
        if released or added:
            self._on_layer_changed(layer)

    async def wait_until_delivered(self, until: float) -> None:
        """Wait until all neurons that left this device have arrived, at most until an instant, in seconds.

        A message to a dead device is never acknowledged.
        """
        if self._sends:
            timeout = max(0.0, until - self._device.now())
            await asyncio.wait(self._sends, timeout=timeout)

    def _send(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Send neurons to the other devices that hold them under an assignment."""
        for owner, neurons in assignment.layers[moved.layer].items():
            part = as_channels(set(moved.neurons) & set(neurons))
            if part and owner != self._device.name:
                sent = self._mailbox.post(owner, _select_neurons(moved, part))
                # Without the delivered ones, which would accumulate over a long run.
                self._sends = [each for each in self._sends if not each.done()]
                self._sends.append(sent)

    def _receive(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Add received neurons of this device, and send all others to their present devices."""
        assigned = assignment.neurons_of(self._device.name, moved.layer)
        own = as_channels(set(moved.neurons) & set(assigned))
        if own:
            # `apply` has added these neurons with initial weights, which the received ones replace.
            self._neurons.release(moved.layer, own)
            trained = _select_neurons(moved, own).state
            self._neurons.add(moved.layer, own, trained)
            self._on_layer_changed(moved.layer)
        # This device may know a newer assignment than the sender of the neurons, and forwards those of other devices.
        # The message carries the newer version: a holder that has not received this assignment keeps the neurons
        # until it has, instead of returning them.
        self._send(assignment, replace(moved, version=assignment.version))


def _select_neurons(moved: Moved, neurons: Channels) -> Moved:
    """Return the weights of some neurons in a message."""
    state = {}
    for name, tensor in moved.state.items():
        state[name] = pick(tensor, 0, neurons, moved.neurons)
    return replace(moved, neurons=list(neurons), state=state)
