"""What faults have done to the links so far, as a value: each change returns a new state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from testbed.network.link import Link, Pair
from testbed.network.overlay import overlay

if TYPE_CHECKING:
    from testbed.scenario.schema import DegradePart


@dataclass(frozen=True)
class Partition:
    """Devices that reach each other only within their group."""

    groups: Mapping[str, int]
    """Device -> group; the devices not named form one more."""

    def separates(self, pair: Pair) -> bool:
        """Return whether the two devices cannot reach each other."""
        return self.groups.get(pair[0], -1) != self.groups.get(pair[1], -1)


@dataclass(frozen=True)
class Degradation:
    """Links whose properties are replaced by those that the part gives."""

    part: DegradePart

    def touches(self, pair: Pair) -> bool:
        """Return whether this directed link is among those meant."""
        part = self.part
        if part.device is not None:
            return part.device in pair
        if part.between is not None:
            return pair in (part.between, part.between[::-1])
        return pair == (part.from_, part.to)


@dataclass(frozen=True)
class NetworkState:
    """The links of a run and what is wrong with them right now.

    Impairments pile up: a link is down while any partition separates its ends, and of several degradations of one
    link the latest decides about each key it gives. Each goes by the handle that its maker chose.
    """

    links: Mapping[Pair, Link]
    first: str = ""
    """First device of the scenario: presets have a direction, down is away from it."""
    impairments: Mapping[str, Partition | Degradation] = field(default_factory=dict)
    """In the order in which they were made."""

    def partition(self, groups: Sequence[Sequence[str]], handle: str) -> NetworkState:
        """Cut the groups off from each other and from the devices not named, which form one more group."""
        numbered = {name: number for number, names in enumerate(groups) for name in names}
        return self._with(handle, Partition(numbered))

    def degrade(self, part: DegradePart, handle: str) -> NetworkState:
        """Lay the properties given over those of the links named."""
        return self._with(handle, Degradation(part))

    def _with(self, handle: str, impairment: Partition | Degradation) -> NetworkState:
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
        link = self.links[pair]
        for impairment in self.impairments.values():
            if isinstance(impairment, Partition):
                if impairment.separates(pair):
                    link = replace(link, up=False)
            elif impairment.touches(pair):
                link = overlay(link, impairment.part, from_first=pair[0] == self.first)
        return link

    def changed(self, since: NetworkState) -> dict[Pair, Link]:
        """Return the effective links that differ from an earlier state of the same network, in its order."""
        differing = [
            impairment
            for one, other in ((self, since), (since, self))
            for handle, impairment in one.impairments.items()
            if other.impairments.get(handle) is not impairment
        ]
        found = {}
        for pair in self._touched(differing):
            link = self.effective(pair)
            if link != since.effective(pair):
                found[pair] = link
        return found

    def _touched(self, impairments: Iterable[Partition | Degradation]) -> list[Pair]:
        cuts = [each for each in impairments if isinstance(each, Partition)]
        worse = [each for each in impairments if isinstance(each, Degradation)]
        return [
            pair
            for pair in self.links
            if any(cut.separates(pair) for cut in cuts) or any(each.touches(pair) for each in worse)
        ]
