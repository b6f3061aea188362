"""A device's reaction to long-term volatility (Section V): judge the others, decide, hand over neurons.

At the end of a window each device knows which share of every sender's casts it received, and says so with its own.
When that has come round, the first member that was heard, the coordinator, decides for all, so that there is one
arrangement. It and the neurons that move travel reliably.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.method import Job
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.planner import timetable_of
from testbed.ml.slots.timeslots import LayerAction, SlotSegment
from testbed_versatilefl.handover import Arrange, Handover
from testbed_versatilefl.maintenance import Maintenance
from testbed_versatilefl.planner import VersatileDetails, VersatileOptions
from testbed_versatilefl.rearrangement import (
    Decision,
    DecisionRules,
    after_window,
    decide_join,
    find_coordinator,
    list_moves,
    without_device,
)
from testbed_versatilefl.records import ReceptionRecords, is_silent, mean_credibility


@dataclass(frozen=True)
class Join(Typed, kind="join"):
    """From a device that holds nothing: sent by one that has booted, cast by one that was no longer heard."""

    boot: bool = True


@dataclass(frozen=True)
class Leave(Typed, kind="leave"):
    """From a leaving device that hands over its neurons."""

    announced: bool = True


class ArrangementController:
    """The hook `testbed.ml.slots.program.Arranging`: windows, members that come and go, and on the coordinator what
    follows from them.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        job: Job[VersatileOptions, VersatileDetails],
        records: ReceptionRecords,
        handover: Handover,
        maintenance: Maintenance,
        window: int,
    ) -> None:
        """Judge the others after each ``window`` of steps, where neurons are to be rearranged."""
        problem, details = job.problem, job.plan.details
        self._mailbox = mailbox
        self._device = mailbox.device
        self._records = records
        self._handover = handover
        self._maintenance = maintenance
        self._rules = DecisionRules(details.threshold, job.plan.lead, problem.seed)
        self._others = [
            device.name
            for device in problem.devices
            if device.name != mailbox.device.name
        ]
        self._steps, self._seconds = (
            window,
            window * timetable_of(details).period * details.slot,
        )
        self._rearranges, self._until = (
            problem.options.rearrangement,
            problem.options.naive_after,
        )
        self._reported = 0
        """Windows of which the maintenance was recorded."""
        self._joining: dict[str, int] = {}
        """Devices that have booted, and the version known when they said so."""
        self._leaving: dict[str, None] = {}
        self._newcomers: set[str] = set()
        """Who has joined since the last judgement."""
        self._silent: Collection[str] = ()
        """Devices that nobody heard any more at the end of the last window."""
        self._averages: dict[str, float] = {}
        """Credibility of each device in the last window."""
        mailbox.on(Join, self._on_join)
        mailbox.on(Leave, lambda message: self._leaving.update({message.sender: None}))

    @property
    def now(self) -> NeuronAssignment:
        """The newest arrangement."""
        return self._handover.now

    def _on_join(self, message: Join) -> None:
        known = self._handover.known
        self._joining[message.sender] = -1 if known is None else known.version
        self._newcomers.add(message.sender)
        self._leaving.pop(message.sender, None)

    @property
    def _group(self) -> int | None:
        known = self._handover.known
        return None if known is None else known.group(self._device.name)

    async def wait_for_group(self, until: float) -> int | None:
        """Return the own group as soon as there is one.

        None: the device has left, and all that it had has arrived; or the last slot is over, and the others are gone.
        A device that nobody heard any more, and so lost its neurons, casts now and then: it joins when that is heard.
        """
        device = self._device
        if self._handover.known is None:
            self._post_to_all(Join())
        due = device.now() + self._seconds
        while self._group is None:
            if device.leaving:
                await self._handover.wait_until_sent()
                return None
            if device.now() >= until:
                return None
            if (
                not await self._mailbox.changed(min(due, until) - device.now())
                and device.now() >= due
            ):
                await self._mailbox.cast(self._others, Join())
                due = device.now() + self._seconds
            self._handover.apply_messages()
        return self._group

    def on_slot_start(self, segment: SlotSegment, action: LayerAction | None) -> bool:
        """Apply due changes as a slot begins or a segment ends; return whether the group has changed.

        Raises `GroupLostError` on the coordinator.
        """
        step = None if segment.tests or action is None else action.batch
        self._record_counts(segment, step)
        self._stop_when_due(step)
        if not self._rearranges:
            return False
        before, me = self._group, self._device.name
        self._handover.apply_messages()
        self._forget_arrived()
        self._announce_leaving()
        window = None if step is None else self._judge_devices(step)
        if (
            find_coordinator(self.now, {*self._silent, *self._leaving, *self._joining})
            == me
        ):
            self._rearrange(window)
        return self._group != before

    def _stop_when_due(self, step: int | None) -> None:
        """End all maintenance at the step from which the scenario asks for none."""
        if step is not None and self._until is not None and step >= self._until:
            self._rearranges, self._until = False, None
            self._maintenance.stop_maintaining()

    def _announce_leaving(self) -> None:
        """Tell the others once that this device leaves; the lead cannot."""
        me = self._device.name
        if self._device.leaving and me not in self._leaving and me != self._rules.lead:
            self._leaving[me] = None
            self._post_to_all(Leave())

    def _record_counts(self, segment: SlotSegment, step: int | None) -> None:
        """Record the counts of each window, and those at the end of training."""
        window = (segment.batches.stop if step is None else step) // self._steps
        if not segment.tests and (step is None or window > self._reported):
            self._reported = window
            self._maintenance.record_counts(
                self._device, segment.trained if step is None else step
            )

    def _judge_devices(self, step: int) -> int | None:
        """Close a window as it ends; return the last one when its records have come round."""
        self._records.close_window(step, self.now)
        window = self._records.next_due_window(step)
        if window is not None:
            latest, table = self._records.receptions_of(window)
            members = [name for name in self.now.devices if name not in self._newcomers]
            self._silent = [name for name in members if is_silent(latest, name)]
            me = self._device.name
            if self._records.is_cut_off and me != self._rules.lead:
                # To itself, all others are silent; to them it is.
                self._silent = [me]
            self._averages = {name: mean_credibility(table, name) for name in members}
            self._newcomers.clear()
        return window

    def _rearrange(self, window: int | None) -> None:
        first = now = self.now
        for decision in self._pending_decisions(window):
            changes = list_moves(now, decision.arrangement, decision.gone)
            self._device.record(
                "rearrangement",
                cause=decision.cause,
                devices=list(decision.devices),
                version=decision.arrangement.version,
                moved=sum(
                    len(move.neurons) for move in changes if move.giver is not None
                ),
                anew=sum(len(move.neurons) for move in changes if move.giver is None),
            )
            now = decision.arrangement
        if now.version != first.version:
            layers = [
                {name: list(held) for name, held in layer.items()}
                for layer in now.layers
            ]
            self._post_to_all(Arrange(now.version, layers))
            self._handover.apply(now)
            self._forget_arrived()

    def _pending_decisions(self, window: int | None) -> Iterator[Decision]:
        """Yield the changes due to joining and leaving devices, and to a window with complete records."""
        now, averages, rules = self.now, self._averages, self._rules
        for name in self._joining:
            decision = decide_join(now, name, averages, rules)
            now = decision.arrangement
            yield decision
        for name in self._leaving:
            if now.group(name) is not None:
                now = without_device(now, name, averages, rules.seed)
                yield Decision(now, "retirement", (name,))
        if window is not None:
            for name, value in averages.items():
                self._device.record("credibility", window=window, of=name, value=value)
            yield from after_window(now, self._silent, averages, rules)

    def _forget_arrived(self) -> None:
        """Forget who wanted to join before the present arrangement."""
        version = self.now.version
        self._joining = {
            name: known for name, known in self._joining.items() if known == version
        }

    def _post_to_all(self, message: Typed) -> None:
        for name in self._others:
            self._mailbox.post(name, message)
