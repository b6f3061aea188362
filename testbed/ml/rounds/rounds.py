"""Participation in rounds, on the server, despite crashes and returns of devices.

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
from testbed.messaging.typed import encode
from testbed.ml.rounds.messages import Begin, Begun, Here, Ping, Update
from testbed.wire.message import Message

CONFIGURATION = "configuration"
"""Key of the newest configuration number on the server's disk."""


Choose = Callable[[int, Sequence[str], random.Random], Sequence[str]]
"""Hook: takes a round's number, the devices that are there, and random numbers of the round's own; returns the devices
that are to train, at least as many as a round needs."""


def everyone(number: int, present: Sequence[str], draw: random.Random) -> Sequence[str]:
    """Choose all present devices."""
    return present


@dataclass(frozen=True)
class RoundPolicy:
    """The participants of a round, and the condition for its end."""

    min_updates: int
    """Minimum number of updates in a round."""
    deadline: float | None = None
    """Seconds after its begin at which a round ends without late devices; None: adapted to the measured rounds."""
    choose: Choose = everyone
    planned: Mapping[str, float] = field(default_factory=dict)
    """Planned seconds of a round of each device."""


STARTUP = 30.0
"""Extra seconds of a program's first round: devices do not all start at once."""
LATE = 3.0
"""Default deadline of a round, as a multiple of the planned time and the largest measured overhead."""
LEAST_DEADLINE = 10.0
"""Lower bound of the default deadline in seconds: a busy host may delay a round of milliseconds by seconds."""

Serve = Callable[[Begun], Coroutine[Any, Any, None]]
"""What the server does for a device that trains: runs beside the round, until the device's last iteration."""


class Rounds:
    """Invites devices to one round after the other."""

    def __init__(self, mailbox: Mailbox, policy: RoundPolicy, seed: int) -> None:
        self._mailbox = mailbox
        self._device = mailbox.device
        self._policy = policy
        self._seed = seed
        self._absent: set[str] = set()
        """Devices that were late and have not been heard of since."""
        self._incarnations: dict[str, float] = {}
        """Incarnations of the programs that began the present round."""
        self._restarted: set[str] = set()
        """Devices that began the present round and have started again since."""
        self._updates: dict[str, Update] = {}
        self._began_at = 0.0
        """When the present round began."""
        self._overhead: float | None = None
        """Largest time by which an update took longer than planned; None before the first update."""
        self._serve: Callable[[Begun], None] = lambda begun: None
        mailbox.on(Hello, self._on_greeting)
        mailbox.on(Here, lambda here: self._absent.discard(here.sender))
        mailbox.on(Begun, self._on_begin)
        mailbox.on(Update, self._on_update)
        mailbox.on_open(self._reset_round)

    async def hold(
        self,
        number: int,
        devices: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None = None,
    ) -> list[Update]:
        """Run a round with some of the devices; return their updates in the order of the devices.

        Waits until as many devices are present, and have sent updates, as the policy asks for. ``invite`` makes a
        device's invitation to a configuration. A round with too few updates at twice its deadline is restarted with the
        devices present then, and has twice the time.
        """
        least, times = min(self._policy.min_updates, len(devices)), 1
        startup = STARTUP if self._mailbox.configuration == 0 else 0.0
        while True:
            chosen = self._choose_devices(number, await self.present(devices, least))
            await self._open_round()
            self._began_at = self._device.now()
            updates = await self._run_round(
                chosen,
                invite,
                serve,
                partial(self._collect_updates, chosen, least, startup, times),
            )
            senders = {update.sender for update in updates}
            self._drop_devices(number, [name for name in chosen if name not in senders])
            if len(updates) >= least:
                return updates
            times *= 2

    async def _run_round(
        self,
        chosen: Sequence[str],
        invite: Callable[[str, int], Begin],
        serve: Serve | None,
        collect: Callable[[], Awaitable[None]],
    ) -> list[Update]:
        """Invite devices, serve the participants, and return the collected updates."""
        async with Tasks() as tasks:
            serving: dict[str, asyncio.Task[None]] = {}
            if serve is not None:
                self._serve = lambda begun: serving.update(
                    {begun.sender: tasks.start(serve(begun))}
                )
            for name in chosen:
                self._mailbox.post(name, invite(name, self._mailbox.configuration))
            await collect()
            updates = [self._updates[name] for name in chosen if name in self._updates]
            await asyncio.gather(
                *(
                    serving[update.sender]
                    for update in updates
                    if update.sender in serving
                )
            )
            self._serve = lambda begun: (
                None
            )  # one that begins now is too late for this round
        return updates

    async def present(self, devices: Sequence[str], least: int) -> list[str]:
        """Return the devices known to be present, once there are at least this many."""
        while (
            len(present := [name for name in devices if name not in self._absent])
            < least
        ):
            await self._mailbox.changed()
        return present

    def _choose_devices(self, number: int, present: Sequence[str]) -> list[str]:
        """Return the participants among the present devices, in their order."""
        if not present:
            return []
        draw = random.Random(derive(self._seed, "round", number))
        chosen = set(self._policy.choose(number, present, draw))
        return [name for name in present if name in chosen]

    async def _open_round(self) -> None:
        """Begin a configuration numbered above all former ones, including those before a restart."""
        kept = self._device.saved(CONFIGURATION)
        former = max(self._mailbox.configuration, 0 if kept is None else kept["number"])
        self._mailbox.open(former + 1)
        await self._device.save(
            CONFIGURATION, Message(CONFIGURATION, {"number": former + 1})
        )

    def _reset_round(self) -> None:
        """Reset the state of the previous configuration."""
        self._incarnations.clear()
        self._restarted.clear()
        self._updates.clear()
        self._serve = lambda begun: None

    def _time_limit(self, chosen: Sequence[str], enough: bool) -> float:
        """Return the round's time limit in seconds, for ``enough`` updates or for too few.

        Without a configured deadline an update may take three times the slowest device's planned time plus the largest
        overhead of any update so far, caused by a busy host or by devices sharing a channel. Before the first update
        the overhead is unknown, and all devices may share one channel.
        """
        if self._policy.deadline is not None:
            return self._policy.deadline if enough else 2 * self._policy.deadline
        planned = self._policy.planned
        times = [planned.get(name, 0.0) for name in chosen]
        seconds = max(
            LEAST_DEADLINE, LATE * (max(times, default=0.0) + (self._overhead or 0.0))
        )
        if enough:
            return seconds
        return (
            2 * seconds
            if self._overhead is not None
            else max(2 * seconds, LATE * sum(times))
        )

    async def _collect_updates(
        self, chosen: Sequence[str], least: int, startup: float, times: int
    ) -> None:
        """Wait until all devices have sent an update or lost the round; after the deadline, wait for enough updates
        only.

        The deadline is extended by ``startup`` seconds, ``times`` over.
        """
        awaited = list(reversed(chosen))
        while True:
            while awaited and (
                awaited[-1] in self._updates or awaited[-1] in self._restarted
            ):
                awaited.pop()  # neither is taken back within a round
            if not awaited:
                return
            enough = len(self._updates) >= least
            allowed = times * (
                self._time_limit(chosen, enough) + (startup if enough else 2 * startup)
            )
            left = self._began_at + allowed - self._device.now()
            if left <= 0:
                return
            await self._mailbox.changed(left)

    def _drop_devices(self, number: int, names: Collection[str]) -> None:
        """Continue without these devices; those never started are invited again only after an answer."""
        if names:
            self._device.record("missed", round=number, devices=names)
        for name in names:
            if name not in self._restarted:
                self._absent.add(name)
                # Not through the mailbox: a new configuration would take it back.
                self._mailbox.start(self._device.send(name, encode(Ping())))

    def _on_greeting(self, hello: Hello) -> None:
        self._absent.discard(hello.sender)
        if self._incarnations.get(hello.sender, hello.incarnation) != hello.incarnation:
            self._restarted.add(hello.sender)

    def _on_begin(self, begun: Begun) -> None:
        self._incarnations[begun.sender] = begun.incarnation
        self._serve(begun)

    def _on_update(self, update: Update) -> None:
        self._updates[update.sender] = update
        taken = self._device.now() - self._began_at
        self._overhead = max(
            self._overhead or 0.0, taken - self._policy.planned.get(update.sender, 0.0)
        )
