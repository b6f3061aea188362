"""Who is there, and what each device is for its coordinator: it answers, and has the role that it is given.

Information only. What to do about a device that is silent is a recovery's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Numbered, Typed

Held = Sequence[tuple[int, int, Sequence[int]]]
"""(configuration, step, units) of every state of which a device has a replica; as it travels."""


@dataclass(frozen=True)
class Hello(Typed, kind="hello"):
    """To the coordinator: the program has started and holds nothing."""

    incarnation: float
    """When it started, which distinguishes it from the one before a restart."""


@dataclass(frozen=True)
class Probe(Numbered, kind="probe", opens=True):
    """From the coordinator: are you there? Whatever is of a lower configuration is void."""

    question: int


@dataclass(frozen=True)
class Alive(Numbered, kind="alive"):
    """The answer to a probe."""

    question: int
    holds: int
    """The configuration that the device has a role in, given up now if lower than the probe's; 0 for none."""
    incarnation: float
    actions: int
    """Pieces of work done in that role so far."""
    computing: bool
    """Whether the device computes or sends, which may take long."""
    overdue: Mapping[str, float]
    """Peers that should have acknowledged something, and for how many seconds."""
    held: Held = ()


@dataclass(frozen=True)
class Configured(Numbered, kind="configured"):
    """To the coordinator: ready for work in this configuration."""

    incarnation: float


ARRIVING_INTERVAL = 0.5
"""Seconds after which to look again whether a message still arrives."""
_NOBODY: Mapping[str, float] = {}

MEMBERSHIP_KINDS: tuple[type[Typed], ...] = (Hello, Probe, Alive, Configured)


@dataclass(frozen=True)
class Status:
    """What a device can say of its role; see `Alive`."""

    holds: int = 0
    actions: int = 0
    computing: bool = False
    held: Held = ()


class Presence:
    """Answers the coordinator's probes, on every device."""

    def __init__(self, mailbox: Mailbox, coordinator: str, status: Callable[[], Status]) -> None:
        self.incarnation = mailbox.device.now()
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._status = status
        mailbox.on(Probe, self._answer)

    def greet(self) -> None:
        """Report to the coordinator that this device has started and holds nothing."""
        self._mailbox.post(self._coordinator, Hello(self.incarnation))

    def answer(self) -> Alive:
        """Return what this device says of itself."""
        return self._say(self._status(), self._mailbox.configuration, 0)

    def _answer(self, probe: Probe) -> None:
        status = self._status()
        self._mailbox.open(probe.configuration)
        self._mailbox.post(self._coordinator, self._say(status, probe.configuration, probe.question))

    def _say(self, status: Status, configuration: int, question: int) -> Alive:
        overdue = self._mailbox.sends.overdue()
        return Alive(configuration, question, incarnation=self.incarnation, overdue=overdue, **vars(status))


class Membership:
    """The other devices, as they answer in one configuration after the other."""

    def __init__(self, mailbox: Mailbox, names: Collection[str]) -> None:
        self.others = [name for name in names if name != mailbox.device.name]
        self.assigned: frozenset[str] = frozenset()
        """Devices that have a role in the present configuration."""
        self.present: dict[str, float] = {}
        """Devices heard of since this configuration began, with their incarnations."""
        self.known: dict[str, float] = {}
        """Incarnations of the devices when they were given their roles."""
        self.restarted: set[str] = set()
        """Devices that have started again since they were given their roles, and so hold nothing any more."""
        self.ready: set[str] = set()
        """Devices that said that they are ready for their role."""
        self.answers: dict[str, Alive] = {}
        """Answers to the last question."""
        self.answered = 0
        """Answers in what was the present configuration when they came."""
        self.joiners: set[str] = set()
        """Devices that answer and have no role."""
        self.excluded: set[str] = set()
        """Devices that may answer, but are not to have a role again."""
        self.refusal: str | None = None
        """Why no device can join; None: any can."""
        self._refused: set[str] = set()
        self._device = mailbox.device
        self._mailbox = mailbox
        self._probes: dict[str, asyncio.Future[None]] = {}
        self._question = 0
        mailbox.on_open(self._open)
        mailbox.on(Hello, lambda hello: self._hear(hello.sender, hello.incarnation))
        mailbox.on(Alive, self._take_answer)
        mailbox.on(Configured, self._take_ready)

    def _open(self) -> None:
        self.present.clear()
        self.ready.clear()
        self.mark_configured()

    def mark_configured(self) -> None:
        """Count a device that starts again from now on as one that has lost the role that it is being given."""
        self.restarted.clear()
        self.known = dict(self.present)

    def exclude(self, names: Collection[str]) -> None:
        """Turn devices away for good, though they may answer: with them the others get nowhere."""
        for name in sorted({*names} - self.excluded):
            self._device.record(
                "log", text=f"{name} is turned away: it may answer, but the others do not get on with it"
            )
        self.excluded |= {*names}

    def ask(self, names: Collection[str]) -> None:
        """Forget earlier answers and put a new question; a probe that is still on its way is taken back."""
        self._question += 1
        self.answers.clear()
        for name in names:
            if name in self._probes:
                self._probes[name].cancel()
            self._probes[name] = self._mailbox.post(name, Probe(self._mailbox.configuration, self._question))

    async def ping_all(
        self,
        allowed: Mapping[str, float],
        enough: Callable[[], bool] = lambda: False,
        arriving: Mapping[str, float] = _NOBODY,
    ) -> set[str]:
        """Ask for a sign of life; return who is silent for its ``allowed`` seconds beyond what was posted before.

        A device has ``arriving`` seconds while a message from it arrives, since its answer comes behind that message.
        """
        self.ask(allowed)
        posted = {name: self._mailbox.sends.due(name) for name in allowed}
        while silent := allowed.keys() - self.answers.keys():
            now = self._device.now()
            left = max(posted[name] + allowed[name] for name in silent) - now
            if left <= 0:
                ends = [
                    posted[name] + arriving[name] for name in silent & arriving.keys() if self._device.receives(name)
                ]
                left = min(max(ends, default=now) - now, ARRIVING_INTERVAL)
            if left <= 0:
                return silent
            await self._mailbox.changed(left)
            if enough():
                break
        return set()

    async def gather(self, deadlines: Mapping[str, float], greeted: bool = False) -> None:
        """Ask all others and wait for some, each until its deadline; ``greeted``: that it has started will do."""
        self.ask(self.others)
        heard: Collection[str] = self.present if greeted else self.answers
        awaited = {name: until for name, until in deadlines.items() if name != self._device.name}
        while True:
            now = self._device.now()
            left = [
                until - now
                for name, until in awaited.items()
                if name not in heard and name not in self.excluded and until > now
            ]
            if not left:
                return
            await self._mailbox.changed(max(left))

    def _hear(self, name: str, incarnation: float) -> None:
        self.present[name] = incarnation
        if self.known.setdefault(name, incarnation) != incarnation:
            self.restarted.add(name)
        if name in self.excluded | self.assigned:
            return
        if self.refusal is None:
            self.joiners.add(name)
        elif name not in self._refused:
            self._device.record("log", text=f"{name} is turned away: {self.refusal}")
            self._refused.add(name)

    def _take_answer(self, answer: Alive) -> None:
        self.answered += 1
        self._hear(answer.sender, answer.incarnation)
        if answer.question == self._question:
            self.answers[answer.sender] = answer

    def _take_ready(self, configured: Configured) -> None:
        self._hear(configured.sender, configured.incarnation)
        self.ready.add(configured.sender)


R = TypeVar("R", bound="Role")


class Role(Protocol):
    """What a device is in one configuration, such as a stage."""

    @property
    def actions(self) -> int:
        """Pieces of work done: rises as long as it gets on."""

    @property
    def computing(self) -> bool:
        """Whether the device computes for it right now."""

    async def prepare(self) -> None:
        """Get ready, by loading weights for example."""

    async def serve(self) -> None:
        """Do the role's work until cancelled."""


class RoleHolder:
    """One device from the start of its program on; knows nothing from before.

    A configuration higher than its own ends its role, whatever message brings it: the coordinator has given that up.
    """

    def __init__(
        self, mailbox: Mailbox, coordinator: str, status: Callable[[Status], Status] = lambda status: status
    ) -> None:
        """``status`` may add to what the device says of itself when it is asked."""
        self.role: Role | None = None
        self.presence = Presence(mailbox, coordinator, lambda: status(self._status()))
        self._mailbox = mailbox
        self._coordinator = coordinator
        mailbox.on_open(self._end)

    def follow(self, configure: type[Typed], role_of: Callable[[Any], Role]) -> None:
        """Have each role that messages of this kind bring, as soon as it arrives; the kind opens its configuration."""

        def take(message: Any) -> None:
            if self.assume(message.configuration, lambda: role_of(message)):
                self._mailbox.start_in_configuration(self._serve(announce=True))

        self._mailbox.on(configure, take)

    def assume(self, configuration: int, role_of: Callable[[], Role]) -> bool:
        """Have a role from now on, unless there is one already or the configuration is over; say whether so."""
        self._mailbox.open(configuration)
        if self.role is not None or configuration < self._mailbox.configuration:
            return False
        self.role = role_of()
        return True

    def begin(self) -> None:
        """Do the role's work until the configuration ends."""
        self._mailbox.start_in_configuration(self._serve())

    def ready(self) -> None:
        """Report to the coordinator that this device is ready for its role."""
        configured = Configured(self._mailbox.configuration, self.presence.incarnation)
        self._mailbox.post(self._coordinator, configured)

    async def serve(self) -> None:
        """Be there for the coordinator until cancelled: the program of every other device."""
        self.presence.greet()
        await asyncio.get_running_loop().create_future()

    async def _serve(self, announce: bool = False) -> None:
        assert self.role is not None
        role = self.role
        await role.prepare()
        if announce:
            self.ready()
        await role.serve()

    def _end(self) -> None:
        self.role = None

    def _status(self) -> Status:
        role = self.role
        if role is None:
            return Status()
        # A message that is still on its way, as long as it may take, is work like any other.
        busy = role.computing or self._mailbox.sends.waiting()
        return Status(self._mailbox.configuration, role.actions, busy)
