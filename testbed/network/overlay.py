"""What a part of a scenario says about a link, laid over what the levels above say, and the presets it can name.

A preset sets only what its source states. None of the sources states a delay, so a preset has none unless it is marked
an assumption: write the delay beside the preset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from testbed.network.link import GilbertElliott, Link

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


@dataclass(frozen=True)
class LinkPreset:
    """Figures of one kind of access network, as a device sees it."""

    name: str
    up: float
    """bit/s from a device towards the first device of the scenario; also between any two others, where what goes down
    to one has first gone up from the other."""
    down: float
    """bit/s from the first device of the scenario."""
    source: str
    delay: float | None = None
    """One-way, in seconds; None where the source says nothing."""
    frame: int | None = None
    """Bytes that a radio's longest frame carries; of 802.15.4 they include the header. Nothing is computed from it."""

    def rate(self, from_first: bool) -> float:
        """Return bit/s in one direction: down from the first device, up from every other."""
        return self.down if from_first else self.up


_PIPELEARN = "PipeLearn (Zhang et al.), test platform: the first device is the server"

_PRESETS = (
    LinkPreset("ethernet-10", 10e6, 10e6, "IEEE 802.3, 10BASE-T"),
    LinkPreset("ethernet-100", 100e6, 100e6, "IEEE 802.3, 100BASE-TX"),
    LinkPreset("ethernet-1000", 1e9, 1e9, "IEEE 802.3, 1000BASE-T"),
    LinkPreset("4g", 10e6, 25e6, _PIPELEARN),
    LinkPreset("4g+", 20e6, 40e6, _PIPELEARN),
    LinkPreset("wifi", 50e6, 50e6, _PIPELEARN),
    LinkPreset(
        "802.15.4",
        250e3,
        250e3,
        "IEEE 802.15.4 at 2.4 GHz, as in EdgePipe (Yoon et al.), equation (4); aMaxPHYPacketSize",
        frame=127,
    ),
    LinkPreset(
        "802.11a", 6e6, 6e6, "IEEE 802.11a-1999, the lowest rate, which reaches farthest; longest MSDU", frame=2304
    ),
    LinkPreset("lan", 1e9, 1e9, "assumption: gigabit Ethernet through one switch", delay=0.1e-3),
)

PRESETS = {preset.name: preset for preset in _PRESETS}
