"""The way from one device to another: a queue at the sender's link, the link, and acknowledgements back."""

from __future__ import annotations

import math
from asyncio import Future
from collections import deque
from random import Random
from typing import TYPE_CHECKING

from testbed.network.framing import SEGMENT, cast_wire_bytes, fragments, wire_bytes
from testbed.network.link import Link
from testbed.wire import Message

if TYPE_CHECKING:
    from testbed.simulation.device import Host, SimulatedDevice
    from testbed.simulation.loop import VirtualLoop

RETRANSMISSION_TIMEOUT = 0.2
"""Seconds beyond the round trip before TCP sends unanswered bytes again (Linux's minimum); doubles each time."""
RETRANSMISSION_TIMEOUT_MAX = 120.0
"""Seconds at which that doubling ends (RFC 6298 asks for at least 60; Linux uses 120)."""


class Parcel:
    """One message on its way."""

    __slots__ = ("begun", "bytes", "called", "due", "end", "future", "message", "remaining", "sender", "start")

    def __init__(self, sender: SimulatedDevice, message: Message, size: int, called: float, future: Future[None]):
        self.sender = sender
        self.message = message
        self.bytes = size
        self.remaining = wire_bytes(size)
        self.called = called
        self.future = future
        self.begun = -1.0
        self.start = -1.0
        self.end = -1.0
        self.due = -1.0


class Channel:
    """Everything under way from one host to another.

    A transmission starts when the one before it has ended, lasts as long as the rate says, and is there a delay
    after its end. The acknowledgement takes the delay of the way back.
    """

    def __init__(self, loop: VirtualLoop, source: Host, target: Host, link: Link, seed: int) -> None:
        self.source = source
        self.target = target
        self.link = link
        self.waiting: deque[Parcel] = deque()
        """Not yet arrived, in the order of the calls."""
        self.acknowledged_at = 0.0
        self._loop = loop
        self._random = Random(seed)
        self._free_at = 0.0
        self._last_due = 0.0
        self.back: Channel

    def enqueue(self, parcel: Parcel) -> None:
        """Send a message after those before it."""
        self.waiting.append(parcel)
        self._launch(parcel)

    def _launch(self, parcel: Parcel) -> None:
        link, loop = self.link, self._loop
        start = max(self._free_at, loop._now)
        wire, lag = parcel.remaining, 0.0
        if link.loss:
            wire, lag = self._with_losses(wire)
        end = start if link.rate is None else start + wire * 8 / link.rate
        if parcel.begun < 0:
            parcel.begun = start
        parcel.start = start
        parcel.end = end
        self._free_at = end
        due = end + link.delay + lag
        self._last_due = parcel.due = due if due > self._last_due else self._last_due
        loop.at(parcel.due, self._arrive, parcel)

    def _with_losses(self, wire: float) -> tuple[float, float]:
        """Draw how many segments get lost; return the bytes sent in all and the wait for their repetition.

        Each round repeats what the round before lost. Where enough segments follow a lost one it is noticed within
        a round trip, a lone segment only by the retransmission time-out.
        """
        full = SEGMENT + 66.0
        round_trip = self.link.delay + self.back.link.delay
        total, lag, timeout = wire, 0.0, RETRANSMISSION_TIMEOUT
        segments = math.ceil(wire / full)
        while lost := sum(self._random.random() < self.link.loss for _ in range(segments)):
            total += min(lost * full, wire)
            if segments == 1:
                lag += round_trip + timeout
                timeout = min(2 * timeout, RETRANSMISSION_TIMEOUT_MAX)
            else:
                lag += round_trip
            segments = lost
        return total, lag

    def _arrive(self, parcel: Parcel) -> None:
        now = self._loop._now
        if parcel.due != now:
            return
        parcel.due = -1.0
        self.waiting.popleft()
        device = self.target.device
        assert device is not None
        start = parcel.begun + self.link.delay
        device.deliver(parcel.message, parcel.bytes, start, now - start)
        self._loop.at(now + self.back.link.delay, self._acknowledge, parcel)

    def _acknowledge(self, parcel: Parcel) -> None:
        now = self._loop._now
        self.acknowledged_at = now
        if parcel.future.done():
            return
        parcel.sender.write(
            "send",
            {
                "peer": self.target.name,
                "message": parcel.message.kind,
                "bytes": parcel.bytes,
                "start": parcel.called,
                "duration": now - parcel.called,
                "queued": parcel.begun - parcel.called,
                "encode": 0.0,
            },
        )
        parcel.future.set_result(None)

    def withdraw(self, parcel: Parcel) -> None:
        """Take back a message that has not arrived; those behind it move up."""
        if parcel.due < 0:
            return
        behind = list(self.waiting)[self.waiting.index(parcel) + 1 :]
        parcel.due = -1.0
        self.waiting.remove(parcel)
        now = self._loop._now
        if parcel.end > now:
            self._free_at = max(now, parcel.start)
            for other in behind:
                self._launch(other)

    def cast(self, message: Message, size: int) -> float:
        """Transmit a datagram once; return when its last byte has left."""
        link, loop = self.link, self._loop
        start = max(self._free_at, loop._now)
        end = start + link.transmission_time(cast_wire_bytes(size))
        self._free_at = end
        if self._random.random() >= 1 - (1 - link.loss) ** fragments(size):
            loop.at(end + link.delay, self._hear, (message, size, start + link.delay))
        return end

    def _hear(self, cast: tuple[Message, int, float]) -> None:
        message, size, start = cast
        if self.target.device is not None:
            self.target.device.deliver(message, size, start, self._loop._now - start)
