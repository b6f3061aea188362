"""What one device does about long-term volatility (Section V): judge the others, decide, give and take neurons.

At the end of a window each device knows which share of every sender's casts it received, and tells so with its own.
When that has come round, the first member that was heard, the coordinator, decides for all, so that there is one
arrangement. It and the neurons that move travel reliably.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.typed import Typed
from testbed.methods.versatile.arrangement import moves
from testbed.methods.versatile.credibility import average, silent
from testbed.methods.versatile.decisions import Decision, Setting, after_window, coordinator, entered, without
from testbed.methods.versatile.handover import Handover
from testbed.methods.versatile.knowledge import Knowledge
from testbed.methods.versatile.messages import Arrange, Join, Leave
from testbed.methods.versatile.windows import Windows


class Course:
    """Windows, members that come and go, and on the coordinator what follows from them."""

    def __init__(
        self,
        mailbox: Mailbox,
        knowledge: Knowledge,
        windows: Windows,
        handover: Handover,
        setting: Setting,
    ) -> None:
        self._mailbox = mailbox
        self._device = mailbox.device
        self._knowledge = knowledge
        self._windows = windows
        self._handover = handover
        self._setting = setting
        self._joining: dict[str, int] = {}
        """Devices that have booted, and the version known when they told so."""
        self._leaving: dict[str, None] = {}
        self._newcomers: set[str] = set()
        """Who has joined since the last judgement."""
        self._silent: Collection[str] = ()
        """Devices that nobody heard any more at the end of the last window."""
        self._averages: dict[str, float] = {}
        """Credibility of each device in the last window."""
        mailbox.on(Join, self._joins)
        mailbox.on(Leave, lambda message: self._leaving.update({message.sender: None}))

    def _joins(self, message: Join) -> None:
        arrangement = self._knowledge.arrangement
        self._joining[message.sender] = -1 if arrangement is None else arrangement.version
        self._newcomers.add(message.sender)
        self._leaving.pop(message.sender, None)

    @property
    def group(self) -> int | None:
        """The own group; None where the device is no member."""
        arrangement = self._knowledge.arrangement
        return None if arrangement is None else arrangement.group(self._device.name)

    async def enter(self) -> int | None:
        """Return the own group as soon as there is one; None: the device has left, and all that it had has arrived.

        One that nobody heard any more, and so lost its neurons, casts now and then: it joins when that is heard.
        """
        if self._knowledge.arrangement is None:
            self._tell(Join())
        due = self._device.now() + self._setting.again
        while self.group is None:
            if self._device.leaving:
                await self._handover.sent()
                return None
            if not await self._mailbox.changed(due - self._device.now()):
                await self._mailbox.cast(self._others, Join())
                due = self._device.now() + self._setting.again
            self._handover.carry_out()
        return self.group

    def attend(self, step: int | None) -> bool:
        """Do what is due as a slot of a training step, or of a test, begins; return whether the group is another now.

        Raises `GroupLostError` on the coordinator.
        """
        before, me = self.group, self._device.name
        self._handover.carry_out()
        self._forget_arrived()
        if self._device.leaving and me not in self._leaving and me != self._setting.lead:
            self._leaving[me] = None
            self._tell(Leave())
        window = None if step is None else self._judge(step)
        if coordinator(self._knowledge.now, {*self._silent, *self._leaving, *self._joining}) == me:
            self._coordinate(window)
        return self.group != before

    def _judge(self, step: int) -> int | None:
        """Close a window as it ends; return the last one when its records have come round."""
        self._windows.close(step)
        window = self._windows.due(step)
        if window is not None:
            latest, table = self._knowledge.latest(window), self._knowledge.credibility(window)
            members = [name for name in self._knowledge.now.devices if name not in self._newcomers]
            self._silent = [name for name in members if silent(latest, name)]
            me = self._device.name
            if self._windows.cut_off and me != self._setting.lead:
                # To itself, all others are silent; to them it is.
                self._silent = [me]
            self._averages = {name: average(table, name) for name in members}
            self._newcomers.clear()
        return window

    def _coordinate(self, window: int | None) -> None:
        first = now = self._knowledge.now
        for decision in self._decisions(window):
            changes = moves(now, decision.arrangement, decision.gone)
            self._device.record(
                "rearrangement",
                cause=decision.cause,
                devices=list(decision.devices),
                version=decision.arrangement.version,
                moved=sum(len(move.neurons) for move in changes if move.giver is not None),
                anew=sum(len(move.neurons) for move in changes if move.giver is None),
            )
            now = decision.arrangement
        if now.version != first.version:
            layers = [{name: list(held) for name, held in layer.items()} for layer in now.layers]
            self._tell(Arrange(now.version, layers))
            self._handover.apply(now)
            self._forget_arrived()

    def _decisions(self, window: int | None) -> Iterator[Decision]:
        """Yield what follows from who joins and leaves, and from a window whose records have come round."""
        now, averages, setting = self._knowledge.now, self._averages, self._setting
        for name in self._joining:
            decision = entered(now, name, averages, setting)
            now = decision.arrangement
            yield decision
        for name in self._leaving:
            if now.group(name) is not None:
                now = without(now, name, averages, setting.seed)
                yield Decision(now, "retirement", (name,))
        if window is not None:
            for name, value in averages.items():
                self._device.record("credibility", window=window, of=name, value=value)
            yield from after_window(now, self._silent, averages, setting)

    def _forget_arrived(self) -> None:
        """Forget who wanted to join before the present arrangement."""
        version = self._knowledge.now.version
        self._joining = {name: known for name, known in self._joining.items() if known == version}

    @property
    def _others(self) -> list[str]:
        return [name for name in self._setting.devices if name != self._device.name]

    def _tell(self, message: Typed) -> None:
        for name in self._others:
            self._mailbox.post(name, message)
