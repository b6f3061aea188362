"""Participation in rounds, on the server, despite crashes and returns of devices.

`Rounds` invites devices and collects their updates; `testbed.ml.rounds.server` merges the updates.

A round ends when all its participants have sent their updates, or at its deadline with enough updates. With too few
updates it is attempted again. A late device is absent from the following rounds until its computation ends and it
answers a ping; a restarted device is invited to the next round. Each attempt at a round is a configuration of the
mailbox with its own number, so messages of earlier attempts are dropped.
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
"""Extra seconds of a program's first round, since devices start at different times."""
DEADLINE_FACTOR = 3.0
"""Default deadline of a round, as a multiple of the planned time and the largest measured overhead."""
MIN_DEADLINE = 10.0
"""Lower bound of the default deadline in seconds: a busy host may delay a round of milliseconds by seconds."""

Serve = Callable[[Begun], Coroutine[Any, Any, None]]
"""Function that does the server's part of a device's training, which ends with the device's last iteration."""


def _ignore_training(begun: Begun) -> None:
    """Ignore the beginning of a device's training: the server trains no layers, or the device is too late."""


class Rounds:
    """Runs rounds on the server: invites devices, collects their updates, and keeps track of absent devices."""

    def __init__(self, mailbox: Mailbox, policy: RoundPolicy, seed: int) -> None:
        self._mailbox = mailbox
        self._device = mailbox.device
        self._policy = policy
        self._seed = seed
        self._absent: set[str] = set()
        """Late devices that have not answered a ping yet."""
        self._incarnations: dict[str, float] = {}
        """Start times of the programs that began the current attempt, by device: a restart changes the time."""
        self._restarted: set[str] = set()
        """Devices that restarted after they began the current attempt."""
        self._updates: dict[str, Update] = {}
        """Updates in the current attempt, by device."""
        self._start_time = 0.0
        """Start of the current attempt, in seconds of the device's clock."""
        self._overhead: float | None = None
        """Largest number of seconds by which an update took longer than planned; None before the first update."""
        self._handle_begun: Callable[[Begun], None] = _ignore_training
        """Called when a device begins its training."""
        mailbox.on(Hello, self._on_greeting)
        mailbox.on(Here, lambda here: self._absent.discard(here.sender))
        mailbox.on(Begun, self._on_begun)
        mailbox.on(Update, self._on_update)
        mailbox.on_open(self._reset_attempt)

    async def run_round(
        self,
        number: int,
        devices: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None = None,
    ) -> list[Update]:
        """Run round ``number`` with some of the devices; return the updates in the order of the devices.

        Waits until the policy's minimum number of devices are present and have sent updates. ``invite`` takes the name
        of a device and the number of a configuration, and returns the message for the device. ``serve`` does the
        server's part of a device's training; None if the server trains no layers. An attempt with too few updates at
        twice its deadline is followed by another one with the devices present then, which has twice the time.
        """
        minimum = min(self._policy.min_updates, len(devices))
        extension = 1
        # A new program, also after a restart, has not opened a configuration yet.
        startup = STARTUP if self._mailbox.configuration == 0 else 0.0
        while True:
            present = await self.wait_for_present(devices, minimum)
            participants = self._choose_participants(number, present)
            await self._open_configuration()
            self._start_time = self._device.now()
            collect = partial(
                self._collect_updates, participants, minimum, startup, extension
            )
            updates = await self._attempt_round(participants, invite, serve, collect)
            senders = {update.sender for update in updates}
            late = [name for name in participants if name not in senders]
            self._drop_devices(number, late)
            if len(updates) >= minimum:
                return updates
            extension *= 2

    async def _attempt_round(
        self,
        participants: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None,
        collect: Callable[[], Awaitable[None]],
    ) -> list[Update]:
        """Invite the participants, do the server's part of their training, and return the updates.

        ``collect`` waits for the updates.
        """
        async with Tasks() as tasks:
            server_trainings: dict[str, asyncio.Task[None]] = {}

            def start_training(begun: Begun) -> None:
                assert serve is not None
                server_trainings[begun.sender] = tasks.start(serve(begun))

            if serve is not None:
                self._handle_begun = start_training
            for name in participants:
                invitation = invite(name, self._mailbox.configuration)
                self._mailbox.post(name, invitation)
            await collect()
            updates = []
            trainings_of_updates = []
            for name in participants:
                if name in self._updates:
                    updates.append(self._updates[name])
                    if name in server_trainings:
                        trainings_of_updates.append(server_trainings[name])
            # A device's update may arrive before the server has updated its own layers for this device.
            await asyncio.gather(*trainings_of_updates)
            # A device that begins from now on is too late for this round.
            self._handle_begun = _ignore_training
        return updates

    async def wait_for_present(self, devices: Sequence[str], minimum: int) -> list[str]:
        """Wait until at least ``minimum`` of the devices are present (not absent); return their names."""
        while True:
            present = [name for name in devices if name not in self._absent]
            if len(present) >= minimum:
                return present
            await self._mailbox.changed()

    def _choose_participants(self, number: int, present: Sequence[str]) -> list[str]:
        """Return the participants of round ``number`` among the present devices, in their order."""
        if not present:
            return []
        # Seeded by the round, so that another attempt with the same devices draws the same participants.
        draw = random.Random(derive(self._seed, "round", number))
        chosen = set(self._policy.choose(number, present, draw))
        return [name for name in present if name in chosen]

    async def _open_configuration(self) -> None:
        """Open a configuration with a number above all former numbers, also across restarts of the server."""
        former_number = self._mailbox.configuration
        saved = self._device.saved(CONFIGURATION)
        if saved is not None:
            former_number = max(former_number, saved["number"])
        number = former_number + 1
        self._mailbox.open(number)
        saved_number = Message(CONFIGURATION, {"number": number})
        await self._device.save(CONFIGURATION, saved_number)

    def _reset_attempt(self) -> None:
        """Discard the state of the previous attempt when a configuration is opened."""
        self._incarnations.clear()
        self._restarted.clear()
        self._updates.clear()
        self._handle_begun = _ignore_training

    async def _collect_updates(
        self, participants: Sequence[str], minimum: int, startup: float, extension: int
    ) -> None:
        """Wait for the updates of all participants, except restarted ones, or until a time limit.

        The time limit is `_time_limit` plus ``startup`` seconds, multiplied by ``extension``. It is twice as long
        while there are fewer than ``minimum`` updates.
        """
        awaited = list(reversed(participants))
        while True:
            # Each step checks the last name of the list, and removes it for good: with thousands of devices, a scan of
            # all devices after each message would take quadratic time.
            while awaited and self._is_done(awaited[-1]):
                awaited.pop()
            if not awaited:
                return
            is_enough = len(self._updates) >= minimum
            limit = self._time_limit(participants, is_enough=is_enough)
            limit += startup if is_enough else 2 * startup
            remaining = self._start_time + extension * limit - self._device.now()
            if remaining <= 0:
                return
            await self._mailbox.changed(remaining)

    def _is_done(self, name: str) -> bool:
        """Return whether a device sends no further update, having sent one or restarted during the attempt."""
        return name in self._updates or name in self._restarted

    def _time_limit(self, participants: Sequence[str], *, is_enough: bool) -> float:
        """Return the time limit of an attempt in seconds; ``is_enough`` is whether the received updates suffice.

        Without a configured deadline an update may take three times the slowest device's planned time plus the largest
        overhead of any update so far, caused by a busy host or by devices that share a channel. Before the first update
        the overhead is unknown, and all devices may share one channel.
        """
        deadline = self._policy.deadline
        if deadline is not None:
            return deadline if is_enough else 2 * deadline
        planned = self._policy.planned
        times = [planned.get(name, 0.0) for name in participants]
        slowest = max(times, default=0.0)
        overhead = self._overhead or 0.0
        seconds = max(MIN_DEADLINE, DEADLINE_FACTOR * (slowest + overhead))
        if is_enough:
            return seconds
        if self._overhead is not None:
            return 2 * seconds
        # The sum is the time of devices that train one after the other: the worst case of a shared channel.
        return max(2 * seconds, DEADLINE_FACTOR * sum(times))

    def _drop_devices(self, number: int, names: Collection[str]) -> None:
        """Record late devices; those that have not restarted are absent until they answer a ping."""
        if names:
            self._device.record("missed", round=number, devices=names)
        for name in names:
            # A restarted device has greeted the server already, and is ready for the next round.
            if name not in self._restarted:
                self._absent.add(name)
                # Sent without the mailbox, which withdraws its messages when a new configuration is opened.
                ping = self._device.send(name, encode(Ping()))
                self._mailbox.start(ping)

    def _on_greeting(self, hello: Hello) -> None:
        """Note the start of a device's program, which may be a restart within a round."""
        self._absent.discard(hello.sender)
        incarnation = self._incarnations.get(hello.sender)
        if incarnation is not None and incarnation != hello.incarnation:
            self._restarted.add(hello.sender)

    def _on_begun(self, begun: Begun) -> None:
        self._incarnations[begun.sender] = begun.incarnation
        self._handle_begun(begun)

    def _on_update(self, update: Update) -> None:
        self._updates[update.sender] = update
        planned = self._policy.planned.get(update.sender, 0.0)
        overhead = self._device.now() - self._start_time - planned
        self._overhead = max(self._overhead or 0.0, overhead)
