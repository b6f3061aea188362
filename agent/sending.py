"""Reliable, ordered delivery to one peer, and how long to wait for it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from agent.connection import Connection, ConnectionLost
from agent.settings import Address

BACKOFF_SECONDS = 0.01
BACKOFF_SECONDS_MOST = 0.25
_COME_BACK = 503


class Rejected(Exception):  # noqa: N818 - what the peer did
    """The peer will not take this message however often it is sent."""


@dataclass(frozen=True)
class Delivery:
    """When a message's first attempt began and when it was acknowledged, as monotonic instants."""

    begun: float
    ended: float


class Lane:
    """The way to one peer: one message at a time, in the order of the calls."""

    def __init__(self, peer: str, address: Address, token: str, slowness: float = 0.0) -> None:
        self.peer = peer
        self.waiting = 0
        """Messages under way or behind one that is."""
        self._progress = 0.0
        """Monotonic instant of the last sign that the peer takes in what it is sent."""
        self._turn = asyncio.Lock()
        self._connection = Connection(address, "/messages", token, slowness)

    async def deliver(self, body: bytes, patience: float | None = None, not_before: float = 0.0) -> Delivery:
        """Send until the peer has acknowledged; the message is withdrawn when this is cancelled or fails.

        Nothing leaves before the monotonic instant ``not_before``.

        Raises:
            TimeoutError: when the peer took in nothing for ``patience`` seconds.
            Rejected: when the peer refuses the message for good.
        """
        called = time.monotonic()
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        self.waiting += 1
        try:
            async with asyncio.timeout(None) as limit:

                def check() -> None:
                    nonlocal timer
                    assert patience is not None
                    left = max(self._progress, called) + patience - time.monotonic()
                    if left > 0:
                        timer = loop.call_later(left, check)
                    else:
                        limit.reschedule(loop.time())

                if patience is not None:
                    timer = loop.call_later(patience, check)
                async with self._turn:
                    if (early := not_before - time.monotonic()) > 0:
                        await asyncio.sleep(early)
                    begun = time.monotonic()
                    await self._insist(body)
                    return Delivery(begun, time.monotonic())
        finally:
            self.waiting -= 1
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    async def _insist(self, body: bytes) -> None:
        backoff = BACKOFF_SECONDS
        arrived = 0

        def acknowledged(count: int) -> None:
            # Only more than any attempt before: a peer that refuses the same bytes again and again makes no progress.
            nonlocal arrived
            if count > arrived:
                arrived = count
                self._progress = time.monotonic()

        while True:
            try:
                status, text = await self._connection.post(body, acknowledged)
            except ConnectionLost as lost:
                if lost.stale:
                    continue
            else:
                if status < 300:
                    self._progress = time.monotonic()
                    return
                if status != _COME_BACK:
                    raise Rejected(f"{self.peer} refused a message: {_reason(status, text)}")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_SECONDS_MOST)


def _reason(status: int, text: bytes) -> str:
    try:
        return f"{json.loads(text)['error']} ({status})"
    except (ValueError, KeyError, TypeError):
        return str(status)
