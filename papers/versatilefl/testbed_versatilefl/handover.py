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
    """Neurons with their weights, to the device that holds them under the assignment of this version."""

    version: int
    layer: int
    neurons: list[int]
    state: State


class Handover:
    """The neurons of one device as assignments change.

    A device holds the neurons that it has in the newest assignment that it has received. A neuron has its initial
    weights until its trained weights arrive, and keeps them if its previous holder has failed.
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
        """The assignment with the highest version that was applied here; None before one was applied."""
        self.by_version: dict[int, NeuronAssignment] = {}
        """All received assignments by version, applied or not: a cast sent under any of them may still arrive."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._neurons = neurons
        self._planned = planned
        self._on_layer_changed = on_layer_changed
        self._arrange_messages: list[Arrange] = []
        self._moved_messages: list[Moved] = []
        """Received neurons that are not added yet, in the order of arrival."""
        self._sends: list[asyncio.Future[None]] = []
        """Neurons on their way to other devices; a future completes when its message has arrived."""
        mailbox.on(Arrange, self._arrange_messages.append)
        mailbox.on(Moved, self._moved_messages.append)

    @property
    def assignment(self) -> NeuronAssignment:
        """The newest assignment. Raises ValueError before an assignment was applied."""
        if self.newest is None:
            raise ValueError(
                f"{self._device.name} has received no assignment since its program started"
            )
        return self.newest

    def apply_messages(self) -> None:
        """Apply the newest assignment received since the last call, and add the neurons that have arrived for it."""
        assignments = []
        for message in self._arrange_messages:
            assignment = self._assignment_of(message)
            # Also an assignment that a newer one has overtaken: another device may have cast under it.
            self.by_version[message.version] = assignment
            assignments.append(assignment)
        self._arrange_messages.clear()
        if assignments:
            self.apply(max(assignments, key=lambda assignment: assignment.version))
        if self.newest is not None:
            self._add_arrived_neurons(self.newest)

    def _assignment_of(self, message: Arrange) -> NeuronAssignment:
        layers = []
        for neuron_lists in message.layers:
            holders = {}
            for name, neurons in neuron_lists.items():
                holders[name] = as_channels(neurons)
            layers.append(holders)
        return replace(self._planned, layers=tuple(layers), version=message.version)

    def _add_arrived_neurons(self, assignment: NeuronAssignment) -> None:
        """Add received neurons, except neurons moved here by a later assignment than ``assignment``."""
        current: list[Moved] = []
        later: list[Moved] = []
        for moved in self._moved_messages:
            if moved.version <= assignment.version:
                current.append(moved)
            else:
                later.append(moved)
        # In place, since the mailbox appends to this list.
        self._moved_messages[:] = later
        # In the order of arrival. If a neuron moves on before its trained weights have arrived, its holder first sends
        # initial weights, and later the trained weights, which have to replace the initial ones.
        for moved in current:
            self._add_or_forward(assignment, moved)

    def apply(self, assignment: NeuronAssignment) -> None:
        """Send neurons that this device does not have in an assignment any more, and add neurons that it newly has.

        Only an assignment that is newer than the current one changes anything.
        """
        if self.newest is not None and assignment.version <= self.newest.version:
            return
        self.newest = assignment
        self.by_version[assignment.version] = assignment
        # Layer 0 is the input, whose neurons have no weights.
        for layer in range(1, len(assignment.sizes)):
            self._apply_layer(assignment, layer)
        own_name = self._device.name
        # The event also counts neurons of the input layer, whose values the device casts.
        counts = {}
        for layer in range(len(assignment.sizes)):
            counts[str(layer)] = len(assignment.neurons_of(own_name, layer))
        self._device.record(
            "arrangement",
            version=assignment.version,
            neurons=sum(counts.values()),
            layers=counts,
        )

    def _apply_layer(self, assignment: NeuronAssignment, layer: int) -> None:
        shard = self._neurons.shards.get(layer)
        # The rows of a layer's weights are its neurons.
        before = set(shard.part.rows if shard else ())
        after = set(assignment.neurons_of(self._device.name, layer))
        released = as_channels(before - after)
        added = as_channels(after - before)
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
        """Wait until all neurons that left this device have arrived, at most until the instant ``until``, in seconds.

        The limit is needed because a message to a failed device is never acknowledged.
        """
        if self._sends:
            timeout = max(0.0, until - self._device.now())
            await asyncio.wait(self._sends, timeout=timeout)

    def _send(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Send neurons to the other devices holding the neurons under an assignment."""
        for owner, neurons in assignment.layers[moved.layer].items():
            part = as_channels(set(moved.neurons) & set(neurons))
            if part and owner != self._device.name:
                sending = self._mailbox.post(owner, _select_neurons(moved, part))
                # Without delivered messages, which would accumulate over a long run.
                pending = [future for future in self._sends if not future.done()]
                self._sends = [*pending, sending]

    def _add_or_forward(self, assignment: NeuronAssignment, moved: Moved) -> None:
        """Add received neurons that this device has in an assignment, and send all others to their devices."""
        assigned = assignment.neurons_of(self._device.name, moved.layer)
        own_neurons = as_channels(set(moved.neurons) & set(assigned))
        if own_neurons:
            # `apply` has added these neurons with initial weights, which the received weights replace.
            self._neurons.release(moved.layer, own_neurons)
            trained_state = _select_neurons(moved, own_neurons).state
            self._neurons.add(moved.layer, own_neurons, trained_state)
            self._on_layer_changed(moved.layer)
        # This device may know a newer assignment than the sender, in which other devices have the neurons. The
        # forwarded message has the newer version: a device that has not received this assignment yet keeps the message
        # until then, instead of returning the neurons.
        self._send(assignment, replace(moved, version=assignment.version))


def _select_neurons(moved: Moved, neurons: Channels) -> Moved:
    """Return the message with some of the neurons alone."""
    state = {}
    for name, tensor in moved.state.items():
        state[name] = pick(tensor, 0, neurons, moved.neurons)
    return replace(moved, neurons=list(neurons), state=state)
