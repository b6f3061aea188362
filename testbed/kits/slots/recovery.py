"""What is done so that a cast is not lost: nothing, repeating it, or repeating it until it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.messages import Heard, Losses, Outputs


class Transmit(Protocol):
    """A way to cast to several."""

    async def __call__(self, receivers: Sequence[str], message: Outputs | Losses, until: float) -> None:
        """Cast, before an instant; return when no more is done about it."""

    def heard(self, message: Outputs | Losses) -> None:
        """Answer a cast of another device, each time that it arrives."""


class Repeated:
    """So many times, whoever has heard it: the paper's r-TX. Once is no recovery."""

    def __init__(self, mailbox: Mailbox, times: int = 1) -> None:
        self._mailbox = mailbox
        self._times = times

    async def __call__(self, receivers: Sequence[str], message: Outputs | Losses, until: float) -> None:
        """Cast to all, all the times."""
        for _ in range(self._times):
            await self._mailbox.cast(receivers, message)

    def heard(self, message: Outputs | Losses) -> None:
        """Answer nothing."""


class Acknowledged:
    """To those that have not acknowledged, until all have, or the timeslot has no time for another: the paper's ACK.

    Acknowledgements are casts that are lost as any.
    """

    def __init__(self, mailbox: Mailbox, wait: float) -> None:
        """``wait``: how many seconds acknowledgements take after a cast has left."""
        self._mailbox = mailbox
        self._wait = wait
        self._missing: dict[tuple[str, int, int], set[str]] = {}
        """By what was cast, who has not acknowledged it."""
        self._complete: asyncio.Future[None] | None = None
        mailbox.on(Heard, self._acknowledged)

    async def __call__(self, receivers: Sequence[str], message: Outputs | Losses, until: float) -> None:
        """Cast at least once."""
        device = self._mailbox.device
        what = (message.kind, message.batch, message.layer)
        missing = self._missing[what] = set(receivers)
        while missing:
            began = device.now()
            await self._mailbox.cast(sorted(missing), message)
            round_trip = device.now() - began + self._wait
            if device.now() + round_trip >= until:
                break
            await self._answers(missing)
        del self._missing[what]

    async def _answers(self, missing: set[str]) -> None:
        """Wait until none is missing, at most as long as acknowledgements take."""
        if missing:
            self._complete = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._wait):
                    await self._complete
            except TimeoutError:
                pass

    def heard(self, message: Outputs | Losses) -> None:
        """Acknowledge; what was acknowledged before is so again, since that may have been lost."""
        answer = Heard(message.kind, message.batch, message.layer)
        self._mailbox.start(self._mailbox.cast([message.sender], answer))

    def _acknowledged(self, answer: Heard) -> None:
        missing = self._missing.get((answer.what, answer.batch, answer.layer), set())
        missing.discard(answer.sender)
        if not missing and self._complete is not None and not self._complete.done():
            self._complete.set_result(None)
