"""Presence of the devices in a run, as the coordinator sees it, and the role of each device.

The coordinator has a `Membership`, which sends each device a `Probe` and reports which devices reply, have restarted or
are silent. Every device has a `RoleHolder` for its work, with a `Presence` that replies to probes. An incarnation is
one start of a device's program, identified by its time. Consequences for silent devices, such as new roles for the
others, are decisions of a recovery policy (`testbed.messaging.supervision.RecoveryPolicy`).
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
    """Start time of the program, in seconds; a restart has a later time."""


@dataclass(frozen=True)
class Probe(ConfigurationMessage, kind="probe", opens=True):
    """Message from the coordinator to request an `Alive`.

    If the probe's configuration is newer than the device's, the device opens it and drops its role in the older one.
    """

    question: int
    """Number of the probe, which the reply repeats."""


@dataclass(frozen=True)
class Alive(ConfigurationMessage, kind="alive"):
    """A device's reply to a probe."""

    question: int
    """Number of the probe; 0 if the coordinator reports on itself."""
    holds: int
    """Configuration of the device's role when the probe arrived; 0 without a role. A newer probe ends this role."""
    incarnation: float
    actions: int
    """Number of tasks that the role has completed."""
    computing: bool
    """Whether the device is busy for its role: computing, or sending a message that is not overdue."""
    overdue: Mapping[str, float]
    """Peer -> seconds since its acknowledgement of a message should have arrived, for peers with such messages."""
    held: ReplicaList = ()
    """The replicas that the device stores for others."""


@dataclass(frozen=True)
class Configured(ConfigurationMessage, kind="configured"):
    """Message to the coordinator: the device is ready for its role in the configuration."""

    incarnation: float


ARRIVING_INTERVAL = 0.5
"""Seconds between two checks whether a device's message is still arriving.

A device whose message stops arriving counts as silent at most this much too late.
"""

MEMBERSHIP_KINDS: tuple[type[TypedMessage], ...] = (Hello, Probe, Alive, Configured)


@dataclass(frozen=True)
class Status:
    """A device's report on the present role: the method-specific fields of `Alive`, with the same names."""

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
        """Return an `Alive` without a probe, so that the coordinator judges itself like the other devices."""
        return self._compose_reply(self._status(), self._mailbox.configuration, 0)

    def _answer_probe(self, probe: Probe) -> None:
        status = self._status()
        # The status is taken first: if the probe opens a newer configuration, `open` ends the role.
        self._mailbox.open(probe.configuration)
        self._mailbox.post(
            self._coordinator,
            self._compose_reply(status, probe.configuration, probe.question),
        )

    def _compose_reply(
        self, status: Status, configuration: int, question: int
    ) -> Alive:
        overdue = self._mailbox.outbox.overdue()
        return Alive(
            configuration,
            question,
            incarnation=self.incarnation,
            overdue=overdue,
            **vars(status),
        )


class Membership:
    """The other devices of a run, and their replies to the coordinator::

    members = Membership(mailbox, ["source", "worker1", "worker2"])
    silent = await members.ping_all({"worker1": 2.0, "worker2": 2.0})
    """

    def __init__(self, mailbox: Mailbox, names: Collection[str]) -> None:
        self.others = [name for name in names if name != mailbox.device.name]
        self.assigned: frozenset[str] = frozenset()
        """Devices with a role in the current configuration."""
        self.present: dict[str, float] = {}
        """Incarnation of each device of which a `Hello`, `Alive` or `Configured` has arrived in this configuration."""
        self.assigned_incarnations: dict[str, float] = {}
        """Incarnation of each device at the assignment of roles; of a then absent device, in its first later
        message."""
        self.restarted: set[str] = set()
        """Devices that have restarted since their roles were assigned, and therefore lost their state."""
        self.ready: set[str] = set()
        """Devices that are ready for their roles: their `Configured` has arrived in the current configuration."""
        self.answers: dict[str, Alive] = {}
        """Replies to the latest probe."""
        self.reply_count = 0
        """Number of replies in the whole run, including late replies but not replies of older configurations."""
        self.joiners: set[str] = set()
        """Present devices that may get a role. The recovery policy removes a device when it gives the device a role."""
        self.excluded: set[str] = set()
        """Devices that get no role, even if they reply, until the recovery policy removes them from this set."""
        self.refusal: str | None = None
        """Reason why no device may join, or None if devices may join."""
        self._logged_refusals: dict[str, str] = {}
        """Device -> the reason logged last, since a device replies to every probe."""
        self._device = mailbox.device
        self._mailbox = mailbox
        self._probes: dict[str, asyncio.Future[None]] = {}
        """The latest probe of each device, done with its acknowledgement."""
        self._question = 0
        """Number of the latest round of probes, which distinguishes its replies from late ones."""
        mailbox.on_open(self._reset_presence)
        # A device sends `Hello` without a probe at each start of its program.
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
        """Record the assignment of roles: from now on, a restarted device has lost the assigned role."""
        self.restarted.clear()
        self.assigned_incarnations = dict(self.present)

    def exclude(self, names: Collection[str]) -> None:
        """Exclude devices from roles: each replies, but blocks the progress of the other devices."""
        for name in sorted({*names} - self.excluded):
            self._device.record(
                "log",
                text=f"{name} is excluded: it replies, but the other devices make no progress with it",
            )
        self.excluded |= {*names}

    def ask(self, names: Collection[str]) -> None:
        """Discard all earlier replies, and send a new probe to each named device.

        Earlier probes to these devices are cancelled if they are still in transit.
        """
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
        reply_seconds: Mapping[str, float],
        stop: Callable[[], bool] = lambda: False,
        arriving: Mapping[str, float] = {},
    ) -> set[str]:
        """Probe devices, wait for their replies, and return the silent devices.

        ``reply_seconds`` names the devices and the time that each has for its reply, in seconds. The time begins when
        the probe, and all earlier messages to the device, should be acknowledged. ``arriving`` has the longer time of a
        device while one of its messages is arriving, since its reply queues behind that message. As soon as ``stop``
        returns True after a message, the wait ends and the result is empty.
        """
        self.ask(reply_seconds)
        starts = {}
        for name in reply_seconds:
            starts[name] = self._mailbox.outbox.acknowledgement_deadline(name)
        while silent := reply_seconds.keys() - self.answers.keys():
            now = self._device.now()
            remaining = max(starts[name] + reply_seconds[name] for name in silent) - now
            if remaining <= 0:
                remaining = self._arriving_seconds(silent, starts, arriving)
            if remaining <= 0:
                return silent
            await self._mailbox.changed(remaining)
            if stop():
                break
        return set()

    def _arriving_seconds(
        self,
        silent: Collection[str],
        starts: Mapping[str, float],
        arriving: Mapping[str, float],
    ) -> float:
        """Return the seconds to wait for devices whose messages are arriving; not above 0 if none has time left."""
        now = self._device.now()
        end = now
        for name in silent:
            if name in arriving and self._device.receives(name):
                end = max(end, starts[name] + arriving[name])
        # In short steps, since a message may stop arriving at any moment.
        return min(end - now, ARRIVING_INTERVAL)

    async def gather(
        self, deadlines: Mapping[str, float], greeted: bool = False
    ) -> None:
        """Probe all other devices; return once each device of ``deadlines`` has replied or is too late.

        ``deadlines`` are instants of the run in seconds. This device and excluded ones are not waited for. With
        ``greeted``, any message that shows a device's presence in this configuration, such as `Hello`, counts as a
        reply.
        """
        self.ask(self.others)
        responders: Collection[str] = self.present if greeted else self.answers
        ignored = {*self.excluded, self._device.name}
        while True:
            now = self._device.now()
            remaining = []
            for name, deadline in deadlines.items():
                # `responders` grows while this function waits.
                if name in responders or name in ignored:
                    continue
                if deadline > now:
                    remaining.append(deadline - now)
            if not remaining:
                return
            await self._mailbox.changed(max(remaining))

    def _note_presence(self, name: str, incarnation: float) -> None:
        """Record the presence of a device, including a restart or a wish to join."""
        self.present[name] = incarnation
        # The device has restarted since the assignment of roles, and has lost its state.
        if self.assigned_incarnations.setdefault(name, incarnation) != incarnation:
            self.restarted.add(name)
        has_role = name in self.assigned
        if not has_role and name not in self.excluded:
            self._admit_or_refuse(name)

    def _admit_or_refuse(self, name: str) -> None:
        if self.refusal is None:
            self.joiners.add(name)
        elif self._logged_refusals.get(name) != self.refusal:
            self._device.record("log", text=f"{name} cannot join: {self.refusal}")
            self._logged_refusals[name] = self.refusal

    def _handle_answer(self, answer: Alive) -> None:
        self.reply_count += 1
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
    """The role of one device, which may have several roles one after the other.

    A role ends with its configuration: when a newer configuration opens, the coordinator assigns all roles again.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        coordinator: str,
        status: Callable[[Status], Status] = lambda status: status,
    ) -> None:
        """``status`` receives the report on the role for each probe, and returns it with additions of the method."""
        self.role: Role | None = None
        # A method adds the replicas on this device, which exist independently of a role.
        self.presence = Presence(
            mailbox, coordinator, lambda: status(self._report_status())
        )
        self._mailbox = mailbox
        self._coordinator = coordinator
        mailbox.on_open(self._drop_role)

    def follow(
        self, configure: type[TypedMessage], role_of: Callable[[Any], Role]
    ) -> None:
        """Register the kind of message for assigning roles: ``role_of`` makes the role from a message.

        Each message opens its configuration. The role is prepared, reported as ready, and served.
        """

        def assume_role(message: Any) -> None:
            if self.assume(message.configuration, lambda: role_of(message)):
                self._mailbox.start_in_configuration(self._run_role(announce=True))

        self._mailbox.on(configure, assume_role)

    def assume(self, configuration: int, role_of: Callable[[], Role]) -> bool:
        """Open a configuration and make the device's role; return whether the device got the role.

        A device that already has a role in this configuration, or knows a newer one, does not get the role.
        """
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
        """Send `Configured` to the coordinator, which adds the device to `Membership.ready`."""
        configured = Configured(self._mailbox.configuration, self.presence.incarnation)
        self._mailbox.post(self._coordinator, configured)

    async def serve(self) -> None:
        """Greet the coordinator and follow received messages until cancelled: the program of all other devices."""
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
        busy = role.computing or self._mailbox.outbox.is_busy()
        return Status(self._mailbox.configuration, role.actions, busy)
