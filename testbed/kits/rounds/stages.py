"""The stage graph of a PipeLearn iteration (Zhang et al., Table I) and how long an iteration takes.

A device forwards N mini-batches one after the other, uploads what leaves its last layer, the server forwards and
backwards the rest, and the device backwards once all its forwards are done. Everything of one kind goes in the order of
the mini-batches: one upload at a time, one download at a time. With N = 1 it is an iteration of split (federated)
learning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

Kind = Literal["forward", "upload", "server forward", "server backward", "download", "backward"]
"""The paper's f^c, u, f^s, b^s, d and b^c."""

GraphStage = tuple[Kind, int]
"""A kind of work, and the mini-batch n = 1..N that it is for."""

KINDS: tuple[Kind, ...] = ("forward", "upload", "server forward", "server backward", "download", "backward")

PREVIOUS: Mapping[Kind, tuple[tuple[Kind, int], ...]] = {
    "forward": (("forward", -1),),
    "upload": (("upload", -1), ("forward", 0)),
    "server forward": (("upload", 0), ("server backward", -1)),
    "server backward": (("server forward", 0),),
    "download": (("download", -1), ("server backward", 0)),
    "backward": (("backward", -1), ("download", 0)),
}
"""Table I: what a stage of mini-batch n waits for, as (kind, difference to n). Where that would be mini-batch 0, there
is nothing to wait for, but for the first backward: it waits for the last forward."""


def previous(stage: GraphStage, count: int) -> tuple[GraphStage, ...]:
    """Return the previous stages of a stage, in an iteration of ``count`` mini-batches."""
    kind, n = stage
    found: tuple[GraphStage, ...] = tuple((other, n + shift) for other, shift in PREVIOUS[kind] if n + shift >= 1)
    return (("forward", count), *found) if stage == ("backward", 1) else found


def stages(count: int) -> Iterator[GraphStage]:
    """Return all stages of an iteration, each after its previous ones."""
    for n in range(1, count + 1):
        yield "forward", n
    for n in range(1, count + 1):
        for kind in KINDS[1:-1]:
            yield kind, n
    for n in range(1, count + 1):
        yield "backward", n


def ends(
    durations: Mapping[Kind, float], count: int, delays: Mapping[Kind, float] | None = None
) -> dict[GraphStage, float]:
    """Return T(r) of every stage r, the seconds from the iteration's begin to its end: equations (11) to (13).

    Args:
        durations: t(r) in seconds, the same for all mini-batches.
        count: N, at least 1.
        delays: seconds until the end of a stage is known to stages of other kinds: a message arrives a link's delay
            after its last byte has left, when the next one is under way. The paper knows none.
    """
    delays = delays or {}
    found: dict[GraphStage, float] = {}
    for stage in stages(count):
        kind, _ = stage
        waits = (
            found[before] + (delays.get(before[0], 0.0) if before[0] != kind else 0.0)
            for before in previous(stage, count)
        )
        found[stage] = durations[kind] + max(waits, default=0.0)
    return found


def iteration_time(durations: Mapping[Kind, float], count: int, delays: Mapping[Kind, float] | None = None) -> float:
    """Return T(b_N), the seconds of an iteration of ``count`` mini-batches; arguments as of `ends`."""
    return ends(durations, count, delays)["backward", count]
