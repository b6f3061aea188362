"""Links with worse figures."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from testbed.common.errors import Key
from testbed.faults.actions.linkset import LinkFault, LinkSetPart
from testbed.faults.conditions import Conditions
from testbed.faults.setting import Setting
from testbed.network import checks
from testbed.network.link import Link, Pair
from testbed.network.overlay import FIGURES, given, overlay
from testbed.network.parts import LinkPart
from testbed.network.presets import PRESETS


class DegradePart(LinkSetPart, LinkPart):
    """The links to make worse, and their new figures."""


class Degrade(LinkFault[DegradePart]):
    """Links take the figures given; of several degradations of a link the latest decides about each figure."""

    name = "degrade"

    def problems(self, setting: Setting) -> Iterator[tuple[Key, str]]:
        """Yield links that are not there, and figures that are unknown or cannot be."""
        part = self.value
        yield from super().problems(setting)
        if part.preset is None and not given(part):
            yield (), f"changes nothing: give at least one of preset, {', '.join(FIGURES)}"
        if part.preset is not None and part.preset not in PRESETS:
            yield ("preset",), f"there is no preset '{part.preset}': use one of {', '.join(PRESETS)}"
            return
        states = chain(setting.links.items(), setting.traced)
        # By identity: a mesh of a thousand devices has a million links, but few values.
        for link in {id(link): link for pair, link in states if part.touches(pair)}.values():
            # Which direction a preset has is of no matter here: presets state nothing that could clash.
            for figure, text in checks.problems(overlay(link, part, from_first=True)):
                key = figure.partition(".")[0]
                yield (key,) if getattr(part, key) is not None else (), text

    def impair(self, link: Link, pair: Pair, now: Conditions) -> Link:
        """Replace the figures that are given."""
        return overlay(link, self.value, now.from_first(pair))
