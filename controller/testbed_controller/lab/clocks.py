"""Monotonic clocks of the machines that engines run on, by that of the controller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from testbed.common.errors import TestbedError

KEPT = 256
"""Samples in use: those of some minutes."""
SEGMENT = 16
"""Samples of which the one with the least round trip counts."""
SURE = 5.0
"""Standard deviations of its error beyond which a drift is one."""
EXCHANGE_SECONDS = 1.0
"""Between two exchanges of times."""
_FIRST_EXCHANGES = 16
_SAME = 1e-3
"""Seconds beyond half a round trip by which one and the same clock may seem to differ from itself."""


class Clock:
    """The monotonic clock of an engine's host, by that of the controller: one clock, on the same machine."""

    def there(self, here: float) -> float:
        """Return what the clock there shows when the one here shows this; in seconds."""
        return here

    def here(self, there: float) -> float:
        """Return what the clock here shows when the one there shows this."""
        return there


class Sample(NamedTuple):
    """One exchange; all in seconds, of two clocks."""

    sent: float
    """By the clock here, as `back` is."""
    arrived: float
    """By the clock there, as `returned` is."""
    returned: float
    back: float

    @property
    def round_trip(self) -> float:
        """The time on the way, both ways together."""
        return (self.back - self.sent) - (self.returned - self.arrived)

    @property
    def offset(self) -> float:
        """The clock there minus the clock here, if both ways took the same time."""
        return ((self.arrived - self.sent) + (self.returned - self.back)) / 2

    @property
    def middle(self) -> float:
        """The instant here that the offset is about."""
        return (self.sent + self.back) / 2


@dataclass(frozen=True)
class Offset:
    """What the clock there shows beyond the one here, as a line over time."""

    at: float = 0.0
    """Seconds, of the clock here."""
    seconds: float = 0.0
    drift: float = 0.0
    """Seconds a second."""
    uncertainty: float = 0.0
    """Seconds: half the least round trip, which either way may have taken alone."""

    def there(self, here: float) -> float:
        """Return what the clock there shows when the one here shows this."""
        return here + self.seconds + self.drift * (here - self.at)

    def here(self, there: float) -> float:
        """Return what the clock here shows when the one there shows this."""
        return self.at + (there - self.seconds - self.at) / (1 + self.drift)


class HostClock:
    """Takes in exchanges; the offset is a line through those that had the least round trip of their time."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._pinned: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Take in an exchange."""
        self._samples.append(sample)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> Sample:
        """The latest exchange."""
        return self._samples[-1]

    @property
    def round_trip(self) -> float:
        """The least, in seconds."""
        return min((each.round_trip for each in list(self._samples)), default=0.0)

    def facts(self) -> dict[str, float]:
        """Return ``offset``, ``drift``, ``uncertainty`` and ``round_trip`` by now, in seconds."""
        found = self.offset
        here = self._samples[-1].back if self._samples else 0.0
        return {
            "offset": found.there(here) - here,
            "drift": found.drift,
            "uncertainty": found.uncertainty,
            "round_trip": self.round_trip,
        }

    def pin(self, at: float, offset: float, round_trip: float) -> None:
        """Take in what is known better: what the clock there shows beyond the one here at an instant of the latter."""
        half = round_trip / 2
        self._pinned.append(Sample(at - half, at + offset, at + offset, at + half))

    @property
    def offset(self) -> Offset:
        """The best estimate so far; that of equal clocks before the first exchange.

        A line of least squares, each exchange weighted by its round trip. There is a drift only where the exchanges
        say so beyond chance: half a round trip of error must not look like one.
        """
        samples = list(self._samples)
        parts = [samples[first : first + SEGMENT] for first in range(0, len(samples), SEGMENT)]
        best = [*self._pinned, *(min(part, key=lambda each: each.round_trip) for part in parts)]
        if not best:
            return Offset()
        chosen = min(best, key=lambda each: each.round_trip)
        middles, offsets, trips = np.array([(each.middle, each.offset, each.round_trip) for each in best]).T
        weights = (4 / np.maximum(trips, 1e-6)) ** 2
        at = float(np.average(middles, weights=weights))
        mean = float(np.average(offsets, weights=weights))
        spread = float(weights @ (middles - at) ** 2)
        slope = float(weights @ ((middles - at) * (offsets - mean))) / (spread or 1.0)
        if slope**2 * spread > SURE**2:
            return Offset(at, mean, slope, chosen.round_trip / 2)
        return Offset(chosen.middle, chosen.offset, 0.0, chosen.round_trip / 2)


class MeasuredClock(Clock):
    """Another clock than the one here, by exchanges of times."""

    def __init__(self) -> None:
        self.clock = HostClock()
        """The estimate so far."""
        self._origins: dict[float, float] = {}

    def there(self, here: float) -> float:
        """Return what the clock there shows at an instant of this one; always the same of the same instant.

        The origin of a run is such an instant, and what a device keeps on its disk is kept under it.
        """
        return self._origins.setdefault(here, self.clock.offset.there(here))

    def here(self, there: float) -> float:
        """Return what the clock here shows when the one there shows this."""
        return self.clock.offset.here(there)


class EngineClock(MeasuredClock):
    """The clock of an engine's machine that is not this one: of a virtual machine such as Docker Desktop's."""

    def __init__(self, ask: Callable[[], float]) -> None:
        """``ask`` returns the time there."""
        super().__init__()
        self._ask = ask
        for _ in range(_FIRST_EXCHANGES):
            self._exchange()

    @property
    def is_other(self) -> bool:
        """Whether this is another clock than the one here, beyond what the exchanges leave open."""
        found = self.clock.offset
        return abs(found.seconds) > found.uncertainty + _SAME

    def follow(self, over: threading.Event) -> None:
        """Exchange times until something is over: two clocks drift apart by milliseconds a minute."""
        while not over.wait(EXCHANGE_SECONDS):
            with suppress(TestbedError):  # a shaper that is busy, or that ends
                self._exchange()

    def _exchange(self) -> None:
        sent = time.monotonic()
        there = self._ask()
        self.clock.add(Sample(sent, there, there, time.monotonic()))
