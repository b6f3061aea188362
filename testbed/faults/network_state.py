"""What faults and a trace have done to the links so far, as a value: each change returns a new state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from testbed.network.link import Link, Pair
from testbed.network.overlay import overlay

if TYPE_CHECKING:
    from testbed.faults.parts import DegradePart, FlapPart
    from testbed.network.parts import LinkPart


@dataclass(frozen=True)
class Partition:
    """Devices that reach each other only within their group."""

    groups: Mapping[str, int]
    """Device -> group; the devices not named form one more."""

    def touches(self, pair: Pair) -> bool:
        """Return whether the two devices cannot reach each other."""
        return self.groups.get(pair[0], -1) != self.groups.get(pair[1], -1)


@dataclass(frozen=True)
class Degradation:
    """Links whose properties are replaced by those that the part gives."""

    part: DegradePart

    def touches(self, pair: Pair) -> bool:
        """Return whether this directed link is among those meant."""
        return self.part.touches(pair)


@dataclass(frozen=True)
class Outage:
    """Links that drop everything: the down phase of a flap."""

    part: FlapPart

    def touches(self, pair: Pair) -> bool:
        """Return whether this directed link is among those meant."""
        return self.part.touches(pair)


Impairment = Partition | Degradation | Outage


@dataclass(frozen=True)
class NetworkState:
    """The links of a run and what is wrong with them right now.

    Impairments pile up: a link is down while any partition separates its ends or any outage is on it, and of several
    degradations of one link the latest decides about each key it gives. Each goes by the handle that its maker chose.
    What a trace says of a link stands below all of them.
    """

    links: Mapping[Pair, Link]
    first: str = ""
    """First device of the scenario: presets have a direction, down is away from it."""
    impairments: Mapping[str, Impairment] = field(default_factory=dict)
    """In the order in which they were made."""
    traced: Mapping[Pair, Link] = field(default_factory=dict)
    """Links whose own figures a trace has changed."""

    def partition(self, groups: Sequence[Sequence[str]], handle: str) -> NetworkState:
        """Cut the groups off from each other and from the devices not named, which form one more group."""
        numbered = {name: number for number, names in enumerate(groups) for name in names}
        return self._with(handle, Partition(numbered))

    def degrade(self, part: DegradePart, handle: str) -> NetworkState:
        """Lay the properties given over those of the links named."""
        return self._with(handle, Degradation(part))

    def cut(self, part: FlapPart, handle: str) -> NetworkState:
        """Take the links named down, as a flap does."""
        return self._with(handle, Outage(part))

    def set(self, pairs: Iterable[Pair], part: LinkPart) -> NetworkState:
        """Give links other figures of their own, under whatever impairments are in force on them."""
        new = {
            pair: overlay(self.traced.get(pair) or self.links[pair], part, from_first=pair[0] == self.first)
            for pair in pairs
        }
        return replace(self, traced={**self.traced, **new})

    def _with(self, handle: str, impairment: Impairment) -> NetworkState:
        if handle in self.impairments:
            raise ValueError(f"'{handle}' is in force already: undo it first, or choose another handle")
        return replace(self, impairments={**self.impairments, handle: impairment})

    def undo(self, handle: str) -> NetworkState:
        """Take back one impairment; the others stay. One that has been healed meanwhile is no error."""
        return replace(self, impairments={key: value for key, value in self.impairments.items() if key != handle})

    def heal(self) -> NetworkState:
        """Take back every impairment."""
        return replace(self, impairments={})

    def effective(self, pair: Pair) -> Link:
        """Return the directed link as it is now; raise KeyError where there is none."""
        link = self.traced.get(pair) or self.links[pair]
        for impairment in self.impairments.values():
            if not impairment.touches(pair):
                continue
            if isinstance(impairment, Degradation):
                link = overlay(link, impairment.part, from_first=pair[0] == self.first)
            else:
                link = replace(link, up=False)
        return link

    def changed(self, since: NetworkState) -> dict[Pair, Link]:
        """Return the effective links that differ from an earlier state of the same network, in its order."""
        found = {}
        for pair in self._suspects(since):
            link = self.effective(pair)
            if link != since.effective(pair):
                found[pair] = link
        return found

    def _suspects(self, since: NetworkState) -> Iterable[Pair]:
        """Return the links that may differ, in order: there may be a million, and most changes are to one."""
        differing = [
            impairment
            for one, other in ((self, since), (since, self))
            for handle, impairment in one.impairments.items()
            if other.impairments.get(handle) is not impairment
        ]
        traced = {
            pair
            for pair in self.traced.keys() | since.traced.keys()
            if self.traced.get(pair) is not since.traced.get(pair)
        }
        if not differing:
            return sorted(traced)
        return [pair for pair in self.links if pair in traced or any(each.touches(pair) for each in differing)]
