"""Failure detection for devices that work together, and the loop that recovers from failures.

Detection uses messages alone. News are messages of the current configuration other than replies to probes. After the
stall timeout without news, the supervisor probes all devices with a role. The supervisor waits for a slow device that
replies; a silent device, or a device without its role, is lost. A reply queues behind the device's earlier messages, so
a device whose message is still arriving has more time.

Two classes implement `RecoveryPolicy`: `testbed.ml.pipeline.checkpointing.CheckpointRecovery` stops all devices and
resumes from the last checkpoint; `testbed.ml.pipeline.recovery.ReplicaRecovery` resumes from replicas that the devices
hold for each other. A method that continues without lost devices needs neither: it takes messages with a deadline and
asks `Membership` for the present devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from testbed.common.errors import TestbedError
from testbed.messaging.mailbox import ANY, OVERDUE_FACTOR, Mailbox, transfer_time
from testbed.messaging.membership import Membership, Presence
from testbed.messaging.typed_messages import TypedMessage
from testbed.method import PlanningProblem
from testbed.plan import Assignment
from testbed.wire.message import size_around

K = TypeVar("K", bound=TypedMessage)

_LOG = logging.getLogger(__name__)

MAX_ARRIVING_FACTOR = 8.0
"""Factor on the allowed transfer time for a message that is still arriving. A busy host delivers late and deserves more
time, but the wait for a nearly dead link must end."""
MAX_STALL_TIMEOUT_FACTOR = 8.0
"""Upper bound of the learned stall timeout for slow devices, as a multiple of the configured one."""


class Lost(Exception):  # noqa: N818 - a state of the devices, which a recovery deals with
    """The current configuration cannot continue because of lost devices."""

    def __init__(
        self,
        missing: Collection[str],
        unreachable: Collection[str] = (),
        restarted: Collection[str] = (),
    ) -> None:
        super().__init__(", ".join(sorted(missing)) or "no progress")
        self.missing = sorted(missing)
        """Devices that are silent, have restarted, or cannot reach a neighbour."""
        self.unreachable = frozenset(unreachable)
        """The missing devices that reply to the coordinator but cannot reach a neighbour."""
        self.restarted = frozenset(restarted)
        """The missing devices that have restarted without state."""


@dataclass(frozen=True)
class Timeouts:
    """Time-outs of the failure detection, in seconds."""

    stall_timeout: float
    """Time without news before the devices are probed, and without a reply before they count as lost."""
    rejoin_timeout: float
    """Time for lost devices to return before the others continue without them."""
    standstill: float
    """Time without progress, although all devices reply, before the devices count as lost."""
    startup: float = 10.0
    """Stall timeout until the first configuration is established, since devices start at different times."""


class Supervisor:
    """The coordinator's wait for messages; raises `Lost` when a device fails."""

    def __init__(
        self,
        mailbox: Mailbox,
        presence: Presence,
        problem: PlanningProblem,
        timeouts: Timeouts,
        backlog: Callable[[Assignment], float],
    ) -> None:
        """``presence`` is the coordinator's own presence.

        ``backlog`` returns the number of bytes that a device with the given assignment may be sending to the
        coordinator when a probe arrives.
        """
        self.mailbox = mailbox
        self.device = mailbox.device
        self.membership = Membership(mailbox, [spec.name for spec in problem.devices])
        self.timeouts = timeouts
        self.stall_timeout = max(timeouts.startup, timeouts.stall_timeout)
        """Time without news before devices are probed, in seconds: longer at first, and for slow devices."""
        self.progress = 0
        """Number of completed tasks; a recovery after which the number does not rise is fruitless."""
        self.layout: Sequence[Assignment] = ()
        """The assignments of units to devices, in the order of the stages."""
        self.presence = presence
        self._backlog = backlog
        self._established = False
        """Whether all devices have been ready for their roles once."""
        self._completed_tasks = -1
        """Total number of completed tasks on all devices, at the last check; -1 before the first check."""
        self._last_movement = 0.0
        """Instant at which the number changed, or at which a device was computing."""
        mailbox.on_open(self.begin)

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """The layout as recorded in events: (device, first unit, end unit)."""
        return [(part.device, part.start, part.stop) for part in self.layout]

    def watch(self, layout: Sequence[Assignment]) -> None:
        """Supervise the devices of a layout from now on."""
        self.layout = layout
        self.membership.assigned = frozenset(part.device for part in layout)

    def start(self, layout: Sequence[Assignment]) -> None:
        """Open the first configuration, with a number above all earlier ones of the device."""
        self.watch(layout)
        # Milliseconds of the run's clock: a restarted coordinator must not reuse a number.
        self.mailbox.open(int(self.device.now() * 1000) + 1)

    def begin(self) -> None:
        """Note the assignment of roles: a later restart loses the role."""
        self.membership.mark_configured()
        self._completed_tasks = -1
        self._last_movement = 0.0

    async def take(self, kind: type[K], key: Hashable = ANY) -> K:
        """Take a message as `Mailbox.take` does; raises `Lost` if a required device fails first."""
        await self.until(lambda: self.mailbox.holds(kind, key))
        message = self.mailbox.pop(kind, key)
        # `until` has just returned, and nothing else ran meanwhile.
        assert message is not None
        return message

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition on received messages; raises `Lost` when a device fails first."""
        while not done():
            # A device that is up again answers every probe, but its part of the work is gone.
            restarted = self.membership.restarted & self.membership.assigned
            if restarted:
                raise Lost(restarted, restarted=restarted)
            before = self._count_news()
            has_arrived = await self.mailbox.changed(self.stall_timeout)
            # A message may arrive in the same turn of the loop as the time-out.
            if not has_arrived and self._count_news() == before:
                await self._probe_devices()

    async def ready(self) -> None:
        """Wait until all devices are ready for their roles; the startup timeout then ends. Raises `Lost`."""
        await self.until(lambda: self.membership.ready >= self.membership.assigned)
        if not self._established:
            self._established = True
            self.stall_timeout = self.timeouts.stall_timeout

    def learn_stall_timeout(
        self, lost: Lost, incarnations: Mapping[str, float]
    ) -> None:
        """Increase the stall timeout if a lost device was running and only slow to reach.

        ``incarnations`` are those at the assignment of roles: a restarted device is not slow. The device's
        configuration is not considered, since a very slow link may not have delivered the device's role.
        """
        present = self.membership.present
        for name in self.membership.answers.keys() & {*lost.missing} - lost.unreachable:
            # A changed incarnation means a restart, not slowness.
            if incarnations.get(name) == present[name]:
                limit = max(
                    self.stall_timeout,
                    MAX_STALL_TIMEOUT_FACTOR * self.timeouts.stall_timeout,
                )
                # Doubled once for each loss, independent of the number of slow devices.
                self.stall_timeout = min(2 * self.stall_timeout, limit)
                return

    def _count_news(self) -> int:
        """Return the number of received messages besides replies to probes, which rises as long as devices work."""
        return self.mailbox.received_count - self.membership.reply_count

    async def _probe_devices(self) -> None:
        """Probe every device; return if all reply or a message arrives meanwhile, else raise `Lost`."""
        members = self.membership
        before = self._count_news()

        def has_news() -> bool:
            if self._count_news() != before:
                return True
            return bool(members.restarted & members.assigned)

        others = [part for part in self.layout if part.device != self.device.name]
        allowed: dict[str, float] = {}
        arriving: dict[str, float] = {}
        for part in others:
            # The stall timeout of a device begins after everything queued on its link has arrived.
            transfer = OVERDUE_FACTOR * self._transfer_seconds(part)
            allowed[part.device] = transfer + self.stall_timeout
            arriving[part.device] = MAX_ARRIVING_FACTOR * transfer + self.stall_timeout
        silent = await members.ping_all(allowed, has_news, arriving)
        if silent:
            raise Lost(silent)
        if has_news():
            return
        # A device that replies without its role has restarted, or never received the role.
        without_role = set()
        for part in others:
            if members.answers[part.device].holds != self.mailbox.configuration:
                without_role.add(part.device)
        if without_role:
            raise Lost(without_role)
        self._check_movement()

    def _transfer_seconds(self, part: Assignment) -> float:
        """Return the predicted transfer time of everything queued by a device before its reply."""
        wire_bytes = size_around(self._backlog(part))
        links = self.mailbox.links
        return transfer_time(links, part.device, self.device.name, wire_bytes)

    def _check_movement(self) -> None:
        """Raise `Lost` if all devices reply but none has made progress for too long.

        A peer has failed to reach each of the lost devices for that time. Between two devices of the layout, the later
        stage is lost. A device outside the layout may be needed for its replicas, so it may be lost too, except if the
        peer is the coordinator.
        """
        own = self.device.name
        standstill = self.timeouts.standstill
        answers = {**self.membership.answers, own: self.presence.answer()}
        order = [part.device for part in self.layout]
        now = self.device.now()
        actions = sum(answers[name].actions for name in order)
        # A computation or a transfer may take long without completing a task.
        is_computing = any(answers[name].computing for name in order)
        if actions != self._completed_tasks or is_computing:
            self._completed_tasks = actions
            self._last_movement = now
            return
        if now - self._last_movement < standstill:
            return
        unreachable = set()
        for name in order:
            for peer, seconds in answers[name].overdue.items():
                if seconds < standstill:
                    continue
                if peer in order:
                    # A blocked link concerns two stages, and dropping one of them is enough.
                    unreachable.add(max(name, peer, key=order.index))
                elif name != own:
                    unreachable.add(peer)
        raise Lost(unreachable, unreachable=unreachable)


MAX_RETRIES_WITH_LOST = 10
"""Number of consecutive fruitless recoveries after which devices that fail again are excluded."""
MAX_RETRIES = 20
"""Number of consecutive fruitless recoveries after which the run fails."""


class ResumableWork(Protocol):
    """Work with the ability to resume after the loss of devices."""

    @property
    def start(self) -> int:
        """The step, or request, from which the work resumes."""

    async def run(self) -> None:
        """Do the remaining work; called again after every recovery. Raises `Lost`."""


class RecoveryPolicy(Protocol):
    """A strategy for the assignment of roles to devices, also after a loss."""

    async def establish(self) -> None:
        """Assign a role to every device and wait until all are ready. Raises `Lost`."""

    async def recover(self, lost: Lost, start: int) -> None:
        """Choose the devices and the state to resume with. Raises `TestbedError` if no recovery is possible."""


async def run_with_recovery(
    work: ResumableWork,
    recovery: RecoveryPolicy,
    supervisor: Supervisor,
    recovering: bool = False,
) -> None:
    """Run the work to the end, and recover from each loss of devices.

    Set ``recovering`` if devices were lost before the call. Raises `TestbedError` after too many fruitless recoveries.
    Example::

        await run_with_recovery(training, CheckpointRecovery(...), supervisor)
    """
    record = supervisor.device.record
    fruitless = 0
    # Devices that start at the same instant send their greeting before they receive a role.
    await asyncio.sleep(0)
    while True:
        before = supervisor.progress
        try:
            await recovery.establish()
            if recovering:
                start, stages = work.start, supervisor.stages
                _LOG.info("recovered: resuming at %d with %s", start, stages)
                record("recovery", phase="resumed", step=start, partition=stages)
                recovering = False
            await work.run()
            return
        except Lost as lost:
            recovering = True
            _LOG.info("lost: %s; recovering from %d", lost, work.start)
            fruitless = 0 if supervisor.progress > before else fruitless + 1
            if fruitless == MAX_RETRIES:
                raise TestbedError(
                    f"giving up after {MAX_RETRIES} consecutive recoveries without progress (last: {lost}); "
                    "if links or devices are slower than the scenario defines, raise method.stall_timeout"
                ) from lost
            # Devices that reply and fail again and again are treated as cut off, which excludes them.
            if fruitless >= MAX_RETRIES_WITH_LOST:
                lost = Lost(
                    lost.missing, unreachable=lost.missing, restarted=lost.restarted
                )
            # A device without contact to a neighbour would block every further configuration.
            supervisor.membership.exclude(lost.unreachable)
            await recovery.recover(lost, work.start)
