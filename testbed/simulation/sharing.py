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
    """A shared rate with its current transmissions."""

    rate: float
    """bit/s."""
    flows: dict[SharedTransfer, None] = field(default_factory=dict)
    """Transmissions in the order of their start."""
    reserved_until: float = 0.0
    """End of the reservation for broadcasts; other transmissions wait."""


@dataclass(eq=False, slots=True)
class SharedTransfer:
    """One transmission under way; with shared cores, one piece of work in seconds instead of bits."""

    whole: float
    """Size in bits at the start."""
    cap: float
    """Rate limit in bit/s of the transmission's own link."""
    uses: Sequence[tuple[Shared, float]]
    """Shared rates with the bits that each bit occupies: more than one if the link is slower than a radio channel and
    occupies the channel longer."""
    on_end: Callable[[], None]
    bits: float = field(init=False)
    """Unsent bits at time ``since``."""
    rate: float = 0.0
    """bit/s since the time ``since``; 0 while other traffic has reserved a shared rate."""
    since: float = 0.0
    ends: float = -1.0
    """End time at the current rate; negative without a rate."""

    def __post_init__(self) -> None:
        self.bits = self.whole

    def is_stopped(self, level: float, full: Collection[Shared]) -> bool:
        """Return whether a rate of ``level`` bit/s is the maximum: the own link's, or that of a full shared rate."""
        return self.cap <= level or any(shared in full for shared, _ in self.uses)


class Sharing:
    """All transmissions with shared rates."""

    def __init__(self, event_queue: EventQueue) -> None:
        self._event_queue = event_queue
        self._touched: dict[Shared, None] = {}
        """Shared rates whose transmissions have changed at this instant, in the order of the changes."""

    def begin(self, flow: SharedTransfer) -> None:
        """Add a transmission."""
        flow.since = self._event_queue.now
        for shared, _ in flow.uses:
            shared.flows[flow] = None
            self.touch(shared)

    def stop(self, flow: SharedTransfer) -> float:
        """Stop a transmission early; return the unsent bits."""
        self._remove_flow(flow)
        return max(0.0, flow.bits - flow.rate * (self._event_queue.now - flow.since))

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
        """Schedule recomputation of affected rates after all events of this instant."""
        if not self._touched:
            self._event_queue.at(self._event_queue.now, self._settle_rates, None)
        self._touched[shared] = None

    def _remove_flow(self, flow: SharedTransfer) -> None:
        flow.ends = -1.0
        for shared, _ in flow.uses:
            del shared.flows[flow]
            self.touch(shared)

    def _settle_rates(self, _nothing: None) -> None:
        now, flows = self._event_queue.now, self._affected_transfers()
        for flow, rate in max_min_fair_rates(flows, now).items():
            # Recomputing an unchanged transmission would round its end differently.
            if rate == flow.rate and flow.ends >= 0:
                continue
            flow.bits = max(0.0, flow.bits - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.ends = now + flow.bits / rate if rate > 0 else -1.0
            if rate > 0:
                self._event_queue.at(flow.ends, self._end_flow, flow)

    def _affected_transfers(self) -> list[SharedTransfer]:
        """Return all transmissions connected to the touched rates, directly or indirectly."""
        shared_rates = list(self._touched)
        self._touched.clear()
        # Dictionaries as sets, since the order of a set changes from run to run, and with it the rounding of rates.
        seen = dict.fromkeys(shared_rates)
        flows: dict[SharedTransfer, None] = {}
        # The list grows as the search meets further rates.
        for shared in shared_rates:
            for flow in shared.flows:
                if flow in flows:
                    continue
                flows[flow] = None
                for other, _ in flow.uses:
                    if other not in seen:
                        seen[other] = None
                        shared_rates.append(other)
        return list(flows)

    def _end_flow(self, flow: SharedTransfer) -> None:
        # Void if the rate has changed meanwhile, or the transmission was stopped.
        if flow.ends != self._event_queue.now:
            return
        self._remove_flow(flow)
        flow.on_end()


def max_min_fair_rates(
    flows: Sequence[SharedTransfer], now: float
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
    left: dict[Shared, float] = {}
    for flow in flows:
        for shared, _ in flow.uses:
            left[shared] = 0.0 if now < shared.reserved_until else shared.rate
    rates: dict[SharedTransfer, float] = {}
    rising = dict.fromkeys(flows)
    while rising:
        level, full = _raise_rates(rising, left)
        stopped = [flow for flow in rising if flow.is_stopped(level, full)]
        for flow in stopped:
            rates[flow] = level
            del rising[flow]
            for shared, share in flow.uses:
                # Rounding must not leave a negative rate for the others.
                left[shared] = max(0.0, left[shared] - level * share)
    return rates


def _raise_rates(
    rising: Iterable[SharedTransfer], remaining: Mapping[Shared, float]
) -> tuple[float, set[Shared]]:
    """Return the highest common rate of the rising transmissions and the media filled by this rate; none if a link is
    the limit."""
    weights: dict[Shared, float] = {}
    for flow in rising:
        for shared, share in flow.uses:
            weights[shared] = weights.get(shared, 0.0) + share
    level = min(remaining[shared] / weight for shared, weight in weights.items())
    slowest = min(flow.cap for flow in rising)
    # A transmission's own link limits it alone; what it leaves is shared by the others in the next step.
    if slowest <= level:
        return slowest, set()
    full = set()
    for shared, weight in weights.items():
        if remaining[shared] * _FULL_SHARE <= level * weight:
            full.add(shared)
    return level, full
