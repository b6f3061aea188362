"""Named figures for links, each with its source.

A preset sets only what its source states. None of the sources states a delay, so a preset has none unless it is marked
an assumption: write the delay beside the preset.
"""

from __future__ import annotations

from dataclasses import dataclass


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
