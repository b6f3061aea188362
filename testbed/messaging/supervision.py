"""Waiting for what devices bring about together, noticing that they cannot any more, and the loop that then recovers.

Detection uses nothing but messages. Nothing heard for ``patience`` seconds makes the supervisor ask all devices that
have a role; one that is slow answers and is waited for, one that is silent or holds nothing is lost. An answer comes
behind all that its device is sending: one of which a message is arriving is waited for longer.

There are two `RecoveryPolicy`s: `testbed.ml.pipeline.checkpointing.FromCheckpoint` stops everything and
goes on from the last checkpoint, `testbed.ml.pipeline.recovery.FromReplicas` from what the devices keep for
each other. A method that goes on without those who are gone, or with substitutes for what they would have sent, needs
neither: it takes its messages with a deadline, and asks `Membership` who is there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import ANY, SLACK, Mailbox, transfer_time
from testbed.messaging.membership import Membership, Presence
from testbed.messaging.typed import Typed
from testbed.method import Problem
from testbed.plan import Piece
from testbed.wire.message import size_around

K = TypeVar("K", bound=Typed)

_LOG = logging.getLogger(__name__)

MOST_ARRIVING = 8.0
"""How many times longer a message that is arriving may take than is allowed for: a busy host delivers it late, but a
link on which next to nothing gets through is of no use."""
MAX_PATIENCE_FACTOR = 8.0
"""How many times its first patience the supervisor may come to have with devices that turn out to be slow to reach."""


class Lost(Exception):  # noqa: N818 - a state of the devices, which a recovery deals with
    """The configuration cannot go on."""

    def __init__(self, missing: Collection[str], cut: Collection[str] = (), back: Collection[str] = ()) -> None:
        super().__init__(", ".join(sorted(missing)) or "nothing moves")
        self.missing = sorted(missing)
        """Devices that are silent, have started again, or are cut off from a neighbour."""
        self.cut = frozenset(cut)
        """Those of them that answer but do not reach a neighbour: of no use."""
        self.back = frozenset(back)
        """Those of them that are there again, empty."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for what, in seconds."""

    patience: float
    """Seconds without news before the devices are asked, and without an answer before they count as lost."""
    return_window: float
    """Seconds for lost devices to come back before the others go on without them."""
    standstill: float
    """Seconds without anything done, though all devices answer."""
    startup: float = 10.0
    """Patience until the first configuration stands: devices do not all start at once."""


class Supervisor:
    """Waits on the coordinator's device; raises `Lost` instead of waiting for ever."""

    def __init__(
        self,
        mailbox: Mailbox,
        presence: Presence,
        problem: Problem,
        timeouts: Timeouts,
        backlog: Callable[[Piece], float],
    ) -> None:
        """``presence`` is this device's own.

        ``backlog`` is how many bytes a device may be sending here when it is asked for a sign of life.
        """
        self.mailbox = mailbox
        self.device = mailbox.device
        self.membership = Membership(mailbox, [spec.name for spec in problem.devices])
        self.timeouts = timeouts
        self.patience = max(timeouts.startup, timeouts.patience)
        self.progress = 0
        """Rises with every piece of work done: recoveries without any in between are fruitless."""
        self.layout: Sequence[Piece] = ()
        """Who has which part, in the order of the stages."""
        self.presence = presence
        self._backlog = backlog
        self._established = False
        self._still: tuple[int, float] = (-1, 0.0)
        """Pieces of work done by all devices together, and since when there are no more."""
        mailbox.on_open(self.begin)

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """The layout as it is sent and recorded: (device, first unit, one after its last)."""
        return [(part.device, part.first, part.last) for part in self.layout]

    def watch(self, layout: Sequence[Piece]) -> None:
        """Count these devices as having a role, and wait for them, from now on."""
        self.layout = layout
        self.membership.assigned = frozenset(part.device for part in layout)

    def start(self, layout: Sequence[Piece]) -> None:
        """Open the first configuration, numbered above those of a former program of this device."""
        self.watch(layout)
        self.mailbox.open(int(self.device.now() * 1000) + 1)

    def begin(self) -> None:
        """Note that the devices are given their roles now: one that starts again from here on has lost it."""
        self.membership.mark_configured()
        self._still = (-1, 0.0)

    async def take(self, kind: type[K], key: Hashable = ANY) -> K:
        """Take a message like `Mailbox.take`; raises `Lost` when it cannot come any more."""
        await self.until(lambda: self.mailbox.holds(kind, key))
        message = self.mailbox.pop(kind, key)
        assert message is not None
        return message

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until messages have brought something about; raises `Lost` when they cannot any more."""
        while not done():
            if restarted := self.membership.restarted & self.membership.assigned:
                raise Lost(restarted, back=restarted)
            heard = self._heard()
            if not await self.mailbox.changed(self.patience) and self._heard() == heard:
                await self._check()

    async def ready(self) -> None:
        """Wait until all devices are ready for their roles; once they have been, patience is what was asked for."""
        await self.until(lambda: self.membership.ready >= self.membership.assigned)
        if not self._established:
            self._established = True
            self.patience = self.timeouts.patience

    def learn_patience(self, lost: Lost, known: Mapping[str, float]) -> None:
        """Be more patient if a device was there all the time, only slow to reach.

        ``known`` are the incarnations that were given roles: one that has started again is not slow. What a device
        holds says less, since it may be so slow to reach that it never heard what to be.
        """
        present, answers = self.membership.present, self.membership.answers
        answering = [name for name in lost.missing if name in answers and name not in lost.cut]
        if any(known.get(name) == present[name] for name in answering):
            most = max(self.patience, MAX_PATIENCE_FACTOR * self.timeouts.patience)
            self.patience = min(2 * self.patience, most)

    def _heard(self) -> int:
        """Messages of this configuration but answers: rises as long as the devices get on."""
        return self.mailbox.arrived - self.membership.answered

    async def _check(self) -> None:
        """Ask every device for a sign of life; return if all gave it, or something has come meanwhile."""
        members, before = self.membership, self._heard()

        def come() -> bool:
            return self._heard() != before or bool(members.restarted & members.assigned)

        others = [part for part in self.layout if part.device != self.device.name]
        transfers = {part.device: SLACK * self._transfer_seconds(part) for part in others}
        allowed = {name: seconds + self.patience for name, seconds in transfers.items()}
        arriving = {name: MOST_ARRIVING * seconds + self.patience for name, seconds in transfers.items()}
        silent = await members.ping_all(allowed, come, arriving)
        if silent:
            raise Lost(silent)
        if come():
            return
        strangers = {part.device for part in others if members.answers[part.device].holds != self.mailbox.configuration}
        if strangers:
            raise Lost(strangers)
        self._check_movement()

    def _transfer_seconds(self, part: Piece) -> float:
        """Return the predicted seconds of all that a device may be sending here before its answer."""
        return transfer_time(self.mailbox.links, part.device, self.device.name, size_around(self._backlog(part)))

    def _check_movement(self) -> None:
        """Raise `Lost` if all devices answer but none has done anything for too long.

        Named are those that another has not reached for so long; of two the later one. One without a role may be asked
        for replicas, and not be reached either; that the coordinator does not reach such a device means nothing.
        """
        own, patience = self.device.name, self.timeouts.standstill
        answers = {**self.membership.answers, own: self.presence.answer()}
        order = [part.device for part in self.layout]
        now = self.device.now()
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
            if seconds >= patience and (peer in order or name != own)
        }
        raise Lost(cut, cut)


MAX_RETRIES_WITH_LOST = 10
"""Recoveries in a row, nothing having been done in between, after which devices that are lost again are left out."""
MAX_RETRIES = 20
"""Recoveries in a row, nothing having been done in between, after which the run fails."""


class ResumableWork(Protocol):
    """What is to be done, whatever happens to the devices meanwhile."""

    @property
    def start(self) -> int:
        """The step, or request, to go on with."""

    async def run(self) -> None:
        """Do what is left to do; called again after every recovery. Raises `Lost`."""


class RecoveryPolicy(Protocol):
    """Sets devices up, and does so again after a loss."""

    async def establish(self) -> None:
        """Send every device its role, and wait until all are ready. Raises `Lost`."""

    async def recover(self, lost: Lost, start: int) -> None:
        """Decide which devices to go on with, and from where. Raises `TestbedError` where that cannot be."""


async def run_with_recovery(
    work: ResumableWork, recovery: RecoveryPolicy, supervisor: Supervisor, recovering: bool = False
) -> None:
    """Work to the end; ``recovering``: devices were lost before. Raises `TestbedError` when nothing helps."""
    record = supervisor.device.record
    fruitless = 0
    await asyncio.sleep(0)  # devices that start at this very instant greet before they are sent anything
    while True:
        before = supervisor.progress
        try:
            await recovery.establish()
            if recovering:
                _LOG.info("recovered: resuming at %d with %s", work.start, supervisor.stages)
                record("recovery", phase="resumed", step=work.start, partition=supervisor.stages)
                recovering = False
            await work.run()
            return
        except Lost as lost:
            recovering = True
            _LOG.info("lost: %s; recovering from %d", lost, work.start)
            fruitless = 0 if supervisor.progress > before else fruitless + 1
            if fruitless == MAX_RETRIES:
                raise TestbedError(
                    f"{MAX_RETRIES} recoveries in a row without getting on, the last for {lost}: if links or "
                    "devices are slower than the scenario says, raise method.patience"
                ) from lost
            if fruitless >= MAX_RETRIES_WITH_LOST:
                lost = Lost(lost.missing, lost.missing, lost.back)
            supervisor.membership.exclude(lost.cut)
            await recovery.recover(lost, work.start)
