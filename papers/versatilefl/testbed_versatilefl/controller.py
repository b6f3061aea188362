"""A device's reaction to long-term volatility (Section V): judge the others, decide, hand over neurons.

At the end of a window each device knows the fraction received of every sender's casts, and adds this record to its own
casts. After the records have reached all devices, the acting coordinator decides for all devices: the first member of
the assignment whose casts were received in the last window. The plan's coordinator, which scores the tests, is another
role. The assignment and the neurons that move are sent reliably.
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
    """Request for neurons: sent after a boot, cast by a device without neurons whose casts had been lost."""


@dataclass(frozen=True)
class Leave(TypedMessage, kind="leave"):
    """Announcement of a leaving device, whose neurons other devices take over."""


class ArrangementController:
    """The hook `testbed.ml.slots.program.AssignmentPolicy`: windows, joining and leaving devices, and rearrangement.

    Every device has one; only the acting coordinator's decides.
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
        """``window`` is the number of steps after which devices are judged."""
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
        self._others = names
        self._steps = window
        """Number of steps of a window."""
        self._seconds = window * timetable_of(details).period * details.timeslot
        """Duration of a window."""
        self._rearranges = options.rearrangement
        self._until = options.naive_after
        """Step at which all maintenance ends; None: never, or ended already."""
        self._reported = 0
        """Number of windows with recorded counts of maintenance."""
        self._joining: dict[str, int] = {}
        """Devices that asked to join, and the version of the assignment known here at that time."""
        self._leaving: dict[str, None] = {}
        """Leaving devices, in the order of their messages."""
        self._newcomers: dict[str, float] = {}
        """Devices without a full window since they asked to join, and the window that they joined in: infinite until
        the next step begins."""
        self._silent: Collection[str] = ()
        """Devices without received casts at the end of the last window."""
        self._averages: dict[str, float] = {}
        """Credibility of each device in the last window."""
        mailbox.on(Join, self._on_join)
        mailbox.on(Leave, self._on_leave)

    @property
    def assignment(self) -> NeuronAssignment:
        """The newest assignment of neurons."""
        return self._handover.assignment

    def _on_join(self, message: Join) -> None:
        known = self._handover.newest
        # A device that has just booted knows no version; any assignment is newer then.
        version = -1 if known is None else known.version
        self._joining[message.sender] = version
        self._newcomers[message.sender] = math.inf
        self._leaving.pop(message.sender, None)

    def _on_leave(self, message: Leave) -> None:
        # A dictionary as an ordered set.
        self._leaving[message.sender] = None

    @property
    def _group(self) -> int | None:
        known = self._handover.newest
        return None if known is None else known.group_of(self._device.name)

    async def wait_for_group(self, until: float) -> int | None:
        """Return the own group as soon as the device has one.

        Return None if the device has left and all its neurons have arrived elsewhere, or at the instant ``until``, in
        seconds, the end of the last slot. A device that lost its neurons because its casts did not arrive repeats
        `Join` by cast, once a window: the cast arrives when the device can be heard again.
        """
        device = self._device
        if self._handover.newest is None:
            # After a restart: the others have this device's neurons, or will have them.
            self._newcomers[device.name] = math.inf
            self._post_to_all(Join())
        next_cast = device.now() + self._seconds
        while self._group is None:
            if device.leaving:
                await self._handover.wait_until_delivered(until)
                return None
            if device.now() >= until:
                return None
            timeout = min(next_cast, until) - device.now()
            has_message = await self._mailbox.changed(timeout)
            # A message may bring neurons. After `next_cast` the next wait ends at once, so that messages do not delay
            # the cast.
            if not has_message and device.now() >= next_cast:
                self._newcomers[device.name] = math.inf
                await self._mailbox.cast(self._others, Join())
                next_cast = device.now() + self._seconds
            self._handover.apply_messages()
        return self._group

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Apply due changes as a slot begins or a segment ends; return whether the group has changed.

        Raises `GroupLostError` on the acting coordinator if a group has no device left.
        """
        step = None if segment.is_test or action is None else action.batch
        self._record_counts(segment, step)
        self._stop_when_due(step)
        if not self._rearranges:
            return False
        before = self._group
        self._handover.apply_messages()
        self._forget_joined()
        self._announce_leaving()
        window = None if step is None else self._judge_devices(step)
        # A newcomer has not judged the others. As a second acting coordinator beside the one that the others elect, it
        # would send another assignment of the same version.
        absent = {*self._silent, *self._leaving, *self._joining, *self._newcomers}
        if find_coordinator(self.assignment, absent) == self._device.name:
            self._rearrange(window)
        return self._group != before

    def _stop_when_due(self, step: int | None) -> None:
        """End all maintenance at the step given by `naive_after` (the comparison of Figure 11)."""
        if step is None or self._until is None:
            return
        if step >= self._until:
            self._rearranges = False
            self._until = None
            self._maintenance.stop_maintaining()

    def _announce_leaving(self) -> None:
        """Announce once that this device leaves. The coordinator scores the tests and cannot leave."""
        me = self._device.name
        if not self._device.leaving or me == self._rules.coordinator:
            return
        if me not in self._leaving:
            self._leaving[me] = None
            self._post_to_all(Leave())

    def _record_counts(self, segment: SlotSegment, step: int | None) -> None:
        """Record the counts of maintenance after each window and at the end of training."""
        if segment.is_test:
            return
        if step is None:
            # The segment is over.
            self._reported = segment.batches.stop // self._steps
            self._maintenance.record_counts(self._device, segment.trained_steps)
        elif step // self._steps > self._reported:
            self._reported = step // self._steps
            self._maintenance.record_counts(self._device, step)

    def _judge_devices(self, step: int) -> int | None:
        """Close a window that is over; return the last window once all devices have its records."""
        self._records.close_window(step, self.assignment)
        for name, joined in self._newcomers.items():
            if joined == math.inf:
                # Whoever is there by the first step of a window has no part of that window to miss.
                self._newcomers[name] = (step - 1) // self._steps
        window = self._records.next_due_window(step)
        if window is None:
            return None
        latest, credibilities = self._records.receptions_of(window)
        for name, joined in list(self._newcomers.items()):
            if joined < window:
                del self._newcomers[name]
        silent = []
        averages = {}
        for name in self.assignment.devices:
            # Devices that joined during this window or later cannot be judged by it.
            if name in self._newcomers:
                continue
            averages[name] = mean_credibility(credibilities, name)
            if is_silent(latest, name):
                silent.append(name)
        me = self._device.name
        if self._records.is_cut_off and me != self._rules.coordinator:
            # A device without links finds all others silent, but it is the silent one for them.
            silent = [me]
        self._silent = silent
        self._averages = averages
        return window

    def _rearrange(self, window: int | None) -> None:
        """Apply all pending decisions as one new assignment, and send it to all devices."""
        before = assignment = self.assignment
        for decision in self._pending_decisions(window):
            self._record_decision(assignment, decision)
            assignment = decision.assignment
        if assignment.version == before.version:
            return
        layers = []
        for holders in assignment.layers:
            lists = {}
            for name, own in holders.items():
                # A range cannot travel as JSON.
                lists[name] = list(own)
            layers.append(lists)
        # The others apply the assignment when the message arrives. Until then, the version in each cast identifies the
        # neurons of its sender.
        self._post_to_all(Arrange(assignment.version, layers))
        self._handover.apply(assignment)
        self._forget_joined()

    def _record_decision(self, before: NeuronAssignment, decision: Decision) -> None:
        """Record a decision with the numbers of moved and of reset neurons."""
        moved = reset = 0
        for move in list_moves(before, decision.assignment, decision.gone):
            # Without a giver nobody has the trained weights.
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
        """Yield the changes due to joining and leaving devices, and to a window with complete records."""
        assignment, averages, rules = self.assignment, self._averages, self._rules
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
        """Forget requests to join once a newer assignment has answered them."""
        version = self.assignment.version
        for name, known in list(self._joining.items()):
            if known != version:
                del self._joining[name]

    def _post_to_all(self, message: TypedMessage) -> None:
        for name in self._others:
            self._mailbox.post(name, message)
