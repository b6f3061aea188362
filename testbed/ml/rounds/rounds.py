"""Participation in rounds, on the server, despite crashes and returns of devices.

`Rounds` invites devices and collects their updates; `testbed.ml.rounds.server` merges the updates.

A round ends when all its devices have sent their updates, or at its deadline with enough of them. A late device is
excluded from the following rounds until its computation ends and it answers a ping; a restarted device is invited to
the next round. Each attempt at a round is a configuration with its own number, so messages of earlier attempts are
dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from testbed.common.seeds import derive
from testbed.messaging.mailbox import Mailbox, Tasks
from testbed.messaging.membership import Hello
from testbed.messaging.typed_messages import encode
from testbed.ml.rounds.messages import Begin, Begun, Here, Ping, Update
from testbed.wire.message import Message

CONFIGURATION = "configuration"
"""Key of the newest configuration number on the server's disk."""


Choose = Callable[[int, Sequence[str], random.Random], Sequence[str]]
"""Hook: takes a round's number, the present devices, and a generator for this round; returns the participants, at least
as many as a round needs."""


def choose_all(
    number: int, present: Sequence[str], draw: random.Random
) -> Sequence[str]:
    """Choose all present devices."""
    return present


@dataclass(frozen=True)
class RoundPolicy:
    """The choice of a round's participants, and the condition for the end of the round."""

    min_updates: int
    """Minimum number of updates in a round."""
    deadline: float | None = None
    """Seconds after which a round ends without late devices; None: adapted to the measured rounds."""
    choose: Choose = choose_all
    """Chooses the participants among the present devices."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """Planned seconds of a round of each device."""


STARTUP = 30.0
"""Extra seconds of a program's first round: devices do not all start at once."""
LATE = 3.0
"""Default deadline of a round, as a multiple of the planned time and the largest measured overhead."""
LEAST_DEADLINE = 10.0
"""Lower bound of the default deadline in seconds: a busy host may delay a round of milliseconds by seconds."""

Serve = Callable[[Begun], Coroutine[Any, Any, None]]
"""The server's part of a device's training: runs beside the round, until the device's last iteration."""


def _serve_nothing(begun: Begun) -> None:
    """Ignore the beginning of a device's training: the server trains nothing, or the device is too late."""


class Rounds:
    """Invites devices to one round after the other."""

    def __init__(self, mailbox: Mailbox, policy: RoundPolicy, seed: int) -> None:
        self._mailbox = mailbox
        self._device = mailbox.device
        self._policy = policy
        self._seed = seed
        self._absent: set[str] = set()
        """Late devices that have not answered since."""
        self._incarnations: dict[str, float] = {}
        """Start times of the programs that began the present round, by device: a restart changes the time."""
        self._restarted: set[str] = set()
        """Devices that began the present round and have restarted since."""
        self._updates: dict[str, Update] = {}
        """Updates of the present round, by device."""
        self._began_at = 0.0
        """When the present round began, in seconds."""
        self._overhead: float | None = None
        """Largest time by which an update took longer than planned; None before the first update."""
        self._serve: Callable[[Begun], None] = _serve_nothing
        """Handles the beginning of a device's training."""
        mailbox.on(Hello, self._on_greeting)
        mailbox.on(Here, lambda here: self._absent.discard(here.sender))
        mailbox.on(Begun, self._on_begin)
        mailbox.on(Update, self._on_update)
        mailbox.on_open(self._reset_round)

    async def run_round(
        self,
        number: int,
        devices: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None = None,
    ) -> list[Update]:
        """Run a round with some of the devices; return the updates in the order of the devices.

        Waits until as many devices are present, and have sent updates, as the policy asks for. ``invite`` makes the
        invitation of a device to a configuration, and ``serve`` does the server's part of a device's training. A round
        with too few updates at twice its deadline is restarted with the devices present then, and has twice the time.
        """
        least = min(self._policy.min_updates, len(devices))
        extension = 1
        startup = STARTUP if self._mailbox.configuration == 0 else 0.0
        while True:
            present = await self.present(devices, least)
            chosen = self._choose_devices(number, present)
            await self._open_round()
            self._began_at = self._device.now()
            collect = partial(self._collect_updates, chosen, least, startup, extension)
            updates = await self._attempt_round(chosen, invite, serve, collect)
            senders = {update.sender for update in updates}
            late = [name for name in chosen if name not in senders]
            self._drop_devices(number, late)
            if len(updates) >= least:
                return updates
            extension *= 2

    async def _attempt_round(
        self,
        chosen: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None,
        collect: Callable[[], Awaitable[None]],
    ) -> list[Update]:
        """Invite devices, serve the participants, and return the collected updates."""
        async with Tasks() as tasks:
            serving: dict[str, asyncio.Task[None]] = {}

            def start_serving(begun: Begun) -> None:
                assert serve is not None
                training = serve(begun)
                serving[begun.sender] = tasks.start(training)

            if serve is not None:
                self._serve = start_serving
            for name in chosen:
                invitation = invite(name, self._mailbox.configuration)
                self._mailbox.post(name, invitation)
            await collect()
            updates = []
            unfinished = []
            for name in chosen:
                if name in self._updates:
                    updates.append(self._updates[name])
                    if name in serving:
                        unfinished.append(serving[name])
            # An update may arrive before the server's last layers are updated.
            await asyncio.gather(*unfinished)
            # A device that begins only now is too late for this round.
            self._serve = _serve_nothing
        return updates

    async def present(self, devices: Sequence[str], minimum: int) -> list[str]:
        """Wait until at least ``minimum`` devices are known to be present; return their names."""
        while True:
            present = [name for name in devices if name not in self._absent]
            if len(present) >= minimum:
                return present
            await self._mailbox.changed()

    def _choose_devices(self, number: int, present: Sequence[str]) -> list[str]:
        """Return the participants among the present devices, in their order."""
        if not present:
            return []
        # Seeded by the round, so that a repeated attempt with the same devices draws the same.
        draw = random.Random(derive(self._seed, "round", number))
        chosen = set(self._policy.choose(number, present, draw))
        return [name for name in present if name in chosen]

    async def _open_round(self) -> None:
        """Begin a configuration with a number above all former numbers, also those before a restart of the server."""
        former = self._mailbox.configuration
        saved = self._device.saved(CONFIGURATION)
        if saved is not None:
            former = max(former, saved["number"])
        number = former + 1
        self._mailbox.open(number)
        saved_number = Message(CONFIGURATION, {"number": number})
        await self._device.save(CONFIGURATION, saved_number)

    def _reset_round(self) -> None:
        """Reset the state of the previous configuration."""
        self._incarnations.clear()
        self._restarted.clear()
        self._updates.clear()
        self._serve = _serve_nothing

    def _time_limit(self, chosen: Sequence[str], *, enough: bool) -> float:
        """Return the round's time limit in seconds, for ``enough`` updates or for too few.

        Without a configured deadline an update may take three times the slowest device's planned time plus the largest
        overhead of any update so far, caused by a busy host or by devices sharing a channel. Before the first update
        the overhead is unknown, and all devices may share one channel.
        """
        deadline = self._policy.deadline
        if deadline is not None:
            return deadline if enough else 2 * deadline
        planned = self._policy.planned
        times = [planned.get(name, 0.0) for name in chosen]
        slowest = max(times, default=0.0)
        overhead = self._overhead or 0.0
        seconds = max(LEAST_DEADLINE, LATE * (slowest + overhead))
        if enough:
            return seconds
        if self._overhead is not None:
            return 2 * seconds
        # As if the devices trained one after the other, which is the worst case of a shared channel.
        return max(2 * seconds, LATE * sum(times))

    async def _collect_updates(
        self, chosen: Sequence[str], minimum: int, startup: float, extension: int
    ) -> None:
        """Wait until all devices have sent an update or lost the round; after the deadline, for ``minimum`` updates.

        The time limit is `_time_limit` plus ``startup`` seconds, multiplied by ``extension``.
        """
        awaited = list(reversed(chosen))
        while True:
            # Only the next awaited device is looked at, and never again once it is done: with thousands of devices, a
            # scan of all after each message would take quadratic time.
            while awaited and self._is_done(awaited[-1]):
                awaited.pop()
            if not awaited:
                return
            enough = len(self._updates) >= minimum
            limit = self._time_limit(chosen, enough=enough)
            limit += startup if enough else 2 * startup
            left = self._began_at + extension * limit - self._device.now()
            if left <= 0:
                return
            await self._mailbox.changed(left)

    def _is_done(self, name: str) -> bool:
        """Return whether no update is to be awaited: the device has sent one, or has restarted since it began."""
        return name in self._updates or name in self._restarted

    def _drop_devices(self, number: int, names: Collection[str]) -> None:
        """Continue without late devices; a device that has not restarted is invited again only after an answer."""
        if names:
            self._device.record("missed", round=number, devices=names)
        for name in names:
            # A restarted device has greeted already, and is ready for the next round.
            if name not in self._restarted:
                self._absent.add(name)
                # Not posted by the mailbox: a new configuration would withdraw the message.
                ping = self._device.send(name, encode(Ping()))
                self._mailbox.start(ping)

    def _on_greeting(self, hello: Hello) -> None:
        """Note the start of a device's program, which may be a restart within a round."""
        self._absent.discard(hello.sender)
        before = self._incarnations.get(hello.sender)
        if before is not None and before != hello.incarnation:
            self._restarted.add(hello.sender)

    def _on_begin(self, begun: Begun) -> None:
        self._incarnations[begun.sender] = begun.incarnation
        self._serve(begun)

    def _on_update(self, update: Update) -> None:
        self._updates[update.sender] = update
        planned = self._policy.planned.get(update.sender, 0.0)
        overhead = self._device.now() - self._began_at - planned
        self._overhead = max(self._overhead or 0.0, overhead)
