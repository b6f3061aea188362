"""How late things were, in bins. Pure."""

from __future__ import annotations


class LatenessHistogram:
    """How much later than due packets were let go, in bins of 10 us up to 10 ms."""

    BIN = 1e-5
    BINS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.BINS + 1)
        self._worst = 0.0
        self._sum = 0.0

    def add(self, seconds: float, packets: int) -> None:
        """Count packets that were this late."""
        index = int(seconds / self.BIN)
        self._counts[index if index < self.BINS else self.BINS] += packets
        self._sum += seconds * packets
        if seconds > self._worst:
            self._worst = seconds

    def percentile(self, fraction: float) -> float:
        """Return the lateness in seconds below which this fraction of packets stayed; in the last bin, the worst."""
        wanted = fraction * sum(self._counts)
        seen = 0
        for index, count in enumerate(self._counts[: self.BINS]):
            seen += count
            if seen >= wanted and seen:
                return min((index + 1) * self.BIN, self._worst)
        return self._worst

    def summary(self) -> dict[str, float]:
        """Return the figures for a report."""
        return {
            "mean": self._sum / max(1, sum(self._counts)),
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
            "p999": self.percentile(0.999),
            "max": self._worst,
        }
