"""VersatileFL's program: a device in timeslots, with the hooks for missing data, rearrangement and notes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.ml.data.batches import steps_per_epoch
from testbed.ml.method import ProgramContext
from testbed.ml.models.slices import Channels
from testbed.ml.slots import program
from testbed.ml.slots.casts import AnyValues, Outputs, Values
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.program import SlotProgram, answering_time, make_transmit
from testbed.ml.slots.weights import receive_initial_weights
from testbed.wire.message import Message
from testbed_versatilefl.controller import ArrangementController, Join, Leave
from testbed_versatilefl.handover import Arrange, Handover, Moved
from testbed_versatilefl.maintenance import (
    Complete,
    DynamicUpdate,
    LayerConfirmation,
    Maintenance,
    ReliableResults,
)
from testbed_versatilefl.planner import (
    VersatileDetails,
    VersatileOptions,
    initial_assignment,
)
from testbed_versatilefl.records import ReceptionRecords

VersatileContext = ProgramContext[VersatileOptions, VersatileDetails]
KINDS: tuple[type[Any], ...] = (*program.KINDS, Complete, Arrange, Moved, Join, Leave)
STARTED = "started"
"""Name of a file on the disk of a device, by which its program recognizes a restart."""


@dataclass(frozen=True)
class VersatileNotes:
    """The hook `testbed.ml.slots.casts.Notes`: casts carry the sender's records of other devices."""

    handover: Handover
    records: ReceptionRecords
    maintenance: Maintenance
    update: DynamicUpdate

    def annotate(self, message: AnyValues) -> AnyValues:
        """Return a message with a note: version of the assignment, stage, records and, for outputs, success rates."""
        records = {}
        for name, (window, record) in self.records.newest.items():
            records[name] = [window, record]
        note: dict[str, Any] = {
            "version": self.handover.assignment.version,
            "stage": self.update.stage,
            "records": records,
        }
        # Losses have no success rate: the forward criterion concerns outputs alone.
        if isinstance(message, Outputs):
            key = (message.layer, message.batch)
            note["rates"] = self.maintenance.rates.pop(key, ())
        return replace(message, note=note)

    def read_note(self, message: Values) -> Channels | None:
        """Process the note of a message, and return the sender's neurons in the message's layer.

        Return None if the sender's assignment is unknown here, so that the neurons of the values are unknown.
        """
        note = message.note or {}
        self.records.note_cast(message.sender, received=True)
        self.records.merge_records(note["records"])
        # Casts of a stage may arrive after casts of the next stage.
        self.update.stage = max(self.update.stage, note["stage"])
        sender_assignment = self.handover.by_version.get(note["version"])
        if sender_assignment is None:
            return None
        return sender_assignment.neurons_of(message.sender, message.layer)

    def note_missing(self, sender: str) -> None:
        """Record a message as missing."""
        self.records.note_cast(sender, received=False)


async def run(device: Device, context: VersatileContext) -> None:
    """Train and test, slot by slot; a restarted device first waits for neurons from other devices."""
    problem = context.problem
    details = context.plan.details
    options = problem.options
    planned = initial_assignment(problem, details)
    has_restarted = device.saved(STARTED) is not None
    await device.save(STARTED, Message(STARTED))
    window = _window_steps(context)
    async with Mailbox(device, problem.links, KINDS) as mailbox:
        initial_weights = await receive_initial_weights(mailbox, context)
        neurons = Neurons(device, problem, initial_weights)
        update = DynamicUpdate(options)
        # `confirm` calls the lambda during training only, when `handover` exists.
        confirm = LayerConfirmation(
            mailbox, lambda: handover.assignment, answering_time(mailbox, details)
        )
        maintenance = Maintenance(update, confirm)
        handover = Handover(mailbox, neurons, planned, maintenance.forget_layer)
        # Without rearrangement no device would send neurons, so a restarted device continues with initial weights.
        awaits_neurons = has_restarted and options.rearrangement
        if not awaits_neurons:
            handover.apply(planned)
        # Equation (4): C(0) is the initial connectivity of the network.
        ratios = {pair: 1 - link.message_loss for pair, link in problem.links.items()}
        records = ReceptionRecords(
            device.name, ratios, options.alpha, window, details.record_delay
        )
        controller = ArrangementController(
            mailbox, context, records, handover, maintenance, window
        )
        transmit = make_transmit(mailbox, context)
        if options.result_sharing == "ideal":
            transmit = ReliableResults(mailbox, transmit, planned.output_layer)
        notes = VersatileNotes(handover, records, maintenance, update)
        program = SlotProgram(
            mailbox, context, neurons, controller, maintenance, transmit, notes
        )
        await program.run()


def _window_steps(context: VersatileContext) -> int:
    """Return the number of steps of a management window: by default an epoch, as in Section VI-B."""
    details = context.plan.details
    if details.management_window is not None:
        return details.management_window
    assert context.dataset is not None
    sample_count = len(context.dataset.train_labels)
    epoch = steps_per_epoch(sample_count, context.problem.workload.batch_size)
    # An epoch of a small data set may be too short for records to reach all devices.
    return max(epoch, details.record_delay + 1)
