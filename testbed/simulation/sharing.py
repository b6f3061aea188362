"""Rates that several transmissions share at once: a device's uplink and downlink, the channel of a radio cell.

Packets of those who transmit at the same time alternate, as in the shaper, so each gets the same rate unless its own
link gives it less, in which case the others have what it leaves: the rates are fair in the sense of max and min. They
are computed again at each instant at which a transmission begins or ends, for those that it can concern.

Work on the cores of a machine is shared alike: a second of work stands for a bit there, and a core for 1 bit/s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from testbed.simulation.calendar import Calendar

_NEARLY = 1 - 1e-12
"""What is as full as this is full: rates are sums of floats."""


@dataclass(eq=False, slots=True)
class Shared:
    """A rate, and who takes from it right now."""

    rate: float
    """bit/s."""
    flows: dict[SharedTransfer, None] = field(default_factory=dict)
    """In the order in which they began."""
    reserved_until: float = 0.0
    """Until then casts have all of it, and who transmits otherwise waits."""


@dataclass(eq=False, slots=True)
class SharedTransfer:
    """One transmission under way."""

    whole: float
    """Bits."""
    cap: float
    """bit/s that its own link allows."""
    uses: Sequence[tuple[Shared, float]]
    """What it shares, and how much of that each of its bits takes: more than one where its link is slower than a radio
    channel, for it then holds the channel longer."""
    ended: Callable[[], None]
    bits: float = field(init=False)
    """Bits that had not left at ``since``."""
    rate: float = 0.0
    since: float = 0.0
    ends: float = -1.0
    """When it does at its present rate; negative while it has none."""

    def __post_init__(self) -> None:
        self.bits = self.whole

    def is_stopped(self, level: float, full: Collection[Shared]) -> bool:
        """Return whether its link, or something full that it shares, allows no rate above a level."""
        return self.cap <= level or any(shared in full for shared, _ in self.uses)


class Sharing:
    """All transmissions of a world that share something."""

    def __init__(self, calendar: Calendar) -> None:
        self._calendar = calendar
        self._touched: dict[Shared, None] = {}

    def begin(self, flow: SharedTransfer) -> None:
        """Let a transmission take its share from now on."""
        flow.since = self._calendar.now
        for shared, _ in flow.uses:
            shared.flows[flow] = None
            self.touch(shared)

    def stop(self, flow: SharedTransfer) -> float:
        """End a transmission before its time; return the bits that have not left."""
        self._forget(flow)
        return max(0.0, flow.bits - flow.rate * (self._calendar.now - flow.since))

    def reserve(self, shared: Shared, start: float, end: float) -> None:
        """Give casts all of a rate between two instants; times of several casts may not overlap."""
        if end > start:
            self._calendar.at(start, self._reserve, (shared, end))
            self._calendar.at(end, self.touch, shared)

    def _reserve(self, reservation: tuple[Shared, float]) -> None:
        shared, until = reservation
        shared.reserved_until = until
        self.touch(shared)

    def touch(self, shared: Shared) -> None:
        """Compute the rates around something again, once all that happens at this instant has happened."""
        if not self._touched:
            self._calendar.at(self._calendar.now, self._settle, None)
        self._touched[shared] = None

    def _forget(self, flow: SharedTransfer) -> None:
        flow.ends = -1.0
        for shared, _ in flow.uses:
            del shared.flows[flow]
            self.touch(shared)

    def _settle(self, _nothing: None) -> None:
        now, flows = self._calendar.now, self._concerned()
        for flow, rate in max_min_fair_rates(flows, now).items():
            if rate == flow.rate and flow.ends >= 0:
                continue
            flow.bits = max(0.0, flow.bits - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.ends = now + flow.bits / rate if rate > 0 else -1.0
            if rate > 0:
                self._calendar.at(flow.ends, self._end, flow)

    def _concerned(self) -> list[SharedTransfer]:
        """Return all transmissions that share something, directly or not, with what was touched."""
        shareds = list(self._touched)
        self._touched.clear()
        seen = dict.fromkeys(shareds)
        flows: dict[SharedTransfer, None] = {}
        for shared in shareds:
            for flow in shared.flows:
                if flow not in flows:
                    flows[flow] = None
                    new = [other for other, _ in flow.uses if other not in seen]
                    seen.update(dict.fromkeys(new))
                    shareds.extend(new)
        return list(flows)

    def _end(self, flow: SharedTransfer) -> None:
        if flow.ends != self._calendar.now:
            return  # its rate has changed meanwhile, or it was stopped
        self._forget(flow)
        flow.ended()


def max_min_fair_rates(flows: Sequence[SharedTransfer], now: float) -> dict[SharedTransfer, float]:
    """Return the bit/s of each transmission, fair in the sense of max and min, by progressive filling.

    Three steps repeat until every transmission has a rate. Raise all others together until a link or something shared
    is full. Fix the rate of the transmissions that this stops. Subtract their part from everything that they share.
    See Bertsekas and Gallager, Data Networks, 2nd edition, section 6.5.2.
    """
    left = {shared: 0.0 if now < shared.reserved_until else shared.rate for flow in flows for shared, _ in flow.uses}
    rates: dict[SharedTransfer, float] = {}
    rising = dict.fromkeys(flows)
    while rising:
        level, full = _raise(rising, left)
        for flow in [flow for flow in rising if flow.is_stopped(level, full)]:
            rates[flow] = level
            del rising[flow]
            for shared, share in flow.uses:
                left[shared] = max(0.0, left[shared] - level * share)
    return rates


def _raise(rising: Iterable[SharedTransfer], left: Mapping[Shared, float]) -> tuple[float, set[Shared]]:
    """Return the highest common rate of some transmissions, and what is full at it; nothing where a link limits it."""
    weights: dict[Shared, float] = {}
    for flow in rising:
        for shared, share in flow.uses:
            weights[shared] = weights.get(shared, 0.0) + share
    level = min(left[shared] / weight for shared, weight in weights.items())
    slowest = min(flow.cap for flow in rising)
    if slowest <= level:
        return slowest, set()
    return level, {shared for shared, weight in weights.items() if left[shared] * _NEARLY <= level * weight}
