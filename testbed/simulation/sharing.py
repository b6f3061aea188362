"""Rates shared by concurrent transmissions: a device's uplink and downlink, the channel of a radio cell.

Packets of concurrent transmissions alternate, as in the shaper. Rates are therefore max-min fair: each transmission
gets an equal share unless its own link is slower, in which case the others share the remainder. Rates are recomputed
for all affected transmissions whenever one begins or ends.

Work on the cores of a shared machine follows the same rule: a second of work corresponds to one bit, and a core to 1
bit/s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from testbed.simulation.event_queue import EventQueue

_FULL_SHARE = 1 - 1e-12
"""Share of a rate from which it counts as full, because rates are sums of floats."""


@dataclass(eq=False, slots=True)
class Shared:
    """A rate shared by the current transmissions."""

    rate: float
    """bit/s."""
    transfers: dict[SharedTransfer, None] = field(default_factory=dict)
    """Transmissions in the order of their start."""
    reserved_until: float = 0.0
    """End of the reservation for broadcasts; other transmissions wait."""


@dataclass(eq=False, slots=True)
class SharedTransfer:
    """A transmission at shared rates; for shared cores, one piece of work in seconds instead of bits."""

    total_bits: float
    """Size in bits at the start."""
    cap: float
    """Rate limit in bit/s of the transmission's own link."""
    uses: Sequence[tuple[Shared, float]]
    """Shared rates with the bits that each bit occupies: more than one if the link is slower than a radio channel and
    occupies the channel longer."""
    on_end: Callable[[], None]
    unsent_bits: float = field(init=False)
    """Unsent bits at time ``updated_at``."""
    rate: float = 0.0
    """bit/s since the time ``updated_at``; 0 while other traffic has reserved a shared rate."""
    updated_at: float = 0.0
    """Time of the last change of ``rate``."""
    end: float = -1.0
    """End time at the current rate; negative without a rate."""

    def __post_init__(self) -> None:
        self.unsent_bits = self.total_bits

    def is_stopped(self, level: float, full: Collection[Shared]) -> bool:
        """Return whether the transfer's own link or a full shared rate allows no more than ``level`` bit/s."""
        return self.cap <= level or any(shared in full for shared, _ in self.uses)


class Sharing:
    """All transmissions with shared rates."""

    def __init__(self, event_queue: EventQueue) -> None:
        self._event_queue = event_queue
        self._touched: dict[Shared, None] = {}
        """Shared rates whose transmissions have changed at this instant, in the order of the changes."""

    def begin(self, transfer: SharedTransfer) -> None:
        """Add a transmission."""
        transfer.updated_at = self._event_queue.now
        for shared, _ in transfer.uses:
            shared.transfers[transfer] = None
            self.touch(shared)

    def stop(self, transfer: SharedTransfer) -> float:
        """Stop a transmission early; return the unsent bits."""
        self._remove_transfer(transfer)
        return max(
            0.0,
            transfer.unsent_bits
            - transfer.rate * (self._event_queue.now - transfer.updated_at),
        )

    def reserve(self, shared: Shared, start: float, end: float) -> None:
        """Reserve the whole rate for a broadcast between two instants; reservations must not overlap."""
        # A broadcast at infinite rate takes no time, so no transmission waits.
        if end > start:
            self._event_queue.at(start, self._apply_reservation, (shared, end))
            self._event_queue.at(end, self.touch, shared)

    def _apply_reservation(self, reservation: tuple[Shared, float]) -> None:
        shared, until = reservation
        shared.reserved_until = until
        self.touch(shared)

    def touch(self, shared: Shared) -> None:
        """Schedule recomputation of affected rates after all events of the present instant."""
        if not self._touched:
            self._event_queue.at(self._event_queue.now, self._settle_rates, None)
        self._touched[shared] = None

    def _remove_transfer(self, transfer: SharedTransfer) -> None:
        transfer.end = -1.0
        for shared, _ in transfer.uses:
            del shared.transfers[transfer]
            self.touch(shared)

    def _settle_rates(self, _nothing: None) -> None:
        now, transfers = self._event_queue.now, self._affected_transfers()
        for transfer, rate in max_min_fair_rates(transfers, now).items():
            # Recomputing an unchanged transmission would round its end differently.
            if rate == transfer.rate and transfer.end >= 0:
                continue
            transfer.unsent_bits = max(
                0.0, transfer.unsent_bits - transfer.rate * (now - transfer.updated_at)
            )
            transfer.updated_at, transfer.rate = now, rate
            transfer.end = now + transfer.unsent_bits / rate if rate > 0 else -1.0
            if rate > 0:
                self._event_queue.at(transfer.end, self._end_transfer, transfer)

    def _affected_transfers(self) -> list[SharedTransfer]:
        """Return all transmissions connected to the touched rates, directly or indirectly."""
        shared_rates = list(self._touched)
        self._touched.clear()
        # Dictionaries as sets, since the order of a set changes from run to run, and with it the rounding of rates.
        seen = dict.fromkeys(shared_rates)
        transfers: dict[SharedTransfer, None] = {}
        # The list grows as the search meets further rates.
        for shared in shared_rates:
            for transfer in shared.transfers:
                if transfer in transfers:
                    continue
                transfers[transfer] = None
                for other, _ in transfer.uses:
                    if other not in seen:
                        seen[other] = None
                        shared_rates.append(other)
        return list(transfers)

    def _end_transfer(self, transfer: SharedTransfer) -> None:
        # Void if the rate has changed meanwhile, or the transmission was stopped.
        if transfer.end != self._event_queue.now:
            return
        self._remove_transfer(transfer)
        transfer.on_end()


def max_min_fair_rates(
    transfers: Sequence[SharedTransfer], now: float
) -> dict[SharedTransfer, float]:
    """Return the max-min fair rate of each transmission in bit/s, by progressive filling.

    Three steps repeat until every transmission has a rate. Raise all others together until a link or a shared rate is
    full. Fix the rate of the transmissions limited by it. Subtract their part from everything that they share.
    See Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.

    >>> uplink = Shared(10e6)
    >>> slow = SharedTransfer(8e6, 2e6, [(uplink, 1.0)], on_end=lambda: None)
    >>> fast = SharedTransfer(8e6, 50e6, [(uplink, 1.0)], on_end=lambda: None)
    >>> list(max_min_fair_rates([slow, fast], now=0.0).values())
    [2000000.0, 8000000.0]
    """
    remaining_rates: dict[Shared, float] = {}
    for transfer in transfers:
        for shared, _ in transfer.uses:
            remaining_rates[shared] = (
                0.0 if now < shared.reserved_until else shared.rate
            )
    rates: dict[SharedTransfer, float] = {}
    rising = dict.fromkeys(transfers)
    while rising:
        level, full = _raise_rates(rising, remaining_rates)
        stopped = [transfer for transfer in rising if transfer.is_stopped(level, full)]
        for transfer in stopped:
            rates[transfer] = level
            del rising[transfer]
            for shared, share in transfer.uses:
                # Rounding must not leave a negative rate for the others.
                remaining_rates[shared] = max(
                    0.0, remaining_rates[shared] - level * share
                )
    return rates


def _raise_rates(
    rising: Iterable[SharedTransfer], remaining: Mapping[Shared, float]
) -> tuple[float, set[Shared]]:
    """Return the highest common rate of the rising transmissions and the media filled by this rate; none if a link is
    the limit."""
    weights: dict[Shared, float] = {}
    for transfer in rising:
        for shared, share in transfer.uses:
            weights[shared] = weights.get(shared, 0.0) + share
    level = min(remaining[shared] / weight for shared, weight in weights.items())
    slowest = min(transfer.cap for transfer in rising)
    # A transmission's own link limits it alone; what it leaves is shared by the others in the next step.
    if slowest <= level:
        return slowest, set()
    full = set()
    for shared, weight in weights.items():
        if remaining[shared] * _FULL_SHARE <= level * weight:
            full.add(shared)
    return level, full
