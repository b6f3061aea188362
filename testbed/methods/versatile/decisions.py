"""What the coordinator decides: who holds what from now on, and why. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from testbed.common.errors import TestbedError
from testbed.methods.versatile.arrangement import Arrangement, joined, left, rearranged

Cause = Literal["failure", "credibility", "retirement", "join"]


class GroupLostError(TestbedError):
    """Nobody is left who could hold the neurons of a group of layers."""


@dataclass(frozen=True)
class Decision:
    """An arrangement, and what led to it."""

    arrangement: Arrangement
    cause: Cause
    devices: tuple[str, ...]
    """Those that failed, retired or joined, or that are no longer credible."""
    gone: frozenset[str] = frozenset()
    """Those whose neurons begin with new weights."""


@dataclass(frozen=True)
class Setting:
    """What all decisions of a run have in common."""

    threshold: float
    """Credibility below which the group of a device is rearranged."""
    lead: str
    """Scores the tests, and so it stays."""
    seed: int
    devices: tuple[str, ...]
    """All that there may ever be."""
    again: float
    """Seconds from one cast to the next of a device that wants to be heard again: those of a window."""


def after_window(
    now: Arrangement, failed: Iterable[str], averages: Mapping[str, float], setting: Setting
) -> Iterator[Decision]:
    """Yield what follows from a window: devices that nobody heard leave, groups with a poor device are rearranged.

    ``averages`` are the credibilities of devices; a group with one of which there is none stays. Raises
    `GroupLostError`.
    """
    for name in failed:
        if name != setting.lead and now.group(name) is not None:
            now = without(now, name, averages, setting.seed)
            yield Decision(now, "failure", (name,), frozenset({name}))
    for group in range(len(now.groups)):
        members = now.members(group)
        if not all(name in averages for name in members):
            continue
        poor = tuple(name for name in members if averages[name] < setting.threshold)
        after = rearranged(now, group, averages, setting.seed) if poor else now
        if after.layers != now.layers:
            now = after
            yield Decision(now, "credibility", poor)


def without(now: Arrangement, device: str, averages: Mapping[str, float], seed: int) -> Arrangement:
    """Return the arrangement without a device. Raises `GroupLostError`."""
    group = now.group(device)
    after = left(now, device, averages, seed)
    if group is not None and not after.members(group):
        layers = now.groups[group]
        which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        raise GroupLostError(f"group {group} ({which}) is left with no device: {device} was its last")
    return after


def entered(now: Arrangement, device: str, averages: Mapping[str, float], setting: Setting) -> Decision:
    """Return what follows from a device that holds nothing, and has booted or is heard again.

    The lead takes its own place.
    """
    if device == setting.lead:
        return Decision(now.again(), "join", (device,), frozenset({device}))
    after = joined(left(now, device, averages, setting.seed), device, setting.seed)
    return Decision(after, "join", (device,), frozenset({device}))


def coordinator(now: Arrangement, absent: Collection[str]) -> str | None:
    """Return the first member who is not known to be absent; who has the input layer alone hears nobody."""
    hearing = (name for group, layers in enumerate(now.groups) if layers[-1] for name in now.members(group))
    return next((name for name in hearing if name not in absent), None)
