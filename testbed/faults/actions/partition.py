"""Groups of devices that cannot reach each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from testbed.common.errors import Key
from testbed.faults.conditions import Conditions, FaultAction
from testbed.faults.setting import Setting
from testbed.network.link import Link, Pair


class NetworkPartition(FaultAction[tuple[tuple[str, ...], ...]]):
    """Devices reach each other only within their group; those that no group names form one more."""

    name = "partition"

    @property
    def target(self) -> str:
        """The groups."""
        return " | ".join(",".join(group) for group in self.value)

    def named(self) -> list[tuple[Key, str]]:
        """Return the members of all groups."""
        return [((number, place), name) for number, group in enumerate(self.value) for place, name in enumerate(group)]

    def problems(self, setting: Setting) -> Iterator[tuple[Key, str]]:
        """Yield devices that are named twice, and groups that separate nobody."""
        listed = [name for group in self.value for name in group]
        for name in sorted({name for name in listed if listed.count(name) > 1}):
            yield (), f"'{name}' is named twice: a device is in one group"
        kept = len([group for group in self.value if group]) + (len(set(listed)) < len(setting.devices))
        if kept < 2:
            yield (), "separates nobody: name at least two groups, or leave devices out of the only one"

    @cached_property
    def _group(self) -> dict[str, int]:
        return {name: number for number, names in enumerate(self.value) for name in names}

    def touches(self, pair: Pair) -> bool:
        """Return whether the two devices are in different groups."""
        return self._group.get(pair[0], -1) != self._group.get(pair[1], -1)

    def impair(self, link: Link, pair: Pair, now: Conditions) -> Link:
        """Drop everything."""
        return replace(link, up=False)
