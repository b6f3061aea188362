"""Conversion of times between the controller's monotonic clock and the monotonic clocks of the engines' hosts.

A `HostClock` converts the instants of one host. If the host is the controller's own machine, both clocks are the same.
For another machine, a `MeasuredClock` exchanges times with the host: each `TimeExchange` gives one offset between the
clocks, and an `OffsetEstimator` fits an `Offset`, a linear function of time, to the offsets.
"""

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

MAX_EXCHANGES = 256
"""Number of latest exchanges in an estimate; at one a second, they cover four minutes."""
SEGMENT = 16
"""Number of successive exchanges of which only the exchange with the smallest round trip is used."""
MIN_DRIFT_SIGNIFICANCE = 5.0
"""Smallest drift that is used, in standard deviations of its error."""
EXCHANGE_SECONDS = 1.0
"""Interval of exchanges, in seconds."""
_FIRST_EXCHANGES = 16
"""Number of exchanges before the first estimate, without a pause between them."""
_SAME_CLOCK_TOLERANCE = 1e-3
"""Offset beyond the uncertainty at which two clocks still count as the same, in seconds."""


class HostClock:
    """The clock of an engine's host; this class is for the controller's own machine, where both clocks are the same."""

    def to_host(self, instant: float) -> float:
        """Convert an instant of the controller's clock to the host's clock, in seconds."""
        return instant

    def to_controller(self, host_instant: float) -> float:
        """Convert an instant of the host's clock to the controller's clock, in seconds."""
        return host_instant


class TimeExchange(NamedTuple):
    """A question from the controller to a host and the answer, with the clocks' times; all values in seconds."""

    sent: float
    """Instant of sending, on the controller's clock."""
    arrived: float
    """Instant of arrival at the host, on the host's clock."""
    answered: float
    """Instant of the host's answer, on the host's clock."""
    answer_arrived: float
    """Instant of the answer's arrival, on the controller's clock."""

    @property
    def round_trip(self) -> float:
        """Transmission time of both directions together."""
        return (self.answer_arrived - self.sent) - (self.answered - self.arrived)

    @property
    def offset(self) -> float:
        """The host's clock minus the controller's clock, assuming equal times in both directions."""
        there = self.arrived - self.sent
        back = self.answered - self.answer_arrived
        return (there + back) / 2

    @property
    def middle(self) -> float:
        """The instant to which the offset applies, on the controller's clock."""
        return (self.sent + self.answer_arrived) / 2


@dataclass(frozen=True)
class Offset:
    """The host's clock minus the controller's clock, as a linear function of time.

    >>> offset = Offset(at=100.0, seconds=5.0, drift=1e-6)
    >>> offset.to_host(100.0)
    105.0
    """

    at: float = 0.0
    """Instant of the controller's clock at which the offset is ``seconds``."""
    seconds: float = 0.0
    drift: float = 0.0
    """Change of the offset in seconds per second."""
    uncertainty: float = 0.0
    """Half the smallest round trip, in seconds: the error of its exchange if one direction takes the whole time."""

    def to_host(self, instant: float) -> float:
        """Convert an instant of the controller's clock to the host's clock."""
        return instant + self.seconds + self.drift * (instant - self.at)

    def to_controller(self, host_instant: float) -> float:
        """Convert an instant of the host's clock to the controller's clock."""
        elapsed = (host_instant - self.seconds - self.at) / (1 + self.drift)
        return self.at + elapsed


def _round_trip_of(exchange: TimeExchange) -> float:
    return exchange.round_trip


class OffsetEstimator:
    """An estimate of the offset of a host's clock, from the exchanges with the smallest round trips.

    >>> estimator = OffsetEstimator()
    >>> estimator.add(TimeExchange(sent=10.0, arrived=60.001, answered=60.001, answer_arrived=10.002))
    >>> round(estimator.offset.to_host(11.0), 6)
    61.0
    """

    def __init__(self) -> None:
        self._exchanges: deque[TimeExchange] = deque(maxlen=MAX_EXCHANGES)
        self._permanent: list[TimeExchange] = []
        """Measurements by other means, as equivalent exchanges; these are never dropped."""

    def add(self, exchange: TimeExchange) -> None:
        """Add an exchange."""
        self._exchanges.append(exchange)

    def __len__(self) -> int:
        """Return the number of stored exchanges."""
        return len(self._exchanges)

    @property
    def last_exchange(self) -> TimeExchange:
        """The latest exchange; IndexError before the first one."""
        return self._exchanges[-1]

    @property
    def round_trip(self) -> float:
        """The smallest round trip in seconds; zero before the first exchange."""
        exchanges = list(self._exchanges)  # another thread adds exchanges
        return min((exchange.round_trip for exchange in exchanges), default=0.0)

    def facts(self) -> dict[str, float]:
        """Return ``offset`` at the latest exchange, ``uncertainty`` and ``round_trip`` in seconds, and ``drift``."""
        estimate = self.offset
        latest = self._exchanges[-1].answer_arrived if self._exchanges else 0.0
        return {
            "offset": estimate.to_host(latest) - latest,
            "drift": estimate.drift,
            "uncertainty": estimate.uncertainty,
            "round_trip": self.round_trip,
        }

    def add_permanent(self, at: float, offset: float, round_trip: float) -> None:
        """Add a measurement by other means, which is never dropped: the offset at the controller's instant ``at``.

        The weight of the measurement follows from ``round_trip``, as for an exchange.
        """
        half = round_trip / 2
        host_time = at + offset
        self._permanent.append(TimeExchange(at - half, host_time, host_time, at + half))

    @property
    def offset(self) -> Offset:
        """The best estimate so far; zero before the first exchange.

        A weighted least-squares line through the exchanges, where the weight decreases with the round trip. A drift is
        used only if it is significant: an error of half a round trip must not look like a drift.
        """
        exchanges = list(self._exchanges)  # another thread adds exchanges
        # The exchange with the smallest round trip of a segment has the smallest error.
        selected = list(self._permanent)
        for start in range(0, len(exchanges), SEGMENT):
            segment = exchanges[start : start + SEGMENT]
            selected.append(min(segment, key=_round_trip_of))
        if not selected:
            return Offset()
        best = min(selected, key=_round_trip_of)
        middles = np.array([exchange.middle for exchange in selected])
        offsets = np.array([exchange.offset for exchange in selected])
        trips = np.array([exchange.round_trip for exchange in selected])
        # The inverse variance of each offset, with a quarter of its round trip as the standard deviation of its error.
        # The minimum avoids a division by zero.
        weights = (4 / np.maximum(trips, 1e-6)) ** 2
        mean_instant = float(np.average(middles, weights=weights))
        mean_offset = float(np.average(offsets, weights=weights))
        distances = middles - mean_instant
        spread = float(weights @ distances**2)
        # If all exchanges have one instant, the spread is zero, and 1.0 avoids a division by zero: the slope is zero.
        slope = float(weights @ (distances * (offsets - mean_offset))) / (spread or 1.0)
        uncertainty = best.round_trip / 2
        # With these weights, the variance of the slope is 1 / spread.
        if slope**2 * spread > MIN_DRIFT_SIGNIFICANCE**2:
            return Offset(mean_instant, mean_offset, slope, uncertainty)
        return Offset(best.middle, best.offset, 0.0, uncertainty)


class MeasuredClock(HostClock):
    """The clock of a remote host, measured by exchanges of times."""

    def __init__(self) -> None:
        self.estimator = OffsetEstimator()
        self._converted: dict[float, float] = {}
        """The host's instants, by the controller's instants of which they are conversions."""

    def to_host(self, instant: float) -> float:
        """Convert an instant of the controller's clock to the host's clock; equal instants always give equal results.

        Equal results matter for the origin of a run: a device uses the converted origin as the key of its files.
        """
        conversion = self.estimator.offset.to_host(instant)
        return self._converted.setdefault(instant, conversion)

    def to_controller(self, host_instant: float) -> float:
        """Convert an instant of the host's clock to the controller's clock."""
        return self.estimator.offset.to_controller(host_instant)


class EngineClock(MeasuredClock):
    """The clock of an engine in a virtual machine, such as Docker Desktop's."""

    def __init__(self, read_host_clock: Callable[[], float]) -> None:
        """Exchange the first times; ``read_host_clock`` asks the host for the time of its clock in seconds."""
        super().__init__()
        self._read_host_clock = read_host_clock
        for _ in range(_FIRST_EXCHANGES):
            self._exchange_times()

    @property
    def has_offset(self) -> bool:
        """Whether the clocks differ: the offset exceeds the uncertainty of the exchanges."""
        estimate = self.estimator.offset
        return abs(estimate.seconds) > estimate.uncertainty + _SAME_CLOCK_TOLERANCE

    def follow(self, stop: threading.Event) -> None:
        """Exchange times until the event is set, because two clocks drift apart by milliseconds per minute."""
        while not stop.wait(EXCHANGE_SECONDS):
            with suppress(TestbedError):  # the shaper may be busy or stopping
                self._exchange_times()

    def _exchange_times(self) -> None:
        sent = time.monotonic()
        host_time = self._read_host_clock()
        # The answer has a single reading, which is used for arrival and return, so the host's processing time counts as
        # transmission time.
        exchange = TimeExchange(sent, host_time, host_time, time.monotonic())
        self.estimator.add(exchange)
