"""Links and speeds that change over time as a trace says, replayed by either runtime.

The runtime asks `TraceScript.next_deadline`, takes the changes that are `due` and carries them out. All instants count
from the start of the workload: a late change makes no later one late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.faults.conditions import Conditions
from testbed.faults.device_actions import ThrottlePart
from testbed.network.link import Link, Pair
from testbed.network.overlay import overlay
from testbed.network.parts import LinkPart


@dataclass(frozen=True)
class Change:
    """One entry of a trace: a link or a device has another figure of its own from then on."""

    time: float
    """Seconds since the start of the workload."""
    what: str
    """As the trace has it: ``link a->b rate``, ``device a speed``."""
    value: str
    pairs: tuple[Pair, ...] = ()
    """Links that change, one for each direction; none where a device's speed does."""
    link: LinkPart | None = None
    """What they are from then on, beside what they were."""
    speed: ThrottlePart | None = None
    """The device and its speed, or how much slower than its own speed it is from then on."""

    def apply(self, now: Conditions) -> Conditions:
        """Return the conditions after it."""
        if self.link is not None:
            part = self.link
            now = now.set_figures({p: overlay(now.own_link(p), part, now.from_first(p)) for p in self.pairs})
        if self.speed is not None:
            device = self.speed.device
            now = now.set_speed(device, self.speed.slowed(1.0, now.speeds[device]))
        return now


@dataclass(frozen=True)
class Changes:
    """Changes that are due together, as one step."""

    changes: Sequence[Change]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        """Return what they change."""
        return f"the trace's '{', '.join(change.what for change in self.changes)}'"

    @property
    def switches(self) -> bool:
        """Whether they change the state of a device: never."""
        return False

    def apply(self, now: Conditions) -> Conditions:
        """Return the conditions after all of them."""
        for change in self.changes:
            now = change.apply(now)
        return now

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a ``trace`` event for each."""
        return [("trace", {"what": each.what, "value": each.value, "intended": each.time}) for each in self.changes]


class TraceScript:
    """The changes of a trace, in the order of time, and how far they have come."""

    def __init__(self, changes: Sequence[Change] = ()) -> None:
        self._changes = changes
        self._next = 0

    def next_deadline(self) -> float | None:
        """Return the next instant at which something changes."""
        return self._changes[self._next].time if self._next < len(self._changes) else None

    def due(self, now: float) -> Changes:
        """Take what is due, in the order of the trace."""
        first = self._next
        while self._next < len(self._changes) and self._changes[self._next].time <= now:
            self._next += 1
        return Changes(self._changes[first : self._next])


def traced_links(links: Mapping[Pair, Link], changes: Iterable[Change], first: str) -> Iterator[tuple[int, Pair, Link]]:
    """Yield each link as each change leaves it: (index of the change, pair, link).

    ``first`` is the first device of the scenario. Changes of links that are not there are passed over.
    """
    now: dict[Pair, Link] = {}
    for index, change in enumerate(changes):
        for pair in change.pairs:
            if pair in links and change.link is not None:
                now[pair] = overlay(now.get(pair) or links[pair], change.link, from_first=pair[0] == first)
                yield index, pair, now[pair]
