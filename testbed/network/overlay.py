"""What a part of a scenario says about a link, laid over what the levels above say."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from testbed.network.link import GilbertElliott, Link
from testbed.network.presets import PRESETS

if TYPE_CHECKING:
    from testbed.network.parts import LinkPart

FIGURES = tuple(field.name for field in fields(Link) if field.name not in ("up", "frame"))
"""The keys with which a part of a scenario describes a link, beside ``preset``."""


def given(part: LinkPart) -> dict[str, Any]:
    """Return the figures that a part gives itself, by field of `Link`."""
    found = {name: value for name in FIGURES if (value := getattr(part, name)) is not None}
    if part.bursts is not None:
        found["bursts"] = GilbertElliott(part.bursts.p, part.bursts.r, part.bursts.bad_loss, part.bursts.good_loss)
    return found


def overlay(link: Link, part: LinkPart, from_first: bool) -> Link:
    """Return the link with the part's preset, then its own figures; raise KeyError for an unknown preset.

    A loss replaces the bursts of the levels above, and bursts their loss. Without jitter or loss, what described
    them goes as well. ``from_first`` says that the link leads away from the first device of the scenario (a
    preset's down direction).
    """
    figures = given(part)
    if part.preset is not None:
        preset = PRESETS[part.preset]
        stated = {"rate": preset.rate(from_first)} | ({} if preset.delay is None else {"delay": preset.delay})
        figures = stated | figures
    if "bursts" in figures:
        figures = {"loss": 0.0, "loss_correlation": 0.0} | figures
    elif "loss" in figures:
        figures = {"bursts": None} | ({"loss_correlation": 0.0} if figures["loss"] == 0 else {}) | figures
    if figures.get("jitter") == 0:
        figures = {"distribution": "normal", "jitter_correlation": 0.0} | figures
    return replace(link, **figures)
