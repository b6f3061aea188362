"""What the lead knows about the other devices: who answers, who started anew, who came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from testbed.device import Device
from testbed.methods.base import Problem
from testbed.methods.parts import messages
from testbed.methods.parts.bell import Bell
from testbed.methods.parts.membership import Held as Inventory
from testbed.methods.parts.outbox import SLACK, Outbox, transfer_time
from testbed.plan import Piece
from testbed.wire import Message, size_around


class Lost(Exception):  # noqa: N818 - a state of the crew, which the lead recovers from
    """The configuration cannot go on."""

    def __init__(self, missing: Collection[str], cut: Collection[str] = (), back: Collection[str] = ()) -> None:
        super().__init__(", ".join(sorted(missing)) or "nothing moves")
        self.missing = sorted(missing)
        """Devices that are silent, have started anew, or are cut off from a neighbour."""
        self.cut = frozenset(cut)
        """Those of them that answer the lead but do not reach a neighbour: no use as a stage."""
        self.back = frozenset(back)
        """Those of them that are there again, empty."""


@dataclass(frozen=True)
class Answer:
    """What a device said of itself; see `messages`."""

    holds: int
    actions: int
    computing: bool
    overdue: Mapping[str, float]
    held: Inventory = ()


class Crew:
    """The other devices, as they answer in one configuration after the other."""

    def __init__(
        self, device: Device, problem: Problem, outbox: Outbox, news: Bell, content: Callable[[Piece], float]
    ) -> None:
        """``content`` says how many bytes a stage may be sending to the lead when it is asked for a sign of life."""
        self.others = [spec.name for spec in problem.devices if spec.name != device.name]
        self.configuration = 0
        self.there: dict[str, float] = {}
        """Devices heard of since this configuration began, with their incarnations."""
        self.answers: dict[str, Answer] = {}
        """To the last question."""
        self.ready: set[str] = set()
        """Devices that said that they are a stage of this configuration."""
        self.restarted: set[str] = set()
        """Devices that have started anew since they were told what to be, and so hold nothing any more."""
        self._device = device
        self._problem = problem
        self._outbox = outbox
        self._news = news
        self._content = content
        self.appointed: dict[str, float] = {}
        """Incarnations of the devices that were told what to be."""
        self._probes: dict[str, asyncio.Future[None]] = {}
        self._question = 0
        self._still: tuple[int, float] = (-1, 0.0)
        """Actions done by all stages together, and since when there are no more."""

    def enter(self, configuration: int) -> None:
        """Begin a new configuration, of which nobody is a stage yet."""
        self.configuration = configuration
        self.there.clear()
        self.ready.clear()
        self.appoint()

    def appoint(self) -> None:
        """From now on, a device that starts anew has lost what it is being told."""
        self.restarted.clear()
        self.appointed = dict(self.there)
        self._still = (-1, 0.0)

    def ask(self, names: Collection[str]) -> None:
        """Forget earlier answers and put a new question; a probe that is still on its way is taken back."""
        self._question += 1
        self.answers.clear()
        for name in names:
            if name in self._probes:
                self._probes[name].cancel()
            self._probes[name] = self._outbox.post(
                name, messages.PROBE, configuration=self.configuration, question=self._question
            )

    def handle(self, message: Message) -> None:
        """Take in a hello, an answer to a probe, or the word that a stage is ready."""
        name, incarnation = message.sender, message["incarnation"]
        if message.kind != messages.HELLO and message["configuration"] != self.configuration:
            return
        self.there[name] = incarnation
        if self.appointed.setdefault(name, incarnation) != incarnation:
            self.restarted.add(name)
        if message.kind == messages.CONFIGURED:
            self.ready.add(name)
        elif message.kind == messages.ALIVE and message["question"] == self._question:
            self.answers[name] = Answer(*(message[key] for key in ("holds", "actions", "computing", "overdue", "held")))
        self._news.ring()

    async def roll_call(self, layout: Sequence[Piece], patience: float, heard: Callable[[], int]) -> bool:
        """Ask every stage for a sign of life; say whether all gave it.

        Not all need to when ``heard()`` rises meanwhile or one turns out to have started anew. Raises `Lost` with those
        that stay silent for ``patience`` beyond what their link needs for all that may be on it, and with those that
        answer but are not the stage that they should be.
        """
        stages = {part.device: part for part in layout if part.device != self._device.name}
        before = heard()
        self.ask(stages)
        deadlines = {name: self._deadline(part, patience) for name, part in stages.items()}
        while silent := [name for name in stages if name not in self.answers]:
            left = max(deadlines[name] for name in silent) - self._device.now()
            if left <= 0:
                raise Lost(silent)
            await self._news.wait(left)
            if heard() != before or self.restarted & stages.keys():
                return False
        strangers = {name for name in stages if self.answers[name].holds != self.configuration}
        if strangers:
            raise Lost(strangers)
        return True

    def _deadline(self, part: Piece, patience: float) -> float:
        """Return when a stage's answer should be here, behind all else that it may be sending."""
        back = transfer_time(self._problem.links, part.device, self._device.name, size_around(self._content(part)))
        return self._outbox.due(part.device) + SLACK * back + patience

    def check_movement(self, layout: Sequence[Piece], own: Answer, patience: float) -> None:
        """Raise `Lost` if all stages answer but none has done anything for ``patience`` seconds.

        Named are those that another stage has not reached for so long; of two stages the later one. Who is no stage may
        be asked for replicas, and not be reached either; that the lead does not reach such a device means nothing.
        """
        answers = {**self.answers, self._device.name: own}
        order = [part.device for part in layout]
        now = self._device.now()
        actions = sum(answers[name].actions for name in order)
        if actions != self._still[0] or any(answers[name].computing for name in order):
            self._still = (actions, now)
            return
        if now - self._still[1] < patience:
            return
        cut = {
            max(name, peer, key=order.index) if peer in order else peer
            for name in order
            for peer, seconds in answers[name].overdue.items()
            if seconds >= patience and (peer in order or name != self._device.name)
        }
        raise Lost(cut, cut)
