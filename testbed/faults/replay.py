"""Links and speeds that change over time as a trace says, replayed by either runtime.

The runtime asks `TraceScript.next_deadline`, takes the changes that are `due`, and lays each over its `NetworkState` or
its `Speeds`. All instants count from the start of the workload: a late change makes no later one late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from testbed.faults.parts import DegradePart, ThrottlePart
from testbed.faults.speeds import slowed
from testbed.network.link import Link, Pair
from testbed.network.overlay import overlay
from testbed.network.parts import LinkPart

if TYPE_CHECKING:
    from testbed.faults.network_state import NetworkState
    from testbed.faults.speeds import Speeds


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

    def on_links(self, state: NetworkState) -> NetworkState:
        """Return the links after it."""
        return state if self.link is None else state.set(self.pairs, self.link)

    def on_speeds(self, state: Speeds) -> Speeds:
        """Return the speeds after it."""
        if self.speed is None:
            return state
        return state.set(self.speed.device, slowed(1.0, self.speed, state.own[self.speed.device]))

    def parts(self) -> list[DegradePart]:
        """Return the same as parts of a scenario, one for each direction, for who keeps them written down."""
        given = {} if self.link is None else self.link.model_dump(mode="json", exclude_none=True)
        return [DegradePart.model_validate({"from": source, "to": target, **given}) for source, target in self.pairs]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the ``trace`` event."""
        return {"what": self.what, "value": self.value, "intended": self.time}


class TraceScript:
    """The changes of a trace, in the order of time, and how far they have come."""

    def __init__(self, changes: Sequence[Change] = ()) -> None:
        self._changes = changes
        self._next = 0

    def next_deadline(self) -> float | None:
        """Return the next instant at which something changes."""
        return self._changes[self._next].time if self._next < len(self._changes) else None

    def due(self, now: float) -> list[Change]:
        """Take what is due, in the order of the trace."""
        first = self._next
        while self._next < len(self._changes) and self._changes[self._next].time <= now:
            self._next += 1
        return list(self._changes[first : self._next])


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
