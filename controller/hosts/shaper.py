"""The shapers of several hosts as one: each shapes what its devices send, and what arrives there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from controller.hosts.channel import Channel
from controller.lab.links import Shaper
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement

T = TypeVar("T")


class Shapers:
    """As `Shaper`, of several; ``devices`` are those on each host."""

    def __init__(
        self, parts: Mapping[str, Shaper], devices: Mapping[str, Sequence[str]], channels: Mapping[str, Channel]
    ) -> None:
        self._parts = parts
        self._host = {name: host for host, names in devices.items() for name in names}
        self._channels = channels

    def crosses(self, pair: Pair) -> bool:
        """Say whether a link leads from one host to another."""
        return self._host[pair[0]] != self._host[pair[1]]

    def imposed(self, links: Mapping[Pair, Link]) -> dict[Pair, Link]:
        """Return what shapers are to do to links so that they are as asked."""
        return dict(links)

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links, live; no other link notices."""
        imposed = self.imposed(links)
        self._each(lambda host, shaper: shaper.set({p: link for p, link in imposed.items() if self._is_at(p, host)}))

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure these links between the devices themselves."""
        wanted = list(pairs)
        found = {}
        for host, shaper in self._parts.items():
            own = [pair for pair in wanted if not self.crosses(pair) and self._host[pair[0]] == host]
            found.update({(each.source, each.destination): each for each in (shaper.probe(own) if own else [])})
        return [found[pair] for pair in wanted if pair in found]

    def renew(self) -> None:
        """Let the containers live for another lease."""
        self._each(lambda _host, shaper: shaper.renew())

    def show(self) -> dict[str, Any]:
        """Return what `Shaper.show` does, of all devices and links."""
        shown = self._each(lambda _host, shaper: shaper.show())
        links = {(link["source"], link["destination"]): link for each in shown for link in each["links"]}
        return {
            "backend": ", ".join(sorted({each["backend"] for each in shown})),
            "devices": {name: value for each in shown for name, value in each["devices"].items()},
            "links": [*links.values()],
        }

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return drops at queues and bytes sent by device, and of what is one figure a host, the largest."""
        return merged(self._each(lambda _host, shaper: shaper.statistics(reset)))

    def _is_at(self, pair: Pair, host: str) -> bool:
        return host in (self._host[pair[0]], self._host[pair[1]])

    def _each(self, act: Callable[[str, Shaper], T]) -> list[T]:
        with ThreadPoolExecutor(len(self._parts)) as pool:
            return list(pool.map(lambda each: act(*each), self._parts.items()))


def merged(statistics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several shapers say as one: of each number the largest, of each text the first."""
    found: dict[str, Any] = {}
    for each in statistics:
        for name, value in each.items():
            known = found.get(name)
            if isinstance(value, dict):
                found[name] = merged([known or {}, value])
            elif known is None or (isinstance(value, int | float) and value > known):
                found[name] = value
    return found
