"""A device's reaction to long-term volatility (Section V): judge other devices, decide, hand over neurons.

Training is divided into windows of equally many steps. At the end of a window each device knows the fraction of every
sender's casts that it has received, and adds this record to its casts. After the records have reached all devices, the
acting coordinator decides for all devices: the first device of the assignment whose casts were received in the last
window. The plan's coordinator, which scores the tests, is another role. The assignment and the neurons that move are
sent reliably.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.method import ProgramContext
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.planner import timetable_of
from testbed.ml.slots.timeslots import LayerAction, SlotSegment
from testbed_versatilefl.handover import Arrange, Handover
from testbed_versatilefl.maintenance import Maintenance
from testbed_versatilefl.planner import VersatileDetails, VersatileOptions
from testbed_versatilefl.rearrangement import (
    Decision,
    DecisionRules,
    decide_after_window,
    decide_join,
    find_coordinator,
    list_moves,
    without_device,
)
from testbed_versatilefl.records import ReceptionRecords, is_silent, mean_credibility


@dataclass(frozen=True)
class Join(TypedMessage, kind="join"):
    """Request for neurons, from a device that has restarted or that has lost its neurons to other devices."""


@dataclass(frozen=True)
class Leave(TypedMessage, kind="leave"):
    """Announcement of a leaving device, whose neurons other devices take over."""


class ArrangementController:
    """The hook `testbed.ml.slots.program.AssignmentPolicy`: windows, joining and leaving devices, and rearrangement.

    Every device has a controller; only the controller of the acting coordinator decides.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        context: ProgramContext[VersatileOptions, VersatileDetails],
        records: ReceptionRecords,
        handover: Handover,
        maintenance: Maintenance,
        window: int,
    ) -> None:
        """``window`` is the number of steps of a window."""
        problem, details = context.problem, context.plan.details
        options = problem.options
        self._mailbox = mailbox
        self._device = mailbox.device
        self._records = records
        self._handover = handover
        self._maintenance = maintenance
        self._rules = DecisionRules(
            details.credibility_threshold, context.plan.coordinator, problem.seed
        )
        names = [device.name for device in problem.devices]
        names.remove(mailbox.device.name)
        self._other_devices = names
        self._window_steps = window
        slots_per_window = window * timetable_of(details).period
        self._window_seconds = slots_per_window * details.timeslot
        self._rearranges = options.rearrangement
        self._maintenance_end = options.naive_after
        """Step at which all maintenance ends; None: never, or ended already."""
        self._reported_windows = 0
        """Number of windows whose counts of maintenance are recorded."""
        self._joining: dict[str, int] = {}
        """Device that has asked to join -> version of the newest assignment known here at that time."""
        self._leaving: dict[str, None] = {}
        """Leaving devices, in the order of their messages; a dictionary in place of an ordered set."""
        self._newcomers: dict[str, float] = {}
        """Device that has asked to join -> window in which it joined, until the device has been present for a whole
        window. The number is infinite until the next step begins."""
        self._silent: Collection[str] = ()
        """Devices none of whose casts were received at the end of the last window."""
        self._averages: dict[str, float] = {}
        """Device -> its mean credibility in the last window."""
        mailbox.on(Join, self._on_join)
        mailbox.on(Leave, self._on_leave)

    @property
    def assignment(self) -> NeuronAssignment:
        """The newest assignment of neurons."""
        return self._handover.assignment

    def _on_join(self, message: Join) -> None:
        newest = self._handover.newest
        # A device that has just booted knows no assignment, so that every assignment will be newer.
        version = -1 if newest is None else newest.version
        self._joining[message.sender] = version
        self._newcomers[message.sender] = math.inf
        self._leaving.pop(message.sender, None)

    def _on_leave(self, message: Leave) -> None:
        self._leaving[message.sender] = None

    @property
    def _group(self) -> int | None:
        """The number of the device's group of layers; None without neurons."""
        newest = self._handover.newest
        return None if newest is None else newest.group_of(self._device.name)

    async def wait_for_group(self, until: float) -> int | None:
        """Return the number of this device's group of layers as soon as the device has neurons.

        Return None if the device has left and all its neurons have arrived elsewhere, or at the instant ``until``, in
        seconds, the end of the last slot. A device that lost its neurons because its casts did not arrive repeats
        `Join` as a cast, once a window: the cast arrives when the link works again.
        """
        device = self._device
        if self._handover.newest is None:
            # After a restart: other devices have this device's neurons, or will get them.
            self._newcomers[device.name] = math.inf
            self._post_to_all(Join())
        next_cast = device.now() + self._window_seconds
        while self._group is None:
            if device.leaving:
                await self._handover.wait_until_delivered(until)
                return None
            if device.now() >= until:
                return None
            timeout = min(next_cast, until) - device.now()
            has_message = await self._mailbox.changed(timeout)
            # A message may bring neurons, and is handled first. The cast is not delayed for long: after `next_cast` the
            # next wait ends at once.
            if not has_message and device.now() >= next_cast:
                self._newcomers[device.name] = math.inf
                await self._mailbox.cast(self._other_devices, Join())
                next_cast = device.now() + self._window_seconds
            self._handover.apply_messages()
        return self._group

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Apply pending changes as a slot begins or a segment ends; return whether this device's group has changed.

        Raises `GroupLostError` on the acting coordinator if a group has no device left.
        """
        # The step of training; None in tests and at the end of a segment.
        step = None if segment.is_test or action is None else action.batch
        self._record_counts(segment, step)
        self._stop_maintenance(step)
        if not self._rearranges:
            return False
        previous_group = self._group
        self._handover.apply_messages()
        self._forget_joined()
        self._announce_leaving()
        window = None if step is None else self._judge_devices(step)
        # A newcomer has not judged the other devices. If it acted as coordinator beside the one that the others elect,
        # both would send an assignment of the same version.
        excluded = {*self._silent, *self._leaving, *self._joining, *self._newcomers}
        if find_coordinator(self.assignment, excluded) == self._device.name:
            self._rearrange(window)
        return self._group != previous_group

    def _stop_maintenance(self, step: int | None) -> None:
        """End all maintenance at the step of the option `naive_after` (the comparison of Figure 11)."""
        if step is None or self._maintenance_end is None:
            return
        if step >= self._maintenance_end:
            self._rearranges = False
            self._maintenance_end = None
            self._maintenance.stop_maintaining()

    def _announce_leaving(self) -> None:
        """Announce once that this device leaves. The plan's coordinator scores the tests and cannot leave."""
        own_name = self._device.name
        if not self._device.leaving or own_name == self._rules.coordinator:
            return
        if own_name not in self._leaving:
            self._leaving[own_name] = None
            self._post_to_all(Leave())

    def _record_counts(self, segment: SlotSegment, step: int | None) -> None:
        """Record the counts of maintenance after each window and at the end of training."""
        if segment.is_test:
            return
        if step is None:
            # The segment is over.
            self._reported_windows = segment.batches.stop // self._window_steps
            self._maintenance.record_counts(self._device, segment.trained_steps)
        elif step // self._window_steps > self._reported_windows:
            self._reported_windows = step // self._window_steps
            self._maintenance.record_counts(self._device, step)

    def _judge_devices(self, step: int) -> int | None:
        """Close a window that is over; judge the devices by its records once all devices have these, and return it.

        Returns None at all other steps.
        """
        self._records.close_window(step, self.assignment)
        for name, joined_window in self._newcomers.items():
            if joined_window == math.inf:
                # ``step - 1``: a device that is present at the first step of a window takes part in the whole window,
                # and thus joined in the window before.
                self._newcomers[name] = (step - 1) // self._window_steps
        window = self._records.next_due_window(step)
        if window is None:
            return None
        latest, credibilities = self._records.receptions_of(window)
        for name, joined_window in list(self._newcomers.items()):
            if joined_window < window:
                del self._newcomers[name]
        silent = []
        averages = {}
        for name in self.assignment.devices:
            # The window has no complete record of devices that joined during it or later.
            if name in self._newcomers:
                continue
            averages[name] = mean_credibility(credibilities, name)
            if is_silent(latest, name):
                silent.append(name)
        own_name = self._device.name
        if self._records.is_cut_off and own_name != self._rules.coordinator:
            # A device without links receives nothing from all others, but for the others it is the silent device.
            silent = [own_name]
        self._silent = silent
        self._averages = averages
        return window

    def _rearrange(self, window: int | None) -> None:
        """Apply all pending decisions as one new assignment, and send it to all devices."""
        assignment = self.assignment
        for decision in self._pending_decisions(window):
            self._record_decision(assignment, decision)
            assignment = decision.assignment
        if assignment.version == self.assignment.version:
            return
        layers = []
        for holders in assignment.layers:
            neuron_lists = {}
            for name, neurons in holders.items():
                # JSON has no ranges.
                neuron_lists[name] = list(neurons)
            layers.append(neuron_lists)
        # Other devices apply the assignment when the message arrives. Until then, the version in each cast identifies
        # the neurons of its sender.
        self._post_to_all(Arrange(assignment.version, layers))
        self._handover.apply(assignment)
        self._forget_joined()

    def _record_decision(self, before: NeuronAssignment, decision: Decision) -> None:
        """Record a decision with the numbers of moved and of reset neurons."""
        moved = 0
        reset = 0
        moves = list_moves(
            before, decision.assignment, decision.devices_without_weights
        )
        for move in moves:
            # Without a giver, no device has the trained weights.
            if move.giver is None:
                reset += len(move.neurons)
            else:
                moved += len(move.neurons)
        self._device.record(
            "rearrangement",
            cause=decision.cause,
            devices=list(decision.devices),
            version=decision.assignment.version,
            moved=moved,
            reset=reset,
        )

    def _pending_decisions(self, window: int | None) -> Iterator[Decision]:
        """Yield the decisions about joining and leaving devices, and about a window with complete records."""
        assignment = self.assignment
        averages = self._averages
        rules = self._rules
        # Joining devices first: they may take the neurons of devices that leave.
        for name in self._joining:
            decision = decide_join(assignment, name, averages, rules)
            assignment = decision.assignment
            yield decision
        for name in self._leaving:
            if assignment.group_of(name) is not None:
                assignment = without_device(assignment, name, averages, rules.seed)
                yield Decision(assignment, "retirement", (name,))
        if window is not None:
            for name, value in averages.items():
                self._device.record(
                    "credibility", window=window, rated_device=name, value=value
                )
            yield from decide_after_window(assignment, self._silent, averages, rules)

    def _forget_joined(self) -> None:
        """Forget requests to join once answered by a newer assignment."""
        version = self.assignment.version
        for name, version_at_request in list(self._joining.items()):
            if version_at_request != version:
                del self._joining[name]

    def _post_to_all(self, message: TypedMessage) -> None:
        for name in self._other_devices:
            self._mailbox.post(name, message)
