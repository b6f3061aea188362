"""What a part of a scenario says about a link, laid over what the levels above say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from testbed.network.link import Link
from testbed.network.presets import PRESETS

if TYPE_CHECKING:
    from testbed.scenario.schema import LinkPart


def overlay(link: Link, part: LinkPart, from_first: bool) -> Link:
    """Return the link with the part's preset, then its own figures; raise KeyError for an unknown preset.

    ``from_first`` says that the link leads away from the first device of the scenario (a preset's down direction).
    """
    if part.preset is not None:
        preset = PRESETS[part.preset]
        link = replace(link, rate=preset.rate(from_first))
        if preset.delay is not None:
            link = replace(link, delay=preset.delay)
    given = {name: getattr(part, name) for name in ("rate", "delay", "loss") if getattr(part, name) is not None}
    return replace(link, **given)
