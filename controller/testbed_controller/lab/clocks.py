"""Synchronisation of the monotonic clocks of engine hosts with the controller's clock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from testbed.common.errors import TestbedError
from testbed.common.lazy import np

SAMPLES = 256
"""Number of latest exchanges in an estimate; they cover some minutes."""
SEGMENT = 16
"""Number of successive exchanges of which only the one with the smallest round trip is used."""
MIN_DRIFT_SIGNIFICANCE = 5.0
"""Smallest accepted drift, in standard deviations of its error."""
EXCHANGE_SECONDS = 1.0
"""Interval of time exchanges, in seconds."""
_FIRST_EXCHANGES = 16
"""Number of time exchanges before the first estimate."""
_SAME_CLOCK = 1e-3
"""Tolerance for identical clocks beyond half a round trip, in seconds."""


class Clock:
    """The clock of an engine's host on the same machine, hence identical to the controller's clock."""

    def there(self, here: float) -> float:
        """Convert an instant of the controller's clock to the host's clock, in seconds."""
        return here

    def here(self, there: float) -> float:
        """Convert an instant of the host's clock to the controller's clock, in seconds."""
        return there


class Sample(NamedTuple):
    """One exchange of times between two clocks; all values in seconds."""

    sent: float
    """Instant of sending, on the controller's clock."""
    arrived: float
    """Instant of arrival at the host, on the host's clock."""
    returned: float
    """Instant of the host's answer, on the host's clock."""
    back: float
    """Instant of the answer's arrival, on the controller's clock."""

    @property
    def round_trip(self) -> float:
        """Transmission time of both directions together."""
        return (self.back - self.sent) - (self.returned - self.arrived)

    @property
    def offset(self) -> float:
        """The host's clock minus the controller's clock, assuming equal times in both directions."""
        return ((self.arrived - self.sent) + (self.returned - self.back)) / 2

    @property
    def middle(self) -> float:
        """The instant to which the offset applies, on the controller's clock."""
        return (self.sent + self.back) / 2


@dataclass(frozen=True)
class Offset:
    """The host's clock minus the controller's clock, as a linear function of time.

    >>> offset = Offset(at=100.0, seconds=5.0, drift=1e-6)
    >>> offset.there(100.0)
    105.0
    """

    at: float = 0.0
    """Instant of the controller's clock, in seconds."""
    seconds: float = 0.0
    drift: float = 0.0
    """Change of the offset in seconds per second."""
    uncertainty: float = 0.0
    """Maximum error in seconds: half the smallest round trip, reached if one direction takes the whole round trip."""

    def there(self, here: float) -> float:
        """Convert an instant of the controller's clock to the host's clock."""
        return here + self.seconds + self.drift * (here - self.at)

    def here(self, there: float) -> float:
        """Convert an instant of the host's clock to the controller's clock."""
        return self.at + (there - self.seconds - self.at) / (1 + self.drift)


def _round_trip_of(sample: Sample) -> float:
    return sample.round_trip


class HostClock:
    """An estimate of a host's clock: a line through the exchanges with the smallest round trips.

    >>> clock = HostClock()
    >>> clock.add(Sample(sent=10.0, arrived=60.001, returned=60.001, back=10.002))
    >>> round(clock.offset.there(11.0), 6)
    61.0
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._pinned: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add an exchange."""
        self._samples.append(sample)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> Sample:
        """The latest exchange."""
        return self._samples[-1]

    @property
    def round_trip(self) -> float:
        """The smallest round trip in seconds."""
        return min((sample.round_trip for sample in list(self._samples)), default=0.0)

    def facts(self) -> dict[str, float]:
        """Return the current ``offset``, ``drift``, ``uncertainty`` and ``round_trip``, in seconds."""
        estimate = self.offset
        now = self._samples[-1].back if self._samples else 0.0
        return {
            "offset": estimate.there(now) - now,
            "drift": estimate.drift,
            "uncertainty": estimate.uncertainty,
            "round_trip": self.round_trip,
        }

    def pin(self, at: float, offset: float, round_trip: float) -> None:
        """Add a measurement that stays in use: the offset at an instant ``at`` of the controller's clock.

        The weight of the measurement follows from ``round_trip``, as for an exchange.
        """
        half = round_trip / 2
        self._pinned.append(Sample(at - half, at + offset, at + offset, at + half))

    @property
    def offset(self) -> Offset:
        """The best estimate so far; zero before the first exchange.

        A weighted least-squares line through the exchanges, where the weight decreases with the round trip. A drift is
        used only if it is significant: an error of half a round trip must not look like a drift.
        """
        samples = list(self._samples)  # another thread adds samples
        # The sample with the smallest round trip of a segment has the smallest error.
        candidates = list(self._pinned)
        for start in range(0, len(samples), SEGMENT):
            segment = samples[start : start + SEGMENT]
            candidates.append(min(segment, key=_round_trip_of))
        if not candidates:
            return Offset()
        best_sample = min(candidates, key=_round_trip_of)
        middles = np.array([sample.middle for sample in candidates])
        offsets = np.array([sample.offset for sample in candidates])
        trips = np.array([sample.round_trip for sample in candidates])
        # The inverse variance of each offset, with a quarter of its round trip as the standard deviation of its error.
        weights = (4 / np.maximum(trips, 1e-6)) ** 2
        at = float(np.average(middles, weights=weights))
        mean = float(np.average(offsets, weights=weights))
        spread = float(weights @ (middles - at) ** 2)
        # If all samples have one instant, the spread is zero, and 1.0 avoids a division by zero: the slope is zero.
        slope = float(weights @ ((middles - at) * (offsets - mean))) / (spread or 1.0)
        # With these weights, the variance of the slope is 1 / spread.
        if slope**2 * spread > MIN_DRIFT_SIGNIFICANCE**2:
            return Offset(at, mean, slope, best_sample.round_trip / 2)
        return Offset(
            best_sample.middle, best_sample.offset, 0.0, best_sample.round_trip / 2
        )


class MeasuredClock(Clock):
    """A clock on another machine, estimated from exchanges."""

    def __init__(self) -> None:
        self.clock = HostClock()
        """The current estimate."""
        self._there_by_here: dict[float, float] = {}

    def there(self, here: float) -> float:
        """Convert an instant of the controller's clock; equal instants always give equal results.

        Equal results matter for the origin of a run: a device uses the converted origin as the key of its files.
        """
        return self._there_by_here.setdefault(here, self.clock.offset.there(here))

    def here(self, there: float) -> float:
        """Convert an instant of the host's clock to the controller's clock."""
        return self.clock.offset.here(there)


class EngineClock(MeasuredClock):
    """The clock of an engine in a virtual machine, such as Docker Desktop's."""

    def __init__(self, ask: Callable[[], float]) -> None:
        """``ask`` returns the time of the host's clock in seconds."""
        super().__init__()
        self._ask = ask
        for _ in range(_FIRST_EXCHANGES):
            self._exchange_times()

    @property
    def is_other(self) -> bool:
        """Whether the clocks differ by more than the uncertainty of the exchanges."""
        estimate = self.clock.offset
        return abs(estimate.seconds) > estimate.uncertainty + _SAME_CLOCK

    def follow(self, stop: threading.Event) -> None:
        """Exchange times until the event is set, because two clocks drift apart by milliseconds per minute."""
        while not stop.wait(EXCHANGE_SECONDS):
            with suppress(TestbedError):  # the shaper may be busy or stopping
                self._exchange_times()

    def _exchange_times(self) -> None:
        sent = time.monotonic()
        remote = self._ask()
        # The answer has a single reading, which is used for arrival and return, so the host's processing time counts as
        # transmission time.
        self.clock.add(Sample(sent, remote, remote, time.monotonic()))
