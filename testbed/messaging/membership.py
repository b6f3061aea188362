"""Presence of the devices in a run, as the coordinator sees it, and the roles that they hold.

This module only informs; a recovery policy decides about silent devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import ConfigurationMessage, TypedMessage

ReplicaList = Sequence[tuple[int, int, Sequence[int]]]
"""Encoded replicas of a device: a (configuration, step, units) for each replicated state."""


@dataclass(frozen=True)
class Hello(TypedMessage, kind="hello"):
    """Message to the coordinator: the program has started without state."""

    incarnation: float
    """Start time of the program; a restarted program has a larger one."""


@dataclass(frozen=True)
class Probe(ConfigurationMessage, kind="probe", opens=True):
    """Message from the coordinator to request an `Alive`; lower configurations become void."""

    question: int


@dataclass(frozen=True)
class Alive(ConfigurationMessage, kind="alive"):
    """A device's reply to a probe."""

    question: int
    holds: int
    """Configuration of the device's role, which ends now if it is lower than the probe's; 0 without a role."""
    incarnation: float
    actions: int
    """Number of tasks completed in the role."""
    computing: bool
    """Whether the device is computing or sending."""
    overdue: Mapping[str, float]
    """Seconds by which the acknowledgements of each peer are overdue."""
    held: ReplicaList = ()


@dataclass(frozen=True)
class Configured(ConfigurationMessage, kind="configured"):
    """Message to the coordinator: the device is ready for its role in the configuration."""

    incarnation: float


ARRIVING_INTERVAL = 0.5
"""Interval, in seconds, at which the arrival of a message's bytes is checked."""
_NOBODY: Mapping[str, float] = {}

MEMBERSHIP_KINDS: tuple[type[TypedMessage], ...] = (Hello, Probe, Alive, Configured)


@dataclass(frozen=True)
class Status:
    """A device's report on its role; the fields are those of `Alive`."""

    holds: int = 0
    actions: int = 0
    computing: bool = False
    held: ReplicaList = ()


class Presence:
    """The replies of a device to the coordinator's probes."""

    def __init__(
        self, mailbox: Mailbox, coordinator: str, status: Callable[[], Status]
    ) -> None:
        self.incarnation = mailbox.device.now()
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._status = status
        mailbox.on(Probe, self._answer_probe)

    def greet(self) -> None:
        """Report the start of the device, without state, to the coordinator."""
        self._mailbox.post(self._coordinator, Hello(self.incarnation))

    def answer(self) -> Alive:
        """Return the device's own `Alive` message."""
        return self._compose_reply(self._status(), self._mailbox.configuration, 0)

    def _answer_probe(self, probe: Probe) -> None:
        status = self._status()
        # The status is taken before a newer configuration ends the role.
        self._mailbox.open(probe.configuration)
        self._mailbox.post(
            self._coordinator,
            self._compose_reply(status, probe.configuration, probe.question),
        )

    def _compose_reply(
        self, status: Status, configuration: int, question: int
    ) -> Alive:
        overdue = self._mailbox.sends.overdue()
        return Alive(
            configuration,
            question,
            incarnation=self.incarnation,
            overdue=overdue,
            **vars(status),
        )


class Membership:
    """The other devices of a run and their replies in the current configuration."""

    def __init__(self, mailbox: Mailbox, names: Collection[str]) -> None:
        self.others = [name for name in names if name != mailbox.device.name]
        self.assigned: frozenset[str] = frozenset()
        """Devices with a role in the current configuration."""
        self.present: dict[str, float] = {}
        """Incarnations of the devices that have sent a message in the current configuration."""
        self.known: dict[str, float] = {}
        """Incarnations of the devices when their roles were assigned."""
        self.restarted: set[str] = set()
        """Devices that have restarted since their roles were assigned, and therefore lost their state."""
        self.ready: set[str] = set()
        """Devices that have reported ready for their role."""
        self.answers: dict[str, Alive] = {}
        """Replies to the latest probe."""
        self.answered = 0
        """Number of replies received in the configuration that was current at their arrival."""
        self.joiners: set[str] = set()
        """Devices that reply and have no role."""
        self.excluded: set[str] = set()
        """Devices that must not receive a role again, even if they reply."""
        self.refusal: str | None = None
        """Reason why no device may join, or None if devices may join."""
        self._logged_refusals: dict[str, str] = {}
        """Device -> the reason logged last, since a device replies to every probe."""
        self._device = mailbox.device
        self._mailbox = mailbox
        self._probes: dict[str, asyncio.Future[None]] = {}
        self._question = 0
        mailbox.on_open(self._reset_presence)
        # A greeting without a probe: the device has started, maybe again.
        mailbox.on(
            Hello, lambda hello: self._note_presence(hello.sender, hello.incarnation)
        )
        mailbox.on(Alive, self._handle_answer)
        mailbox.on(Configured, self._handle_ready)

    def _reset_presence(self) -> None:
        self.present.clear()
        self.ready.clear()
        self.mark_configured()

    def mark_configured(self) -> None:
        """Treat devices restarted from now on as having lost their new role."""
        self.restarted.clear()
        self.known = dict(self.present)

    def exclude(self, names: Collection[str]) -> None:
        """Ban devices from roles for good, although they reply: the other devices make no progress."""
        for name in sorted({*names} - self.excluded):
            self._device.record(
                "log",
                text=f"{name} is excluded: it replies, but the other devices make no progress with it",
            )
        self.excluded |= {*names}

    def ask(self, names: Collection[str]) -> None:
        """Discard earlier replies and send a new probe; probes still in transit are cancelled."""
        self._question += 1
        self.answers.clear()
        for name in names:
            # A cancelled probe leaves room on a slow link for the new one.
            if name in self._probes:
                self._probes[name].cancel()
            self._probes[name] = self._mailbox.post(
                name, Probe(self._mailbox.configuration, self._question)
            )

    async def ping_all(
        self,
        allowed: Mapping[str, float],
        enough: Callable[[], bool] = lambda: False,
        arriving: Mapping[str, float] = _NOBODY,
    ) -> set[str]:
        """Probe devices and return the silent ones.

        ``allowed`` is the time of each device in seconds, counted from the due acknowledgement of earlier messages.
        ``arriving`` is its time while one of its messages is arriving, since the reply queues behind that message. The
        wait ends early when ``enough`` returns True.
        """
        self.ask(allowed)
        # A device's time begins when the messages posted to it before the probe are through.
        posted = {name: self._mailbox.sends.due(name) for name in allowed}
        while silent := allowed.keys() - self.answers.keys():
            now = self._device.now()
            left = max(posted[name] + allowed[name] for name in silent) - now
            if left <= 0:
                extended = []
                for name in silent & arriving.keys():
                    if self._device.receives(name):
                        extended.append(posted[name] + arriving[name])
                # In short steps, since a message may stop arriving at any moment.
                left = min(max(extended, default=now) - now, ARRIVING_INTERVAL)
            if left <= 0:
                return silent
            await self._mailbox.changed(left)
            if enough():
                break
        return set()

    async def gather(
        self, deadlines: Mapping[str, float], greeted: bool = False
    ) -> None:
        """Probe all other devices and wait for the ``deadlines`` of the named ones.

        With ``greeted``, a `Hello` in this configuration counts as a reply.
        """
        self.ask(self.others)
        heard: Collection[str] = self.present if greeted else self.answers
        ignored = {*self.excluded, self._device.name}
        while True:
            now = self._device.now()
            left = []
            for name, until in deadlines.items():
                # `heard` grows while this function waits.
                if name not in heard and name not in ignored and until > now:
                    left.append(until - now)
            if not left:
                return
            await self._mailbox.changed(max(left))

    def _note_presence(self, name: str, incarnation: float) -> None:
        self.present[name] = incarnation
        # A different incarnation than at the assignment of roles: the device has lost its state.
        if self.known.setdefault(name, incarnation) != incarnation:
            self.restarted.add(name)
        if name in self.excluded or name in self.assigned:
            return
        if self.refusal is None:
            self.joiners.add(name)
        elif self._logged_refusals.get(name) != self.refusal:
            self._device.record("log", text=f"{name} cannot join: {self.refusal}")
            self._logged_refusals[name] = self.refusal

    def _handle_answer(self, answer: Alive) -> None:
        self.answered += 1
        self._note_presence(answer.sender, answer.incarnation)
        # A late reply to an earlier probe shows presence, but its status is outdated.
        if answer.question == self._question:
            self.answers[answer.sender] = answer

    def _handle_ready(self, configured: Configured) -> None:
        self._note_presence(configured.sender, configured.incarnation)
        self.ready.add(configured.sender)


R = TypeVar("R", bound="Role")


class Role(Protocol):
    """The work of a device in one configuration, such as a pipeline stage."""

    @property
    def actions(self) -> int:
        """Number of completed tasks; rises as long as the role makes progress."""

    @property
    def computing(self) -> bool:
        """Whether the device is computing for the role."""

    async def prepare(self) -> None:
        """Prepare for work, for example by loading weights."""

    async def serve(self) -> None:
        """Do the role's work until cancelled."""


class RoleHolder:
    """The role of one device since the start of its program.

    Any message of a higher configuration ends the role, since the coordinator has replaced its assignment.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        coordinator: str,
        status: Callable[[Status], Status] = lambda status: status,
    ) -> None:
        """``status`` may extend the device's report when the coordinator probes the device."""
        self.role: Role | None = None
        # Last in the chain: a method adds its replicas to the report of the role.
        self.presence = Presence(
            mailbox, coordinator, lambda: status(self._report_status())
        )
        self._mailbox = mailbox
        self._coordinator = coordinator
        mailbox.on_open(self._drop_role)

    def follow(
        self, configure: type[TypedMessage], role_of: Callable[[Any], Role]
    ) -> None:
        """Assume each role assigned by a message of kind ``configure``; the message opens its configuration."""

        def assume_role(message: Any) -> None:
            if self.assume(message.configuration, lambda: role_of(message)):
                self._mailbox.start_in_configuration(self._run_role(announce=True))

        self._mailbox.on(configure, assume_role)

    def assume(self, configuration: int, role_of: Callable[[], Role]) -> bool:
        """Assume a role and return True, or return False if another role is held or the configuration is outdated."""
        self._mailbox.open(configuration)
        # The coordinator may send the assignment again, and a late one belongs to an earlier configuration.
        if self.role is not None or configuration < self._mailbox.configuration:
            return False
        self.role = role_of()
        return True

    def begin(self) -> None:
        """Do the role's work in the background until the configuration ends."""
        self._mailbox.start_in_configuration(self._run_role())

    def ready(self) -> None:
        """Report to the coordinator: the device is ready for its role."""
        configured = Configured(self._mailbox.configuration, self.presence.incarnation)
        self._mailbox.post(self._coordinator, configured)

    async def serve(self) -> None:
        """Serve the coordinator until cancelled: the program of every other device."""
        self.presence.greet()
        # Handlers do all the work; the mailbox cancels this wait with the program.
        await asyncio.get_running_loop().create_future()

    async def _run_role(self, announce: bool = False) -> None:
        assert self.role is not None
        role = self.role
        await role.prepare()
        if announce:
            self.ready()
        await role.serve()

    def _drop_role(self) -> None:
        self.role = None

    def _report_status(self) -> Status:
        role = self.role
        if role is None:
            return Status()
        # A message in transit counts as work: on a slow link, sending may take most of the time.
        busy = role.computing or self._mailbox.sends.is_busy()
        return Status(self._mailbox.configuration, role.actions, busy)
